"""The calculation of many GPUs: equal to what was measured on two, and properties that hold for every layout."""

from dataclasses import replace

import pytest
import torch

from benchmarks import fsdp, plots, scale
from benchmarks import scale as m
from benchmarks.harness import read_json
from docs.records import ASSETS, RESULTS

TWO = m.Layout(shard=2)
TOKENS = fsdp.BATCH * fsdp.LENGTH


@pytest.fixture(scope="module")
def record():
    return {row.work: row for row in read_json(RESULTS / "fsdp-h200.json", fsdp.FsdpRow, "train")[1]}


@pytest.mark.parametrize(("config", "wire"), [(fsdp.BASE, m.BF16), (fsdp.VALUES, m.BF16), (fsdp.CODES, m.MXFP8)])
def test_gathered_bytes_are_those_that_two_gpus_counted(config, wire, record):
    assert record[config].ranks == 2
    assert sum(m.gathered(m.MEASURED, wire, TWO)) == record[config].gathered_bytes


@pytest.mark.parametrize(("config", "wire"), [(fsdp.BASE, m.BF16), (fsdp.CODES, m.MXFP8)])
def test_the_peak_of_memory_is_near_the_measured_one(config, wire, record):
    calculated = sum(m.memory(m.MEASURED, wire, TWO, TOKENS, recompute=False).values())
    assert calculated == pytest.approx(record[config].peak_bytes, rel=0.05)


def test_the_measured_model_is_the_one_of_the_benchmark():
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fsdp.LLAMA_1B))
    assert sum(p.numel() for p in model.parameters()) == m.MEASURED.parameters
    assert sum(p.numel() for p in model.model.layers[0].parameters()) == m.MEASURED.layer


def test_parameters_are_those_that_the_names_say():
    found = [(model.parameters / 1e9, model.active / 1e9) for model in m.MODELS]
    assert found == [
        (pytest.approx(8.03, abs=0.01), pytest.approx(7.5, abs=0.01)),
        (pytest.approx(70.55, abs=0.01), pytest.approx(69.5, abs=0.01)),
        (pytest.approx(235.1, abs=0.1), pytest.approx(21.6, abs=0.1)),
    ]


LAYOUTS = [(study, layout) for study in scale.STUDIES for layout in study.layouts]


@pytest.mark.parametrize(("study", "layout"), LAYOUTS, ids=lambda value: str(getattr(value, "gpus", "")))
def test_layouts_are_whole(study, layout):
    model = study.model
    assert model.layers % layout.pipeline == 0 and layout.shard % layout.expert == 0
    assert model.heads % layout.tensor == 0 and model.experts % layout.expert == 0
    assert layout.tensor <= scale.NODE and (model.experts == 1) == (layout.expert == 1)


def test_the_numbers_of_gpus_are_those_of_the_page():
    for study in scale.STUDIES:
        assert [layout.gpus for layout in study.layouts] == [8, 64, 512, 4096, 10000]


@pytest.mark.parametrize(("study", "layout"), LAYOUTS, ids=lambda value: str(getattr(value, "gpus", "")))
def test_codes_never_take_more_memory_and_halve_the_gather_of_matrices(study, layout):
    sent = {wire.name: m.wire_bytes(study.model, wire, layout, study.tokens, study.recompute) for wire in m.WIRES}
    for kind in ("FSDP reduce", "DP reduce", "PP"):
        assert len({bytes_of[kind] for bytes_of in sent.values()}) == 1
    gather = sent["mxfp8"]["FSDP gather"] / sent["bf16"]["FSDP gather"]
    assert 0.5 < gather < (0.6 if study.model.experts == 1 else 0.95)  # stacks are gathered as values
    if layout.expert > 1:
        assert sent["mxfp8"]["EP"] / sent["bf16"]["EP"] == pytest.approx((2 + 1 + 1 / 32) / 4)
    base, codes = (m.memory(study.model, wire, layout, study.tokens, study.recompute) for wire in (m.BF16, m.MXFP8))
    assert codes.keys() == base.keys() == set(m.MEMORY) and sum(codes.values()) <= sum(base.values())
    assert all(
        codes[name] <= base[name] for name in m.MEMORY if name != "gradients"
    )  # they fill what activations leave


@pytest.mark.parametrize(("study", "layout"), LAYOUTS, ids=lambda value: str(getattr(value, "gpus", "")))
def test_layers_that_run_again_exchange_again(study, layout):
    once, twice = (m.wire_bytes(study.model, m.BF16, layout, study.tokens, recompute) for recompute in (False, True))
    for kind in m.KINDS:
        ratio = 1.5 if kind == "EP" else (1 + 3 / 8 if study.model.experts == 1 else 1.5) if kind == "TP" else 1
        assert twice[kind] == pytest.approx(ratio * once[kind])


def test_one_gpu_receives_nothing_and_stores_everything():
    model, alone = m.MODELS[0], m.Layout()
    assert set(m.wire_bytes(model, m.BF16, alone, 4096, True).values()) == {0.0}
    assert m.memory(model, m.BF16, alone, 1, False)["parameters and moments"] == 12 * model.parameters


def test_parts_add_up_to_the_model():
    for study, layout in LAYOUTS:
        if layout.tensor == 1:  # norms are on every GPU of a layer
            stored = m.Share.of(study.model, layout).sharded(layout)
            assert stored * layout.shard * layout.pipeline == pytest.approx(study.model.parameters)


def test_times_by_hand():
    received = 7e9  # of 8e9 bytes over 8 GPUs of a node
    assert scale.over_nodes(received, 8, 8) == pytest.approx(received / (450e9 * 0.8))
    assert scale.over_nodes(0.0, 1, 1) == 0
    whole = 64e9  # over 64 GPUs: seven eighths come from other nodes, through eight ports
    assert scale.over_nodes(whole * 63 / 64, 64, 8) == pytest.approx(whole * 7 / 8 / (8 * 50e9 * 0.8))
    study = replace(scale.STUDIES[0], tokens=1000)
    speed = 1e15
    assert scale.computation(study, m.Layout(), speed) == pytest.approx(6 * study.model.active * 1000 / speed)
    twice = replace(study, recompute=True)
    assert scale.computation(twice, m.Layout(pipeline=2, shard=1), speed) == pytest.approx(
        8 * study.model.active * 8000 / 2 / speed
    )


def test_speeds_are_read_from_the_record():
    speed = scale.speeds()
    assert speed.keys() == {wire.name for wire in m.WIRES} and 6e14 < speed["bf16"] < 1e15


def test_the_picture_has_a_bar_for_each_kind_and_is_current(tmp_path):
    pytest.importorskip("matplotlib")
    axes = plots.draw_scale().axes
    bars = [len(panel.patches) for panel in axes]
    assert bars == [10 * len(m.KINDS)] * 3 + [10 * len(m.MEMORY)] * 3
    assert plots.scale_checksum().encode() in (ASSETS / "scale.png").read_bytes(), (
        "draw again: python -m benchmarks.plots"
    )


def test_the_command_prints_its_tables(capsys):
    scale.main(["scale"])
    out = capsys.readouterr().out
    assert "4,161,015,808" in out and "EP32 PP2 FSDP256 DP8" in out and "nvfp4" in out


# ---------------------------------------------------------------------------------------------- one layer


def test_eighty_layers_have_the_parameters_of_a_70b_model_without_embeddings():
    assert pytest.approx(68.5e9, rel=0.01) == 80 * m.LAYER


@pytest.mark.parametrize("setup", m.SETUPS, ids=lambda s: s.name)
def test_more_gpus_never_take_less_time_nor_fewer_tokens(setup):
    times, tokens = ([f(setup, gpus) for gpus in m.SHARDED] for f in (m.gather_time, m.tokens_to_hide))
    assert times == sorted(times) and tokens == sorted(tokens)


@pytest.mark.parametrize("gpus", m.SHARDED)
def test_codes_halve_the_bytes_but_not_the_latency(gpus):
    plain, codes = m.SETUPS[:2]
    hops = m.HOP * (max(gpus // m.NODE, 1) - 1)
    assert (m.gather_time(codes, gpus) - hops) / (m.gather_time(plain, gpus) - hops) == pytest.approx(1025 / 2048)


@pytest.mark.parametrize("setup", m.SETUPS, ids=lambda s: s.name)
def test_at_the_tokens_of_the_table_products_take_as_long_as_communication(setup):
    tokens = m.tokens_to_hide(setup, 64)
    reduced = m.collective(m.LAYER * m.REDUCED, 64, setup.link)
    slack = (
        m.forward_time(setup, tokens) - m.gather_time(setup, 64),
        2 * m.forward_time(setup, tokens) - m.gather_time(setup, 64) - reduced,
    )
    assert min(slack) == pytest.approx(0, abs=1e-9)


def test_one_gpu_sends_nothing():
    assert m.collective(1e9, 1, 450e9) == 0

"""The decoding benchmarks without a GPU: figures, tables, and the decoding loop."""

import re

import pytest
import torch
import transformers

import mxtensor as mx
from benchmarks import decode, decode_model, plots
from docs import generate


def row(m, shape, **relative):
    times = {name: 0.03 * value for name, value in {"bfloat16": 1.0, **relative}.items()}
    n, k = shape
    return decode.DecodeRow(f"{m}x{n}x{k}", times, n * k, relative={"bfloat16": 1.0, **relative}, m=m, n=n, k=k)


ROWS = [
    row(1, (4096, 4096), **{"mxfp8-weight-only": 0.5, "mxfp8": 0.64}),
    row(1, (14336, 4096), **{"mxfp8-weight-only": 0.5, "mxfp8": 0.49}),
    row(256, (14336, 4096), **{"mxfp8-weight-only": 1.2}),
]


def test_the_mean_is_geometric_and_the_worst_figure_names_its_shape():
    assert decode.mean_speedup(ROWS, "mxfp8", 1) == pytest.approx((1 / 0.64 / 0.49) ** 0.5)
    verdicts = {line[0]: line for line in (target.verdict(ROWS) for target in decode.TARGETS)}
    assert verdicts["mxfp8, 1 row, mean"] == ["mxfp8, 1 row, mean", ">= 1.85", "1.79", "", "no"]
    assert verdicts["mxfp8-weight-only, 1 row, mean"][2:] == ["2", "", "yes"]
    assert verdicts["mxfp8, 1 row, every shape"][2:] == ["1.56", "1x4096x4096", "no"]
    assert verdicts["128 to 512 rows, time over bfloat16"][2:] == ["1.2", "mxfp8-weight-only 256x14336x4096", "no"]
    assert verdicts["mxfp4, 16 rows, mean"][-1] == "not measured"


def test_a_line_has_a_cell_for_each_shape():
    lines = decode.lines(ROWS)
    assert [line[:3] for line in lines] == [
        ["1", "mxfp8-weight-only", "2.00 (15.0 us)"],
        ["1", "mxfp8", "1.56 (19.2 us)"],
    ]
    assert all(len(line) == len(decode.HEADER) for line in lines)


def test_the_curve_is_drawn_over_the_number_of_rows():
    pytest.importorskip("matplotlib")
    machine = {"versions": {"torch": "2.11.0"}, "gpu": "a GPU", "cpu": "a CPU", "date": "2026-01-02"}
    both = {"mxfp8-weight-only": 0.5, "mxfp4-weight-only": 0.4}
    rows = [row(256, decode.CURVE_SHAPE, **both), row(1, decode.CURVE_SHAPE, **both)]
    (axes,) = plots.draw_decode(machine, rows).axes
    assert [list(line.get_xdata()) for line in axes.lines] == [[1, 256]] * 3
    assert [line.get_ydata()[0] for line in axes.lines] == pytest.approx([30, 15, 12])


@pytest.mark.parametrize("name", ["decode", "decode_model"])
def test_the_page_shows_the_records(name):
    tables = re.findall(r"(?:^\|.*\n?)+", generate.TABLES[name](), re.MULTILINE)
    assert tables and all(len({line.count(" | ") for line in table.splitlines()}) == 1 for table in tables)


SMALL = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=1000,
)  # fmt: skip


def test_a_decoder_gives_the_tokens_of_the_model_without_a_cache():
    torch.manual_seed(0)
    model, prompt = decode_model.build(**SMALL).float(), torch.randint(0, 200, (1, 5))
    with torch.no_grad():
        whole = prompt
        for _ in range(6):
            following = model(input_ids=whole, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            whole = torch.cat([whole, following], 1)
        decoder = decode_model.Decoder(model, 16)
        decoder.prefill(prompt)
        tokens = [decoder.token.item()]
        for _ in range(5):
            decoder.step()
            tokens.append(decoder.token.item())
    assert tokens == whole[0, 5:].tolist() and isinstance(model, transformers.LlamaForCausalLM)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("config", ["bfloat16", "mxfp8-weight-only", "mxfp8", "mxfp4-weight-only"])
def test_compiled_layers_share_one_graph_for_all_layers_and_tokens(config):
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model, prompt = decode_model.build(**SMALL), torch.randint(0, 1000, (1, 8))
    if config != "bfloat16":
        mx.quantize_(model, config)
    caches = []
    with torch.no_grad():
        for compiles in (False, True):
            decoder = decode_model.Decoder(model, 16)
            decoder.prefill(prompt)
            if compiles:
                decode_model.compile_layers(decoder)
            for token in (5, 400, 31):
                decoder.token.fill_(token)
                decoder.step()
            caches.append(torch.stack([t for c in decoder.cache.layers for t in (c.keys, c.values)]).double())
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for _ in range(2):
            model(input_ids=prompt, use_cache=False, logits_to_keep=1)
    assert (graphs, torch._dynamo.utils.counters["stats"]["unique_graphs"]) == (1, 2)
    assert (caches[0] - caches[1]).norm() / caches[0].norm() < 0.01 and caches[0].norm() > 0


def test_a_model_is_measured_and_its_weight_bytes_are_counted(monkeypatch):
    monkeypatch.setattr(decode_model, "TOKENS", 2)
    monkeypatch.setattr(decode_model, "ROUNDS", 1)
    with torch.no_grad():
        rows = [decode_model.measured(c, lambda: decode_model.build(**SMALL), "cpu", 8) for c in ("bfloat16", "mxfp8")]
    assert rows[1].weight_bytes / rows[0].weight_bytes == pytest.approx(mx.FORMATS["mxfp8"].bits_per_value / 16)
    assert rows[1].kernels and not rows[0].kernels and all(r.tokens_a_second > 0 for r in rows)
    assert all(len(line) == len(decode_model.HEADER) for line in decode_model.lines(rows))

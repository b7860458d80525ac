"""The commands of ``benchmarks.users`` without a GPU: shapes, figures, tables, and each command at a toy size."""

import argparse
import json
import math

import pytest
import torch

from benchmarks import users, users_experts, users_first, users_generate, users_layers, users_train
from benchmarks.decode import DecodeRow


def row(m, shape, **relative):
    times = {name: 0.02 * value for name, value in {"bfloat16": 1.0, **relative}.items()}
    n, k = shape
    return DecodeRow(f"{m}x{n}x{k}", times, n * k, relative={"bfloat16": 1.0, **relative}, m=m, n=n, k=k)


ROWS = [
    row(1, (64, 32), mxfp8=0.5, mxfp4=0.25),
    row(64, (64, 32), mxfp8=0.8, mxfp4=2.0),
    row(65, (64, 32), mxfp8=1.25),
]


def test_the_shapes_are_those_of_the_models():
    shapes = users_layers.model_shapes()
    assert shapes[4096, 4096] == "Llama 3 8B q, o; Qwen 3 8B q, o"
    assert shapes[1024, 4096] == "Llama 3 8B kv; Qwen 3 8B kv"
    expected = {
        "Llama 3 70B": {(8192, 8192), (1024, 8192), (28672, 8192), (8192, 28672)},
        "Qwen 3 30B-A3B": {(4096, 2048), (512, 2048), (2048, 4096), (1536, 2048), (2048, 768)},
        "gpt-oss-20b": {(4096, 2880), (512, 2880), (2880, 4096), (5760, 2880), (2880, 2880)},
        "Mistral Small 24B": {(4096, 5120), (1024, 5120), (5120, 4096), (32768, 5120), (5120, 32768)},
        "Gemma 3 12B": {(4096, 3840), (2048, 3840), (3840, 4096), (15360, 3840), (3840, 15360)},
        "Phi 4": {(7680, 5120), (5120, 5120), (35840, 5120), (5120, 17920)},
    }
    for name, found in expected.items():
        assert {shape for shape, names in shapes.items() if name in names} == found
    assert all(n % 32 == 0 and k % 32 == 0 for n, k in shapes)


def test_drawn_shapes_are_new_and_the_same_for_a_seed():
    drawn = users_layers.random_shapes(1)
    assert drawn == users_layers.random_shapes(1) != users_layers.random_shapes(2)
    assert len(drawn) == users_layers.DRAWN and not drawn.keys() & users_layers.model_shapes().keys()
    assert all(n % 32 == k % 32 == 0 and min(n, k) >= 512 and max(n, k) <= 18432 for n, k in drawn)


def test_quick_takes_some_of_the_shapes():
    args = argparse.Namespace(quick=True, seed_shapes=None)
    shapes = users_layers.chosen_shapes(args)
    assert len(shapes) == users_layers.QUICK_SHAPES and shapes.items() <= users_layers.model_shapes().items()


def test_the_worst_figure_is_first_and_means_are_geometric():
    found = users_layers.figures(ROWS)
    assert [(f.speed, f.config, f.row.m) for f in found][:2] == [(0.5, "mxfp4", 64), (0.8, "mxfp8", 65)]
    lines = users_layers.summary(found, users_layers.band_of)
    assert sorted(lines) == [
        ["1 to 64", "mxfp4", "1.41", "0.50", "64x64x32", "1 of 2"],
        ["1 to 64", "mxfp8", "1.58", "1.25", "64x64x32", "0 of 2"],
        ["65 to 512", "mxfp8", "0.80", "0.80", "65x64x32", "1 of 1"],
    ]
    assert [line[0] for line in users_layers.summary(found, str) if line[1] == "mxfp8"] == ["1", "64", "65"]
    assert all(len(line) == len(users_layers.SUMMARY_HEADER) for line in lines)
    (worst,) = users_layers.worst_lines(found, {(64, 32): "toy"}, top=1)
    assert worst == ["64x64x32", "mxfp4", "0.50", "40.0", "20.0", "", "toy"]
    assert len(worst) == len(users_layers.WORST_HEADER)


def test_host_time_is_shown_beside_that_of_bfloat16():
    rows = [users.HostRow("", {"bfloat16": 0.01, "mxfp8": 0.025}, kind="F.linear", m=m) for m in (1, 8)]
    rows[1].times.pop("mxfp8")
    header, lines = users.host_table(rows)
    assert header == ["F.linear, us", "1 rows", "8 rows"]
    assert lines == [["bfloat16", "10.0", "10.0"], ["mxfp8", "25.0 (+15.0)", "nan (+nan)"]]


def generated(config, batch, ms, **more):
    times = {"token": ms, "first": 9.0}
    return users_generate.GenerateRow("", times, config=config, mode="eager", batch=batch, **more)


def test_tokens_are_compared_with_bfloat16_at_the_same_batch():
    rows = [generated("bfloat16", 8, 10.0), generated("mxfp8", 1, 5.0, relative={"token": 0.625})]
    rows.append(generated("mxfp8", 8, 20.0, gpu_ms=12.0, host_ms=19.0, launches=300.4, relative={"token": 2.0}))
    lines = [users_generate.line(r) for r in users_generate.ordered(rows)]
    assert [line[1:5] for line in lines] == [
        ["1", "mxfp8", "200.0", "1.60"],
        ["8", "bfloat16", "800.0", "nan"],
        ["8", "mxfp8", "400.0", "0.50"],
    ]
    failed = users_generate.GenerateRow("", {}, failed={"generate": "no"}, config="x", mode="eager", batch=1)
    assert {len(line) for line in [*lines, users_generate.line(failed)]} == {len(users_generate.HEADER)}
    assert users_generate.profile_cells(rows[-1]) == ["12.00", "19.00", "300", "host"]
    assert math.isnan(failed.tokens_a_second)


@pytest.mark.parametrize("batched", [False, True])
def test_experts_multiply_the_rows_of_their_tokens(batched):
    stack = users_experts.Stack(4, 2, 16, 32)
    weight, x = torch.randn(4, 16, 32), torch.randn(2 * 3, 32)
    choice = users_experts.choices_of(stack, 3, "cpu", batched)[0]
    rows = choice if batched else torch.repeat_interleave(torch.arange(4), choice.diff(prepend=choice.new_zeros(1)))
    expected = torch.einsum("mk,mnk->mn", x, weight[rows])
    torch.testing.assert_close(users_experts.product(x, weight, choice, batched), expected)


def test_a_compiled_step_is_compared_with_both_modes():
    rows = [
        users_train.StepRow("", {"bfloat16": ms, "mxfp8": 80.0}, size="a", mode=mode, tokens=1000)
        for mode, ms in (("eager", 100.0), ("compiled", 60.0))
    ]
    for each in rows:
        each.prepare_s = {name: 1.0 for name in each.times}
    assert users_train.lines(rows)[-1] == ["a", "compiled", "mxfp8", "80.0", "12,500", "0.750", "1.250", "1.0"]


def test_the_first_token_waits_for_quantize_and_two_passes():
    times = {"quantize": 0.0, "first": 500.0, "second": 100.0, "steady": 20.0}
    rows = [users_first.FirstRow("", times, config="bfloat16", cache="cold")]
    rows.append(users_first.FirstRow("", times | {"quantize": 2000.0}, config="mxfp8", cache="cold"))
    assert users_first.lines(rows)[1] == ["mxfp8", "cold", "2.00", "0.50", "0.10", "2.60", "+2.00", "20.0"]


TOY = {
    "host": ["--repeats", "1"],
    "layers": [],
    "experts": [],
    "generate": ["--eager", "--batches", "2", "--formats", "bfloat16", "mxfp8", "--tokens", "4", "--profile"],
    "train": ["--eager", "--recipes", "bfloat16", "mxfp8"],
    "first-token": ["--formats", "bfloat16"],
}


def test_every_command_has_a_toy_size():
    assert TOY.keys() == users.COMMANDS.keys()


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("command", users.COMMANDS)
def test_a_command_runs_at_a_toy_size(command, tmp_path, capsys, monkeypatch):
    if command == "first-token":  # without the processes, which take seconds
        tokens = users_first.first_tokens
        monkeypatch.setattr(
            users_first,
            "in_new_process",
            lambda config, cache, folder, args: users_first.FirstRow(
                "", tokens(config, args), config=config, cache=cache
            ),
        )
    path = tmp_path / "record.json"
    with monkeypatch.context() as patched:
        patched.setattr(users.logging, "disable", lambda level: None)
        users.main([command, "--device", "cpu", "--tiny", "--json", str(path), *TOY[command]])
    rows = json.loads(path.read_text())["rows"]
    assert rows and all(r["failed"] == {} and r["times"] for r in rows)
    assert "bfloat16" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the benchmark")
@pytest.mark.parametrize("command", users.COMMANDS)
def test_without_a_gpu_a_command_says_so(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        users.main([command])
    assert stopped.value.code == 1 and "torch finds no CUDA device" in capsys.readouterr().err

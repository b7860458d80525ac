"""The benchmarks without a GPU: rounds, byte counts, targets, tables, records and pictures."""

import argparse
import json
import math
import pkgutil
import re
from dataclasses import replace

import pytest
import torch

import benchmarks
import mxtensor as mx
from benchmarks import cast, cuda, harness, host, linear, plots, train_grouped
from docs import generate
from docs import records as records_of_docs
from mxtensor.core.select import KERNEL_NAMES
from mxtensor.kernels.quantize.select_pair import quantize_operands
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.formats import Orientation, get_format

ON_CPU = argparse.Namespace(device="cpu", repeats=5, quick=True)
MACHINE = {
    "date": "2026-01-02", "cpu": "a CPU", "threads": 1, "gpu": "a GPU", "cuda": "13.0", "python": "3.11.7",
    "versions": {"mxtensor": "0.1.0", "torch": "2.11.0"},
}  # fmt: skip


def cast_row(format, kind, size=8192, over_copy=0.5, **others):
    """A row whose copy took 0.25 ms and whose contenders took ``over_copy`` times as long."""
    f = get_format(format)
    nbytes = cast.moved_bytes(f, kind, size, size) if kind in cast.WORKS else 0
    relative = {cast.COPY: 1.0, cast.OURS: over_copy} | others
    row = cast.CastRow(f"{format} {kind} {size}x{size}", {n: r * 0.25 for n, r in relative.items()}, nbytes)
    row.format, row.kind, row.size, row.relative = format, kind, f"{size}x{size}", relative
    row.twice_nbytes = nbytes + 2 * size * size if cast.reads_twice(f, kind) else 0
    row.copy_nbytes = 2 * cast.COPY_BYTES
    row.kernels = {cast.OURS: "triton"}
    return row


def linear_row(contender, shape, ratio):
    times = {linear.BASE: 0.5, contender: 0.5 * ratio}
    return linear.LinearRow(
        f"{contender} {shape}", times, relative={linear.BASE: 1.0, contender: ratio}, kernels={contender: "dequant"},
        contender=contender, shape=shape,
    )  # fmt: skip


CAST_ROWS = [
    *(cast_row("mxfp8_e4m3", kind, size, 0.2, **{cast.FLOOR: 0.198, "torchao compiled": 0.9})
      for kind in cast.WORKS for size in (8192, 16384)),
    *(cast_row("nvfp4", kind, size, 0.3) for kind in cast.WORKS for size in (8192, 16384)),
    cast_row("mxfp8_e4m3[32x32]", "rowwise"),
    cast.CastRow("mxfp8 host time", {cast.OURS: 0.0301, "mxtensor, both": 0.04}, format="mxfp8_e4m3", kind=cast.HOST),
]  # fmt: skip
LINEAR_ROWS = [
    linear_row(contender, shape, ratio)
    for contender, ratio in (("mxfp8", 1.05), ("nvfp4", 1.2), ("float8_row", 0.6), ("torchao mxfp8", 2.1))
    for shape in ("4096x4096x4096", "8192x14336x4096")
]


def test_the_list_of_the_benchmarks_names_every_module():
    modules = {module.name for module in pkgutil.iter_modules(benchmarks.__path__)}
    rows = set(re.findall(r"^\| ``(\w+)`` \|", benchmarks.__doc__, re.MULTILINE))
    assert modules <= set(re.findall(r"``(\w+)``", benchmarks.__doc__)) and rows <= modules


# ---------------------------------------------------------------------------------------------- rounds


def scripted(times):
    """A clock that reads times from lists. The result of the work is the name of its list."""

    def clock(run):
        values = iter(times[run()])
        return lambda: next(values)

    return clock


def test_contenders_alternate_and_ratios_compare_times_of_the_same_round():
    times = {"a": [1.0, 2.0, 4.0, 8.0, 16.0], "b": [3.0, 6.0, 12.0, 24.0, 32.0]}
    contenders = {name: lambda name=name: lambda: name for name in times}
    row = harness.timed(harness.Row("work", {}), contenders, repeats=5, warmup=1, clock=scripted(times))
    assert row.times == {"a": 4.0, "b": 12.0}
    assert row.relative == {"a": 1.0, "b": 3.0}, "the last round, where b was twice as slow as a, is outvoted"


def test_a_contender_that_raises_is_recorded_and_the_others_are_timed():
    def broken():
        raise ImportError("No module named 'torchao'")

    row = harness.timed(
        harness.Row("work", {}), {"a": lambda: lambda: "a", "b": broken}, 2, 1, scripted({"a": [1.0, 3.0]})
    )
    assert row.times == {"a": 2.0} and row.failed == {"b": "ImportError: No module named 'torchao'"}
    assert math.isnan(row.ratio("a", "b"))


def test_there_are_no_ratios_if_the_first_contender_fails():
    def broken():
        raise RuntimeError("no")

    row = harness.timed(
        harness.Row("work", {}), {"b": broken, "a": lambda: lambda: "a"}, 2, 1, scripted({"a": [1.0, 3.0]})
    )
    assert row.times == {"a": 2.0} and row.relative == {}


def test_rounds_end_after_the_given_seconds_but_not_before_the_fewest_rounds():
    calls = []
    contenders = {"a": lambda: lambda: calls.append(1)}
    harness.timed(harness.Row("work", {}), contenders, 50, 1, harness.wall_clock, seconds=0.0)
    assert len(calls) == 1 + harness.FEWEST_ROUNDS


def test_peers_are_skipped_after_the_deadline():
    late = cuda.Deadline(-1).guard(lambda: lambda: None)
    with pytest.raises(TimeoutError, match="the -1 seconds of this run have passed"):
        late()
    assert cuda.Deadline(60).guard(lambda: "work")() == "work"


def test_a_step_of_ragged_experts_is_timed(monkeypatch):
    """On a CPU, with another clock."""
    sizes = train_grouped.ends_of(96, 4, "cpu").diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    assert sizes[1:3] == [0, 0] and sum(sizes) == 96
    monkeypatch.setattr(train_grouped, "event_clock", lambda ms, max_calls: harness.wall_clock)
    row = train_grouped.measured("mxfp8", train_grouped.Shape(96, 4, 32, 32), "cpu", quick=True, repeats=3)
    assert row.over_base(train_grouped.EAGER) > 0 and row.kernels["mxfp8"].count(",") == 2
    assert len(train_grouped.cells(row)) == len(train_grouped.HEADER)
    assert [work for work, _ in train_grouped.TARGETS[0].figures([row])] == [row.work]


def test_inputs_are_rotated():
    seen = []
    run = cuda.rotate_inputs([1, 2, 3], seen.append)()
    for _ in range(5):
        run()
    assert seen == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("module", [cast, linear, train_grouped])
def test_without_a_gpu_the_command_exits_with_a_message(module, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["benchmark"])
    with pytest.raises(SystemExit) as exit:
        module.main()
    assert exit.value.code == 1
    assert "torch finds no CUDA device here; nothing was timed" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("name", cast.FORMATS)
@pytest.mark.parametrize("shape", [(256, 512), (129, 72)])
def test_moved_bytes_match_the_operands(name, shape):
    format, x = get_format(name), torch.randn(shape, dtype=torch.bfloat16)
    for work in cast.works(format):
        kind = Orientation.ROWWISE if work == "dequantize" else Orientation.of(work)
        operands = [o for o in quantize_operands(x, Cast.of(name), kind) if o is not None]
        assert cast.moved_bytes(format, work, *shape) == x.nbytes + sum(o.nbytes for o in operands)


def test_moved_bytes_of_known_shapes():
    values = 8192 * 8192
    assert cast.moved_bytes(get_format("mxfp8"), "rowwise", 8192, 8192) == 3 * values + values // 32
    assert cast.moved_bytes(get_format("mxfp4"), "both", 8192, 8192) == 3 * values + values // 16
    assert cast.moved_bytes(get_format("nvfp4"), "dequantize", 8192, 8192) == values * 5 // 2 + values // 16 + 4
    assert cast.moved_bytes(get_format("float8_row"), "columnwise", 8192, 4096) == 3 * 8192 * 4096 + 4 * 4096


def test_which_casts_read_their_input_twice():
    twice = {(name, work) for name in cast.FORMATS for work in cast.WORKS if cast.reads_twice(get_format(name), work)}
    casts = ("rowwise", "columnwise", "both")
    assert twice == {
        *(("nvfp4", work) for work in casts),
        *(("float8_e4m3_tensor", work) for work in casts),
        ("float8_e4m3_row", "columnwise"),
        ("float8_e4m3_row", "both"),
    }


def test_square_blocks_have_one_orientation():
    for name in cast.FORMATS:
        square = mx.quantize(torch.randn(256, 256), name, orientation="both").nbytes == (
            mx.quantize(torch.randn(256, 256), name).nbytes
        )
        assert ("both" not in cast.works(get_format(name))) == square


def test_the_fraction_is_bandwidth_over_that_of_the_copy():
    row = cast_row("nvfp4", "rowwise", over_copy=0.25)
    tbps = row.nbytes / (0.25 * 0.25) / 1e9
    assert row.tbps(cast.OURS) == pytest.approx(tbps)
    assert row.fraction(cast.OURS) == pytest.approx(tbps / (2 * cast.COPY_BYTES / 0.25 / 1e9))
    more = (row.nbytes + 2 * 8192**2) / row.nbytes
    assert row.fraction(cast.OURS, twice=True) == pytest.approx(row.fraction(cast.OURS) * more)
    assert math.isnan(row.fraction("torchao")) and math.isnan(cast_row("mxfp8", "rowwise").fraction(cast.OURS, True))


# ---------------------------------------------------------------------------------------------- rows


@pytest.fixture
def no_gpu_needed(monkeypatch):
    for module in (cast, linear):
        monkeypatch.setattr(module, "event_clock", lambda *args, **options: harness.wall_clock)
        monkeypatch.setattr(module, "cold_copies", lambda nbytes: 2)
    monkeypatch.setattr(cast, "COPY_BYTES", 1 << 12)
    monkeypatch.setattr(cast, "CALLS", 2)


@pytest.mark.parametrize("work", cast.WORKS)
def test_every_format_is_cast(work, no_gpu_needed):
    for name in cast.FORMATS:
        if work in cast.works(get_format(name)):
            row = cast.cast_row(name, work, 64, ON_CPU, cuda.Deadline(60))
            ours = {cast.OURS, cast.FLOOR} if name in cast.WITH_FLOOR and work != "dequantize" else {cast.OURS}
            assert set(row.times) == {cast.COPY} | ours and row.failed == {}
            assert set(row.kernels) == ours and all(row.kernels.values())
            assert row.fraction(cast.OURS) > 0


def test_host_time_is_the_time_of_one_call(no_gpu_needed):
    row = cast.host_row("mxfp8_e4m3[32x32]", ON_CPU)
    assert set(row.times) == {cast.OURS} and 0.001 < row.times[cast.OURS] < 1000


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_host_time_of_a_linear_layer_is_compared_with_plain_torch(device):
    row = host.row(torch.bfloat16, 2, device)
    ours = host.CONTENDERS if device == "cpu" else host.FORMATS
    assert set(row.times) == {"plain torch", "plain torch again", *ours} and row.failed == {}
    for name, (_, contender, us, _) in zip(row.times, host.cells(row), strict=True):
        assert contender == name and float(us) == pytest.approx(row.times[name] / host.CALLS * 1e3, abs=0.06)
        assert 0.1 < float(us) < 10_000


@pytest.mark.parametrize("config", linear.CONFIGS)
def test_every_config_runs_beside_bfloat16(config, no_gpu_needed, capsys):
    pairs = linear.cold_pairs(16, 64, 96, "cpu")
    row = linear.linear_row(config, pairs, linear.ours(config, pairs), ON_CPU)
    assert row.failed == {} and row.shape == "16x64x96"
    assert row.over_base == row.relative[config] > 0
    assert row.kernels[config].split(", ")[0] in KERNEL_NAMES, "the product's kernel comes first"
    assert capsys.readouterr().out.startswith(f"{config} 16x64x96: ")


def test_operations_per_second():
    assert linear_row("mxfp8", "4096x4096x4096", 1.0).tflops("mxfp8") == pytest.approx(2 * 4096**3 / 0.5e-3 / 1e12)


# ---------------------------------------------------------------------------------------------- targets


def verdicts(module, rows):
    return {target.what: target.verdict(rows) for target in module.TARGETS}


def test_a_target_is_judged_by_the_worst_figure():
    rows = [cast_row("mxfp8_e4m3", "rowwise", 8192, over) for over in (0.2, 0.22)]
    rows[1].size = "16384x16384"
    worst = rows[1].fraction(cast.OURS)
    found = verdicts(cast, rows)["rowwise MXFP8, of the copy"]
    assert found == ["rowwise MXFP8, of the copy", ">= 0.90", f"{worst:.3g}", "mxfp8_e4m3 16384x16384", "no"]
    assert verdicts(cast, rows[:1])["rowwise MXFP8, of the copy"][4] == "yes"


def test_a_target_without_figures_is_not_measured():
    assert {line[4] for line in verdicts(cast, []).values()} == {"not measured"}
    assert verdicts(linear, LINEAR_ROWS)["MXFP8 over bfloat16"][2:] == ["1.05", "mxfp8 4096x4096x4096", "yes"]
    assert verdicts(linear, LINEAR_ROWS)["MXFP4 and NVFP4 over bfloat16"][4] == "no"


def test_host_time_and_rceil_have_targets():
    found = verdicts(cast, CAST_ROWS)
    assert found["host time of a call [us]"] == ["host time of a call [us]", "<= 35", "30.1", "mxfp8_e4m3", "yes"]
    assert found["time of RCEIL over FLOOR"][1:3] == ["<= 1.03", f"{0.2 / 0.198:.3g}"]


def test_the_target_that_is_missed_by_most_is_printed_first(capsys):
    target = cuda.Target("time", "<=", 1.0, lambda rows: [("here", figure) for figure in rows])
    targets = [target, target._replace(what="tight", limit=0.5), target._replace(what="loose", limit=9.0)]
    targets += [cuda.Target("speed", ">=", 3.0, target.figures), target._replace(what="none", figures=lambda rows: [])]
    cuda.print_verdicts(targets, [2.0, 1.0])
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[3:]]
    assert names == ["tight", "speed", "time", "loose", "none"]


# ---------------------------------------------------------------------------------------------- tables and records


def test_a_wide_table_wraps_its_headers(capsys):
    harness.print_table(["model", *["a long header"] * 9], [["x", *["1"] * 9]])
    assert capsys.readouterr().out.splitlines()[:2] == ["model" + "  a long" * 9, " " * 5 + "  header" * 9]


def test_a_wide_table_wraps_its_last_column(capsys):
    kernels = "scaled_mm, dequant; " * 5
    harness.print_table(["work", "ms", "kernels"], [["x" * 60, "1.0", kernels], ["y", "2.0", ""]])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= harness.WIDTH and lines[-1].split() == ["y", "2.0"]
    assert " ".join(" ".join(lines[2:-1]).split()) == "x" * 60 + " 1.0 " + kernels.strip()


def test_summaries_have_a_column_for_each_work_or_shape():
    lines = cast.summary(CAST_ROWS)
    assert [line[:2] for line in lines[:3]] == [
        ["mxfp8_e4m3", "8192x8192"], ["mxfp8_e4m3, floor", "8192x8192"], ["nvfp4", "8192x8192"],
    ]  # fmt: skip
    assert all(len(line) == len(cast.SUMMARY_HEADER) for line in lines)
    row = cast_row("nvfp4", "rowwise", over_copy=0.3)
    shown = f"{row.fraction(cast.OURS):.2f} to {row.fraction(cast.OURS, True):.2f} (0.075 ms)"
    assert lines[2][2] == shown
    square = next(line for line in lines if line[0] == "mxfp8_e4m3[32x32]")
    assert square[3:5] == ["", ""] and square[6] == "triton"

    header, body = linear.summary(LINEAR_ROWS)
    assert header == ["contender", "4096x4096x4096", "8192x14336x4096", "kernels"]
    assert body[0] == ["bfloat16 `F.linear`", "0.500 ms", "0.500 ms", "cuBLAS"]
    assert body[1] == ["mxfp8", "1.05", "1.05", "dequant"]


def test_printed_lines_match_their_headers_and_name_failures():
    row = replace(CAST_ROWS[0], failed={"torchao Triton": "AssertionError: needs triton"})
    assert {len(line) for line in cast.cells(row)} == {len(cast.HEADER)}
    assert cast.cells(row)[-1][1:3] == ["torchao Triton", "fails"]
    assert {len(line) for line in cast.peer_cells(row)} == {len(cast.PEER_HEADER)}
    assert cast.peer_cells(CAST_ROWS[-2]) == [] and len(cast.host_cells(CAST_ROWS[-1])) == len(cast.HOST_HEADER)
    failed = linear.LinearRow("x 1x2x3", {linear.BASE: 0.5}, failed={"x": "no"}, contender="x", shape="1x2x3")
    assert {len(linear.cells(r)) for r in (LINEAR_ROWS[0], failed)} == {len(linear.HEADER)}
    assert "fails" in linear.cells(failed)


@pytest.fixture
def records(tmp_path, monkeypatch):
    """A folder with both records, from which docs.records reads them, and the pictures from ``assets``."""
    monkeypatch.setattr(harness, "machine", lambda: MACHINE)
    for name, rows in (("cast", CAST_ROWS), ("linear", LINEAR_ROWS)):
        harness.write_json(tmp_path / f"{name}.json", rows)
    monkeypatch.setattr(records_of_docs, "RESULTS", tmp_path)
    monkeypatch.setattr(records_of_docs, "ASSETS", tmp_path / "assets")
    return tmp_path


def test_a_record_names_command_and_machine_and_reads_back(records, monkeypatch):
    assert harness.read_json(records / "cast.json", cast.CastRow) == (MACHINE, CAST_ROWS)
    assert harness.read_json(records / "linear.json", linear.LinearRow) == (MACHINE, LINEAR_ROWS)
    monkeypatch.setattr("sys.argv", ["x", "--json", "/somewhere/on/this/machine/cast.json", "--quick"])
    harness.write_json(records / "again.json", CAST_ROWS)
    command = json.loads((records / "again.json").read_text())["command"]
    assert command.endswith("--json cast.json --quick")


@pytest.mark.parametrize("name", ["cast", "linear"])
def test_the_page_shows_a_record_or_says_that_there_is_none(name, records):
    text = generate.TABLES[name]()
    assert text.startswith("a GPU, CUDA 13.0, Python 3.11.7, mxtensor 0.1.0, torch 2.11.0; 2026-01-02.")
    assert "| target | limit | worst | where | holds |" in text and "![" not in text
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    assert all(len({len(line.split(" | ")) for line in table.splitlines()}) == 1 for table in tables)
    (records / f"{name}.json").unlink()
    assert generate.TABLES[name]() == (
        f"Not recorded yet: `python -m benchmarks.{name} --json benchmarks/results/{name}.json` writes the record."
    )


# ---------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("name", ["cast", "linear"])
def test_a_picture_is_drawn_from_its_record_and_shown(name, records):
    pytest.importorskip("matplotlib")
    path = plots.draw(name, records, records / "assets")
    assert path == records / "assets" / f"{name}.png"
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG") and plots.checksum(records / f"{name}.json").encode() in content
    assert f"](../assets/{name}.png)" in generate.TABLES[name]()


def test_a_picture_has_a_row_for_each_name_and_a_marker_for_each_figure():
    pytest.importorskip("matplotlib")
    panels = plots.draw_cast(MACHINE, CAST_ROWS).axes
    assert [axes.get_title() for axes in panels] == list(cast.WORKS)
    assert [text.get_text() for text in panels[0].get_yticklabels()] == [
        "mxfp8_e4m3", "mxfp8_e4m3, floor", "nvfp4", "mxfp8_e4m3[32x32]",
    ]  # fmt: skip
    drawn = [line.get_xdata()[0] for line in panels[0].lines if line.get_marker() == "o"]
    ours = [r.fraction(n) for r in CAST_ROWS if r.kind == "rowwise" for n in (cast.OURS, cast.FLOOR) if n in r.times]
    assert sorted(drawn) == pytest.approx(sorted(ours))

    (axes,) = plots.draw_linear(MACHINE, LINEAR_ROWS).axes
    marks = [line.get_xdata()[0] for line in axes.lines if line.get_marker() in plots.SHAPE_MARKERS]
    assert sorted(marks) == pytest.approx(sorted(row.over_base for row in LINEAR_ROWS))


def test_without_a_record_nothing_is_drawn(tmp_path):
    assert plots.draw("cast", tmp_path, tmp_path) is None and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", list(plots.DRAWN))
def test_the_pictures_of_the_documentation_are_current(name):
    record, picture = plots.ROOT / "benchmarks" / "results" / f"{name}.json", records_of_docs.ASSETS / f"{name}.png"
    assert record.exists() == picture.exists(), "draw the records: python -m benchmarks.plots"
    if record.exists():
        assert plots.checksum(record).encode() in picture.read_bytes(), "draw again: python -m benchmarks.plots"


# ---------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_the_event_clock_distinguishes_a_long_copy_from_a_short_one():
    clock = cuda.event_clock(1.0)
    long, short = (torch.randn(n, device="cuda") for n in (1 << 27, 1 << 24))
    times = [clock(lambda x=x: x.clone())() for x in (long, short)]
    assert times[0] > 3 * times[1] > 0
    assert cuda.cold_copies(1) > 1 == cuda.cold_copies(1 << 40)

"""What all benchmarks share: rounds, targets, tables, records, the command, the list."""

import json
import math
import pkgutil
import sys

import pytest
import torch

import benchmarks
from benchmarks import __main__ as listing
from benchmarks import cuda, harness


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
    assert row.speedup("b") == pytest.approx(1 / 3) and row.over_base("b") == 3.0 and math.isnan(row.speedup("c"))


def test_a_contender_that_raises_is_recorded_and_the_others_are_timed():
    def broken():
        raise ImportError("No module named 'torchao'")

    contenders = {"a": lambda: lambda: "a", "b": broken}
    row = harness.timed(harness.Row("work", {}), contenders, 2, 1, scripted({"a": [1.0, 3.0]}))
    assert row.times == {"a": 2.0} and row.failed == {"b": "ImportError: No module named 'torchao'"}
    assert math.isnan(row.ratio("a", "b"))
    first = harness.timed(
        harness.Row("work", {}), dict(reversed(contenders.items())), 2, 1, scripted({"a": [1.0, 3.0]})
    )
    assert first.times == {"a": 2.0} and first.relative == {}, "there are no ratios if the first contender fails"


def test_rounds_end_after_the_given_seconds_but_not_before_the_fewest_rounds():
    calls = []
    harness.timed(harness.Row("work", {}), {"a": lambda: lambda: calls.append(1)}, 50, 1, seconds=0.0)
    assert len(calls) == 1 + harness.FEWEST_ROUNDS


def test_the_fastest_time_counts_where_that_is_asked_for():
    clock = scripted({"a": [3.0, 1.0, 2.0, 5.0, 4.0]})
    found = harness.timed(harness.Row("work", {}), {"a": lambda: lambda: "a"}, 5, 0, clock, summary=min)
    assert found.times == {"a": 1.0}


def test_the_bandwidth_is_that_of_the_faster_reader():
    row = harness.Row("work", {"a": 1.0, "sum": 4.0, "amax": 2.0}, relative={"a": 1.0, "sum": 4.0})
    assert harness.take_bandwidth(row, megabytes=100) == 50
    assert row.times == {"a": 1.0} and row.relative == {"a": 1.0}


def test_peers_are_skipped_after_the_deadline():
    late = cuda.Deadline(-1).guard(lambda: lambda: None)
    with pytest.raises(TimeoutError, match="the -1 seconds of this run have passed"):
        late()
    assert cuda.Deadline(60).guard(lambda: "work")() == "work"


def test_inputs_are_rotated():
    seen = []
    run = cuda.rotate_inputs([1, 2, 3], seen.append)()
    for _ in range(5):
        run()
    assert seen == [1, 2, 3, 1, 2]


def test_a_target_is_judged_by_the_worst_figure():
    target = harness.Target("time", "<=", 1.0, lambda rows: [(f"at {figure}", figure) for figure in rows])
    assert target.verdict([0.5, 2.0, math.nan]) == ["time", "<= 1.00", "2", "at 2.0", "no"]
    assert target._replace(sign=">=").verdict([1.5, 2.0]) == ["time", ">= 1.00", "1.5", "at 1.5", "yes"]
    assert target.verdict([math.nan])[-1] == "not measured"


def test_a_wide_table_wraps_its_headers_and_its_last_column(capsys):
    harness.print_table(["model", *["a long header"] * 9], [["x", *["1"] * 9]])
    assert capsys.readouterr().out.splitlines()[:2] == ["model" + "  a long" * 9, " " * 5 + "  header" * 9]
    kernels = "scaled_mm, dequant; " * 5
    harness.print_table(["work", "ms", "kernels"], [["x" * 60, "1.0", kernels], ["y", "2.0", ""]])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= harness.WIDTH and lines[-1].split() == ["y", "2.0"]
    assert " ".join(" ".join(lines[2:-1]).split()) == "x" * 60 + " 1.0 " + kernels.strip()


# ---------------------------------------------------------------------------------------------- records and commands


def test_a_record_names_command_and_machine_and_keeps_other_sections(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "--json", "/somewhere/on/this/machine/cast.json", "--tiny"])
    path, rows = tmp_path / "new" / "a.json", [harness.Row("w", {"a": 1.0}), harness.Row("v", {})]
    harness.write_json(path, rows, "one", more=3)
    harness.write_json(path, rows[:1], "two")
    harness.write_json(path, rows[1:], "two")
    record = json.loads(path.read_text())
    assert list(record) == ["one", "two"] and record["one"]["more"] == 3
    assert record["one"]["command"].endswith("--json cast.json --tiny")
    machine, found = harness.read_json(path, harness.Row, "one")
    assert found == rows and machine["versions"]["torch"] and machine["date"]
    assert harness.read_json(path, harness.Row, "two")[1] == rows[1:]
    assert sum('"work"' in line for line in path.read_text().splitlines()) == 3, "a line for each row"
    harness.write_json(path, rows)
    assert harness.read_json(path, harness.Row)[1] == rows, "without sections"
    harness.write_json(None, rows)


def test_every_module_is_a_script_or_named_by_the_package():
    modules = {module.name for module in pkgutil.iter_modules(benchmarks.__path__)} - {"__main__"}
    assert modules - set(listing.SCRIPTS) == {name for name in modules if f"``{name}``" in benchmarks.__doc__}


def test_the_list_has_a_question_for_every_section(capsys):
    assert listing.main([]) == 0
    out = capsys.readouterr().out
    for name in listing.SCRIPTS:
        for section, row in listing.sections_of(name).items():
            assert f"    {section}" in out and row.question in out
    assert "layers layers-h100.json layers-h200.json" in out


def test_each_machine_has_a_record_of_its_own(monkeypatch):
    assert listing.machine_name("NVIDIA H100 80GB HBM3", "AMD EPYC") == "h100"
    assert listing.machine_name(None, "AMD EPYC") == "epyc"
    assert listing.machine_name(None, "Intel(R) Xeon(R) Processor") == "xeon"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert listing.command_of("layers") == []
    command = listing.command_of("host")
    assert command[:4] == [sys.executable, "-m", "benchmarks.host", "cpu"] and "/host-" in command[-1]
    assert listing.command_of("models")[-1].endswith("/models.json")
    assert listing.command_of("scale")[-2:] == ["scale", "sharding"]


def test_names_that_do_not_exist_are_refused(capsys):
    for main, words in ((listing.main, ["nothing"]), (listing.import_module("benchmarks.cpu").main, ["nothing"])):
        with pytest.raises(SystemExit):
            main(words)
        assert "there is no" in capsys.readouterr().err


OF_GPU = [name for name in listing.SCRIPTS if any(section.gpu for section in listing.sections_of(name).values())]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run the benchmark")
@pytest.mark.parametrize("name", OF_GPU)
def test_without_a_gpu_a_script_says_so(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        listing.import_module(f"benchmarks.{name}").main([])
    assert stopped.value.code == 1 and "torch finds no CUDA device here" in capsys.readouterr().err


SECTIONS = [
    (name, section)
    for name in ("layers", "generate", "training", "cast", "host", "cpu")
    for section in listing.sections_of(name)
    if (name, section) not in {("training", "memory"), ("cpu", "sweep"), ("generate", "transformers")}
]
"""Those with a toy size; processes of generate take long, the sweep has options: test_cpu.py."""


@pytest.mark.exhaustive(quick=4)
@pytest.mark.parametrize(("name", "section"), SECTIONS)
def test_a_section_runs_at_a_toy_size(name, section, tmp_path, capsys, monkeypatch):
    script, path = listing.import_module(f"benchmarks.{name}"), tmp_path / "record.json"
    if section == "first":  # without the processes, which take seconds
        make = lambda config, cache, folder, args: script.FirstRow(  # noqa: E731
            config, script.first_tokens(config, args), config=config, cache=cache
        )
        monkeypatch.setattr(script, "in_new_process", make)
    script.main([section, "--tiny", "--repeats", "1", "--json", str(path)])
    rows = json.loads(path.read_text())[section]["rows"]
    ours = [row for row in rows if not any("torchao" in word or "gemlite" in word for word in row["failed"])]
    assert rows and all(row["times"] for row in rows)
    assert all(row["failed"] == {} for row in ours)
    assert capsys.readouterr().out


@pytest.mark.gpu
def test_the_event_clock_distinguishes_a_long_copy_from_a_short_one():
    clock = cuda.event_clock(1.0)
    long, short = (torch.randn(n, device="cuda") for n in (1 << 27, 1 << 24))
    times = [clock(lambda x=x: x.clone())() for x in (long, short)]
    assert times[0] > 3 * times[1] > 0
    assert cuda.copies(1) > 1 == cuda.copies(1 << 40)

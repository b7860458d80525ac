"""The sweep of CPU products: its figures, and a run of the smallest product."""

import json

import pytest
import torch

from benchmarks import cpu_sweep, harness
from mxtensor.kernels.gemm import cpu_library


def row(work, chosen, whole):
    return harness.Row(work, {cpu_sweep.CHOSEN: chosen, cpu_sweep.WHOLE: whole})


def test_the_worst_row_comes_first_and_decides_the_target():
    rows = [row("a", 1.0, 2.0), row("b", 3.0, 2.0)]
    assert [line[0] for line in cpu_sweep.lines(rows)] == ["b", "a"]
    assert cpu_sweep.lines(rows)[0] == ["b", "3000", "2000", "1.50"]
    (target,) = cpu_sweep.TARGETS
    assert target.worst(rows) == (1.5, "b") and target.worst(rows[:1]) == (0.5, "a")


def test_products_are_summed_up_by_their_rows():
    found = [
        ("32x32 mxfp8, 4 rows of float32", 1, 4),
        ("64x32 nvfp4, 4 rows of float16", 1, 1),
        ("8x8 a, 33 rows of b", 3, 2),
    ]
    assert cpu_sweep.by_rows([row(*each) for each in found]) == [
        ["4", "2", "0.50", "1.00"],
        ["33", "1", "1.50", "1.50"],
    ]


def test_the_fastest_time_counts():
    times = iter((3.0, 1.0, 2.0, 5.0, 4.0))
    contenders = {"a": lambda: lambda: None}
    found = harness.timed(
        harness.Row("work", {}), contenders, repeats=5, warmup=0, clock=lambda run: lambda: next(times), summary=min
    )
    assert found.times == {"a": 1.0}


def test_a_run_writes_its_record(tmp_path, capsys):
    path = tmp_path / "sweep.json"
    arguments = ["--json", str(path), "--repeats", "1", "--formats", "mxfp4", "--dtypes", "float32", "--rows", "1"]
    cpu_sweep.main([*arguments, "--shapes", "32x32"])
    (found,) = json.loads(path.read_text())["rows"]
    assert found["work"] == "32x32 mxfp4, 1 rows of float32" and not found["failed"]
    assert found["times"].keys() == {cpu_sweep.CHOSEN, cpu_sweep.WHOLE}
    assert "1 products" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_instruction_sets_are_timed_beside_each_other(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cpu_library, "TILE_ROWS", cpu_library.TILE_ROWS)
    found = cpu_library.library()
    sets, before, threads = cpu_library.usable_instructions()[-2:], found.kernels, torch.get_num_threads()
    path, used, use = tmp_path / "sweep.json", [], cpu_library.Library.use
    monkeypatch.setattr(
        cpu_library.Library, "use", lambda self, kernels: (use(self, kernels), used.append(self.instructions))
    )
    arguments = ["--json", str(path), "--repeats", "2", "--formats", "mxint8", "--dtypes", "bfloat16", "--rows", "2"]
    try:
        cpu_sweep.main([*arguments, "--shapes", "32x64", "--casts", "--threads", "1", "--instructions", *sets])
        assert [name[:4] for name in used] == [sets[i][:4] for i in (0, 1, 0, 1, 1, 0)] and torch.get_num_threads() == 1
    finally:
        found.use(before)
        torch.set_num_threads(threads)
    (row,) = json.loads(path.read_text())["rows"]
    assert list(row["times"]) == sets and not row["failed"]
    assert "32x64 mxint8, 2 rows of bfloat16" in capsys.readouterr().out
    (line,) = cpu_sweep.lines_of_sets([harness.Row("a", {"amx": 1.0, "avx2": 3.0})], ("amx", "avx2"))
    assert line == ["a", "1000", "3000", "3.00"]


def test_an_instruction_set_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        cpu_sweep.main(["--instructions", "avx1024"])
    assert "this processor does not run avx1024" in capsys.readouterr().err


def test_an_unknown_dtype_is_refused(capsys):
    with pytest.raises(SystemExit):
        cpu_sweep.main(["--dtypes", "float64"])
    assert "float64" in capsys.readouterr().err

"""The sweep of CPU products: its figures, and runs of the smallest product."""

import json

import pytest
import torch

from benchmarks import cpu, harness
from mxtensor.kernels.gemm import cpu_codes


def row(work, chosen, whole):
    return harness.Row(work, {cpu.CHOSEN: chosen, cpu.WHOLE: whole})


def test_products_are_summed_up_by_their_rows():
    found = [
        ("32x32 mxfp8, 4 rows of float32", 1, 4),
        ("64x32 nvfp4, 4 rows of float16", 1, 1),
        ("8x8 a, 33 rows of b", 3, 2),
    ]
    assert cpu.by_rows([row(*each) for each in found]) == [
        ["4", "2", "0.50", "1.00"],
        ["33", "1", "1.50", "1.50"],
    ]


def test_a_run_writes_its_record(tmp_path, capsys):
    path = tmp_path / "sweep.json"
    arguments = ["--json", str(path), "--repeats", "1", "--formats", "mxfp4", "--dtypes", "float32", "--rows", "1"]
    cpu.main(["sweep", *arguments, "--shapes", "32x32"])
    (found,) = json.loads(path.read_text())["sweep"]["rows"]
    assert found["work"] == "32x32 mxfp4, 1 rows of float32" and not found["failed"]
    assert found["times"].keys() == {cpu.CHOSEN, cpu.WHOLE}
    assert "32x32 mxfp4, 1 rows of float32" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_instruction_sets_are_timed_beside_each_other(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cpu_codes, "TILE_ROWS", cpu_codes.TILE_ROWS)
    found = cpu_codes.library()
    sets, before, threads = cpu_codes.usable_instructions()[-2:], found.kernels, torch.get_num_threads()
    path, used, use = tmp_path / "sweep.json", [], cpu_codes.Library.use
    monkeypatch.setattr(
        cpu_codes.Library, "use", lambda self, kernels: (use(self, kernels), used.append(self.instructions))
    )
    arguments = ["--json", str(path), "--repeats", "2", "--formats", "mxint8", "--dtypes", "bfloat16", "--rows", "2"]
    try:
        cpu.main(["sweep", *arguments, "--shapes", "32x64", "--casts", "--threads", "1", "--instructions", *sets])
        assert [name[:4] for name in used] == [sets[i][:4] for i in (0, 1, 0, 1, 1, 0)] and torch.get_num_threads() == 1
    finally:
        found.use(before)
        torch.set_num_threads(threads)
    (row,) = json.loads(path.read_text())["sweep"]["rows"]
    assert list(row["times"]) == sets and not row["failed"]
    assert "32x64 mxint8, 2 rows of bfloat16" in capsys.readouterr().out
    (line,) = cpu.lines_of_sets([harness.Row("a", {"amx": 1.0, "avx2": 3.0})], ("amx", "avx2"))
    assert line == ["a", "1000", "3000", "3.00"]


def test_an_instruction_set_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        cpu.main(["sweep", "--instructions", "avx1024"])
    assert "this processor does not run avx1024" in capsys.readouterr().err


def test_an_unknown_dtype_is_refused(capsys):
    with pytest.raises(SystemExit):
        cpu.main(["sweep", "--dtypes", "float64"])
    assert "float64" in capsys.readouterr().err

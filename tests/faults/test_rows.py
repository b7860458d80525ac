"""The list of planted faults fits the code of today, and has every room of the package."""

import ast

import pytest

from tests.faults.plant import FAILED, ROOT, planted
from tests.faults.rows import FAULTS
from tests.floors import FACE, ROOMS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_is_still_a_program(fault):
    text = planted((ROOT / "mxtensor" / fault.file).read_text(), fault)
    if fault.file.endswith(".py"):
        ast.parse(text)
    assert fault.old != fault.new
    assert all((ROOT / "tests" / name).exists() for name in fault.near.split())


def test_there_are_at_least_34_and_one_in_every_room():
    names = [fault.name for fault in FAULTS]
    assert len(names) >= 34 and len(names) == len(set(names))
    assert {fault.file.split("/")[0] for fault in FAULTS} == set(ROOMS) - {FACE}


def test_the_folders_of_the_kernels_all_have_one():
    kernels = ROOT / "mxtensor" / "kernels"
    folders = {p.name for p in kernels.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert {f.file.split("/")[1] for f in FAULTS if f.file.startswith("kernels/")} >= folders


def test_the_name_of_a_failed_test_is_read_from_the_summary():
    summary = "FAILED tests/a.py::test_b[x - y] - assert 1\nERROR tests/c.py::test_d\n1 failed"
    assert FAILED.findall(summary) == ["tests/a.py::test_b[x - y]", "tests/c.py::test_d"]

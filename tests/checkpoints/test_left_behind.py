"""What a killed process leaves of a destination does not stand in the way of the next one."""

import os
import signal
import subprocess
import sys

import pytest
import torch

import mxtensor as mx
from mxtensor.checkpoints import destination
from mxtensor.checkpoints.destination import Destination
from tests.helpers.checkpoint_files import checkpoint

KILLED = """
import os, signal, sys, torch
import mxtensor as mx
from mxtensor.checkpoints import {module} as module
original = module.{name}
def killed(*arguments, **more):
    {before}
    os.kill(os.getpid(), signal.SIGKILL)
module.{name} = killed
mx.checkpoints.save({{"a": torch.ones(3)}}, sys.argv[1], layout="plain", overwrite=True)
"""
AFTER = "original(*arguments)\n    if not str(arguments[1]).endswith('.old'): return"
MOMENTS = {
    "while it writes": {"module": "store", "name": "config_files", "before": "pass"},
    "after the old one was moved": {"module": "destination", "name": "os.replace", "before": AFTER},
    "before the old one is removed": {"module": "destination", "name": "shutil.rmtree", "before": "pass"},
}


@pytest.mark.exhaustive(quick=2)
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no kill -9")
@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        ("new", "while it writes"), ("empty", "while it writes"), ("file", "while it writes"),
        ("old", "while it writes"), ("old", "before the old one is removed"), ("old", "after the old one was moved"),
    ],
)  # fmt: skip
def test_a_destination_of_a_process_that_was_killed_can_be_used_again(kind, moment, tmp_path):
    out = tmp_path / ("out.safetensors" if kind == "file" else "out")
    if kind == "empty":
        out.mkdir()
    if kind == "old":
        checkpoint(out, {"before": torch.zeros(2)})
    code = KILLED.format(**MOMENTS[moment])
    done = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = [p for p in tmp_path.rglob(".*") if p.suffix in (".partial", ".old")]
    assert len(left) >= 1
    assert out.exists() == (kind in ("empty", "old") and moment != "after the old one was moved")
    mx.checkpoints.save({"a": torch.ones(3)}, out, layout="plain", overwrite=kind == "old")
    assert torch.equal(mx.checkpoints.load(out)["a"], torch.ones(3))
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".partial"] == []
    mx.checkpoints.save({"a": torch.ones(3)}, out, layout="plain", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == [out.name]


def test_what_another_process_is_writing_stays(tmp_path):
    class Folder(Destination):
        is_file = False

    (tmp_path / "out").mkdir()
    with Folder(tmp_path / "out") as first:
        (first.folder / "x").touch()
        with pytest.raises(FileExistsError, match="out is being written by another process"):
            Folder(tmp_path / "out", overwrite=True)
        assert (first.folder / "x").exists()
    with Destination(tmp_path / "a.safetensors") as first, Destination(tmp_path / "a.safetensors") as second:
        assert first.folder != second.folder and first.folder.exists()
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["out"]


def test_folders_with_other_names_and_new_ones_stay(tmp_path):
    names = [
        ".out.abc.partial",
        ".other.12345678.partial",
        "out.12345678.partial",
        ".out.12345678.parti",
        ".out.00000000.partial",
    ]
    for name in names:
        (tmp_path / name).mkdir()
    for name in names[:-1]:
        (tmp_path / name / "x").touch()
    destination.remove_left_behind(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)
    os.utime(tmp_path / names[-1], (0, 0))
    destination.remove_left_behind(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names[:-1])


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no umask")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_are_those_of_the_umask(mask, tmp_path):
    before = os.umask(mask)
    try:
        mx.checkpoints.save({"a.weight": mx.quantize(torch.randn(32, 32), "mxfp8")}, tmp_path / "out")
        mx.checkpoints.save({"a": torch.ones(3)}, tmp_path / "a.safetensors", layout="plain")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~mask
    files = [*(tmp_path / "out").iterdir(), tmp_path / "a.safetensors"]
    assert {p.stat().st_mode & 0o777 for p in files} == {0o666 & ~mask}

"""The programs of ``examples/frameworks`` on two ranks: one that is killed and continued ends as one that was not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVE, KILL = 4, 2, 3


def run(name, folder, recipe, *options):
    """One program under torchrun."""
    arguments = ["--folder", folder, "--recipe", recipe, "--steps", STEPS, "--save", SAVE, *options]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", f"examples.frameworks.{name}", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "package", "recipe"),
    [
        ("hf_trainer", "accelerate", "float8-delayed"),
        ("accelerate_fsdp", "accelerate", "float8-delayed"),
        ("lightning_fit", "lightning", "float8-delayed"),
        ("titan_style", "torch", "float8-delayed"),
        ("titan_style", "torch", "nvfp4"),  # tensor parallelism, and stochastic rounding
    ],
)
def test_a_killed_run_resumes_bit_for_bit(name, package, recipe, tmp_path):
    pytest.importorskip(package)
    straight = run(name, tmp_path / "straight", recipe)
    assert straight.returncode == 0, straight.stderr[-4000:]
    killed = run(name, tmp_path / "killed", recipe, "--kill", KILL)
    assert killed.returncode != 0 and "SIGKILL" in killed.stderr, killed.stderr[-4000:]
    assert not list((tmp_path / "killed").glob("result-*"))
    continued = run(name, tmp_path / "killed", recipe, "--resume")
    assert continued.returncode == 0, continued.stderr[-4000:]
    for rank in range(2):
        one, two = (json.loads((tmp_path / of / f"result-{rank}.json").read_text()) for of in ("straight", "killed"))
        assert one.pop("first") <= 1 and two.pop("first") >= SAVE  # not all steps again
        assert one == two and len(one["losses"]) == STEPS and one["losses"][-1] < one["losses"][0]

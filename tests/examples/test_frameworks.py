"""The programs of ``examples/frameworks`` on two ranks: one that is killed and continued ends as one that was not."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.ranks import TWO_GPUS

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVE, KILL = 4, 2, 3
PROGRAMS = (
    ("hf_trainer", ("accelerate",), "float8-delayed", ()),
    ("hf_trainer --experts", ("accelerate",), "float8-delayed", ()),
    ("accelerate_fsdp", ("accelerate",), "float8-delayed", ()),
    ("accelerate_fsdp", ("accelerate",), "mxfp8", ()),
    ("lightning_fit", ("lightning", "pytorch_lightning"), "float8-delayed", ()),
    ("titan_style", ("torch",), "float8-delayed", ()),
    ("titan_style", ("torch",), "nvfp4", ()),  # tensor parallelism, and stochastic rounding
    ("titan_style", ("torch",), "mxfp8", ("--kill-rank", 1)),  # torchrun ends the other rank
)
"""(program and its switches, packages of which it needs one, recipe, options of the run that is killed)."""


def run(name, folder, recipe, device, *options):
    """One program under torchrun; its exit code and what it printed."""
    module, *switches = name.split()
    arguments = [*switches, "--folder", folder, "--recipe", recipe, "--steps", STEPS, "--save", SAVE, *options]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.helpers.leaves_group", f"examples.frameworks.{module}", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said = process.communicate(timeout=300 if device == "cpu" else 90)[1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, which have sessions of their own
        try:
            said = process.communicate(timeout=40)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said = process.communicate()[1]
        said += "\nthe program took too long"
    return process.returncode, said


def three_runs(program, folder, device):
    """What a run without a stop, one that is killed, and its continuation end with, and the results of the last two."""
    name, _, recipe, options = program
    straight = run(name, folder / "straight", recipe, device)
    killed = run(name, folder / "killed", recipe, device, "--kill", KILL, *options)
    left = [path.name for path in (folder / "killed").glob("result-*")]
    continued = run(name, folder / "killed", recipe, device, "--resume")
    return straight, killed, left, continued


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory):
    """Program -> its three runs on two GPUs; all programs at once, because most of the time they start."""
    programs = [program for program in PROGRAMS if installed(program)]
    folders = [tmp_path_factory.mktemp("program") for _ in programs]
    with ThreadPoolExecutor(len(programs)) as pool:
        told = list(pool.map(lambda each: (each[1], three_runs(*each, "cuda")), zip(programs, folders, strict=True)))
    return dict(zip(programs, told, strict=True))


def installed(program):
    return any(importlib.util.find_spec(package) for package in program[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program[0]}-{program[2]}")
def test_a_killed_run_resumes_bit_for_bit(program, device, tmp_path, request):
    if not installed(program):
        pytest.skip(f"needs {program[1][0]}")
    if device == "cuda":
        tmp_path, told = request.getfixturevalue("on_gpus")[program]
    else:
        told = three_runs(program, tmp_path, device)
    (code, said), (killed, its), left, (third, then) = told
    assert code == 0, said[-4000:]
    assert killed != 0 and "SIGKILL" in its, its[-4000:]
    assert left == []
    assert third == 0, then[-4000:]
    for rank in range(2):
        one, two = (json.loads((tmp_path / of / f"result-{rank}.json").read_text()) for of in ("straight", "killed"))
        assert one.pop("first") <= 1 and two.pop("first") >= SAVE  # not all steps again
        assert one == two and len(one["losses"]) == STEPS and one["losses"][-1] < one["losses"][0]


@pytest.mark.parametrize(("name", "package"), [("titan_style", "torch"), ("accelerate_fsdp", "accelerate")])
def test_a_program_that_needs_torchrun_says_so(name, package, tmp_path, monkeypatch, capsys):
    pytest.importorskip(package)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(SystemExit):
        importlib.import_module(f"examples.frameworks.{name}").main(["--folder", str(tmp_path / "run")])
    command = f"torchrun --nproc-per-node 2 -m examples.frameworks.{name} --folder {tmp_path / 'run'}"
    assert command in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
@pytest.mark.parametrize("recipe", ["float8-delayed", "mxfp8"])
def test_fsdp2_of_accelerate_trains_as_replicas_do(recipe, device, tmp_path):
    """accelerate exchanges the parameters of an optimizer by their addresses; every one must be trained."""
    pytest.importorskip("accelerate")
    losses = []
    for folder, options in ((tmp_path / "shards", ()), (tmp_path / "replicas", ("--replicate",))):
        code, said = run("accelerate_fsdp", folder, recipe, device, *options)
        assert code == 0, said[-4000:]
        losses.append(json.loads((folder / "result-0.json").read_text())["losses"])
    shards, replicas = losses
    assert len(shards) == STEPS and shards == replicas
    assert bool(list((tmp_path / "shards").glob("step-*/pytorch_model_fsdp_0/*.distcp")))  # it was sharded
    assert not list((tmp_path / "replicas").glob("step-*/pytorch_model_fsdp_0"))

"""Training on two ranks beyond FSDP2's own tests: the example under torchrun, and DistributedDataParallel.

The cases of two ranks stand in ``train_cases.py``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import cases
from train_cases import SETTINGS

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from examples.gpt import load_text, split
from examples.train_lm import Run, main

ROOT = Path(__file__).resolve().parent.parent


def test_every_case_of_two_ranks_is_looked_at():
    text = Path(__file__).read_text()
    assert [n for n, f in cases().items() if f.__module__ == "train_cases" and f'ranks("{n}")' not in text] == []


def test_the_example_resumes_on_two_ranks_bit_for_bit(ranks):
    first, second = ranks("example_resumed")
    assert first[0] == first[1] == second[0] == second[1] and len(first[0]) == 6
    assert first[2] and second[2]


def test_the_example_goes_on_alone(ranks):
    """What two ranks wrote is the file of one process; sums are in another order there."""
    losses, _, _, path = ranks("example_resumed")[0]
    run = Run.of(SETTINGS)
    run.load(Path(path))
    assert run.losses == losses[:3]
    for _ in range(3):
        run.step(split(load_text(None))[0])
    assert run.losses == pytest.approx(losses, rel=1e-5)


def test_under_torchrun(tmp_path):
    """One table, of the first rank; the checkpoint is there, and the losses are those of one process."""
    picture, file = tmp_path / "picture.png", tmp_path / "run.pt"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = ["--fsdp", "--size", "tiny", "--steps", "5", "--device", "cpu", "--plot", picture, "--checkpoint", file]
    command = [*torchrun, "-m", "examples.train_lm", *map(str, options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("mx.explain() of one step in mxfp8, 4 quantized layers: 4 fprop by emulated") == 1
    assert picture.is_file()
    alone = Run.of(SETTINGS)
    run = Run.of(SETTINGS)
    run.settings = type(SETTINGS)(**{**vars(SETTINGS), "text": run_text(file)})
    run.load(file)
    for _ in range(5):
        alone.step(split(load_text(None))[0])
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)


def run_text(path):
    """The digest of the text that a file was trained on."""
    import torch

    return torch.load(path, weights_only=True)["settings"]["text"]


@pytest.mark.parametrize(
    ("world", "arguments", "message"),
    [
        (None, ["--fsdp"], "--fsdp and torchrun go together"),
        ("2", [], "--fsdp and torchrun go together"),
        ("3", ["--fsdp"], "3 ranks cannot share batches of 8"),
        ("2", ["--fsdp", "--recipe", "float8-delayed"], "keeps an amax history on each rank"),
    ],
)
def test_mistakes_are_named(world, arguments, message, monkeypatch, capsys):
    if world is not None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(SystemExit):
        main(["--size", "tiny", "--device", "cpu", *arguments])
    assert message in " ".join(capsys.readouterr().err.split())


def test_data_parallel_training_is_that_of_one_process(ranks):
    for results in ranks("data_parallel"):
        assert len(results) == 5 and all(map(all, results.values()))

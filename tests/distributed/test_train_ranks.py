"""Training on two ranks: the example under torchrun, and DistributedDataParallel.

The cases of two ranks are in ``train_cases.py``.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.train_cases import SETTINGS, SPLIT
from tests.helpers.ranks import DEVICE, cases

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from examples.gpt import SIZES, load_text, split
from examples.run import Run
from examples.train_lm import digest, main

ROOT = Path(__file__).resolve().parents[2]


def test_every_case_of_two_ranks_has_a_test():
    text = Path(__file__).read_text()
    assert [
        n for n, f in cases().items() if f.__module__ == "tests.distributed.train_cases" and f'"{n}"' not in text
    ] == []


def test_a_monitor_sees_sharded_layers(ranks):
    """A weight that is gathered in codes has no values to compare with."""
    sides = ("rowwise", "columnwise")
    for told in ranks("monitored"):
        for name, operands in (("two copies", ("input", "weight", "grad")), ("tiles", ("input", "grad"))):
            assert told[name] == (
                True, [(fqn, o, side) for fqn in ("0.weight", "2.weight") for o in operands for side in sides]
            )  # fmt: skip


@pytest.mark.parametrize("case", ["example_continued", pytest.param("example_split", marks=pytest.mark.exhaustive)])
def test_the_example_resumes_on_two_ranks_bit_for_bit(case, ranks):
    first, second = ranks(case)
    assert first[0] == first[1] == second[0] == second[1] and len(first[0]) == 6
    assert first[2] and second[2]


@pytest.mark.parametrize(
    ("case", "settings", "close"),
    [
        ("example_continued", SETTINGS, 1e-5),
        pytest.param("example_split", SPLIT, 1e-3, marks=pytest.mark.exhaustive),
    ],
)
def test_the_example_continues_in_one_process(case, settings, close, ranks):
    """One process loads the checkpoint of two ranks. If layers are split, its sums are in another order, and codes may
    round differently."""
    losses, _, _, path = ranks(case)[0]
    run = Run.of(settings)
    run.load(Path(path))
    assert run.losses == losses[:3]
    for _ in range(3):
        run.step(split(load_text(None))[0])
    assert run.losses == pytest.approx(losses, rel=close if DEVICE == "cpu" else 1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("option", "settings", "close"), [("--fsdp", SETTINGS, 1e-5), ("--tp", SPLIT, 1e-3)])
def test_under_torchrun(option, settings, close, tmp_path):
    """The first rank prints one table, the checkpoint exists, and the losses are those of one process. Sums over ranks
    between layers are rounded differently, which changes a code now and then."""
    picture, file, layers = tmp_path / "picture.png", tmp_path / "run", 4 * SIZES[settings.size].layers
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = [option, "--size", settings.size, "--steps", "4", "--device", "cpu", "--plot", picture]
    command = [*torchrun, "-m", "examples.train_lm", *map(str, options), "--checkpoint", str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    said = f"mx.explain() of one step in mxfp8, {layers} quantized layers: {layers} fprop by emulated"
    assert done.stdout.count(said) == 1
    assert picture.is_file()
    settings = replace(settings, device="cpu")
    alone, run = Run.of(settings), Run.of(settings)
    run.settings = replace(settings, text=digest(load_text(None)))
    run.load(file)
    for _ in range(4):
        alone.step(split(load_text(None))[0])
    assert run.losses == pytest.approx(alone.losses, rel=close)


@pytest.mark.parametrize(
    ("world", "arguments", "message"),
    [
        (None, ["--fsdp"], "--fsdp, --tp and torchrun go together"),
        ("2", [], "--fsdp, --tp and torchrun go together"),
        ("2", ["--tp", "3"], "3 of 2 ranks cannot share 2 heads"),
        ("4", ["--tp"], "4 of 4 ranks cannot share 2 heads"),
        ("4", ["--tp", "2"], "add --fsdp"),
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

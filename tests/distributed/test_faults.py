"""A rank that dies: the other reports it within the timeout of its collectives, and the last checkpoint is complete."""

import datetime
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from mxtensor.distributed.checkpoint import Reader, Writer, latest
from tests.distributed.dcp_cases import RECIPES, batches, in_one_process, losses, made, state
from tests.distributed.fsdp_cases import ROWS, WIDTH, plain, values, whole

TIMEOUT = 30
NAME = "tiles"


def die(*arguments):
    """End the process at once, as the kernel's memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


class DyingWriter(Writer):
    """The writer of a rank that dies after writing its tensors."""

    write_data = die


def step_on_two(model, optimizer, rank, folder):
    model[2].register_forward_pre_hook(die if rank == 1 else lambda module, x: None)  # the first layer is gathered
    losses(model, optimizer, batches(1), rank)


def backward_on_two(model, optimizer, rank, folder):
    x = torch.randn(ROWS, WIDTH)
    y = model[1](model[0](x))
    if rank == 1:
        y.register_hook(die)
    model[2](y).square().mean().backward()


def first_gather(model, optimizer, rank, folder):
    """The collective in which ranks compare recipes."""
    fresh, _ = made(RECIPES["one copy"])
    if rank == 1:
        die()
    fresh(torch.randn(ROWS, WIDTH))


def save(model, optimizer, rank, folder):
    writer = (Writer, DyingWriter)[rank](Path(folder, "step-2"))
    dcp.save(state(model, optimizer), storage_writer=writer)


FAULTS = {f.__name__: f for f in (step_on_two, backward_on_two, first_gather, save)}


def work(rank, folder, fault):
    """A step, a checkpoint, then the fault. The remaining rank stores the error that it gets, and after how long."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)
    model, optimizer = made(RECIPES[NAME])
    losses(model, optimizer, batches(1), rank)
    dcp.save(state(model, optimizer), storage_writer=Writer(Path(folder, "step-1")))
    if rank == 0:
        torch.save([whole(plain(p)) for p in model.parameters()], f"{folder}/expected")
    else:
        for p in model.parameters():
            whole(plain(p))
    dist.barrier()
    before = time.monotonic()
    try:
        FAULTS[fault](model, optimizer, rank, folder)
        told = "nothing"
    except BaseException as error:
        told = f"{type(error).__name__}: {error}"
    Path(folder, "told").write_text(f"{time.monotonic() - before}\n{told}")
    os._exit(0)  # the group cannot be destroyed without the other rank


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_dies_is_an_error_on_the_other_and_the_last_checkpoint_loads(fault, tmp_path):
    ranks = spawn(work, (str(tmp_path), fault), 2, join=False)
    with pytest.raises(ProcessExitedException, match="process 1 terminated with signal SIGKILL"):
        while not ranks.join(grace_period=3 * TIMEOUT):  # the other rank has it before it is terminated
            pass
    seconds, told = (tmp_path / "told").read_text().split("\n", 1)
    assert float(seconds) < TIMEOUT + 5
    assert told.startswith(("RuntimeError", "DistBackendError", "CheckpointException")), told
    assert not (tmp_path / "step-2").exists() and latest(tmp_path).name == "step-1"
    model, optimizer = made(RECIPES[NAME], sharded=False)
    saved = state(model, optimizer)
    in_one_process(dcp.load, saved, tmp_path / "step-1", storage_reader=Reader(tmp_path / "step-1"))
    model.load_state_dict(saved["model"])
    expected = torch.load(tmp_path / "expected")
    for mine, its in zip(model.parameters(), expected, strict=True):
        assert torch.equal(values(mine), its)

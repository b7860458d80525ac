"""A rank that dies: the other reports it within the timeout of its collectives, and the last checkpoint is complete."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from mxtensor.distributed.checkpoint import Reader, Writer, latest
from tests.distributed.dcp_cases import RECIPES, batches, in_one_process, losses, made, state
from tests.distributed.fsdp_cases import ROWS, WIDTH, plain, values, whole
from tests.helpers.ranks import ON_CPU, TWO_GPUS, joined

NCCL = "cpu:gloo,cuda:nccl"
TIMEOUTS = {"gloo": 30, NCCL: 10}
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


def work(rank, folder, fault, backend):
    """A step, a checkpoint, then the fault. The remaining rank stores the error that it gets, and after how long."""
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "0"  # NCCL's last calls, which take longer to write than the timeout
    with joined(rank, folder, TIMEOUTS[backend], backend):
        model, optimizer = made(RECIPES[NAME])
        losses(model, optimizer, batches(1), rank)
        dcp.save(state(model, optimizer), storage_writer=Writer(Path(folder, "step-1")))
        parameters = [whole(plain(p)).cpu() for p in model.parameters()]
        if rank == 0:
            torch.save(parameters, f"{folder}/expected")
        dist.barrier()
        Path(folder, f"reached-{rank}").touch()
        before = time.monotonic()
        try:
            FAULTS[fault](model, optimizer, rank, folder)
            if "nccl" in backend:
                torch.cuda.synchronize()  # NCCL waits on the device
            told = "nothing"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        Path(folder, "told").write_text(f"{time.monotonic() - before}\n{told}")
        os._exit(0)  # the group cannot be destroyed without the other rank


def ended(processes, seconds):
    """Exit codes of the ranks after at most ``seconds``; those that are still running then are killed."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fault", "backend"),
    [
        *(pytest.param(fault, "gloo", marks=ON_CPU) for fault in FAULTS),
        *(pytest.param(fault, NCCL, marks=TWO_GPUS, id=f"{fault}-nccl") for fault in ("step_on_two", "save")),
    ],
)
def test_a_rank_that_dies_is_an_error_on_the_other_and_the_last_checkpoint_loads(fault, backend, tmp_path):
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=work, args=(rank, str(tmp_path), fault, backend)) for rank in range(2)]
    for process in processes:
        process.start()
    first, second = ended(processes, 90)
    assert second == -signal.SIGKILL and (tmp_path / "reached-0").exists()
    if backend == "gloo" or first == 0:
        seconds, told = (tmp_path / "told").read_text().split("\n", 1)
        assert float(seconds) < TIMEOUTS[backend] + 5
        assert told.startswith(("RuntimeError", "DistBackendError", "CheckpointException")), told
    else:  # the thread that watches NCCL ends the process
        assert first is not None and first < 0
    assert not (tmp_path / "step-2").exists() and latest(tmp_path).name == "step-1"
    model, optimizer = made(RECIPES[NAME], sharded=False)
    saved = state(model, optimizer)
    in_one_process(dcp.load, saved, tmp_path / "step-1", storage_reader=Reader(tmp_path / "step-1"))
    model.load_state_dict(saved["model"])
    expected = torch.load(tmp_path / "expected")
    for mine, its in zip(model.parameters(), expected, strict=True):
        assert torch.equal(values(mine), its)

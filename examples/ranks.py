"""The ranks that torchrun starts: each learns from its part of a batch and, by FSDP2, holds its part of the weights."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


@dataclass(frozen=True)
class Ranks:
    """This rank among so many; one that is alone shards nothing."""

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def shard(self, model: nn.Module, blocks: nn.Sequential) -> None:
        """FSDP2 of each block and of the model: weights are gathered a block at a time."""
        if self.world > 1:
            for block in blocks:
                fully_shard(block)
            fully_shard(model)

    def part(self, batch: Tensor) -> Tensor:
        """This rank's rows of what all ranks have drawn alike."""
        return batch.chunk(self.world)[self.rank]

    def mean(self, value: Tensor) -> float:
        """The mean over all ranks."""
        if self.world > 1:
            value = value.detach().clone()
            dist.all_reduce(value)
        return value.item() / self.world

    def any(self, here: bool) -> bool:
        """Whether it holds on some rank: what ends a loop must end it on all."""
        if self.world == 1:
            return here
        flag = torch.tensor(float(here), device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.world > 1:
            dist.barrier()


ALONE = Ranks()


def started_by_torchrun() -> bool:
    """Whether the environment names this process's rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The ranks of torchrun over NCCL (each on a GPU of its own) or gloo; alone without torchrun."""
    if not started_by_torchrun():
        yield ALONE
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
        settle()
    finally:
        dist.destroy_process_group()


def settle() -> None:
    """What ranks do last: wait for each other, and for gloo's threads to let go of the tensors that they sent.

    A thread that does so later asks for Python's lock; once Python shuts down it is ended for that, and aborts the
    process ("terminate called without an active exception", pytorch issue 190489). Nothing says when it has done so.
    """
    dist.barrier()
    if dist.get_backend() == "gloo":
        time.sleep(0.5)


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
"""State dicts as one process has them, whatever the number of ranks; on the first rank only."""


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``model`` and ``optimizer`` by the names of the parameters, plain tensors. Every rank must call it."""
    weights, moments = get_state_dict(model, optimizer, options=WHOLE)
    return {"model": weights, "optimizer": moments}


def load_whole(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """The inverse of ``whole_state``; every rank brings the whole."""
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )

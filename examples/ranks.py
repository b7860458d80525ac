"""The ranks that torchrun starts. Each trains on its part of a batch and stores its shard of the weights, with FSDP2
and tensor parallelism."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import mxtensor as mx


@dataclass(frozen=True)
class Ranks:
    """This rank. ``split`` ranks share each layer (tensor parallelism); a world of one rank shards nothing."""

    rank: int = 0
    world: int = 1
    split: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def shard(self, model: nn.Module, blocks: nn.Sequential, device: str) -> None:
        """Split the layers of each block over ``split`` ranks, and shard blocks with FSDP2 over the other ranks."""
        if self.world == 1:
            return
        mesh = init_device_mesh(device, (self.world // self.split, self.split), mesh_dim_names=("data", "layer"))
        columns, rows = mx.parallel.ColwiseParallel(), mx.parallel.RowwiseParallel()
        for block in blocks:
            if self.split > 1:
                styles = {"qkv": columns, "projection": rows, "up": columns, "down": rows}
                parallelize_module(block, mesh["layer"], styles)
            if self.split < self.world:
                fully_shard(block, mesh=mesh["data"])
        if self.split < self.world:
            fully_shard(model, mesh=mesh["data"])

    def part(self, batch: Tensor) -> Tensor:
        """This rank's rows of a batch that all ranks draw identically; ranks that share layers get the same rows."""
        return batch.chunk(self.world // self.split)[self.rank // self.split]

    def means(self, values: Tensor) -> list[float]:
        """The mean of each of ``values``, (N,), over all ranks."""
        if self.world > 1:
            values = values.clone()
            dist.all_reduce(values)
        return [value / self.world for value in values.tolist()]

    def any(self, here: bool) -> bool:
        """Whether ``here`` is true on any rank: a loop must end on all ranks at once."""
        if self.world == 1:
            return here
        flag = torch.tensor(float(here), device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)


ALONE = Ranks()


def started_by_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_ranks(args: argparse.Namespace, parser: argparse.ArgumentParser, heads: int, batch: int) -> None:
    """Check that torchrun's ranks can share layers and batches as ``args`` says; sets ``args.tp``."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if (args.fsdp or args.tp is not None) != started_by_torchrun():
        parser.error("--fsdp, --tp and torchrun go together: torchrun --nproc-per-node 2 -m examples.train_lm --fsdp")
    args.tp = 1 if args.tp is None else args.tp or ranks
    if args.tp < 1 or ranks % args.tp or heads % args.tp:
        parser.error(f"--tp: {args.tp} of {ranks} ranks cannot share {heads} heads; take a divisor of both")
    if args.tp < ranks and not args.fsdp:
        parser.error(f"--tp: {args.tp} of {ranks} ranks share a layer; add --fsdp to shard over the others")
    if batch % (ranks // args.tp):
        parser.error(f"--fsdp: {ranks // args.tp} ranks cannot share batches of {batch}; take a divisor of it")
    if ranks > 1 and args.recipe == "float8-delayed":
        parser.error("--fsdp, --tp: float8-delayed keeps an amax history on each rank; take float8-current")


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by device mesh: torch's fused optimizers do not accept mixed groups."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return list(groups.values())


def clip(groups: list[list[nn.Parameter]], largest: float) -> None:
    """``clip_grad_norm_`` over all groups of ``by_mesh``."""
    norms = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, largest, total)


@contextmanager
def joined(device: str, split: int = 1) -> Iterator[Ranks]:
    """Join the ranks of torchrun over NCCL (one GPU per rank) or gloo; without torchrun, one rank."""
    if not started_by_torchrun():
        yield ALONE
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), split)
    except BaseException:
        dist.destroy_process_group()  # the other ranks may not come
        raise
    leave()


def leave() -> None:
    """End the process group, if there is one, when all ranks are here and gloo has released the tensors that it sent.

    A thread of gloo that releases a tensor needs Python's lock. While Python shuts down, such a thread is ended and
    aborts the process ("terminate called without an active exception", pytorch issue 190489). torch offers no way to
    wait for it.
    """
    if not dist.is_initialized():
        return
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
    if dist.get_backend() == "gloo":
        time.sleep(0.5)
    dist.destroy_process_group()

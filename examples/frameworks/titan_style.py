"""A trainer in torchtitan's style: a mesh of two dimensions, FSDP2 and tensor parallelism, and one DCP checkpoint.

    torchrun --nproc-per-node 2 -m examples.frameworks.titan_style --folder out/titan --recipe mxfp8
    torchrun --nproc-per-node 4 -m examples.frameworks.titan_style --folder out/titan --recipe mxfp8

Half of the ranks (all, if there are two) share each layer; FSDP2 shards over the others. What a run depends on is a
dictionary of ``Stateful`` objects that torch.distributed.checkpoint saves and loads, as in torchtitan: model,
optimizer, and the trainer with its losses and random numbers. With delayed scaling, layers are sharded by FSDP2 only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import mxtensor as mx

from ..gpt import GPT, paper_layers
from ..ranks import by_mesh, clip, joined
from .common import SIZE, Windows, kill_at, made, parsed, random_state, set_random_state, share_scales, write_result

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class ModelState(Stateful):
    """The parameters, and amax histories as extra state, by name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Called by DCP."""
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called by DCP."""
        set_model_state_dict(self.model, state)


class OptimizerState(Stateful):
    """The moments, by the names of parameters."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Called by DCP."""
        return get_optimizer_state_dict(self.model, self.optimizer, options=BY_NAME)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called by DCP."""
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=state, options=BY_NAME)


class Trainer(Stateful):
    """The loop: its step, its losses, and what it trains."""

    def __init__(self, recipe: str, device: str, world: int) -> None:
        torch.manual_seed(0)
        self.model = mx.quantize_(GPT(SIZE), made(recipe), paper_layers).to(device)
        split = 1 if recipe == "float8-delayed" else 2 if world % 2 == 0 else 1
        mesh = init_device_mesh(device, (world // split, split), mesh_dim_names=("dp_shard", "tp"))
        self.data_rank, self.data_world = mesh["dp_shard"].get_local_rank(), world // split
        columns, rows = mx.parallel.ColwiseParallel(), mx.parallel.RowwiseParallel()
        for block in self.model.blocks:
            if split > 1:
                parallelize_module(block, mesh["tp"], {"qkv": columns, "projection": rows, "up": columns, "down": rows})
            fully_shard(block, mesh=mesh["dp_shard"])
        fully_shard(self.model, mesh=mesh["dp_shard"])
        self.groups = by_mesh(self.model.parameters())
        self.optimizer = torch.optim.AdamW([{"params": group} for group in self.groups], lr=1e-2)
        self.losses: list[float] = []
        self.states = {
            "model": ModelState(self.model), "optimizer": OptimizerState(self.model, self.optimizer), "train": self,
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Called by DCP."""
        return {"losses": self.losses, f"random of rank {dist.get_rank()}": random_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called by DCP."""
        self.losses = list(state["losses"])
        set_random_state(state[f"random of rank {dist.get_rank()}"])

    def step(self, data: Windows, device: str) -> None:
        """One training step; the batch depends on the number of steps alone."""
        first = (len(self.losses) * self.data_world + self.data_rank) * SIZE.batch
        loss = self.model.loss(data.windows[first : first + SIZE.batch].to(device))
        loss.backward()
        share_scales(self.model)
        clip(self.groups, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.losses.append(mean.item() / dist.get_world_size())


def main(argv: Sequence[str] | None = None) -> None:
    """Train; the result is in ``--folder``."""
    args = parsed(__doc__ or "", argv, by_torchrun=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with joined(device) as ranks:
        trainer, data = Trainer(args.recipe, device, ranks.world), Windows(1024)
        if args.resume:
            load(trainer.states, storage_reader=mx.checkpoint.Reader(mx.checkpoint.latest(args.folder)))
        while len(trainer.losses) < args.steps:
            trainer.step(data, device)
            if len(trainer.losses) % args.save == 0:
                writer = mx.checkpoint.Writer(args.folder / f"step-{len(trainer.losses)}")
                save(trainer.states, storage_writer=writer)
            kill_at(len(trainer.losses), args)
        write_result(args, trainer.model, trainer.losses)


if __name__ == "__main__":
    main()

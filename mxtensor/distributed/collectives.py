"""What ranks tell each other: the parts of split layers, and the amax histories of delayed scaling.

The collectives of layers are ops that eager code runs and a compiled graph holds. Each waits for its result as torch's
collectives do: the host for a CPU, the stream for a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.arguments import MODULE, Kind, check
from ..core.compat import functional_collectives as ops
from ..core.compat import local_of
from ..training.delayed_scaling import DelayedState, delayed_states, owner_of
from ..training.training_weight import TrainingWeight

_GROUP = Kind(
    "a process group of torch.distributed, or None",
    lambda value: value is None or (dist.is_available() and isinstance(value, dist.ProcessGroup)),
)


class Ranks(NamedTuple):
    """A process group in numbers and names, which a graph may have as constants."""

    group: str
    size: int

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """Those of a process group."""
        return cls(group.group_name, dist.get_world_size(group))


def gathered(mine: Tensor, ranks: Ranks) -> Tensor:
    """(n, ...) of each rank as (size * n, ...), in the order of ranks."""
    return ops.wait_tensor(ops.all_gather_into_tensor(mine.contiguous(), ranks.size, ranks.group))  # type: ignore[no-any-return]


def sum_scattered(of_all: Tensor, ranks: Ranks) -> Tensor:
    """The sum over the ranks of (size * n, ...), of which each rank gets its part (n, ...)."""
    return ops.wait_tensor(ops.reduce_scatter_tensor(of_all.contiguous(), "sum", ranks.size, ranks.group))  # type: ignore[no-any-return]


def largest(mine: Tensor, ranks: Ranks) -> Tensor:
    """The largest of the ranks at each place."""
    return ops.wait_tensor(ops.all_reduce(mine.contiguous(), "max", ranks.group))  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- delayed scaling


def _states(model: nn.Module) -> list[DelayedState]:
    """Every history of the model once, in an order that is the same on all ranks."""
    found: dict[int, DelayedState] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found |= {id(state): state for _, state in sorted(delayed_states(local_of(parameter)).items())}
        for product in getattr(module, "_products", ()):  # modules of mxtensor.te
            if product.delayed is not None:
                found[id(product.delayed)] = product.delayed
    return list(found.values())


def _complete(model: nn.Module, group: Any) -> None:
    """Give the stacks of this rank the histories that another rank has: an expert without tokens has not run here."""
    stacks: dict[str, TrainingWeight] = {}
    for name, parameter in model.named_parameters():
        weight = owner_of(local_of(parameter))
        if isinstance(weight, TrainingWeight) and weight.dim() > 2 and weight.linear_recipe.delayed is not None:
            stacks[name] = weight
    if not stacks:
        return
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, [(name, list(delayed_states(stack))) for name, stack in stacks.items()], group=group)
    for name, attributes in (entry for of_rank in said for entry in of_rank):
        for attribute in set(attributes) - set(delayed_states(stacks[name])):
            setattr(stacks[name], attribute, DelayedState(stacks[name].linear_recipe, stacks[name].device))


@torch.no_grad()
def share_amax(model: nn.Module, group: Any = None) -> None:
    """Give all ranks of ``group`` (all ranks by default) the largest amax that any of them has recorded in this step.

    Call it on every rank after the backward pass. With delayed scaling each rank otherwise scales by what it has seen
    itself, and a checkpoint, which stores a history once, would not continue all ranks exactly. One all-reduce of three
    numbers per layer, and for stacks of experts the names of the slices that have run; nothing for a model without
    delayed scaling, and in a process without a process group. Raises TypeError for another object.
    """
    check("share_amax", "model", model, MODULE)
    check("share_amax", "group", group, _GROUP)
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return
    _complete(model, group)
    states = _states(model)
    if not states:
        return
    records = torch.stack([state.record for state in states])
    dist.all_reduce(records, dist.ReduceOp.MAX, group=group)
    for state, record in zip(states, records, strict=True):
        state.record.copy_(record)

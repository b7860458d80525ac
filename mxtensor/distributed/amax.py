"""``share_amax``: all ranks get the same amax histories of delayed scaling, by one collective a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..core.arguments import MODULE, Kind, check
from ..core.local import local_of
from ..training.delayed_scaling import DelayedState
from ..training.histories import delayed_states, owner_of
from ..training.training_weight import TrainingWeight

_GROUP = Kind(
    "a process group of torch.distributed, or None",
    lambda value: value is None or (dist.is_available() and isinstance(value, dist.ProcessGroup)),
)


def _states(model: nn.Module) -> list[DelayedState]:
    """Every history of the model once, in an order that is the same on all ranks."""
    found: dict[int, DelayedState] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found |= {id(state): state for _, state in sorted(delayed_states(local_of(parameter)).items())}
        for product in getattr(module, "_products", ()):  # modules of mx.nn
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

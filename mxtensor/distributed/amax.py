"""``share_amax``: all ranks get the same amax histories of delayed scaling, by one collective a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..core.arguments import MODULE, Kind, check
from ..training.delayed_scaling import DelayedState
from ..training.histories import delayed_states
from ..training.local import local_of

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


@torch.no_grad()
def share_amax(model: nn.Module, group: Any = None) -> None:
    """Give all ranks of ``group`` (all ranks by default) the largest amax that any of them has recorded in this step.

    Call it on every rank after the backward pass. With delayed scaling each rank otherwise scales by what it has seen
    itself, and a checkpoint, which stores a history once, would not continue all ranks exactly. One all-reduce of three
    numbers per layer; nothing for a model without delayed scaling, and in a process without a process group. Raises
    TypeError for another object.
    """
    check("share_amax", "model", model, MODULE)
    check("share_amax", "group", group, _GROUP)
    states = _states(model)
    if not states or (group is None and not (dist.is_available() and dist.is_initialized())):
        return
    records = torch.stack([state.record for state in states])
    dist.all_reduce(records, dist.ReduceOp.MAX, group=group)
    for state, record in zip(states, records, strict=True):
        state.record.copy_(record)

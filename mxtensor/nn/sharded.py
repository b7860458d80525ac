"""Weight gradients that a module adds up itself, where FSDP2 holds the weight in shards.

Inside a forward pass FSDP2 puts the gathered weight in the place of the sharded parameter; a gradient that autograd
does not hand to it (``fuse_wgrad_accumulation``, ``delay_wgrad_compute``) it would never see. So the gathered weight
remembers the parameter it stands for, and such a gradient is averaged over the ranks into that one's shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Partial

STANDS_FOR = "_mx_stands_for"


def remember(name: str, value: Any, sharded: dict[str, Any]) -> None:
    """Take note that parameter ``name`` of a module becomes ``value``: a sharded one, or what FSDP2 has gathered."""
    if not torch.distributed.is_available():
        return
    if isinstance(value, DTensor):
        sharded[name] = value
    elif name in sharded:
        setattr(value, STANDS_FOR, sharded[name])


def owner(part: Tensor) -> Tensor:
    """The parameter that an optimizer steps where ``part`` is multiplied by: itself, or the sharded one."""
    return getattr(part, STANDS_FOR, part)


def shard_of(dw: Tensor, parameter: Tensor) -> Tensor:
    """What ``parameter`` gets of the gradient ``dw`` of the whole: its shard of the mean over all ranks, each of which
    must call this; ``dw`` where nothing is sharded.
    """
    if not torch.distributed.is_available() or not isinstance(parameter, DTensor):
        return dw
    mesh = parameter.device_mesh
    sums = DTensor.from_local(dw / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)
    return sums.redistribute(placements=parameter.placements)

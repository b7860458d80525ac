"""Weight gradients that a module adds up itself, where FSDP2 holds the weight in shards.

Inside a forward pass FSDP2 puts the gathered weight in the place of the sharded parameter; a gradient that autograd
does not hand to it (``fuse_wgrad_accumulation``, ``delay_wgrad_compute``) it would never see. So the gathered weight
remembers the parameter it stands for, and such a gradient is averaged over the ranks into that one's shards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..training.training_weight import is_sharded, local_of

STANDS_FOR = "_mx_stands_for"


def remember(name: str, value: Any, sharded: dict[str, Any]) -> None:
    """Take note that parameter ``name`` of a module becomes ``value``: a sharded one, or what FSDP2 has gathered."""
    if is_sharded(value):
        sharded[name] = value
    elif name in sharded:
        setattr(value, STANDS_FOR, sharded[name])


def owner(part: Tensor) -> Tensor:
    """The parameter that an optimizer steps where ``part`` is multiplied by: itself, or the sharded one."""
    return getattr(part, STANDS_FOR, part)


def spread(values: Tensor, parameter: Any) -> Tensor:
    """``values`` of the first rank, sharded as ``parameter`` is."""
    if not is_sharded(parameter):
        return values
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values, parameter.device_mesh, parameter.placements)


def version(parameter: Any) -> int:
    """What every write in place raises, also one to a shard alone; -1 for a tensor of inference mode."""
    if parameter.is_inference():
        return -1
    local = local_of(parameter)  # of which DTensor's own writes are none
    return int(parameter._version + (0 if local is parameter else local._version))


def misfit(parameter: Any) -> str | None:
    """What is wrong with ``parameter.main_grad``; None where gradients can be added to it."""
    main = getattr(parameter, "main_grad", None)
    if main is None:
        return "no main_grad"
    if main.shape != parameter.shape:
        return f"a main_grad of shape {tuple(main.shape)}"
    if is_sharded(parameter) and not (is_sharded(main) and main.placements == parameter.placements):
        return "a main_grad that is not sharded as it is"
    return None


def add_gradient(parameter: Any, dw: Tensor, to_main_grad: bool, copy: bool) -> None:
    """Add ``dw``, of the whole weight, to ``main_grad`` or ``grad``: of a sharded parameter its shard of the mean over
    all ranks, made in float32, for which each of them must call this. ``copy``: ``dw`` itself must not become ``grad``.
    """
    if not is_sharded(parameter):
        if to_main_grad:
            parameter.main_grad.add_(dw)
        elif parameter.grad is None:
            parameter.grad = dw.to(parameter.dtype, copy=copy)
        else:
            parameter.grad.add_(dw.to(parameter.dtype))
        return
    from torch.distributed.tensor import DTensor, Partial

    mesh = parameter.device_mesh
    part = DTensor.from_local(dw.float() / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)
    shard = local_of(part.redistribute(placements=parameter.placements))
    if not to_main_grad and parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    cached = local_of(parameter.main_grad if to_main_grad else parameter.grad)
    cached.add_(shard.to(cached.device, cached.dtype))  # which may be offloaded

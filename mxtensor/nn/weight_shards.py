"""Weight gradients that a module accumulates itself while FSDP2 stores the weight in shards.

Inside a forward pass FSDP2 replaces the sharded parameter by the gathered weight. It reduces only gradients that
autograd computes, so not those of ``fuse_wgrad_accumulation`` and ``delay_wgrad_compute``. Therefore the gathered
weight stores the parameter it stands for, and such a gradient is averaged over the ranks into the parameter's shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.local import is_sharded, local_of

STANDS_FOR = "_mx_stands_for"
ADDED = "grad_added_to_main_grad"
"""Megatron's attribute of a parameter: set to True when its gradient has been added to ``main_grad``."""


def remember(name: str, value: Any, sharded: dict[str, Any]) -> None:
    """Record that parameter ``name`` becomes ``value``: a sharded parameter, or the weight gathered from it."""
    if is_sharded(value):
        sharded[name] = value
    elif name in sharded:
        setattr(value, STANDS_FOR, sharded[name])


def owner(weight: Tensor) -> Tensor:
    """The parameter that an optimizer steps for ``weight``: the sharded one that it stands for, or itself."""
    return getattr(weight, STANDS_FOR, weight)


def distributed_like(values: Tensor, parameter: Any) -> Tensor:
    """``values`` of the first rank, sharded like ``parameter``."""
    if not is_sharded(parameter):
        return values
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(values, parameter.device_mesh, parameter.placements)


def version(parameter: Any) -> int:
    """A number that every in-place write increases, also a write to the local shard; -1 for an inference tensor."""
    if parameter.is_inference():
        return -1
    local = local_of(parameter)  # writes to it do not change the version of the DTensor
    return int(parameter._version + (0 if local is parameter else local._version))


def main_grad_misfit(parameter: Any) -> str | None:
    """What is wrong with ``parameter.main_grad``; None if gradients can be added to it."""
    main = getattr(parameter, "main_grad", None)
    if main is None:
        return "no main_grad"
    if main.shape != parameter.shape:
        return f"a main_grad of shape {tuple(main.shape)}"
    if is_sharded(parameter) and not (is_sharded(main) and main.placements == parameter.placements):
        return "a main_grad that is not sharded like the weight"
    return None


def add_gradient(parameter: Any, dw: Tensor, to_main_grad: bool, copy: bool) -> None:
    """Add ``dw``, the gradient of the whole weight, to ``main_grad`` or ``grad``.

    For a sharded parameter, this rank's shard of the mean over all ranks is added, computed in float32; every rank must
    call this. ``copy``: ``dw`` itself must not become ``grad``.
    """
    if to_main_grad and hasattr(parameter, ADDED):
        setattr(parameter, ADDED, True)
    overwrites = to_main_grad and getattr(parameter, "overwrite_main_grad", False)
    if not is_sharded(parameter):
        if to_main_grad:
            (parameter.main_grad.copy_ if overwrites else parameter.main_grad.add_)(dw)
        elif parameter.grad is None:
            parameter.grad = dw.to(parameter.dtype, copy=copy)
        else:
            parameter.grad.add_(dw.to(parameter.dtype))
        return
    from torch.distributed.tensor import DTensor, Partial

    mesh = parameter.device_mesh
    partial = DTensor.from_local(dw.float() / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)
    shard = local_of(partial.redistribute(placements=parameter.placements))
    if not to_main_grad and parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    target = local_of(parameter.main_grad if to_main_grad else parameter.grad)
    shard = shard.to(target.device, target.dtype)  # the gradient may be offloaded to another device
    (target.copy_ if overwrites else target.add_)(shard)


def stand_in(shards: Sequence[Tensor]) -> Tensor | None:
    """The gradient (N, K), all zeros, that autograd gets for a weight whose gradient is in ``main_grad``; None without.

    Megatron's hooks wait for ``weight.grad``, and skip it where ``grad_added_to_main_grad`` is set. As in
    TransformerEngine, a parameter that has this attribute gets one.
    """
    if not all(hasattr(owner(shard), ADDED) for shard in shards):
        return None
    first, rows = shards[0], sum(shard.shape[0] for shard in shards)
    return torch.zeros(rows, first.shape[1], dtype=first.dtype, device=first.device)

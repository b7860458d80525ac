"""A layer's product at decode, made again: what was found out for the first call is kept with the weight.

An eager product of few rows takes the GPU less time than Python needs to choose its kernel. What that depends on is the
same for every token, so the second call of a size goes straight to the launch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..codec import Operand
from ..dispatch import observed
from ..kernels import small_batch
from ..kernels.gemm import kernel_for
from ..kernels.gemm_spec import GemmArgs, Uncast
from ..roles import KernelPreference, LinearRecipe
from ..tensor import MXTensor

MOST = 8
"""Sizes of activations that a weight keeps calls for; then all are forgotten."""
KEPT = "_mxtensor_again"
"""The attribute of a weight that holds them."""


class Kept(NamedTuple):
    """A call, and what it was found out for: these very objects, which lie where they lay."""

    call: Any
    operand: Operand
    recipe: LinearRecipe
    bias: Tensor | None
    addresses: tuple[int, ...]


def _addresses(operand: Operand, bias: Tensor | None) -> tuple[int, ...]:
    last = operand.global_scale
    return (
        operand.data.data_ptr(), operand.scale.data_ptr(), 0 if last is None else last.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )  # fmt: skip


def _key(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15


def made_again(x: Tensor, weight: MXTensor, bias: Tensor | None) -> Tensor | None:
    """``F.linear`` without gradients, if a call like this was kept and nobody looks on; else None."""
    calls = weight.__dict__.get(KEPT)
    if calls is None or observed():
        return None
    kept: Kept | None = calls.get(_key(x))
    if kept is None or kept.addresses != _addresses(kept.operand, kept.bias):
        return None
    if kept.operand is not weight._rowwise or kept.recipe is not weight.recipe or kept.bias is not bias:
        return None
    if x.is_cuda and x.device.index != torch._C._cuda_getDevice():
        return None
    return kept.call(x)  # type: ignore[no-any-return]


def keep(x: Tensor, weight: MXTensor, bias: Tensor | None) -> None:
    """After ``F.linear`` was computed: keep how, if that was one launch of ``small_batch``."""
    operand, recipe = weight._rowwise, weight.recipe
    if operand is None or x.shape[-1] == 0 or x.numel() // x.shape[-1] > small_batch.BY_WARPS or observed():
        return
    rows = x.reshape(-1, x.shape[-1])
    factor = rows if recipe.activation is None else Uncast(rows, recipe.activation)
    prefer = None if recipe.kernel_preference is KernelPreference.AUTO else recipe.kernel_preference.value
    if kernel_for("linear", factor, operand, GemmArgs(x.dtype, bias), prefer) != small_batch.KERNEL.name:
        return
    call = small_batch.again(x, factor, operand, bias)
    if call is not None:
        calls = weight.__dict__.setdefault(KEPT, {})
        if len(calls) >= MOST:
            calls.clear()
        calls[_key(x)] = Kept(call, operand, recipe, bias, _addresses(operand, bias))

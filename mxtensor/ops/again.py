"""A layer's product at decode, made again: what was found out for the first call is kept with the weight.

An eager product of few rows takes the GPU less time than Python needs to choose its kernel. What that depends on is the
same for every token, so the second call of a size goes straight to the launch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..core.dispatch import observed
from ..core.shapes import as_matrix
from ..kernels.gemm.select import kernel_for
from ..kernels.gemm.spec import GemmArgs
from ..kernels.small_m import kernel as small_m
from ..kernels.small_m.heuristics import BY_WARPS
from ..kernels.small_m.launch import Again
from ..numerics.operand import Operand
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from .matmul import Side, gemm_operands, preference

MOST = 64
"""Sizes of activations that a weight keeps calls for; then all are forgotten."""
KEPT = "_mxtensor_again"
"""The attribute of a weight that holds them."""


class Kept(NamedTuple):
    """A call, and what it was found out for: these very objects, which lie where they lay."""

    call: Again | None
    """None where it takes more than one launch, or another kernel"""
    operand: Operand
    recipe: LinearRecipe
    bias: Tensor | None
    addresses: tuple[int, ...]


def _addresses(operand: Operand, bias: Tensor | None) -> tuple[int, ...]:
    global_scale = operand.global_scale
    return (
        operand.data.data_ptr(), operand.scale.data_ptr(), 0 if global_scale is None else global_scale.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )  # fmt: skip


def _key(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15


def found(x: Tensor, weight: MXTensor, bias: Tensor | None) -> Kept | None:
    """What is kept of an ``F.linear`` like this without gradients; None for nothing, or where somebody looks on."""
    calls = weight.__dict__.get(KEPT)
    if calls is None or observed():
        return None
    kept: Kept | None = calls.get(_key(x))
    if kept is None or kept.addresses != _addresses(kept.operand, kept.bias):
        return None
    if kept.operand is not weight._rowwise or kept.recipe is not weight.recipe or kept.bias is not bias:
        return None
    return kept


def keep(x: Tensor, weight: MXTensor, bias: Tensor | None) -> None:
    """After ``F.linear`` was computed, of which nothing was found: keep how, or that it was no single launch."""
    operand, recipe = weight._rowwise, weight.recipe
    if small_m.KERNEL.device not in (None, x.device.type) or operand is None or observed():
        return
    if x.shape[-1] == 0 or x.numel() // x.shape[-1] > BY_WARPS:
        return
    gemm_operand, _ = gemm_operands("linear", Side(as_matrix(x), False), Side(weight, False))
    chosen = kernel_for("linear", gemm_operand, operand, GemmArgs(x.dtype, bias), preference(weight))
    call = small_m.again(x, gemm_operand, operand, bias) if chosen == small_m.KERNEL.name else None
    calls = weight.__dict__.setdefault(KEPT, {})
    if len(calls) >= MOST:
        calls.clear()
    calls[_key(x)] = Kept(call, operand, recipe, bias, _addresses(operand, bias))

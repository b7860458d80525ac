"""The scaled product of checked arguments: one opaque op and the torch function that it calls.

The op is opaque because torch's meta functions reject valid arguments (MXFP4, and a short last 128x128 block, in 2.11
and 2.13) and because inductor has no type for float4 and E8M0: outside this file both are uint8.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import custom_ops
from ...core.tracing import is_traced
from ...numerics.formats import FULL
from .cublas_lt import recorded_product
from .scaled_mm_contract import GROUPED_SCALINGS, ROW_BLOCK, SCALINGS, SQUARE_BLOCK, Product, Scaling, check

USE_FAST_ACCUM = False
"""If True, Hopper accumulates float8 products in about 14 bits and no longer meets the definition."""


def _codes(t: Tensor) -> Tensor:
    return t.view(torch.float4_e2m1fn_x2) if t.dtype is torch.uint8 else t


def _scale(p: Product, side: int) -> Tensor:
    """The scales of one side as torch takes them: in their own dtype, blocks of K in the last dimension."""
    scale = (p.scale_a, p.scale_b)[side].view(p.scaling.scale.view_dtype)
    return scale if p.scaling.swizzled or p.scaling.blocks[side][1] == FULL else scale.t()


def _recipe(p: Product, side: int) -> tuple[list[Tensor], list[F.ScalingType], list[F.SwizzleType]]:
    """(scales, what each one scales, its layout) for ``F.scaled_mm``."""
    rows, cols = p.scaling.blocks[side]
    scales, kinds = [_scale(p, side)], [getattr(F.ScalingType, f"BlockWise{rows}x{cols}")]
    layouts = [F.SwizzleType.SWIZZLE_32_4_4 if p.scaling.swizzled else F.SwizzleType.NO_SWIZZLE]
    if p.global_scales:
        scales.append(p.global_scales[side].reshape(1))
        kinds.append(F.ScalingType.TensorWise)
        layouts.append(F.SwizzleType.NO_SWIZZLE)
    return scales, kinds, layouts


def launch(p: Product) -> Tensor:
    """The product (M, N), in ``p.out_dtype``."""
    check(p)
    a, b = _codes(p.a), _codes(p.b).transpose(-1, -2)
    if p.ends is not None:
        scale_a, scale_b = _scale(p, 0), _scale(p, 1)
        if p.scaling.blocks[0] == ROW_BLOCK:
            scale_a = scale_a.reshape(-1)
        return torch._scaled_grouped_mm(
            a, b, scale_a, scale_b, offs=p.ends, out_dtype=p.out_dtype, use_fast_accum=USE_FAST_ACCUM
        )
    fast = USE_FAST_ACCUM and not p.scaling.swizzled
    if p.scaling.named or p.global_scales:
        (scales_a, kinds_a, layouts_a), (scales_b, kinds_b, layouts_b) = _recipe(p, 0), _recipe(p, 1)
        return F.scaled_mm(
            a, b, scales_a, kinds_a, scales_b, kinds_b, layouts_a, layouts_b, p.bias, p.out_dtype, use_fast_accum=fast
        )
    scale_a, scale_b = _scale(p, 0), _scale(p, 1)
    if not p.scaling.swizzled and {p.scaling.blocks[0][1], p.scaling.blocks[1][1]} == {FULL}:
        out = recorded_product(a, _codes(p.b), scale_a, scale_b, p.bias, p.out_dtype, fast)
        if out is not None:
            return out
    if p.scaling.blocks[1] == ROW_BLOCK:
        scale_b = scale_b.t()
    return torch._scaled_mm(a, b, scale_a, scale_b, bias=p.bias, out_dtype=p.out_dtype, use_fast_accum=fast)


def _fake_is_wrong(p: Product) -> bool:
    """Whether torch's meta function rejects arguments that torch's kernel accepts."""
    square = [t for t, block in zip((p.a, p.b), p.scaling.blocks, strict=True) if block == SQUARE_BLOCK]
    packed = p.scaling.named and p.scaling.swizzled  # it counts the blocks of MXFP4 in bytes
    return packed or any(t.shape[-2] % SQUARE_BLOCK[0] for t in square)  # it rounds the number of blocks of rows down


# ---------------------------------------------------------------------------------------------- one op


def _product(
    a: Tensor, b: Tensor, scales: list[Tensor], bias: Tensor | None, ends: Tensor | None, row: int, dtype: torch.dtype
) -> Product:
    scaling = _ROWS[row]
    return Product(scaling, a, b, scales[0], scales[1], scales[2:], bias, dtype, ends)


_ROWS: tuple[Scaling, ...] = SCALINGS + GROUPED_SCALINGS


@custom_ops.define("mxtensor::scaled_mm")
def scaled_mm(
    a: Tensor, b: Tensor, scales: list[Tensor], bias: Tensor | None, ends: Tensor | None, row: int, dtype: torch.dtype
) -> Tensor:
    """``launch`` of a Product: ``scales`` of a, of b and the two global ones; ``row`` is the index of the scaling."""
    if not 0 <= row < len(_ROWS) or len(scales) < 2:
        raise ValueError(
            f"mxtensor::scaled_mm: row must be from 0 to {len(_ROWS) - 1} and scales at least two, got {row} and "
            f"{len(scales)}"
        )
    return launch(_product(a, b, scales, bias, ends, row, dtype))


@custom_ops.fake_of(scaled_mm)
def _(a, b, scales, bias, ends, row, dtype):  # type: ignore[no-untyped-def]
    p = _product(a, b, scales, bias, ends, row, dtype)
    if _fake_is_wrong(p):
        check(p)
        return a.new_empty(p.shape, dtype=dtype)
    return launch(p)


def multiply(p: Product) -> Tensor:
    """``launch(p)``; one op while being traced."""
    if not is_traced(p.a, p.b):
        return launch(p)
    scales = [p.scale_a, p.scale_b, *p.global_scales]
    return scaled_mm(p.a, p.b, scales, p.bias, p.ends, _ROWS.index(p.scaling), p.out_dtype)  # type: ignore[no-any-return]

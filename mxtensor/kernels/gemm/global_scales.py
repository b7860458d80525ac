"""Global scales of products: one for each row, for each matrix of a stack, or for each group of rows.

Those of rows (``nvfp4[row_scaled]``) and of matrices multiply the float32 result of a product without global scales.

A row of the left operand is a row of the result, a row of the right one a column. Any product kernel can therefore
compute the product, and adds up the same numbers as for one global scale. TransformerEngine computes row-scaled NVFP4
in the same way (``general_gemm`` of ``pytorch/cpp_extensions/gemm.py``).

Triton's grouped product takes those of groups, or of matrices of a stack, as one for each row of each group.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...numerics.formats import Format
from ...numerics.groups import Groups
from ...numerics.operand import Operand
from ..operands import FakeQuantized, GemmOperand, RowOperand, Unquantized, data_of, has_group_scales
from ..quantize.choose_cast import quantize_operand
from .scaled_mm import dense
from .spec import GemmArgs, finish


def has_row_global_scales(side: GemmOperand) -> bool:
    """Whether each row or each matrix of an operand has a global scale, or each row will have one after its cast."""
    if isinstance(side, (Tensor, RowOperand)):
        return False
    if isinstance(side, Operand) and side.has_stack_scales:
        return True
    return side.format.row_scaled and (isinstance(side, Unquantized) or side.global_scale is not None)


def scales_the_result(side: GemmOperand) -> bool:
    """Whether the global scales of this operand multiply the result of the product, and not its values."""
    return has_row_global_scales(side) or (has_group_scales(side) and data_of(side).is_cuda)


def scales_of_rows(scales: Tensor, ends: Tensor, rows: int) -> Tensor:
    """float32 (rows, 1): the scale, of (G, 1, 1), of the matrix of each row; the groups of rows end at ``ends`` (G)."""
    of_row = torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)
    return scales.reshape(-1).index_select(0, of_row.clamp(max=ends.shape[0] - 1)).unsqueeze(1)


class Unscaled(NamedTuple):
    """A product without the global scales of rows or matrices."""

    a: GemmOperand
    b: GemmOperand
    args: GemmArgs
    """float32, without alpha and bias"""
    scales: list[Tensor]
    """What the result is multiplied by: (..., M, 1) for the left operand, (..., 1, N) for the right one."""


def of_groups(b: Operand, args: GemmArgs) -> tuple[Operand, GemmArgs, Tensor]:
    """What a grouped kernel multiplies by instead of a stack, the arguments of that product, and what the products of
    each matrix are multiplied by, (G, 1, 1)."""
    one, (scales,) = _with_one_scale(b)
    return one, without_global_scales(b.data, b.data, args).args, scales


def without_global_scales(a: GemmOperand, b: GemmOperand, args: GemmArgs, casts: bool = True) -> Unscaled:
    """The product that a kernel computes. ``casts=False`` casts nothing, to find out which kernel would run: the codes
    of an unquantized operand have the memory of one value, and there are no scales."""
    left, of_rows = _unscaled(a, casts)
    right, of_columns = _unscaled(b, casts)
    scales = [*of_rows, *(scale.transpose(-1, -2) for scale in of_columns)]
    return Unscaled(left, right, GemmArgs(torch.float64 if args.out_dtype is torch.float64 else torch.float32), scales)


def _unscaled(side: GemmOperand, casts: bool) -> tuple[GemmOperand, list[Tensor]]:
    """An operand without the global scales of its rows or matrices, and those."""
    if isinstance(side, FakeQuantized) and has_group_scales(side):
        assert side.global_scale is not None
        return side.values.to(torch.bfloat16), [side.global_scale]
    if isinstance(side, (Tensor, RowOperand)) or not has_row_global_scales(side):
        return side, []
    if isinstance(side, Operand) and side.has_stack_scales:
        return _with_one_scale(side)
    format = side.format.without_global_scale()
    if isinstance(side, Unquantized):
        if not casts:
            return _of_shape(side.x, format), []
        side = quantize_operand(side.x, side.cast)
    assert side.global_scale is not None
    return replace(side, global_scale=None, format=format), [side.global_scale]


def _with_one_scale(stack: Operand) -> tuple[Operand, list[Tensor]]:
    """A stack with the largest of its global scales for all matrices, and what their products are multiplied by: at
    most 1. Kernels keep large activations from overflowing before a global scale makes their products smaller."""
    scales = stack.global_scale
    assert scales is not None
    largest = scales.amax() if scales.numel() else scales.new_ones(())
    return replace(stack, global_scale=largest), [scales / largest]


def _of_shape(x: Tensor, format: Format) -> Operand:
    """An operand whose values are never read."""
    shape = tuple(x.shape)
    sizes = ((format.data_shape(shape), format.element.dtype), (format.scale_shape(shape), format.scale.dtype))
    data, scale = (x.new_empty((1,) * len(size), dtype=dtype).expand(size) for size, dtype in sizes)
    return Operand(data, scale, None, format, shape)


def times_global_scales(product: Tensor, scales: list[Tensor], args: GemmArgs) -> Tensor:
    """The result of the whole product: times the scales, then alpha and bias, rounded once."""
    for scale in scales:
        product = product * scale
    return finish(product, args)


def rows_with_scales(side: FakeQuantized) -> tuple[Tensor, Tensor]:
    """A side of ``fp8_rows_grouped.multiply``: values, and float32 scales (rows,), contiguous, from those of rows in
    groups (M, K) or of a stack (G, N, K)."""
    assert side.global_scale is not None
    scales = side.global_scale.expand(*side.shape[:-1], 1).reshape(-1)
    return dense(side.values), dense(scales)  # one scale stays expanded in a reshape


def columns_with_scales(side: FakeQuantized, groups: Groups) -> tuple[Tensor, Tensor]:
    """The same of the columns of padded groups (rows, P): scales (G * rows,)."""
    assert side.global_scale is not None
    scale = side.global_scale.expand(side.shape[0], groups.length)
    starts = F.pad(groups.padded_ends, (1, 0)).narrow(0, 0, groups.number).clamp(max=groups.length - 1)
    return dense(side.values), scale.index_select(1, starts).t().reshape(-1)

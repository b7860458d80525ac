"""Products of operands with a global scale for each row (``nvfp4[row_scaled]``), or on CUDA for each matrix of a stack:
a product without global scales, whose float32 result they multiply.

A row of the left operand is a row of the result, a row of the right one a column. Any product kernel can therefore
compute the product, and adds up the same numbers as for one global scale. TransformerEngine computes row-scaled NVFP4
in the same way (``general_gemm`` of ``pytorch/cpp_extensions/gemm.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...numerics.formats import Format
from ...numerics.operand import Operand
from ..quantize.select import quantize_operand
from .row_operand import RowOperand
from .spec import FakeQuantized, GemmArgs, GemmOperand, Unquantized, data_of, finish, has_group_scales


def has_row_global_scales(side: GemmOperand) -> bool:
    """Whether each row of an operand has a global scale, or will have one after its cast."""
    if isinstance(side, (Tensor, RowOperand)):
        return False
    return side.format.row_scaled and (isinstance(side, Unquantized) or side.global_scale is not None)


def scales_the_result(side: GemmOperand) -> bool:
    """Whether the global scales of this operand multiply the result of the product, and not its values."""
    return has_row_global_scales(side) or (has_group_scales(side) and data_of(side).is_cuda)


class Unscaled(NamedTuple):
    """A product without the global scales of rows or matrices."""

    a: GemmOperand
    b: GemmOperand
    args: GemmArgs
    """float32, without alpha and bias"""
    scales: list[Tensor]
    """What the result is multiplied by: (..., M, 1) for the left operand, (..., 1, N) for the right one."""


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
    format = side.format.without_global_scale()
    if isinstance(side, Unquantized):
        if not casts:
            return _of_shape(side.x, format), []
        side = quantize_operand(side.x, side.cast)
    assert side.global_scale is not None
    return replace(side, global_scale=None, format=format), [side.global_scale]


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

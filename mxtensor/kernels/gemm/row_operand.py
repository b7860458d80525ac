"""A matrix as E4M3 codes with one power of two for each row, as ``fp8_rows`` multiplies it, and its memory.

The glossary in ``numerics/row_scaled.py`` explains the terms.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...numerics.formats import E4M3, Format
from ...numerics.operand import Operand
from ...numerics.row_scaled import RowScaled, row_values
from ...numerics.swizzle import round_up

INNER = 16
"""Codes of a row-scaled operand are padded to a multiple of this in each row: torch needs it so."""
ALIGNMENT = 16
"""Bytes: of a tensor that shares the memory of a row-scaled operand."""


class RowOperand(NamedTuple):
    """A matrix (rows, cols) as ``numerics.row_scaled.RowScaled``, and where its exact values are: for ``fp8_rows``."""

    codes: Tensor
    """float8_e4m3fn (rows padded, cols padded)"""
    row_scale: Tensor
    """float32 (groups * rows padded, 1)"""
    out_of_range: Tensor
    """the flags, uint8 (groups * rows padded,): 1 for a row that is out of range"""
    scale: Tensor
    """scales of the blocks, 2-D, as in ``Operand``; where it was made by a cast, in rows out of range only"""
    format: Format
    shape: tuple[int, ...]
    """(rows, cols), or of a stack (weights, rows, cols), whose rows come one after the other"""
    memory: Tensor | None = None
    """uint8 (bytes,): what holds all four, in the order of ``sections``; None if they are apart"""
    groups: int = 1
    """groups of columns in which each row has a scale and a flag of its own: those of all rows, group by group"""

    @classmethod
    def inside(cls, memory: Tensor, format: Format, shape: tuple[int, ...], groups: int = 1) -> RowOperand:
        """The operand in memory of ``sections(format, shape, groups)`` bytes, whose rows are not padded."""
        rows, matrix = math.prod(shape[:-1]), (math.prod(shape[:-1]), shape[-1])
        slices = sections(format, shape, groups)[0]
        codes, row_scale, out_of_range, scale = (memory.narrow(0, start, size) for start, size in slices)
        scale = scale.view(format.scale.dtype).view(format.scale_shape(matrix))
        four = codes.view(rows, -1), row_scale.view(torch.float32).view(-1, 1), out_of_range, scale
        return cls(*four, format, shape, memory, groups)


@cache
def sections(format: Format, shape: tuple[int, ...], groups: int = 1) -> tuple[list[tuple[int, int]], int]:
    """(first byte, bytes) of codes, row scales, flags and scales of blocks in the memory of a row-scaled operand, and
    the bytes of all."""
    rows, cols = math.prod(shape[:-1]), shape[-1]
    scales, each = format.scale_shape((rows, cols)), rows * groups
    sizes = rows * round_up(cols, INNER), 4 * each, each, format.scale.dtype.itemsize * math.prod(scales)
    slices, start = [], 0
    for size in sizes:
        slices.append((start, size))
        start += round_up(size, ALIGNMENT)
    return slices, start


def values_of_rows(operand: RowOperand) -> Tensor:
    """The float32 values of a row-scaled operand without groups of columns."""
    assert operand.groups == 1
    rows, cols = math.prod(operand.shape[:-1]), operand.shape[-1]
    codes, format = operand.codes[:rows, :cols].view(torch.uint8), operand.format
    if format.element.bits < 8:  # in rows out of range its elements are in E4M3
        format = replace(format, element=E4M3)
    own = Operand(codes.view(format.element.dtype), operand.scale, None, format, (rows, cols))
    values = row_values(RowScaled(codes, operand.row_scale[:rows], operand.out_of_range[:rows]), own)
    return values.view(operand.shape)

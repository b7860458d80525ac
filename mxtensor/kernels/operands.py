"""The operands of products: plain values, codes, values that still need a cast, rounded values, and row-scaled codes.

``Operand`` (codes and scales) is in ``numerics/operand.py``. Casts write these forms and products read them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, wraps
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..numerics.cast import Cast
from ..numerics.derived import round_up
from ..numerics.formats import E4M3, Format
from ..numerics.operand import Operand
from ..numerics.row_scaled import RowScaled, row_values

MAX_GROUPS = 1023
"""Groups of one product, or of one cast: torch's grouped products take no more."""
INNER = 16
"""Codes of a row-scaled operand are padded to a multiple of this in each row: torch needs it so."""
ALIGNMENT = 16
"""Bytes: of a tensor that shares the memory of a row-scaled operand."""


@dataclass(frozen=True)
class Unquantized:
    """Plain values and the cast that they still need: each kernel casts them in the form that costs it least.

    Most kernels want codes with scales in a layout of their own, or the rounded values and never the codes.
    """

    x: Tensor
    cast: Cast

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape)

    @property
    def format(self) -> Format:
        return self.cast.format


class Form(Enum):
    """What a cast writes: the form in which the product kernels of a device want an operand."""

    CODES = "codes"
    """an Operand: codes and scales"""
    VALUES = "values"
    """a FakeQuantized: the values that the codes stand for"""
    ROWS = "rows"
    """a RowOperand: E4M3 codes with one power of two for each row"""


@dataclass(frozen=True)
class FakeQuantized:
    """Values that a cast to ``format`` has rounded already, not multiplied by the global scale.

    ``values``: (..., rows, K) with any strides; ``global_scale``: see below, or None.
    """

    values: Tensor
    global_scale: Tensor | None
    """float32: a scalar, or the scales of groups or of matrices of a stack, which broadcast to the values"""
    format: Format

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)


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


def sections(format: Format, shape: tuple[int, ...], groups: int = 1) -> tuple[list[tuple[int, int]], int]:
    """(first byte, bytes) of codes, row scales, flags and scales of blocks in the memory of a row-scaled operand, and
    the bytes of all."""
    known = all(type(size) is int for size in shape)  # a size that torch.compile does not know has no hash
    return (_cached_sections if known else _sections)(format, shape, groups)


def _sections(format: Format, shape: tuple[int, ...], groups: int) -> tuple[list[tuple[int, int]], int]:
    rows, cols = math.prod(shape[:-1]), shape[-1]
    scales, each = format.scale_shape((rows, cols)), rows * groups
    sizes = rows * round_up(cols, INNER), 4 * each, each, format.scale.dtype.itemsize * math.prod(scales)
    slices, start = [], 0
    for size in sizes:
        slices.append((start, size))
        start += round_up(size, ALIGNMENT)
    return slices, start


_cached_sections = cache(_sections)


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


GemmOperand: TypeAlias = Operand | Unquantized | FakeQuantized | RowOperand | Tensor
"""One operand of a product, (..., rows, K): codes blocked along K, values that still need a cast, values that a cast
has rounded, codes under the scales of rows, or plain values."""


def format_of(operand: GemmOperand) -> Format | torch.dtype:
    """The format in which an operand enters the product; the dtype of plain values."""
    return operand.dtype if isinstance(operand, Tensor) else operand.format


def data_of(operand: GemmOperand) -> Tensor:
    """The tensor of an operand that has its device, and that is traced if the operand is."""
    if isinstance(operand, Tensor):
        return operand
    if isinstance(operand, Unquantized):
        return operand.x
    if isinstance(operand, RowOperand):
        return operand.codes
    return operand.data if isinstance(operand, Operand) else operand.values


def has_group_scales(side: GemmOperand) -> bool:
    """Whether groups of an operand, or matrices of a stack, have global scales of their own."""
    return isinstance(side, FakeQuantized) and side.global_scale is not None and side.global_scale.dim() > 0


Quantize = Callable[[Tensor, Cast], Operand]


def by_matrix(quantize: Quantize) -> Quantize:
    """``quantize(x, cast)`` of tensors with at most one global scale, for stacks of matrices too: one after the other.

    Each matrix has the bits that it would have alone. Kernels of casts need to know one global scale only.
    """

    @wraps(quantize)
    def call(x: Tensor, cast: Cast) -> Operand:
        if x.dim() <= 2 or not cast.format.scales_matrices or not x.numel():
            return quantize(x, cast)
        pieces = [quantize(matrix, cast).tensors for matrix in x.flatten(0, -3)]
        shape, format = tuple(x.shape), cast.format
        data, scale, global_scale = (torch.stack(tensors) for tensors in zip(*pieces, strict=True))
        wanted = format.data_shape(shape), format.scale_shape(shape), format.global_scale_shape(shape)
        tensors = [t.view(size) for t, size in zip((data, scale, global_scale), wanted, strict=True)]
        return Operand.from_tensors(tensors, format, shape)

    return call

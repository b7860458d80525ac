"""Row-scaled operands of a matrix and of its transpose, for training: two reads of the values, and no codes between.

Host side of ``triton_device/row_scaled_both.py``. The first pass finds the largest scale of each row and column; the
second one casts and re-expresses at once. Blocks may be any distance apart: see ``numerics/row_scaled.py``. The kernels
read words of two bfloat16; values of other dtypes, such as float32 weights under torch.autocast, take a cast each way.
Square blocks of the transpose are those of the matrix, transposed.

A stack of matrices is cast as its matrices are, and rows in groups as each group is: a column has scales of its own in
each matrix and each group. The ends of the groups stay on the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.names import dtype_name
from ...numerics.cast import Cast
from ...numerics.formats import Rounding
from ...numerics.groups import Groups
from ...numerics.row_scaled import why_not
from ..quantize import triton_tiles as tiles
from ..quantize.triton_common import ceil_div, code_of, in_pairs, power_above, rows_of, seed_of
from ..runtime.triton_launch import device_code, launch, on, zeros
from .fp8_rows_operand import constants_of, rows_of_values, why_not_along_rows
from .row_operand import INNER, RowOperand, sections
from .scaled_mm_contract import MAX_GROUPS

PADS = (32, 64, 128)
"""Rows to which groups may be padded: a tile of rows is a multiple."""
Pair = tuple[RowOperand | None, RowOperand | None]


def why_not_both(x: Tensor, cast: Cast) -> str | None:
    """Why the row-scaled operands of a matrix and of its transpose cannot be cast in two passes; None if they can."""
    format = cast.format
    square = format.square and x.dtype is torch.bfloat16
    reason = why_not(format) or (None if square else why_not_along_rows(x, cast))
    if reason is not None:
        return reason
    if format.block[1] < 32:
        return f"casts blocks of 32 values or more, not {format}"
    random = cast.rounding is Rounding.STOCHASTIC
    if random and (format.element.bits == 8 or format.square or x.dtype is not torch.bfloat16):
        return f"rounds bfloat16 to fewer than 8 bits stochastically, not {dtype_name(x.dtype)} to {format}"
    size = format.block[1] if square else INNER
    if x.dim() not in (2, 3) or x.shape[-2] % size or x.shape[-1] % size or 0 in x.shape:
        return f"needs a matrix of multiples of {size} rows and columns or a stack of them, not {tuple(x.shape)}"
    return None


def why_not_groups(x: Tensor, cast: Cast, groups: Groups) -> str | None:
    """The same of the rows of a matrix in groups, and of the transpose of the padded matrix."""
    reason = why_not_both(x, cast)
    if reason is not None:
        return reason
    if cast.format.square:
        return f"casts blocks along rows in groups, not those of {cast.format}"
    if x.dim() != 2 or x.dtype is not torch.bfloat16:
        return f"casts groups of rows of bfloat16, not {dtype_name(x.dtype)} {tuple(x.shape)}"
    if groups.block not in PADS or groups.block % cast.format.block[1]:
        return f"pads groups to {', '.join(map(str, PADS))} rows and whole blocks, not to {groups.block}"
    if groups.number > MAX_GROUPS:
        return f"casts at most {MAX_GROUPS} groups, got {groups.number}"
    return None


def empty_operand(shape: tuple[int, ...], cast: Cast, device: torch.device, groups: int = 1) -> RowOperand:
    """Memory for an operand with the scales of its blocks: one tensor, which is saved for the backward pass."""
    size = sections(cast.format, shape, groups)[1]
    return RowOperand.inside(torch.empty(size, dtype=torch.uint8, device=device), cast.format, shape, groups)


def rows_of_both(x: Tensor, cast: Cast, rowwise: bool = True) -> Pair:
    """The operand of a matrix or stack that ``why_not_both`` accepts, if asked for, and that of its transpose."""
    shape = tuple(x.shape)
    if x.dtype is not torch.bfloat16:
        return _alone(x, cast) if rowwise else None, _alone(x.mT.contiguous(), cast)
    row = empty_operand(shape, cast, x.device) if rowwise else None
    column = empty_operand((*shape[:-2], shape[-1], shape[-2]), cast, x.device)
    matrices = math.prod(shape[:-2])
    _cast_both(rows_of(x), cast, row, column, _Matrices(None, matrices, shape[-2], 0, 0, 0))
    return row, column


def rows_of_groups(x: Tensor, cast: Cast, groups: Groups, rowwise: bool = True) -> Pair:
    """The operand of rows in groups that ``why_not_groups`` accepts, if asked for, and that of the transpose of the
    padded matrix (cols, P), in which each group of columns has scales of its own."""
    (rows, cols), count = x.shape, groups.number
    row = empty_operand((rows, cols), cast, x.device) if rowwise else None
    column = empty_operand((cols, groups.length), cast, x.device, count)
    blocks, power = groups.length // groups.block, power_above(count)
    _cast_both(
        rows_of(x), cast, row, column, _Matrices(groups.given.contiguous(), count, rows, blocks, groups.block, power)
    )
    return row, column


class _Matrices(NamedTuple):
    """The arguments of ``row_scaled_places.place``."""

    ends: Tensor | None
    number: int
    rows: int
    """of each matrix of a stack; of all groups"""
    blocks: int
    pad: int
    power: int

    def programs(self, high: int) -> int:
        """The most tiles of so many rows."""
        if self.ends is None:
            return self.number * ceil_div(self.rows, high)
        return self.blocks * self.pad // high + self.number + 2


def _cast_both(x: Tensor, cast: Cast, row: RowOperand | None, column: RowOperand, matrices: _Matrices) -> None:
    """Fill both operands from the matrix of all rows."""
    x = x if in_pairs(x) else x.contiguous()
    (rows, cols), device, words = x.shape, x.device, x.shape[1] // 2
    code, constants, block = code_of(cast, device), constants_of(cast.format.element, device), cast.format.block[1]
    seed, square = seed_of(cast, device), cast.format.square
    extremes = zeros(rows + matrices.number * cols, device)
    of_columns, of_rows = extremes[: matrices.number * cols], extremes[matrices.number * cols :]
    high, wide, warps = tiles.EXTREMES
    high, wide = max(high, block, matrices.pad), max(wide, block // 2)
    given = (matrices.ends, matrices.number, matrices.rows)

    def even(high: int, wide: int) -> tuple[bool, bool]:
        whole = words % wide == 0
        return whole and matrices.ends is None and matrices.rows % high == 0, whole

    with on(device):
        launch(
            device_code("row_scaled_both.extremes_of_both"),
            matrices.programs(high) * ceil_div(words, wide),
            (x, of_rows, of_columns, *given, words, x.stride(0) // 2, matrices.blocks),
            (code, constants, high, wide, row is not None, *even(high, wide), matrices.pad, matrices.power, square),
            warps,
        )
        spans, wide, warps = tiles.WORDS["codes" if seed is None else "random codes"]
        spans, wide = max(spans, block // 32, matrices.pad // 32), max(wide, block // 2)
        high = spans * 32
        components = (None,) * 4 if row is None else row[:4]
        length = column.shape[-1]
        launch(
            device_code("row_scaled_both.cast_both_to_rows"),
            matrices.programs(high) * ceil_div(words, wide),
            (
                x, of_rows, of_columns, *components, *column[:4], seed, *given, words, x.stride(0) // 2, words,
                ceil_div(cols, block), ceil_div(length, block), length // INNER, matrices.blocks,
            ),
            (code, constants, spans, wide, row is not None, *even(high, wide), matrices.pad, matrices.power, square),
            warps,
        )  # fmt: skip


def _alone(x: Tensor, cast: Cast) -> RowOperand:
    """The row-scaled operand of a matrix or a stack, by a cast of its own."""
    out = empty_operand(tuple(x.shape), cast, x.device)
    rows_of_values(x, cast, any_distance=True, into=out[:4])
    return out

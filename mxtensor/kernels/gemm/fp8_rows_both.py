"""Row-scaled operands of a matrix and of its transpose, for training: two reads of the values, and no codes between.

Host side of ``triton_device/row_scaled_both.py`` and ``row_scaled_one_read.py``. The first pass finds the largest scale
of each column, and casts the rows: they stay in registers until their scale is known. The second one casts the columns.
Rows that are longer than that, square blocks, and values that are rounded stochastically are cast both ways in the
second pass; then the first finds the largest scales of rows, too. A cast casts and re-expresses at once. Blocks may be
any distance apart: see ``numerics/row_scaled.py``. The kernels read words of two bfloat16; values of other dtypes, such
as float32 weights under torch.autocast, take a cast each way. Square blocks of the transpose are those of the matrix,
transposed.

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
from ..quantize.triton_constants import CastCode
from ..runtime.triton_launch import device_code, launch, on, zeros
from .fp8_rows_operand import RowCode, constants_of, rows_of_values, why_not_along_rows
from .row_operand import INNER, RowOperand, sections
from .scaled_mm_contract import MAX_GROUPS

WIDEST = 16384
"""Columns of a row that one program keeps in registers."""
PLACES = 1024
"""Pairs of a tile and a group that a program which finds the places of tiles looks at."""
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
    _cast_both(rows_of(x), cast, row, column, _Matrices(matrices, shape[-2]))
    return row, column


def rows_of_groups(x: Tensor, cast: Cast, groups: Groups, rowwise: bool = True) -> Pair:
    """The operand of rows in groups that ``why_not_groups`` accepts, if asked for, and that of the transpose of the
    padded matrix (cols, P), in which each group of columns has scales of its own."""
    (rows, cols), count = x.shape, groups.number
    row = empty_operand((rows, cols), cast, x.device) if rowwise else None
    column = empty_operand((cols, groups.length), cast, x.device, count)
    _cast_both(rows_of(x), cast, row, column, _Matrices(count, rows, groups))
    return row, column


class _Matrices(NamedTuple):
    """A stack of matrices, or groups of rows."""

    number: int
    rows: int
    """of each matrix of a stack; of all groups"""
    groups: Groups | None = None

    @property
    def pad(self) -> int:
        """The rows to whose multiples groups are padded; 0 for a stack."""
        return 0 if self.groups is None else self.groups.block

    def tiles(self, high: int) -> int:
        """The most tiles of so many rows."""
        if self.groups is None:
            return self.number * ceil_div(self.rows, high)
        return self.groups.length // high + self.number + 2


def _places(groups: Groups, high: int, tiles: int) -> Tensor:
    """int32 (tiles, 8): the places of tiles of so many rows, by ``row_scaled_places.places_of_groups``."""
    out, power = torch.empty(tiles, 8, dtype=torch.int32, device=groups.given.device), power_above(groups.number)
    many = max(1, PLACES // power)
    launch(
        device_code("row_scaled_places.places_of_groups"),
        ceil_div(tiles, many),
        (groups.given.contiguous(), out, groups.number, groups.rows, groups.length // groups.block, tiles),
        (high, groups.block, power, many),
        4,
    )
    return out


class _Layout(NamedTuple):
    """What the launches of one cast share."""

    code: CastCode
    constants: RowCode
    block: int
    high: int
    """rows of a tile"""
    words: int
    matrices: _Matrices
    places: Tensor | None

    @property
    def given(self) -> tuple[Tensor | None, int, int, int]:
        """The arguments of ``place``, and the words of a row."""
        return self.places, self.matrices.number, self.matrices.rows, self.words

    def even(self, wide: int) -> tuple[bool, bool]:
        """Whether all tiles of so many words, and all their rows, are whole."""
        whole = self.words % wide == 0
        return whole and self.matrices.groups is None and self.matrices.rows % self.high == 0, whole


def _cast_both(x: Tensor, cast: Cast, row: RowOperand | None, column: RowOperand, matrices: _Matrices) -> None:
    """Fill both operands from the matrix of all rows."""
    x = x if in_pairs(x) else x.contiguous()
    (rows, cols), device = x.shape, x.device
    code, constants, block = code_of(cast, device), constants_of(cast.format.element, device), cast.format.block[1]
    seed, square = seed_of(cast, device), cast.format.square
    at_once = row is not None and seed is None and not square and cols <= WIDEST
    form = "" if row is None or at_once else "codes" if seed is None else "random codes"
    spans, wide, warps = tiles.ROW_SCALED[form]
    high, wide = max(spans * 32, block, matrices.pad), max(wide, block // 2)
    count, columns = matrices.tiles(high), matrices.number * cols
    extremes = zeros(columns + (rows if form else 0), device)
    of_columns, of_rows = extremes[:columns], extremes[columns:] if form else None
    with on(device):
        places = None if matrices.groups is None else _places(matrices.groups, high, count)
        layout = _Layout(code, constants, block, high, cols // 2, matrices, places)
        if at_once:
            assert row is not None
            _rows_and_extremes(x, row, of_columns, layout, count)
        else:
            _extremes(x, of_rows, of_columns, layout, count, square)
        components = row[:4] if row is not None and form else (None,) * 4
        length = column.shape[-1]
        launch(
            device_code("row_scaled_both.cast_both_to_rows"),
            count * ceil_div(layout.words, wide),
            (
                x, of_rows, of_columns, *components, *column[:4], seed, *layout.given, x.stride(0) // 2, layout.words,
                ceil_div(cols, block), ceil_div(length, block), length // INNER,
            ),
            (code, constants, high // 32, wide, form != "", *layout.even(wide), matrices.pad, square),
            warps,
        )  # fmt: skip


def _extremes(x: Tensor, of_rows: Tensor | None, of_columns: Tensor, layout: _Layout, count: int, square: bool) -> None:
    """Find the extremes of the columns and, if there is memory for them, of the rows."""
    wide, warps = tiles.EXTREMES
    wide = max(wide, layout.block // 2)
    launch(
        device_code("row_scaled_both.extremes_of_both"),
        count * ceil_div(layout.words, wide),
        (x, of_rows, of_columns, *layout.given, x.stride(0) // 2),
        (
            layout.code, layout.constants, layout.high, wide, of_rows is not None, *layout.even(wide),
            layout.matrices.pad, square,
        ),
        warps,
    )  # fmt: skip


def _rows_and_extremes(x: Tensor, row: RowOperand, of_columns: Tensor, layout: _Layout, count: int) -> None:
    """Fill the operand of the rows and find the extremes of the columns."""
    block, (at_a_time, of_warp) = layout.block, tiles.ONE_READ
    wide = max(block // 2, power_above(layout.words - 1))
    low = max(1, min(block, at_a_time // wide))
    launch(
        device_code("row_scaled_one_read.rows_and_extremes"),
        count * (layout.high // block),
        (x, of_columns, *row[:4], *layout.given, x.stride(0) // 2, ceil_div(2 * layout.words, block)),
        (layout.code, layout.constants, layout.high, low, wide, *layout.even(wide), layout.matrices.pad),
        max(1, min(16, low * wide // of_warp[wide >= 2 * at_a_time])),
    )


def _alone(x: Tensor, cast: Cast) -> RowOperand:
    """The row-scaled operand of a matrix or a stack, by a cast of its own."""
    out = empty_operand(tuple(x.shape), cast, x.device)
    rows_of_values(x, cast, any_distance=True, into=out[:4])
    return out

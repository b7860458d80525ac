"""Row-scaled operands of a matrix and of its transpose, for training: two reads of the values, and no codes between.

Host side of ``triton_device/row_scaled_rows_first.py``, ``row_scaled_exponents.py`` and ``row_scaled_both.py``. The
first pass finds the exponent of each column, and casts the rows: they stay in registers until their scale is known. The
second one casts the columns. Rows that are longer than that or few, square blocks, and values rounded stochastically
are cast both ways in the second pass; then the first finds the exponents of rows, too. Values are cast and rescaled in
one kernel, with unlimited range (the glossary of ``numerics/row_scaled.py`` has the terms). The kernels read words of
two bfloat16; values of other dtypes, such as float32 weights under torch.autocast, take a cast each way. Square blocks
of the transpose are those of the matrix, transposed.

A stack of matrices is cast as its matrices are, and rows in groups as each group is: a column has scales of its own in
each matrix and each group. The ends of the groups stay on the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.devices import multiprocessors
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

WIDEST = 16384
"""Columns of a row that one program keeps in registers."""
BUSY = 12
"""Warps of a multiprocessor that keep it busy: what the cast of rows as they are read needs to be faster."""
TILE_MAP_PAIRS = 1024
"""Pairs of a tile and a group that one program of ``map_tiles_of_groups`` compares."""
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
    _cast_both(rows_of(x), cast, row, column, _Matrices.of(x))
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

    @classmethod
    def of(cls, x: Tensor) -> _Matrices:
        """A stack, or one matrix."""
        return cls(math.prod(x.shape[:-2]), x.shape[-2])

    @property
    def pad(self) -> int:
        """The rows to whose multiples groups are padded; 0 for a stack."""
        return 0 if self.groups is None else self.groups.block

    def tiles(self, tile_rows: int) -> int:
        """The most tiles of so many rows."""
        if self.groups is None:
            return self.number * ceil_div(self.rows, tile_rows)
        return self.groups.length // tile_rows + self.number + 2


def _tile_map(groups: Groups, tile_rows: int, tiles: int) -> Tensor:
    """int32 (tiles, 8): the tile map of tiles of so many rows, by ``row_scaled_tile_map.map_tiles_of_groups``."""
    out, power = torch.empty(tiles, 8, dtype=torch.int32, device=groups.given.device), power_above(groups.number)
    tiles_per_program = max(1, TILE_MAP_PAIRS // power)
    launch(
        device_code("row_scaled_tile_map.map_tiles_of_groups"),
        ceil_div(tiles, tiles_per_program),
        (groups.given.contiguous(), out, groups.number, groups.rows, groups.length // groups.block, tiles),
        (tile_rows, groups.block, power, tiles_per_program),
        4,
    )
    return out


class _Passes:
    """The passes over a matrix of all rows, in words of two values."""

    def __init__(self, x: Tensor, cast: Cast, matrices: _Matrices, form: str) -> None:
        """``form``: in ``triton_tiles.ROW_SCALED``."""
        self.x = x if in_pairs(x) else x.contiguous()
        self.cast, self.matrices, self.form, device = cast, matrices, form, x.device
        self.code, self.constants = code_of(cast, device), constants_of(cast.format.element, device)
        self.block, self.words = cast.format.block[1], x.shape[1] // 2
        self.spans, self.tile_words, self.warps = tiles.ROW_SCALED[form]
        self.tile_rows = max(self.spans * 32, self.block, matrices.pad)
        self.tile_count = matrices.tiles(self.tile_rows)
        tile_map = None if matrices.groups is None else _tile_map(matrices.groups, self.tile_rows, self.tile_count)
        self.tile_arguments = tile_map, matrices.number, matrices.rows, self.words, self.x.stride(0) // 2

    def even(self, wide: int) -> tuple[bool, bool]:
        """Whether all tiles of so many words, and all their rows, are whole."""
        whole = self.words % wide == 0
        return whole and self.matrices.groups is None and self.matrices.rows % self.tile_rows == 0, whole

    def rows_and_column_exponents(self, row: RowOperand, column_exponents: Tensor) -> None:
        """Fill the operand of the rows and find the exponents of the columns."""
        low, wide, warps = _rows_first_tile(self.block, self.words)
        launch(
            device_code("row_scaled_rows_first.rows_and_column_exponents"),
            self.tile_count * (self.tile_rows // self.block),
            (self.x, column_exponents, *row[:4], *self.tile_arguments, ceil_div(2 * self.words, self.block)),
            (self.code, self.constants, self.tile_rows, low, wide, *self.even(wide), self.matrices.pad),
            warps,
        )

    def exponents(self, row_exponents: Tensor | None, column_exponents: Tensor) -> None:
        """Find the exponent words of the columns and, if there is memory for them, of the rows."""
        wide, warps = tiles.EXPONENTS
        wide = max(wide, self.block // 2)
        launch(
            device_code("row_scaled_exponents.exponents_of_both"),
            self.tile_count * ceil_div(self.words, wide),
            (self.x, row_exponents, column_exponents, *self.tile_arguments),
            (
                self.code, self.constants, self.tile_rows, wide, row_exponents is not None, *self.even(wide),
                self.matrices.pad, self.cast.format.square,
            ),
            warps,
        )  # fmt: skip

    def casts(
        self, row: RowOperand | None, column: RowOperand, row_exponents: Tensor | None, column_exponents: Tensor
    ) -> None:
        """Fill the operand of the transpose, and that of the rows if it is given."""
        wide, length = max(self.tile_words, self.block // 2), column.shape[-1]
        launch(
            device_code("row_scaled_both.cast_both_to_rows"),
            self.tile_count * ceil_div(self.words, wide),
            (
                self.x, row_exponents, column_exponents, *((None,) * 4 if row is None else row[:4]), *column[:4],
                seed_of(self.cast, self.x.device), *self.tile_arguments, self.words,
                ceil_div(2 * self.words, self.block), ceil_div(length, self.block), length // INNER,
            ),
            (
                self.code, self.constants, self.tile_rows // 32, wide, row is not None, *self.even(wide),
                self.matrices.pad, self.cast.format.square,
            ),
            self.warps,
        )  # fmt: skip


def _cast_both(x: Tensor, cast: Cast, row: RowOperand | None, column: RowOperand, matrices: _Matrices) -> None:
    """Fill both operands from the matrix of all rows."""
    (rows, cols), device = x.shape, x.device
    columns, random = matrices.number * cols, cast.rounding is Rounding.STOCHASTIC
    rows_first = row is not None and why_not_rows_first(x, cast) is None
    form = "" if row is None or rows_first else "random codes" if random else "codes"
    exponents = zeros(columns + (rows if form else 0), device)
    column_exponents, row_exponents = exponents[:columns], exponents[columns:] if form else None
    with on(device):
        passes = _Passes(x, cast, matrices, form)
        if rows_first:
            assert row is not None
            passes.rows_and_column_exponents(row, column_exponents)
        else:
            passes.exponents(row_exponents, column_exponents)
        passes.casts(row if form else None, column, row_exponents, column_exponents)


# ---------------------------------------------------------------------------------------------- rows and exponents


def _rows_first_tile(block: int, words: int) -> tuple[int, int, int]:
    """(rows at a time, words, warps) of a program that casts a block of rows and finds the exponents of columns."""
    at_a_time, of_warp = tiles.ROWS_FIRST
    wide = max(block // 2, power_above(words - 1))
    low = max(1, min(block, at_a_time // wide))
    return low, wide, max(1, min(16, low * wide // of_warp[wide >= 2 * at_a_time]))


def why_not_rows_first(x: Tensor, cast: Cast) -> str | None:
    """Why the rows of a matrix that ``why_not_both`` accepts are not cast in the pass that finds the exponents of its
    columns; None if they are."""
    if x.dtype is not torch.bfloat16 or cast.rounding is not Rounding.NEAREST or cast.format.square:
        return f"casts blocks along rows of bfloat16 to nearest, not {dtype_name(x.dtype)} to {cast.format}"
    rows, cols, block = math.prod(x.shape[:-1]), x.shape[-1], cast.format.block[1]
    if cols > WIDEST:
        return f"has at most {WIDEST} columns in registers, got {cols}"
    if ceil_div(rows, block) * _rows_first_tile(block, cols // 2)[2] < BUSY * multiprocessors(x.device):
        return f"does not fill the device with {rows} rows"
    return None


def rows_and_column_exponents(x: Tensor, cast: Cast) -> tuple[RowOperand, Tensor]:
    """The operand of a matrix or stack that ``why_not_both`` and ``why_not_rows_first`` accept, and what
    ``columns_by_exponents`` takes, the exponent words of the columns: int32 (matrices * cols,)."""
    row, matrices = empty_operand(tuple(x.shape), cast, x.device), _Matrices.of(x)
    exponents = zeros(matrices.number * x.shape[-1], x.device)
    with on(x.device):
        _Passes(rows_of(x), cast, matrices, "").rows_and_column_exponents(row, exponents)
    return row, exponents


def columns_by_exponents(x: Tensor, cast: Cast, exponents: Tensor) -> RowOperand:
    """The operand of the transpose of what ``rows_and_column_exponents`` has read."""
    column = empty_operand((*x.shape[:-2], x.shape[-1], x.shape[-2]), cast, x.device)
    with on(x.device):
        _Passes(rows_of(x), cast, _Matrices.of(x), "").casts(None, column, None, exponents)
    return column


def _alone(x: Tensor, cast: Cast) -> RowOperand:
    """The row-scaled operand of a matrix or a stack, by a cast of its own."""
    out = empty_operand(tuple(x.shape), cast, x.device)
    rows_of_values(x, cast, unlimited_range=True, into=out[:4])
    return out

"""Row-scaled operands of a matrix and of its transpose, for training: two reads of the values, and no codes between.

Host side of ``triton_device/row_scaled_both.py``. The first pass finds the exponent of each column, and casts the rows:
they stay in registers until their scale is known. The second one casts the columns. Rows that are longer than that or
few, square blocks, and values rounded stochastically are cast both ways in the second pass; then the first finds the
exponents of rows, too. Values are cast and rescaled in one kernel, with unlimited range (the glossary of
``numerics/row_scaled.py`` has the terms). The kernels read words of two bfloat16; values of other dtypes, such as
float32 weights under torch.autocast, take a cast each way.

A matrix in square blocks, and its transpose, may also be cast to codes first, which are then rescaled: a block of the
transpose is the transpose of a block, so one cast serves both. Stacks of matrices are then cast as one matrix of all
rows.

A stack of matrices is cast as its matrices are, and rows in groups as each group is: a column has scales of its own in
each matrix and each group. The ends of the groups stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.devices import multiprocessors
from ...core.kernel import Kernel, Spec
from ...core.names import dtype_name
from ...core.repeated import recorded
from ...core.shapes import as_matrix
from ...numerics.cast import Cast
from ...numerics.formats import FULL, Rounding, get_format
from ...numerics.groups import Groups
from ...numerics.operand import transposed
from ...numerics.row_scaled import why_not
from ..operands import INNER, MAX_GROUPS, Form, GemmOperand, RowOperand, Unquantized, sections
from ..runtime import triton_launch
from ..runtime.custom_op import check_argument, check_codes, check_device
from ..runtime.triton_launch import device_code, launch, on, zeros
from . import definition
from .choose_cast import quantize_operand
from .to_row_scaled import matrix_of, row_code, rows_of_operand, rows_of_values, why_not_along_rows, why_not_in_one
from .triton_common import (
    EXPONENT_TILE,
    ROW_SCALED_TILES,
    ROWS_FIRST_TILE,
    SOURCES,
    ceil_div,
    code_of,
    in_pairs,
    power_above,
    refuses,
    rows_of,
    seed_of,
)
from .triton_ops import cast_arguments

WIDEST = 16384
"""Columns of a row that one program keeps in registers."""
BUSY = 12
"""Warps of a multiprocessor that keep it busy: what the cast of rows as they are read needs to be faster."""
TILE_MAP_PAIRS = 1024
"""Pairs of a tile and a group that one program of ``map_tiles_of_groups`` compares."""
PADS = (32, 64, 128)
"""Rows to which groups may be padded: a tile of rows is a multiple."""
Pair = tuple[RowOperand | None, RowOperand | None]


def why_not_both(x: Tensor, cast: Cast, groups: Groups | None = None) -> str | None:
    """Why the row-scaled operands of a matrix and of its transpose cannot be cast in two passes; None if they can.

    ``groups``: the same of the rows of a matrix in groups, and of the transpose of the padded matrix.
    """
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
    if groups is None:
        return None
    if format.square:
        return f"casts blocks along rows in groups, not those of {format}"
    if x.dim() != 2 or x.dtype is not torch.bfloat16:
        return f"casts groups of rows of bfloat16, not {dtype_name(x.dtype)} {tuple(x.shape)}"
    if groups.block not in PADS or groups.block % format.block[1]:
        return f"pads groups to {', '.join(map(str, PADS))} rows and whole blocks, not to {groups.block}"
    return f"casts at most {MAX_GROUPS} groups, got {groups.number}" if groups.number > MAX_GROUPS else None


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


def _rows_first_tile(block: int, words: int) -> tuple[int, int, int]:
    """(rows at a time, words, warps) of a program that casts a block of rows and finds the exponents of columns."""
    at_a_time, of_warp = ROWS_FIRST_TILE
    wide = max(block // 2, power_above(words - 1))
    low = max(1, min(block, at_a_time // wide))
    return low, wide, max(1, min(16, low * wide // of_warp[wide >= 2 * at_a_time]))


# ---------------------------------------------------------------------------------------------- the passes


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


def _cast(
    x: Tensor, cast: Cast, row: RowOperand | None, column: RowOperand | None, groups: Groups | None = None,
    exponents: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Fill the operand of the rows of x and that of its transpose, or one of them; returns exponent words, first those
    of the columns: int32 (matrices * cols,).

    ``groups``: of the rows of a matrix. ``exponents``: those words, if an earlier call has found them. Rows alone are
    cast in the first pass, columns alone in the second one.
    """
    random, square, device = cast.rounding is Rounding.STOCHASTIC, cast.format.square, x.device
    matrices, each = math.prod(x.shape[:-2]) if groups is None else groups.number, x.shape[-2]
    rows_first = row is not None and (column is None or why_not_rows_first(x, cast) is None)
    form = "" if row is None or rows_first else "random codes" if random else "codes"
    x = rows_of(x)
    (rows, cols), block, pad = x.shape, cast.format.block[1], 0 if groups is None else groups.block
    columns, words, found = matrices * cols, cols // 2, exponents is not None
    exponents = zeros(columns + (rows if form else 0), device) if exponents is None else exponents
    column_exponents, row_exponents = exponents[:columns], exponents[columns:] if form else None
    x = x if in_pairs(x) else x.contiguous()
    code, constants = code_of(cast, device), row_code(cast.format.element, triton_launch.instructions_of(device))
    spans, cast_words, cast_warps = ROW_SCALED_TILES[form]
    tile_rows = max(spans * 32, block, pad)
    tiles = matrices * ceil_div(each, tile_rows) if groups is None else groups.length // tile_rows + matrices + 2

    def even(wide: int) -> tuple[bool, bool]:
        """Whether all tiles of so many words, and all their rows, are whole."""
        return words % wide == 0 and groups is None and each % tile_rows == 0, words % wide == 0

    with on(device):
        tile_map = None if groups is None else _tile_map(groups, tile_rows, tiles)
        tile_arguments = tile_map, matrices, each, words, x.stride(0) // 2
        if rows_first:
            assert row is not None
            low, wide, warps = _rows_first_tile(block, words)
            launch(
                device_code("row_scaled_both.rows_and_column_exponents"),
                tiles * (tile_rows // block),
                (x, column_exponents, *row[:4], *tile_arguments, ceil_div(cols, block)),
                (code, constants, tile_rows, low, wide, *even(wide), pad),
                warps,
            )
        elif not found:
            wide, warps = max(EXPONENT_TILE[0], block // 2), EXPONENT_TILE[1]
            launch(
                device_code("row_scaled_both.exponents_of_both"),
                tiles * ceil_div(words, wide),
                (x, row_exponents, column_exponents, *tile_arguments),
                (code, constants, tile_rows, wide, row_exponents is not None, *even(wide), pad, square),
                warps,
            )
        if column is not None:
            wide, length, filled = max(cast_words, block // 2), column.shape[-1], row if form else None
            launch(
                device_code("row_scaled_both.cast_both_to_rows"),
                tiles * ceil_div(words, wide),
                (
                    x, row_exponents, column_exponents, *((None,) * 4 if filled is None else filled[:4]), *column[:4],
                    seed_of(cast, device), *tile_arguments, words, ceil_div(cols, block), ceil_div(length, block),
                    length // INNER,
                ),
                (code, constants, tile_rows // 32, wide, filled is not None, *even(wide), pad, square),
                cast_warps,
            )  # fmt: skip
    return exponents


# ---------------------------------------------------------------------------------------------- casts


def empty_operand(shape: tuple[int, ...], cast: Cast, device: torch.device, groups: int = 1) -> RowOperand:
    """Memory for an operand with the scales of its blocks: one tensor, which is saved for the backward pass."""
    size = sections(cast.format, shape, groups)[1]
    return RowOperand.inside(torch.empty(size, dtype=torch.uint8, device=device), cast.format, shape, groups)


def rows_of_both(
    x: Tensor, cast: Cast, rowwise: bool = True, groups: Groups | None = None, *, traced: bool = False
) -> Pair:
    """The operand of a matrix or stack that ``why_not_both`` accepts, if asked for, and that of its transpose.

    ``groups``: of the rows of a matrix. Then the transpose is that of the padded matrix (cols, P), in which each group
    of columns has scales of its own. ``traced``: by the custom op.
    """
    shape, format, number = tuple(x.shape), cast.format, 1 if groups is None else groups.number
    transpose = (*shape[:-2], shape[-1], shape[-2] if groups is None else groups.length)
    if traced:
        op = cast_both_to_rows if groups is None else cast_groups_to_rows
        ends = () if groups is None else (groups.given, groups.block)
        memory = op(x.detach(), *ends, *cast_arguments(cast), rowwise)
        row = RowOperand.inside(memory[0], format, shape) if rowwise else None
        return row, RowOperand.inside(memory[-1], format, transpose, number)
    if x.dtype is not torch.bfloat16:
        return _alone(x, cast) if rowwise else None, _alone(x.mT.contiguous(), cast)
    row = empty_operand(shape, cast, x.device) if rowwise else None
    column = empty_operand(transpose, cast, x.device, number)
    _cast(x, cast, row, column, groups)
    return row, column


def _alone(x: Tensor, cast: Cast) -> RowOperand:
    """The row-scaled operand of a matrix or a stack, by a cast of its own."""
    out = empty_operand(tuple(x.shape), cast, x.device)
    rows_of_values(x, cast, unlimited_range=True, into=out[:4])
    return out


def rows_and_column_exponents(x: Tensor, cast: Cast, *, traced: bool = False) -> tuple[RowOperand, Tensor]:
    """The operand of a matrix or stack that ``why_not_both`` and ``why_not_rows_first`` accept, and what
    ``columns_by_exponents`` takes, the exponent words of the columns: int32 (matrices * cols,)."""
    if traced:
        memory, exponents = cast_rows_and_column_exponents(x.detach(), *cast_arguments(cast))
        return RowOperand.inside(memory, cast.format, tuple(x.shape)), exponents
    row = empty_operand(tuple(x.shape), cast, x.device)
    return row, _cast(x, cast, row, None)


def columns_by_exponents(x: Tensor, cast: Cast, exponents: Tensor, *, traced: bool = False) -> RowOperand:
    """The operand of the transpose of what ``rows_and_column_exponents`` has read."""
    shape = (*x.shape[:-2], x.shape[-1], x.shape[-2])
    if traced:
        memory = cast_columns_by_exponents(x.detach(), exponents, *cast_arguments(cast))
        return RowOperand.inside(memory, cast.format, shape)
    column = empty_operand(shape, cast, x.device)
    _cast(x, cast, None, column, exponents=exponents)
    return column


# ---------------------------------------------------------------------------------------------- custom ops


def _check(
    op: str, x: Tensor, most: int, dtypes: Sequence[torch.dtype], why_not_cast: Callable[[], str | None]
) -> None:
    """Raise TypeError or ValueError unless the kernels can read ``x``, of 2 to ``most`` dimensions, and cast it."""
    check_argument(op, "x", x, dtypes, (None,) * max(2, min(x.dim(), most)), x.device)
    check_device(op, x)
    reason = why_not_cast()
    if reason is not None:
        raise ValueError(f"{op} {reason}")


@custom_ops.define("mxtensor::operand_to_rows")
@recorded
def operand_to_rows(data: Tensor, scale: Tensor, format: str, cols: int, unlimited_range: bool) -> list[Tensor]:
    """``rows_of_operand`` of a matrix: codes, row scales, flags of rows out of range."""
    op, row = "mxtensor::operand_to_rows", get_format(format)
    operand = check_codes(op, data, scale, None, row, (data.shape[0], cols))
    check_device(op, data)
    reason = why_not(row)
    if reason is not None or 0 in operand.shape:
        raise ValueError(f"{op}: {reason or f'no values in {operand.shape}'}")
    return list(rows_of_operand(matrix_of(operand), 1, unlimited_range))


def _fake_rows(x: Tensor, rows: int, cols: int) -> list[Tensor]:
    codes = x.new_empty(rows, -(-cols // INNER) * INNER, dtype=torch.uint8)
    return [codes, x.new_empty(rows, 1, dtype=torch.float32), x.new_empty(rows, dtype=torch.uint8)]


@custom_ops.fake_of(operand_to_rows)
def _(data, scale, format, cols, unlimited_range):  # type: ignore[no-untyped-def]
    return _fake_rows(data, data.shape[0], cols)


@custom_ops.define("mxtensor::cast_to_rows")
@recorded
def cast_to_rows(
    x: Tensor, format: str, scaling: str, rounding: str, seed: int | None, amax_epsilon: float, unlimited_range: bool
) -> list[Tensor]:
    """``rows_of_values`` of a matrix: codes, row scales, flags of rows out of range, scales of blocks."""
    op, cast = "mxtensor::cast_to_rows", Cast.of(format, scaling, rounding, seed, amax_epsilon)
    _check(op, x, 2, (x.dtype,), lambda: why_not(cast.format) or why_not_in_one(x, cast))
    return list(rows_of_values(x, cast, unlimited_range))


@custom_ops.fake_of(cast_to_rows)
def _(x, format, scaling, rounding, seed, amax_epsilon, unlimited_range):  # type: ignore[no-untyped-def]
    row = get_format(format)
    scale = x.new_empty(row.scale_shape(tuple(x.shape)), dtype=row.scale.dtype)
    return [*_fake_rows(x, x.shape[0], x.shape[1]), scale]


@custom_ops.define("mxtensor::cast_both_to_rows")
@recorded
def cast_both_to_rows(
    x: Tensor, format: str, scaling: str, rounding: str, seed: int | None, amax_epsilon: float, rowwise: bool
) -> list[Tensor]:
    """``rows_of_both``: the memory of the operand of the matrix, if asked for, then of that of its transpose.

    x: a matrix, or a stack of matrices.
    """
    op, cast = "mxtensor::cast_both_to_rows", Cast.of(format, scaling, rounding, seed, amax_epsilon)
    _check(op, x, 3, SOURCES, lambda: why_not_both(x, cast))
    return [side.memory for side in rows_of_both(x, cast, rowwise) if side is not None]  # type: ignore[misc]


@custom_ops.fake_of(cast_both_to_rows)
def _(x, format, scaling, rounding, seed, amax_epsilon, rowwise):  # type: ignore[no-untyped-def]
    shapes = [tuple(x.shape), tuple(x.mT.shape)] if rowwise else [tuple(x.mT.shape)]
    return [x.new_empty(sections(get_format(format), shape)[1], dtype=torch.uint8) for shape in shapes]


@custom_ops.define("mxtensor::cast_groups_to_rows")
@recorded
def cast_groups_to_rows(
    x: Tensor, ends: Tensor, block: int, format: str, scaling: str, rounding: str, seed: int | None,
    amax_epsilon: float, rowwise: bool,
) -> list[Tensor]:  # fmt: skip
    """``rows_of_both`` of groups that are padded to ``block`` rows: memory as of ``cast_both_to_rows``."""
    op, cast = "mxtensor::cast_groups_to_rows", Cast.of(format, scaling, rounding, seed, amax_epsilon)
    check_argument(op, "ends", ends, (torch.int32,), (None,), x.device)
    _check(op, x, 2, (torch.bfloat16,), lambda: why_not_both(x, cast, Groups(ends, x.shape[0], block)))
    groups = Groups(ends, x.shape[0], block)
    return [side.memory for side in rows_of_both(x, cast, rowwise, groups) if side is not None]  # type: ignore[misc]


@custom_ops.fake_of(cast_groups_to_rows)
def _(x, ends, block, format, scaling, rounding, seed, amax_epsilon, rowwise):  # type: ignore[no-untyped-def]
    (rows, cols), groups, row = x.shape, Groups(ends, x.shape[0], block), get_format(format)
    sizes = [sections(row, (rows, cols))[1]] if rowwise else []
    sizes.append(sections(row, (cols, groups.length), groups.number)[1])
    return [x.new_empty(size, dtype=torch.uint8) for size in sizes]


@custom_ops.define("mxtensor::cast_rows_and_column_exponents")
@recorded
def cast_rows_and_column_exponents(
    x: Tensor, format: str, scaling: str, rounding: str, seed: int | None, amax_epsilon: float
) -> list[Tensor]:
    """``rows_and_column_exponents``: the memory of the operand of the rows, and the exponents of the columns."""
    op, cast = "mxtensor::cast_rows_and_column_exponents", Cast.of(format, scaling, rounding, seed, amax_epsilon)
    _check(op, x, 3, (torch.bfloat16,), lambda: why_not_both(x, cast) or why_not_rows_first(x, cast))
    row, exponents = rows_and_column_exponents(x, cast)
    return [row.memory, exponents]  # type: ignore[list-item]


@custom_ops.fake_of(cast_rows_and_column_exponents)
def _(x, format, scaling, rounding, seed, amax_epsilon):  # type: ignore[no-untyped-def]
    size = sections(get_format(format), tuple(x.shape))[1]
    return [x.new_empty(size, dtype=torch.uint8), x.new_empty(x.numel() // x.shape[-2], dtype=torch.int32)]


@custom_ops.define("mxtensor::cast_columns_by_exponents")
@recorded
def cast_columns_by_exponents(
    x: Tensor, exponents: Tensor, format: str, scaling: str, rounding: str, seed: int | None, amax_epsilon: float
) -> Tensor:
    """``columns_by_exponents``: the memory of the operand of the transpose."""
    op, cast = "mxtensor::cast_columns_by_exponents", Cast.of(format, scaling, rounding, seed, amax_epsilon)
    _check(op, x, 3, (torch.bfloat16,), lambda: why_not_both(x, cast) or why_not_rows_first(x, cast))
    check_argument(op, "exponents", exponents, (torch.int32,), (x.numel() // x.shape[-2],), x.device)
    return columns_by_exponents(x, cast, exponents).memory  # type: ignore[return-value]


@custom_ops.fake_of(cast_columns_by_exponents)
def _(x, exponents, format, scaling, rounding, seed, amax_epsilon):  # type: ignore[no-untyped-def]
    return x.new_empty(sections(get_format(format), tuple(x.mT.shape))[1], dtype=torch.uint8)


# ---------------------------------------------------------------------------------------------- kernels


def _refuses(
    spec: Spec, x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, *_: object,
    why_not_cast: Callable[[Tensor, Cast], str | None],
) -> str | None:  # fmt: skip
    """Why a kernel of pairs refuses that casts, to the row-scaled form alone, what ``why_not_cast`` accepts."""
    if {rowwise, columnwise} - {None} != {Form.ROWS}:
        return "casts to the row-scaled form"
    return refuses(spec) or why_not_cast(x, cast)


def _run(
    x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, *_: object, traced: bool = False
) -> Pair:
    random = cast.rounding is Rounding.STOCHASTIC
    if x.dtype is torch.bfloat16 and x.stride(-1) != 1 and x.stride(-2) == 1 and not random:
        # The rows of a transposed view are best cast as the columns of what its memory holds. Random numbers belong to
        # rows or to columns.
        column, row = rows_of_both(x.mT, cast, columnwise is not None, traced=traced)
        return row if rowwise is not None else None, column
    if columnwise is not None or random or cast.format.square:
        row, column = rows_of_both(x, cast, rowwise is not None, traced=traced)
        return row, column if columnwise is not None else None
    if traced:
        codes, row_scale, out_of_range, scale = cast_to_rows(as_matrix(x.detach()), *cast_arguments(cast), True)
    else:
        codes, row_scale, out_of_range, scale = rows_of_values(x, cast, unlimited_range=True)
    return RowOperand(codes, row_scale, out_of_range, scale, cast.format, tuple(x.shape)), None


def _run_by_codes(
    x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, *_: object, traced: bool = False
) -> Pair:
    quantized = quantize_operand(x, cast)
    sides: list[RowOperand | None] = []
    for form, is_transposed in ((rowwise, False), (columnwise, True)):
        if form is None:
            sides.append(None)
            continue
        operand = transposed(quantized) if is_transposed else quantized
        matrix = matrix_of(operand)
        if traced:
            rows = operand_to_rows(matrix.data, matrix.scale, matrix.format.name, matrix.shape[1], True)
        else:
            rows = rows_of_operand(matrix, 1, unlimited_range=True)
        codes, row_scale, out_of_range = rows
        sides.append(RowOperand(codes, row_scale, out_of_range, matrix.scale, matrix.format, tuple(operand.shape)))
    return sides[0], sides[1]


def why_not_by_codes(x: Tensor, cast: Cast) -> str | None:
    """Why the row-scaled operands of values cannot be made of their codes; None if they can."""
    format = cast.format
    reason = why_not(format)
    if reason is not None:
        return reason
    if not format.square or FULL in format.block or cast.rounding is not Rounding.NEAREST:
        return f"casts square blocks to nearest, not {cast}"
    size = max(INNER, format.block[0])
    if x.dim() not in (2, 3) or x.shape[-2] % size or x.shape[-1] % size or 0 in x.shape:
        return f"needs a matrix of multiples of {size} rows and columns or a stack of them, not {tuple(x.shape)}"
    return None


def why_not_rows(x: Tensor, cast: Cast) -> str | None:
    """Why no kernel casts values, and their transpose, to the row-scaled form; None if one does."""
    return why_not_both(x, cast) if why_not_by_codes(x, cast) is not None else None


def wants_rows(a: GemmOperand, b: GemmOperand) -> bool:
    """Whether operands that still need a cast are best cast to the row-scaled form."""
    return all(
        side.x.dim() == 2 and why_not_rows(side.x, side.cast) is None
        if isinstance(side, Unquantized)
        else isinstance(side, RowOperand)
        for side in (a, b)
    )


def _kernel(name: str, refuses: Callable[..., str | None], run: Callable[..., object]) -> Kernel:
    return Kernel(name, refuses, run, "cuda", partial(run, traced=True))


PAIR = _kernel("triton rows", partial(_refuses, why_not_cast=why_not_both), _run)
PAIR_BY_CODES = _kernel("triton rows by codes", partial(_refuses, why_not_cast=why_not_by_codes), _run_by_codes)
# ``cast_groups`` and ``cast_rows_first`` ask for refusals before.
GROUPS = _kernel("triton rows", definition.refuses, rows_of_both)
ROWS_FIRST = _kernel("triton rows", definition.refuses, rows_and_column_exponents)
COLUMNS_LATER = _kernel("triton rows", definition.refuses, columns_by_exponents)

"""Casts to row-scaled operands as custom ops, and as the kernel of casts for training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.kernel import Kernel, Spec
from ...numerics.cast import Cast
from ...numerics.formats import Rounding, get_format
from ...numerics.groups import Groups
from ...numerics.row_scaled import why_not
from ..quantize.triton_common import SOURCES, refuses
from ..quantize.triton_ops import cast_arguments
from ..runtime.check import check_argument, check_codes, check_device
from ..runtime.recorded_op import recorded
from .fp8_rows_both import (
    Pair,
    columns_by_exponents,
    rows_and_column_exponents,
    rows_of_both,
    rows_of_groups,
    why_not_both,
    why_not_groups,
    why_not_rows_first,
)
from .fp8_rows_operand import matrix_of, rows_of_operand, rows_of_values, why_not_in_one
from .row_operand import INNER, RowOperand, sections
from .spec import Form

# ---------------------------------------------------------------------------------------------- ops


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
    check_argument(op, "x", x, (x.dtype,), (None, None), x.device)
    check_device(op, x)
    reason = why_not(cast.format) or why_not_in_one(x, cast)
    if reason is not None:
        raise ValueError(f"{op} {reason}")
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
    check_argument(op, "x", x, SOURCES, (None,) * max(2, min(x.dim(), 3)), x.device)
    check_device(op, x)
    reason = why_not_both(x, cast)
    if reason is not None:
        raise ValueError(f"{op} {reason}")
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
    """``rows_of_groups`` of groups that are padded to ``block`` rows: memory as of ``cast_both_to_rows``."""
    op, cast = "mxtensor::cast_groups_to_rows", Cast.of(format, scaling, rounding, seed, amax_epsilon)
    check_argument(op, "x", x, (torch.bfloat16,), (None, None), x.device)
    check_argument(op, "ends", ends, (torch.int32,), (None,), x.device)
    check_device(op, x)
    groups = Groups(ends, x.shape[0], block)
    reason = why_not_groups(x, cast, groups)
    if reason is not None:
        raise ValueError(f"{op} {reason}")
    return [side.memory for side in rows_of_groups(x, cast, groups, rowwise) if side is not None]  # type: ignore[misc]


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
    _check_rows_first(op, x, cast)
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
    _check_rows_first(op, x, cast)
    check_argument(op, "exponents", exponents, (torch.int32,), (x.numel() // x.shape[-2],), x.device)
    return columns_by_exponents(x, cast, exponents).memory  # type: ignore[return-value]


@custom_ops.fake_of(cast_columns_by_exponents)
def _(x, exponents, format, scaling, rounding, seed, amax_epsilon):  # type: ignore[no-untyped-def]
    return x.new_empty(sections(get_format(format), tuple(x.mT.shape))[1], dtype=torch.uint8)


def _check_rows_first(op: str, x: Tensor, cast: Cast) -> None:
    check_argument(op, "x", x, (torch.bfloat16,), (None,) * max(2, min(x.dim(), 3)), x.device)
    check_device(op, x)
    reason = why_not_both(x, cast) or why_not_rows_first(x, cast)
    if reason is not None:
        raise ValueError(f"{op} {reason}")


# ---------------------------------------------------------------------------------------------- the kernel


def refuses_rows(why_not_cast: Callable[[Tensor, Cast], str | None]) -> Callable[..., str | None]:
    """``refuses`` of a kernel of pairs that casts, to the row-scaled form alone, what ``why_not_cast`` accepts."""

    def _refuses(
        spec: Spec, x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, *_: object
    ) -> str | None:
        if {rowwise, columnwise} - {None} != {Form.ROWS}:
            return "casts to the row-scaled form"
        return refuses(spec) or why_not_cast(x, cast)

    return _refuses


def _is_transposed(x: Tensor, cast: Cast) -> bool:
    """Whether x is a transposed view, whose rows are best cast as the columns of what its memory holds. Random numbers
    belong to rows or to columns."""
    transposed = x.dtype is torch.bfloat16 and x.stride(-1) != 1 and x.stride(-2) == 1
    return transposed and cast.rounding is not Rounding.STOCHASTIC


def _takes_both(cast: Cast, columnwise: Form | None) -> bool:
    """Whether the cast that makes both operands runs; that of rows alone rounds blocks along rows to nearest."""
    return columnwise is not None or cast.rounding is Rounding.STOCHASTIC or cast.format.square


def _run(x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, *_: object) -> Pair:
    if _is_transposed(x, cast):
        column, row = rows_of_both(x.mT, cast, columnwise is not None)
        return row if rowwise is not None else None, column
    if _takes_both(cast, columnwise):
        row, column = rows_of_both(x, cast, rowwise is not None)
        return row, column if columnwise is not None else None
    codes, row_scale, out_of_range, scale = rows_of_values(x, cast, unlimited_range=True)
    return RowOperand(codes, row_scale, out_of_range, scale, cast.format, tuple(x.shape)), None


def _run_traced(x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, *_: object) -> Pair:
    x, arguments, format = x.detach(), cast_arguments(cast), cast.format
    if _is_transposed(x, cast):
        column, row = _run_traced(x.mT, cast, columnwise, Form.ROWS)
        return row if rowwise is not None else None, column
    shape = tuple(x.shape)
    if not _takes_both(cast, columnwise):
        codes, row_scale, out_of_range, scale = cast_to_rows(x.reshape(-1, shape[-1]), *arguments, True)
        return RowOperand(codes, row_scale, out_of_range, scale, format, shape), None
    memory = cast_both_to_rows(x, *arguments, rowwise is not None)
    row = None if rowwise is None else RowOperand.inside(memory[0], format, shape)
    transpose = (*shape[:-2], shape[-1], shape[-2])
    return row, None if columnwise is None else RowOperand.inside(memory[-1], format, transpose)


PAIR = Kernel("triton rows", refuses_rows(why_not_both), _run, "cuda", _run_traced)


def _no_refusal(*_: object) -> None:
    """``cast_groups`` and ``cast_rows_first`` ask before."""


def _run_groups_traced(x: Tensor, cast: Cast, groups: Groups, rowwise: bool) -> Pair:
    memory = cast_groups_to_rows(x.detach(), groups.given, groups.block, *cast_arguments(cast), rowwise)
    (rows, cols), format = x.shape, cast.format
    row = RowOperand.inside(memory[0], format, (rows, cols)) if rowwise else None
    return row, RowOperand.inside(memory[-1], format, (cols, groups.length), groups.number)


GROUPS = Kernel("triton rows", _no_refusal, rows_of_groups, "cuda", _run_groups_traced)


def _run_first_traced(x: Tensor, cast: Cast) -> tuple[RowOperand, Tensor]:
    memory, exponents = cast_rows_and_column_exponents(x.detach(), *cast_arguments(cast))
    return RowOperand.inside(memory, cast.format, tuple(x.shape)), exponents


def _run_second_traced(x: Tensor, cast: Cast, exponents: Tensor) -> RowOperand:
    memory = cast_columns_by_exponents(x.detach(), exponents, *cast_arguments(cast))
    return RowOperand.inside(memory, cast.format, (*x.shape[:-2], x.shape[-1], x.shape[-2]))


ROWS_FIRST = Kernel("triton rows", _no_refusal, rows_and_column_exponents, "cuda", _run_first_traced)
COLUMNS_LATER = Kernel("triton rows", _no_refusal, columns_by_exponents, "cuda", _run_second_traced)

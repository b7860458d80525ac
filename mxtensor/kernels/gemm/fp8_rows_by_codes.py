"""Row-scaled operands of a matrix in square blocks, and of its transpose: codes first, which are then rescaled.

A block of the transpose is the transpose of a block, so one cast serves both. As in ``fp8_rows_both`` the range is
unlimited (``numerics/row_scaled.py`` has a glossary). Stacks of matrices are cast as one matrix of all rows.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ...core.kernel import Kernel
from ...numerics.cast import Cast
from ...numerics.formats import FULL, Rounding
from ...numerics.operand import Operand, transposed
from ...numerics.row_scaled import why_not
from ..quantize.select import quantize_operand
from .fp8_rows_both import Pair, why_not_both
from .fp8_rows_operand import matrix_of, rows_of_operand
from .fp8_rows_ops import operand_to_rows, refuses_rows
from .row_operand import INNER, RowOperand
from .spec import Form, GemmOperand, Unquantized


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

    def fits(side: GemmOperand) -> bool:
        if isinstance(side, Unquantized):
            return side.x.dim() == 2 and why_not_rows(side.x, side.cast) is None
        return isinstance(side, RowOperand)

    return fits(a) and fits(b)


def _row_scaled(operand: Operand, traced: bool) -> RowOperand:
    matrix = matrix_of(operand)
    if traced:
        made = operand_to_rows(matrix.data, matrix.scale, matrix.format.name, matrix.shape[1], True)
    else:
        made = rows_of_operand(matrix, 1, unlimited_range=True)
    codes, row_scale, out_of_range = made
    return RowOperand(codes, row_scale, out_of_range, matrix.scale, matrix.format, tuple(operand.shape))


def _pair(x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, *_: object, traced: bool) -> Pair:
    operand = quantize_operand(x, cast)
    row = _row_scaled(operand, traced) if rowwise is not None else None
    return row, _row_scaled(transposed(operand), traced) if columnwise is not None else None


PAIR = Kernel(
    "triton rows by codes", refuses_rows(why_not_by_codes), partial(_pair, traced=False), "cuda",
    partial(_pair, traced=True),
)  # fmt: skip

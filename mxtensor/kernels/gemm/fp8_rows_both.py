"""Row-scaled operands of a matrix and of its transpose, for training: two reads of the values, and no codes between.

Host side of ``triton_device/row_scaled_both.py``. The first pass finds the largest scale of each row and column; the
second one casts and re-expresses at once. Blocks may be any distance apart: see ``numerics/row_scaled.py``. The kernels
read words of two bfloat16; values of other dtypes, such as float32 weights under torch.autocast, take a cast each way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...numerics.cast import Cast
from ...numerics.row_scaled import why_not
from ..quantize import triton_tiles as tiles
from ..quantize.triton_common import ceil_div, code_of, in_pairs, rows_of
from ..runtime.triton_launch import device_code, launch, on, zeros
from .fp8_rows_operand import constants_of, rows_of_values, why_not_in_one
from .row_operand import INNER, RowOperand, sections
from .spec import GemmOperand, Unquantized

Pair = tuple[RowOperand | None, RowOperand | None]


def why_not_both(x: Tensor, cast: Cast) -> str | None:
    """Why the row-scaled operands of a matrix and of its transpose cannot be cast in two passes; None if they can."""
    format = cast.format
    reason = why_not(format) or why_not_in_one(x, cast)
    if reason is not None:
        return reason
    if format.element.bits != 8 or format.block[1] < 32:
        return f"casts 8-bit elements in blocks of 32 or more, not {format}"
    if x.dim() != 2 or x.shape[0] % INNER or x.shape[1] % INNER or 0 in x.shape:
        return f"needs a matrix of multiples of {INNER} rows and columns, not {tuple(x.shape)}"
    return None


def empty_operand(rows: int, cols: int, cast: Cast, device: torch.device) -> RowOperand:
    """Memory for an operand with the scales of its blocks: one tensor, which is saved for the backward pass."""
    size = sections(cast.format, (rows, cols))[1]
    return RowOperand.inside(torch.empty(size, dtype=torch.uint8, device=device), cast.format, (rows, cols))


def rows_of_both(x: Tensor, cast: Cast, rowwise: bool = True) -> Pair:
    """The operand of a matrix that ``why_not_both`` accepts, if asked for, and that of its transpose."""
    x = rows_of(x)
    if x.dtype is not torch.bfloat16:
        return _alone(x, cast) if rowwise else None, _alone(x.t().contiguous(), cast)
    x = x if in_pairs(x) else x.contiguous()
    (rows, cols), device, words = x.shape, x.device, x.shape[1] // 2
    code, constants, block = code_of(cast, device), constants_of(cast.format.element, device), cast.format.block[1]
    row = empty_operand(rows, cols, cast, device) if rowwise else None
    column = empty_operand(cols, rows, cast, device)
    extremes = zeros(rows + cols, device)
    of_columns, of_rows = extremes[:cols], extremes[cols:]
    high, wide, warps = tiles.EXTREMES
    high, wide = max(high, block), max(wide, block // 2)
    with on(device):
        launch(
            device_code("row_scaled_both.extremes_of_both"),
            ceil_div(rows, high) * ceil_div(words, wide),
            (x, of_rows, of_columns, rows, words, x.stride(0) // 2),
            (code, constants, high, wide, rowwise, rows % high == 0 and words % wide == 0),
            warps,
        )
        groups, wide, warps = tiles.WORDS["codes"]
        groups, wide = max(groups, block // 32), max(wide, block // 2)
        high = groups * 32
        components = (None,) * 4 if row is None else row[:4]
        launch(
            device_code("row_scaled_both.cast_both_to_rows"),
            ceil_div(rows, high) * ceil_div(words, wide),
            (
                x, of_rows, of_columns, *components, *column[:4], rows, words, x.stride(0) // 2, words,
                ceil_div(cols, block), ceil_div(rows, block), rows // 4,
            ),
            (code, constants, groups, wide, rowwise, rows % high == 0 and words % wide == 0),
            warps,
        )  # fmt: skip
    return row, column


def _alone(x: Tensor, cast: Cast) -> RowOperand:
    """The row-scaled operand of a matrix, by a cast of its own."""
    out = empty_operand(x.shape[0], x.shape[1], cast, x.device)
    rows_of_values(x, cast, any_distance=True, into=out[:4])
    return out


def wants_rows(a: GemmOperand, b: GemmOperand) -> bool:
    """Whether operands that still need a cast are best cast to the row-scaled form."""

    def fits(side: GemmOperand) -> bool:
        if isinstance(side, Unquantized):
            return why_not_both(side.x, side.cast) is None
        return isinstance(side, RowOperand)

    return fits(a) and fits(b)

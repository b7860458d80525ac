"""Row-scaled operands of a matrix and of its transpose, for training: two reads of the values, and no codes between.

Host side of ``triton_device/row_scaled_both.py``. The first pass finds the largest scale of each row and column; the
second one casts and re-expresses at once. Blocks may be any distance apart: see ``numerics/row_scaled.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.kernel import Kernel, Spec
from ...numerics.cast import Cast
from ...numerics.row_scaled import why_not
from ..quantize import triton_tiles as tiles
from ..quantize.triton_common import ceil_div, code_of, in_pairs, refuses, rows_of
from ..quantize.triton_ops import cast_arguments
from ..runtime.check import check_argument, check_device
from ..runtime.recorded_op import recorded
from ..runtime.triton_launch import device_code, launch, on, zeros
from .fp8_rows_operand import INNER, constants_of, empty_rows, rows_of_values, why_not_in_one
from .spec import Form, GemmOperand, RowOperand, Unquantized, row_operand_of

Pair = tuple[RowOperand | None, RowOperand | None]


def why_not_both(x: Tensor, cast: Cast) -> str | None:
    """Why the row-scaled operands of a matrix and of its transpose cannot be cast in two passes; None if they can."""
    format = cast.format
    reason = why_not(format) or why_not_in_one(x, cast)
    if reason is not None:
        return reason
    if format.element.bits != 8 or format.block[1] < 32:
        return f"casts 8-bit elements in blocks of 32 or more, not {format}"
    if x.dtype is not torch.bfloat16:
        return f"not for {str(x.dtype).removeprefix('torch.')}"
    if x.dim() != 2 or x.shape[0] % INNER or x.shape[1] % INNER or 0 in x.shape:
        return f"needs a matrix of multiples of {INNER} rows and columns, not {tuple(x.shape)}"
    return None


def _empty(rows: int, cols: int, cast: Cast, device: torch.device) -> RowOperand:
    codes, row_scale, beyond = empty_rows(rows, cols, device)
    format = cast.format
    scale = torch.empty(format.scale_shape((rows, cols)), dtype=format.scale.dtype, device=device)
    return RowOperand(codes, row_scale, beyond, scale, format, (rows, cols))


def rows_of_both(x: Tensor, cast: Cast, rowwise: bool = True) -> Pair:
    """The operand of a matrix that ``why_not_both`` accepts, if asked for, and that of its transpose."""
    x = rows_of(x)
    x = x if in_pairs(x) else x.contiguous()
    (rows, cols), device, words = x.shape, x.device, x.shape[1] // 2
    code, constants, block = code_of(cast, device), constants_of(cast.format.element, device), cast.format.block[1]
    row = _empty(rows, cols, cast, device) if rowwise else None
    column = _empty(cols, rows, cast, device)
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


# ---------------------------------------------------------------------------------------------- for traced graphs


@custom_ops.define("mxtensor::cast_both_to_rows")
@recorded
def cast_both_to_rows(
    x: Tensor, format: str, scaling: str, rounding: str, seed: int | None, amax_epsilon: float, rowwise: bool
) -> list[Tensor]:
    """``rows_of_both``: codes, row scales, marks and scales of the matrix, if asked for, then of its transpose."""
    op, cast = "mxtensor::cast_both_to_rows", Cast.of(format, scaling, rounding, seed, amax_epsilon)
    check_argument(op, "x", x, (torch.bfloat16,), (None, None), x.device)
    check_device(op, x)
    reason = why_not_both(x, cast)
    if reason is not None:
        raise ValueError(f"{op} {reason}")
    return [t for side in rows_of_both(x, cast, rowwise) if side is not None for t in side[:4]]


@custom_ops.fake_of(cast_both_to_rows)
def _(x, format, scaling, rounding, seed, amax_epsilon, rowwise):  # type: ignore[no-untyped-def]
    cast = Cast.of(format, scaling, rounding, seed, amax_epsilon)
    out: list[Tensor] = []
    for rows, cols in ([tuple(x.shape)] if rowwise else []) + [(x.shape[1], x.shape[0])]:
        out += _empty(rows, cols, cast, x.device)[:4]
    return out


# ---------------------------------------------------------------------------------------------- the kernel


def _refuses(
    spec: Spec, x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, dtype: torch.dtype,
    amax: Tensor | None, record: Tensor | None,
) -> str | None:  # fmt: skip
    if {rowwise, columnwise} - {None} != {Form.ROWS}:
        return "casts to the row-scaled form"
    return refuses(spec) or why_not_both(x, cast)


def _run(x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, *_: object) -> Pair:
    if columnwise is not None:
        return rows_of_both(x, cast, rowwise is not None)
    codes, row_scale, beyond, scale = rows_of_values(x, cast, any_distance=True)
    return RowOperand(codes, row_scale, beyond, scale, cast.format, (x.shape[0], x.shape[1])), None


def _run_traced(x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, *_: object) -> Pair:
    from .fp8_rows import cast_to_rows

    rows, cols = x.shape
    x, arguments, format = x.detach(), cast_arguments(cast), cast.format
    if columnwise is None:
        return row_operand_of(cast_to_rows(x, *arguments, True), format, (rows, cols)), None
    tensors = cast_both_to_rows(x, *arguments, rowwise is not None)
    row = None if rowwise is None else row_operand_of(tensors[:4], format, (rows, cols))
    return row, row_operand_of(tensors[-4:], format, (cols, rows))


PAIR = Kernel("triton rows", _refuses, _run, "cuda", _run_traced)


def wants_rows(a: GemmOperand, b: GemmOperand) -> bool:
    """Whether operands that still need a cast are best cast to the row-scaled form."""

    def fits(side: GemmOperand) -> bool:
        if isinstance(side, Unquantized):
            return why_not_both(side.x, side.cast) is None
        return isinstance(side, RowOperand)

    return fits(a) and fits(b)

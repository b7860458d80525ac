"""Casts of a tensor and of its transpose: two casts, the tuples of kernels, and one function for each."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...core.kernel import Kernel, Spec
from ...core.names import dtype_name
from ...core.select import perform
from ...numerics.cast import Cast
from ...numerics.formats import FULL, Orientation
from ...numerics.groups import Groups
from ...numerics.operand import Operand, transposed
from ...numerics.reference import check_source, tensor_amax
from ..operands import FakeQuantized, Form, GemmOperand, RowOperand
from . import cuda_both, definition, to_row_scaled_both, triton_ops
from .choose_cast import cast_spec, fake_quantize, fake_quantized, quantize_operand
from .to_row_scaled_both import why_not_both, why_not_rows_first
from .triton_common import refuses as triton_refuses

# ---------------------------------------------------------------------------------------------- two casts


def columnwise_cast(cast: Cast) -> Cast:
    """The same cast with random numbers of its own for the columnwise copy."""
    return cast if cast.seed is None else replace(cast, seed=cast.seed + 1)


def _two_casts(x: Tensor, cast: Cast) -> tuple[Operand, Operand]:
    return quantize_operand(x, cast), quantize_operand(x.transpose(-1, -2), columnwise_cast(cast))


def _refuses_pair(spec: Spec, x: Tensor, cast: Cast, *forms: object) -> str | None:
    return "casts to codes and to values" if Form.ROWS in forms[:2] else None


def _in_form(x: Tensor, cast: Cast, form: Form | None, dtype: torch.dtype) -> GemmOperand | None:
    if form is Form.VALUES:
        return FakeQuantized(*fake_quantize(x, cast, dtype), cast.format)
    return quantize_operand(x, cast) if form is Form.CODES else None


def _two_casts_pair(
    x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, dtype: torch.dtype,
    amax: Tensor | None, record: Tensor | None,
) -> tuple[GemmOperand | None, GemmOperand | None]:  # fmt: skip
    if not cast.format.square:
        transpose = x.transpose(-1, -2)
        return _in_form(x, cast, rowwise, dtype), _in_form(transpose, columnwise_cast(cast), columnwise, dtype)
    codes: Operand | None = None
    values: GemmOperand | None = None
    if amax is not None or Form.CODES in (rowwise, columnwise):
        codes = quantize_operand(x, cast) if amax is None else definition.encode_with_amax(x, cast, amax.reshape(()))
    if Form.VALUES in (rowwise, columnwise):
        values = _in_form(x, cast, Form.VALUES, dtype) if codes is None else fake_quantized(codes, dtype)
    if record is not None:
        record.copy_(torch.maximum(record, tensor_amax(x).reshape(record.shape)))
    row = None if rowwise is None else codes if rowwise is Form.CODES else values
    if columnwise is Form.VALUES:
        assert isinstance(values, FakeQuantized)
        return row, replace(values, values=values.values.transpose(-1, -2))
    if columnwise is None or codes is None:
        return row, None
    column = transposed(codes)
    data, scale = (t.clone(memory_format=torch.contiguous_format) for t in (column.data, column.scale))
    return row, replace(column, data=data, scale=scale)  # copies, because products read rows


TWO_CASTS = Kernel("two casts", definition.refuses, _two_casts)
TWO_CASTS_PAIR = Kernel("two casts", _refuses_pair, _two_casts_pair)


# ---------------------------------------------------------------------------------------------- the choice


QUANTIZE_BOTH: tuple[Kernel, ...] = (
    cuda_both.KERNEL,
    triton_ops.QUANTIZE_BOTH,
    TWO_CASTS,
)
"""``run(x, cast)``: the operand of x and the operand of its transpose."""
PAIR: tuple[Kernel, ...] = (
    to_row_scaled_both.PAIR, to_row_scaled_both.PAIR_BY_CODES, cuda_both.KERNEL, triton_ops.PAIR, TWO_CASTS_PAIR,
)  # fmt: skip
"""``run(x, cast, rowwise, columnwise, dtype, amax, record)``: what ``cast_pair`` returns."""


def quantize_operands(x: Tensor, cast: Cast, orientation: Orientation) -> tuple[Operand | None, Operand | None]:
    """(rowwise, columnwise): the operand of x, of its transpose, or both in one pass over x; None if not asked for."""
    if orientation is Orientation.ROWWISE:
        return quantize_operand(x, cast), None
    if orientation is Orientation.COLUMNWISE:
        return None, quantize_operand(x.transpose(-1, -2), cast)
    check_source(x)
    x = x.resolve_neg()  # kernels read memory, and know no lazy minus sign
    return perform(QUANTIZE_BOTH, cast_spec("quantize both", x, cast), x, cast)  # type: ignore[no-any-return]


def cast_pair(
    x: Tensor,
    cast: Cast,
    rowwise: Form | None,
    columnwise: Form | None,
    dtype: torch.dtype,
    amax: Tensor | None = None,
    record: Tensor | None = None,
) -> tuple[GemmOperand | None, GemmOperand | None]:
    """(rowwise, columnwise): x (..., rows, cols) and its transpose, each in its form; None if no form is given.

    Rowwise: ``quantize_operand`` (CODES), ``fake_quantize`` in ``dtype`` (VALUES) or a row-scaled operand (ROWS, alone
    or twice, of values that ``to_row_scaled_both.why_not_rows`` accepts) of x. Columnwise: the same of x
    transposed, with random numbers of its own (``seed + 1``); its values may have the layout of x, as a transposed
    view. Square blocks are rounded once and then transposed.

    Delayed scaling, for formats with one scale per tensor: ``amax``, a float32 scalar, determines the scale instead of
    the amax of x (see ``reference.encode_with_amax``). ``record``, another float32 scalar, becomes the larger of itself
    and the amax of x; NaN counts as the largest.

    Raises ValueError if ``amax`` or ``record`` is given for another format or is on another device, and if x has fewer
    than two dimensions; TypeError if one of them is not one float32.
    """
    check_source(x)
    if x.dim() < 2:
        raise ValueError(f"cast_pair needs a matrix or a stack of matrices, got shape {tuple(x.shape)}")
    for name, value in (("amax", amax), ("record", record)):
        if value is None:
            continue
        if cast.format.block[0] != FULL:
            raise ValueError(
                f"{cast.format} has a scale for each block: {name} is for formats with one scale per tensor"
            )
        if value.dtype is not torch.float32 or value.numel() != 1:
            kind = dtype_name(value.dtype)
            raise TypeError(f"{name} must be one float32, got {kind} {tuple(value.shape)}")
        if value.device != x.device:
            raise ValueError(f"{name} is on {value.device}, the values on {x.device}")
    x = x.resolve_neg()
    operands = (x, cast, rowwise, columnwise, dtype, amax, record)
    return perform(PAIR, cast_spec("cast pair", x, cast, amax, record), *operands)  # type: ignore[no-any-return]


def cast_groups(
    x: Tensor, cast: Cast, groups: Groups, rowwise: bool
) -> tuple[RowOperand | None, RowOperand | None] | None:
    """The row-scaled operand of rows in groups (M, K), if asked for, and that of the transpose of the padded matrix
    (K, P), from one cast; None if no kernel casts them so."""
    check_source(x)
    x = x.resolve_neg()
    spec = cast_spec("cast groups", x, cast)
    if triton_refuses(spec) is not None or why_not_both(x, cast, groups) is not None:
        return None
    return perform((to_row_scaled_both.GROUPS,), spec, x, cast, rowwise, groups)  # type: ignore[no-any-return]


def cast_rows_first(x: Tensor, cast: Cast) -> tuple[RowOperand, Tensor] | None:
    """The row-scaled operand of a matrix or stack whose transpose is cast later, and what ``cast_columns_later`` takes
    then, so that it reads the values once: int32, one for each column. None if no kernel casts them so."""
    check_source(x)
    x = x.resolve_neg()
    spec = cast_spec("cast rows", x, cast)
    if triton_refuses(spec) is not None or x.stride(-1) != 1:
        return None
    if (why_not_both(x, cast) or why_not_rows_first(x, cast)) is not None:
        return None
    return perform((to_row_scaled_both.ROWS_FIRST,), spec, x, cast)  # type: ignore[no-any-return]


def cast_columns_later(x: Tensor, cast: Cast, exponents: Tensor) -> RowOperand:
    """The row-scaled operand of the transpose of what ``cast_rows_first`` has cast to rows."""
    x = x.resolve_neg()
    kernels = (to_row_scaled_both.COLUMNS_LATER,)
    return perform(kernels, cast_spec("cast columns", x, cast), x, cast, exponents)  # type: ignore[no-any-return]

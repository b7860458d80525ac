"""Casts of a tensor and of its transpose: the tuples of kernels, and the one function that goes through each."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.kernel import Kernel
from ...core.names import dtype_name
from ...core.select import perform
from ...numerics.cast import Cast
from ...numerics.formats import FULL, Orientation
from ...numerics.groups import Groups
from ...numerics.operand import Operand
from ...numerics.reference import check_source
from ..gemm import fp8_rows_both, fp8_rows_by_codes, fp8_rows_ops
from ..gemm.row_operand import RowOperand
from ..gemm.spec import Form, GemmOperand
from . import cuda_both_ops, triton_ops, two_casts
from .select import cast_spec, quantize_operand
from .triton_common import refuses as triton_refuses

QUANTIZE_BOTH: tuple[Kernel, ...] = (
    cuda_both_ops.QUANTIZE_BOTH,
    triton_ops.QUANTIZE_BOTH,
    two_casts.QUANTIZE_BOTH,
)
"""``run(x, cast)``: the operand of x and the operand of its transpose."""
PAIR: tuple[Kernel, ...] = (
    fp8_rows_ops.PAIR, fp8_rows_by_codes.PAIR, cuda_both_ops.PAIR, triton_ops.PAIR, two_casts.PAIR,
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
    or twice, of values that ``fp8_rows_by_codes.why_not_rows`` accepts) of x. Columnwise: the same of x
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
    if triton_refuses(spec) is not None or fp8_rows_both.why_not_groups(x, cast, groups) is not None:
        return None
    return perform((fp8_rows_ops.GROUPS,), spec, x, cast, groups, rowwise)  # type: ignore[no-any-return]


def cast_rows_first(x: Tensor, cast: Cast) -> tuple[RowOperand, Tensor] | None:
    """The row-scaled operand of a matrix or stack whose transpose is cast later, and what ``cast_columns_later`` takes
    then, so that it reads the values once: int32, one for each column. None if no kernel casts them so."""
    check_source(x)
    x = x.resolve_neg()
    spec = cast_spec("cast rows", x, cast)
    if triton_refuses(spec) is not None or x.stride(-1) != 1:
        return None
    if fp8_rows_both.why_not_both(x, cast) is not None or fp8_rows_both.why_not_rows_first(x, cast) is not None:
        return None
    return perform((fp8_rows_ops.ROWS_FIRST,), spec, x, cast)  # type: ignore[no-any-return]


def cast_columns_later(x: Tensor, cast: Cast, exponents: Tensor) -> RowOperand:
    """The row-scaled operand of the transpose of what ``cast_rows_first`` has cast to rows."""
    x = x.resolve_neg()
    kernels = (fp8_rows_ops.COLUMNS_LATER,)
    return perform(kernels, cast_spec("cast columns", x, cast), x, cast, exponents)  # type: ignore[no-any-return]

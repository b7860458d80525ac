"""Both copies of a matrix in one pass in Triton: codes or values of its rows, codes or values of its columns."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.kernel import Spec
from ...core.names import dtype_name
from ...numerics.cast import Cast
from ...numerics.formats import FULL, Format
from ...numerics.operand import Operand
from ..gemm.spec import FakeQuantized, Form, GemmOperand
from ..runtime.triton_launch import device_code, launch, on
from . import triton_tiles as tiles
from .triton_columns import Target, encode_columns
from .triton_common import (
    SOURCES,
    amax_of,
    ceil_div,
    code_of,
    empty,
    operand_of,
    refuses,
    rows_of,
    seed_of,
    slow_in_one_pass,
)


def refuses_pair(
    spec: Spec, x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, dtype: torch.dtype,
    amax: Tensor | None, record: Tensor | None,
) -> str | None:  # fmt: skip
    if Form.ROWS in (rowwise, columnwise):
        return "casts to codes and to values"
    rows, cols = cast.format.block
    if x.dim() != 2:
        return "matrices only"
    if rows == FULL:
        if Form.VALUES in (rowwise, columnwise) or (rowwise is None and columnwise is None):
            return "codes only for formats with one scale per tensor"
        if columnwise is None and amax is None and record is None:
            return "rowwise codes alone are one cast"
        return refuses(spec)
    if rows != 1 or cols == FULL:
        return "square blocks are rounded once and then transposed, and blocks of whole rows take two passes"
    if rowwise is None or columnwise is None:
        return "one copy alone is one cast"
    if columnwise is Form.CODES and slow_in_one_pass(cast):
        return "two casts are faster"
    if Form.VALUES in (rowwise, columnwise) and dtype not in SOURCES:
        return f"not for {dtype_name(dtype)}"
    return cast.why_not_plain or refuses(spec)


def pair(
    x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, dtype: torch.dtype,
    amax: Tensor | None, record: Tensor | None,
) -> tuple[GemmOperand | None, GemmOperand | None]:  # fmt: skip
    """``select_pair.cast_pair``."""
    format, shape = cast.format, tuple(x.shape)
    x = rows_of(x)
    if format.block[0] == FULL:
        return _of_one_scale(x, cast, rowwise is not None, columnwise is not None, amax, record)
    targets = _target(x, format, rowwise, shape, dtype), _target(x, format, columnwise, shape[::-1], dtype)
    assert targets[1] is not None
    with on(x.device):
        global_scale = encode_columns(x, cast, targets[0], targets[1])
    left = _side(targets[0], global_scale, format, shape, False)
    return left, _side(targets[1], global_scale, format, shape[::-1], True)


def _target(x: Tensor, format: Format, form: Form | None, shape: tuple[int, ...], dtype: torch.dtype) -> Target | None:
    if form is Form.VALUES:
        return torch.empty(x.shape, dtype=dtype, device=x.device), None
    return None if form is None else empty(x, format, shape)


def _side(
    target: Target | None, global_scale: Tensor | None, format: Format, shape: tuple[int, ...], transposed: bool
) -> GemmOperand | None:
    if target is None:
        return None
    data, scale = target
    if scale is None:
        return FakeQuantized(data.t() if transposed else data, global_scale, format)
    return operand_of((data, scale), global_scale, format, shape)


def _of_one_scale(
    x: Tensor, cast: Cast, rowwise: bool, columnwise: bool, amax: Tensor | None, record: Tensor | None
) -> tuple[Operand | None, Operand | None]:
    """Codes of a matrix and of its transpose with one scale: from ``amax``, or from a first pass over x."""
    format, (rows, cols), code, seed = cast.format, x.shape, code_of(cast, x.device), seed_of(cast, x.device)
    fours, wide, warps = tiles.TRANSPOSE
    components = empty(x, format, (rows, cols)) if rowwise else (None, None)
    transposed = empty(x, format, (cols, rows)) if columnwise else (None, None)
    whole = rows % (4 * fours) == 0 and cols % wide == 0
    with on(x.device):
        bits = amax_of(x) if amax is None else amax.detach()
        launch(
            device_code("quantize_transposed.quantize_transposed"),
            ceil_div(rows, 4 * fours) * ceil_div(cols, wide),
            (
                x, *components, *transposed, bits, None if record is None else record.detach(), seed, rows, cols,
                x.stride(0), rows // 4,
            ),
            (code, fours, wide, rowwise, columnwise, amax is not None, record is not None, whole, rows % 4 == 0),
            warps,
        )  # fmt: skip

    def operand(components: tuple[Tensor | None, Tensor | None], shape: tuple[int, int]) -> Operand | None:
        data, scale = components
        return None if data is None or scale is None else operand_of((data, scale), None, format, shape)

    return operand(components, (rows, cols)), operand(transposed, (cols, rows))

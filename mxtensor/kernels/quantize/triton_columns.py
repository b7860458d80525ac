"""Casts with blocks along columns in Triton, alone or together with blocks along rows: which kernel, in which tiles.

The result for the columns, or for the rows, is written to a ``Target``: (codes as bytes, scales), where columnwise
codes are stored transposed; or (values, None), where values have the layout of a contiguous x.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from ...core.kernel import Spec
from ...core.names import dtype_name
from ...numerics.cast import Cast
from ...numerics.formats import FULL
from ...numerics.operand import Operand
from ..operands import FakeQuantized, Form, GemmOperand
from ..runtime.triton_launch import device_code, launch, on
from .triton_common import (
    COLUMN_TILES,
    ROUND_TILES,
    SOURCES,
    TRANSPOSE_TILE,
    WORD_TILES,
    CastCode,
    amax_of,
    ceil_div,
    code_of,
    empty,
    in_pairs,
    operand_of,
    refuses,
    rows_of,
    seed_of,
    slow_in_one_pass,
)

Target: TypeAlias = tuple[Tensor, Tensor | None]
FAR = 1 << 23
"""Below this many values in a row, offsets inside a tile fit 32 bits."""


def rounds_in_words(code: CastCode, *values: Tensor | None) -> bool:
    """Whether bfloat16 is fake quantized in words of two values: power-of-two scales, bfloat16 results.

    The words round to an even mantissa, which an element without mantissa bits lacks, and keep the sign of a zero.
    """
    if not code.mantissa_bits or not code.signed_zero:
        return False
    return code.mode != "" and code.block > 0 and all(v is None or v.dtype is torch.bfloat16 for v in values)


def round_tiles(x: Tensor, code: CastCode, rowwise: Tensor | None, columnwise: Tensor | None) -> None:
    """Fake quantize a matrix of pairs (``in_pairs``) with blocks along rows, columns or both; contiguous results."""
    (rows, cols), (high, wide, warps) = x.shape, ROUND_TILES[columnwise is not None]
    words, pairs = cols // 2, code.block // 2
    if columnwise is not None and code.block > high:
        high, wide = code.block, wide * high // code.block
    wide = max(wide, pairs)
    launch(
        device_code("quantize.round_tiles"),
        ceil_div(rows, high) * ceil_div(words, wide),
        (x, rowwise, columnwise, rows, words, x.stride(0) // 2, words),
        (code, high, wide, rowwise is not None, columnwise is not None, rows % high == 0 and words % wide == 0),
        warps,
    )


def encode_columns(x: Tensor, cast: Cast, rowwise: Target | None, columnwise: Target) -> Tensor | None:
    """Cast the columns of a matrix, and its rows, into their targets; returns the global scale or None."""
    code, seed, (rows, cols) = code_of(cast, x.device), seed_of(cast, x.device), x.shape
    forms = tuple("" if t is None else "values" if t[1] is None else "codes" for t in (rowwise, columnwise))
    (data, scale), (tdata, tscale) = rowwise or (None, None), columnwise
    if seed is None and in_pairs(x) and code.block > 0:
        words = rounds_in_words(code, *(t[0] for t in (rowwise, columnwise) if t is not None and t[1] is None))
        if words and forms in (("", "values"), ("values", "values")):
            round_tiles(x, code, data, tdata)
            return None
        float8 = code.bits == 8 and code.exponent_bits > 0 and max(x.stride(0), cols) < FAR
        in_fours = float8 and code.signed_zero and rows % 4 == 0
        if in_fours and forms[1] == "codes" and (words or forms[0] != "values"):
            groups, wide, warps = WORD_TILES[forms[0]]
            groups, wide, words_of_row = max(groups, code.block // 32), max(wide, code.block // 2), cols // 2
            high = groups * min(code.block, 32)
            launch(
                device_code("quantize_columns.quantize_columns_words"),
                ceil_div(rows, high) * ceil_div(words_of_row, wide),
                (
                    x, data, scale, tdata, tscale, rows, words_of_row, x.stride(0) // 2,
                    0 if data is None else words_of_row, ceil_div(cols, code.block), ceil_div(rows, code.block),
                    rows // 4,
                ),
                (code, groups, wide, forms[0], rows % high == 0 and words_of_row % wide == 0),
                warps,
            )  # fmt: skip
            return None
    # Any format from any dtype, one value at a time.
    amax = amax_of(x) if cast.format.has_tensor_scale else None
    if code.block == -1:
        amax = torch.linalg.vector_norm(x, float("inf"), dim=0).to(torch.float32).view(torch.int32)
    global_scale = x.new_empty((), dtype=torch.float32) if cast.format.global_scale else None
    block = 32 if code.block == -1 else code.block
    groups, wide, warps = COLUMN_TILES[forms[0]]
    groups, wide = max(groups, block // 32), max(wide, block)
    high = groups * min(block, 32)
    launch(
        device_code("quantize_columns.quantize_columns"),
        ceil_div(rows, high) * ceil_div(cols, wide),
        (
            x, data, scale, tdata, tscale, amax, global_scale, seed, rows, cols, x.stride(0),
            0 if data is None else data.shape[-1], ceil_div(cols, block), tdata.shape[-1], ceil_div(rows, block),
            rows // 4,
        ),
        (code, groups, wide, *forms, rows % high == 0 and cols % wide == 0, rows % 4 == 0),
        warps,
    )  # fmt: skip
    return global_scale


# ---------------------------------------------------------------------------------------------- both, in their forms


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


def refuses_both(spec: Spec, x: Tensor, cast: Cast) -> str | None:
    rows, cols = cast.format.block
    if rows != 1 or cols == FULL:
        return "makes both copies of blocks along rows only"
    return refuses_pair(spec, x, cast, Form.CODES, Form.CODES, spec.dtype, None, None)


def pair(
    x: Tensor, cast: Cast, rowwise: Form | None = Form.CODES, columnwise: Form | None = Form.CODES,
    dtype: torch.dtype = torch.float32, amax: Tensor | None = None, record: Tensor | None = None,
) -> tuple[GemmOperand | None, GemmOperand | None]:  # fmt: skip
    """``choose_pair.cast_pair`` of a matrix, in one pass."""
    format, shapes, x = cast.format, (tuple(x.shape), (x.shape[1], x.shape[0])), rows_of(x)
    if format.block[0] == FULL:
        return _of_one_scale(x, cast, rowwise is not None, columnwise is not None, amax, record)
    targets: list[Target | None] = []
    for form, shape in zip((rowwise, columnwise), shapes, strict=True):
        if form is Form.VALUES:
            targets.append((torch.empty(x.shape, dtype=dtype, device=x.device), None))
        else:
            targets.append(None if form is None else empty(x, format, shape))
    assert targets[1] is not None
    with on(x.device):
        global_scale = encode_columns(x, cast, targets[0], targets[1])
    sides: list[GemmOperand | None] = []
    for target, shape in zip(targets, shapes, strict=True):
        if target is None:
            sides.append(None)
        elif target[1] is None:
            values = target[0].t() if sides else target[0]
            sides.append(FakeQuantized(values, global_scale, format))
        else:
            sides.append(operand_of((target[0], target[1]), global_scale, format, shape))
    return sides[0], sides[1]


def _of_one_scale(
    x: Tensor, cast: Cast, rowwise: bool, columnwise: bool, amax: Tensor | None, record: Tensor | None
) -> tuple[Operand | None, Operand | None]:
    """Codes of a matrix and of its transpose with one scale: from ``amax``, or from a first pass over x."""
    format, (rows, cols), code, seed = cast.format, x.shape, code_of(cast, x.device), seed_of(cast, x.device)
    fours, wide, warps = TRANSPOSE_TILE
    row = empty(x, format, (rows, cols)) if rowwise else None
    column = empty(x, format, (cols, rows)) if columnwise else None
    whole = rows % (4 * fours) == 0 and cols % wide == 0
    with on(x.device):
        bits = amax_of(x) if amax is None else amax.detach()
        launch(
            device_code("quantize_columns.quantize_transposed"),
            ceil_div(rows, 4 * fours) * ceil_div(cols, wide),
            (
                x, *(row or (None, None)), *(column or (None, None)), bits,
                None if record is None else record.detach(), seed, rows, cols, x.stride(0), rows // 4,
            ),
            (code, fours, wide, rowwise, columnwise, amax is not None, record is not None, whole, rows % 4 == 0),
            warps,
        )  # fmt: skip
    return (
        None if row is None else operand_of(row, None, format, (rows, cols)),
        None if column is None else operand_of(column, None, format, (cols, rows)),
    )

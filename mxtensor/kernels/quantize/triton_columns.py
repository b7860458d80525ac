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
from ...numerics.formats import FULL, Format
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


def _form(target: Target | None) -> str:
    """The name of the target's form in the kernels."""
    return "" if target is None else "values" if target[1] is None else "codes"


def encode_columns(x: Tensor, cast: Cast, rowwise: Target | None, columnwise: Target) -> Tensor | None:
    """Cast the columns of a matrix, and its rows, into their targets; returns the global scale or None."""
    code, seed = code_of(cast, x.device), seed_of(cast, x.device)
    forms = _form(rowwise), _form(columnwise)
    if seed is None and in_pairs(x) and code.block > 0:
        values = [t[0] for t in (rowwise, columnwise) if t is not None and t[1] is None]
        words = rounds_in_words(code, *values)
        if words and forms in (("", "values"), ("values", "values")):
            round_tiles(x, code, None if rowwise is None else rowwise[0], columnwise[0])
            return None
        float8 = code.bits == 8 and code.exponent_bits > 0 and max(x.stride(0), x.shape[1]) < FAR
        if (
            float8
            and code.signed_zero
            and x.shape[0] % 4 == 0
            and forms[1] == "codes"
            and (words or forms[0] != "values")
        ):
            _encode_words(x, code, forms[0], rowwise or (None, None), columnwise)
            return None
    return _encode(x, cast, code, seed, forms, rowwise or (None, None), columnwise)


def _encode_words(
    x: Tensor, code: CastCode, form: str, rowwise: tuple[Tensor | None, Tensor | None], columnwise: Target,
) -> None:  # fmt: skip
    """Float8 codes of the columns of a matrix of bfloat16 pairs whose number of rows is a multiple of four."""
    (rows, cols), (data, scale), (tdata, tscale) = x.shape, rowwise, columnwise
    groups, wide, warps = WORD_TILES[form]
    groups, wide, words = max(groups, code.block // 32), max(wide, code.block // 2), cols // 2
    high = groups * min(code.block, 32)
    launch(
        device_code("quantize_columns.quantize_columns_words"),
        ceil_div(rows, high) * ceil_div(words, wide),
        (
            x, data, scale, tdata, tscale, rows, words, x.stride(0) // 2, 0 if data is None else words,
            ceil_div(cols, code.block), ceil_div(rows, code.block), rows // 4,
        ),
        (code, groups, wide, form, rows % high == 0 and words % wide == 0),
        warps,
    )  # fmt: skip


def _encode(
    x: Tensor, cast: Cast, code: CastCode, seed: Tensor | None, forms: tuple[str, str],
    rowwise: tuple[Tensor | None, Tensor | None], columnwise: Target,
) -> Tensor | None:  # fmt: skip
    """Any format from any dtype, one value at a time."""
    (rows, cols), (data, scale), (tdata, tscale) = x.shape, rowwise, columnwise
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


def pair(
    x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, dtype: torch.dtype,
    amax: Tensor | None, record: Tensor | None,
) -> tuple[GemmOperand | None, GemmOperand | None]:  # fmt: skip
    """``choose_pair.cast_pair``."""
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
    fours, wide, warps = TRANSPOSE_TILE
    components = empty(x, format, (rows, cols)) if rowwise else (None, None)
    transposed = empty(x, format, (cols, rows)) if columnwise else (None, None)
    whole = rows % (4 * fours) == 0 and cols % wide == 0
    with on(x.device):
        bits = amax_of(x) if amax is None else amax.detach()
        launch(
            device_code("quantize_columns.quantize_transposed"),
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


# ---------------------------------------------------------------------------------------------- both, as codes


def quantize_both(x: Tensor, cast: Cast) -> tuple[Operand, Operand]:
    """The operands of a matrix and of its transpose in one pass."""
    format, shape = cast.format, tuple(x.shape)
    transposed = (shape[1], shape[0])
    rowwise, columnwise = empty(x, format, shape), empty(x, format, transposed)
    with on(x.device):
        global_scale = encode_columns(rows_of(x), cast, rowwise, columnwise)
    return operand_of(rowwise, global_scale, format, shape), operand_of(columnwise, global_scale, format, transposed)


def refuses_both(spec: Spec, x: Tensor, cast: Cast) -> str | None:
    rows, cols = cast.format.block
    if rows != 1 or cols == FULL:
        return "makes both copies of blocks along rows only"
    if x.dim() != 2:
        return "matrices only"
    if slow_in_one_pass(cast):
        return "two casts are faster"
    return cast.why_not_plain or refuses(spec)

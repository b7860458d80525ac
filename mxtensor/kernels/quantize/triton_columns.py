"""Casts with blocks along columns in Triton, alone or together with blocks along rows: which kernel, in which tiles.

The result for the columns, or for the rows, is written to a ``Target``: (codes as bytes, scales), where columnwise
codes are stored transposed; or (values, None), where values have the layout of a contiguous x.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from ...numerics.cast import Cast
from ..runtime.triton_launch import device_code, launch
from . import triton_tiles as tiles
from .triton_common import amax_of, ceil_div, code_of, in_pairs, needs_amax, seed_of
from .triton_constants import CastCode

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
    (rows, cols), (high, wide, warps) = x.shape, tiles.ROUND[columnwise is not None]
    words, pairs = cols // 2, code.block // 2
    if columnwise is not None and code.block > high:
        high, wide = code.block, wide * high // code.block
    wide = max(wide, pairs)
    launch(
        device_code("values.round_tiles"),
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
    groups, wide, warps = tiles.WORDS[form]
    groups, wide, words = max(groups, code.block // 32), max(wide, code.block // 2), cols // 2
    high = groups * min(code.block, 32)
    launch(
        device_code("quantize_columns_words.quantize_columns_words"),
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
    amax = amax_of(x) if needs_amax(cast.format) else None
    if code.block == -1:
        amax = torch.linalg.vector_norm(x, float("inf"), dim=0).to(torch.float32).view(torch.int32)
    global_scale = x.new_empty((), dtype=torch.float32) if cast.format.global_scale else None
    block = 32 if code.block == -1 else code.block
    groups, wide, warps = tiles.COLUMNS[forms[0]]
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

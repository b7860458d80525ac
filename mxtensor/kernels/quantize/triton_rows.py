"""Casts on CUDA devices in Triton: every format, one pass over the values. Host side of blocks along rows.

Device code: ``triton_device/``. Eager calls use these functions; traced calls use the custom ops of ``triton_ops.py``,
which call them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.kernel import Spec
from ...core.names import dtype_name
from ...numerics.cast import Cast
from ...numerics.derived import swizzled_shape
from ...numerics.formats import FULL, Format
from ...numerics.operand import Operand
from ...numerics.validate import check_sizes
from ..operands import by_matrix
from ..runtime import triton_launch
from ..runtime.triton_launch import device_code, launch, on
from .triton_columns import encode_columns, round_tiles, rounds_in_words
from .triton_common import (
    DECODE_TILES,
    FULL_ROW_TILE,
    PAIR_TILE,
    ROW_TILES,
    SOURCES,
    CastCode,
    amax_of,
    ceil_div,
    code_of,
    empty,
    format_code,
    in_pairs,
    is_transposed_matrix,
    operand_of,
    refuses,
    rows_of,
    seed_of,
)

# ---------------------------------------------------------------------------------------------- quantize


class _Cast(NamedTuple):
    """One cast of a matrix: what each of the kernels below takes."""

    x: Tensor
    out: Tensor
    scale: Tensor | None
    """None: ``out`` gets fake-quantized values, in its dtype, instead of codes"""
    code: CastCode
    seed: Tensor | None
    amax: Tensor | None
    """of the tensor, if a scale depends on it"""
    global_scale: Tensor | None
    """written, if the format has one"""
    swizzled: bool


def encode_matrix(x: Tensor, cast: Cast, out: Tensor, scale: Tensor | None, swizzled: bool) -> Tensor | None:
    """Cast a matrix with unit stride along its rows into ``out`` and ``scale``; returns the global scale or None.

    If ``scale`` is None, the fake-quantized values are written to ``out``, in its dtype, instead of codes.
    """
    format, code, seed = cast.format, code_of(cast, x.device), seed_of(cast, x.device)
    amax = amax_of(x) if format.has_tensor_scale else None
    global_scale = x.new_empty((), dtype=torch.float32) if format.global_scale else None
    one = _Cast(x, out, scale, code, seed, amax, global_scale, swizzled)
    pairs = seed is None and in_pairs(x)
    if code.block == -1:
        _encode_full_rows(one)
    elif format.rows_are_blocked and code.block:
        _encode_squares(one)
    elif scale is None and pairs and rounds_in_words(code, out):
        round_tiles(x, code, out, None)
    elif scale is not None and pairs and code.bits == 4:
        _encode_pairs(one)
    else:
        _encode_rows(one)
    return global_scale


def _encode_full_rows(c: _Cast) -> None:
    """One scale for each row."""
    rows, cols = c.x.shape
    span, warps = FULL_ROW_TILE
    width = min(span * 4, max(128, 1 << (cols - 1).bit_length()))
    whole = width >= cols
    width, warps = (width, min(warps, max(1, width // 512))) if whole else (span, warps)
    launch(
        device_code("quantize.quantize_full_rows"),
        rows,
        (c.x, c.out, c.scale, c.seed, rows, cols, c.x.stride(0), c.out.shape[-1]),
        (c.code, 1, width, cols % width == 0, whole, c.scale is None),
        warps,
    )


def _encode_squares(c: _Cast) -> None:
    """Square blocks."""
    (rows, cols), block = c.x.shape, c.code.block
    blocks = max(1, 128 // block)
    wide = blocks * block
    launch(
        device_code("quantize.quantize_tiles"),
        ceil_div(rows, block) * ceil_div(cols, wide),
        (
            c.x, c.out, c.scale, c.amax, c.global_scale, c.seed, rows, cols, c.x.stride(0), c.out.shape[-1],
            ceil_div(cols, block),
        ),
        (c.code, blocks, rows % block == 0 and cols % wide == 0, c.scale is None),
        4 if block < 128 else 8,
    )  # fmt: skip


def _encode_pairs(c: _Cast) -> None:
    """4-bit codes of bfloat16 values, two at a time."""
    high, wide, warps = PAIR_TILE
    rows, words = c.x.shape[0], c.x.shape[1] // 2
    launch(
        device_code("quantize.quantize_rows_fp4"),
        ceil_div(rows, high) * ceil_div(words, wide),
        (
            c.x, c.out, c.scale, c.amax, c.global_scale, rows, words, c.x.stride(0) // 2, c.out.shape[-1],
            ceil_div(c.x.shape[1], c.code.block),
        ),
        (c.code, high, wide, rows % high == 0 and words % wide == 0, c.swizzled),
        warps,
    )  # fmt: skip


def _encode_rows(c: _Cast) -> None:
    """Blocks along rows, or one scale for the tensor."""
    high, wide, warps = ROW_TILES[c.x.element_size()]
    rows, cols = c.x.shape
    launch(
        device_code("quantize.quantize_rows"),
        ceil_div(rows, high) * ceil_div(cols, wide),
        (
            c.x, c.out, c.scale, c.amax, c.global_scale, c.seed, rows, cols, c.x.stride(0), c.out.shape[-1],
            ceil_div(cols, max(c.code.block, 1)),
        ),
        (c.code, high, wide, rows % high == 0 and cols % wide == 0, c.swizzled, c.scale is None),
        warps,
    )  # fmt: skip


def _one_by_one(x: Tensor, format: Format) -> bool:
    """Whether the matrices of a stack must be cast one by one: a square block would cross from one into the next."""
    square = format.rows_are_blocked and format.block[0] != FULL
    return x.dim() > 2 and square and x.shape[-2] % format.block[0] != 0


@by_matrix
def quantize(x: Tensor, cast: Cast) -> Operand:
    """``reference.encode`` of a CUDA tensor."""
    format, shape = cast.format, tuple(x.shape)
    components = empty(x, format, shape)
    with on(x.device):
        if is_transposed_matrix(x, format):
            global_scale = encode_columns(x.t(), cast, None, components)
        elif _one_by_one(x, format):
            global_scale = None
            for matrix, data, scale in zip(*(t.flatten(0, -3) for t in (x, *components)), strict=True):
                encode_matrix(rows_of(matrix), cast, data, scale, False)
        else:
            rows = rows_of(x)
            data = components[0] if rows is x else components[0].view(rows.shape[0], -1)
            global_scale = encode_matrix(rows, cast, data, components[1], False)
    return operand_of(components, global_scale, format, shape)


def quantize_swizzled(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, scales in the 128x4 layout, global scale) of a matrix with blocks along rows; padding scales are zero."""
    format, shape = cast.format, tuple(x.shape)
    data = torch.empty(format.data_shape(shape), dtype=torch.uint8, device=x.device)
    scale_cols = ceil_div(shape[1], format.block[1])
    whole = swizzled_shape(shape[0], scale_cols)
    make = torch.empty if whole == (shape[0], scale_cols) else torch.zeros
    scale = make(math.prod(whole), dtype=torch.uint8, device=x.device)
    with on(x.device):
        global_scale = encode_matrix(rows_of(x), cast, data, scale, True)
    return data, scale, global_scale


def fake_quantize(x: Tensor, cast: Cast, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The values of x in the format, without the global scale, and the global scale or None.

    If x is the transpose of a row-major matrix, so is the result.
    """
    if x.dim() > 2 and cast.format.scales_matrices:
        pieces = [fake_quantize(matrix, cast, dtype) for matrix in x.flatten(0, -3)]
        scales = torch.stack([scale for _, scale in pieces if scale is not None])
        whole = torch.stack([values for values, _ in pieces]).view(x.shape)
        return whole, scales.view(cast.format.global_scale_shape(tuple(x.shape)))
    if is_transposed_matrix(x, cast.format):
        transposed = torch.empty(x.t().shape, dtype=dtype, device=x.device)
        with on(x.device):
            return transposed.t(), encode_columns(x.t(), cast, None, (transposed, None))
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    with on(x.device):
        if _one_by_one(x, cast.format):
            for matrix, target in zip(x.flatten(0, -3), out.flatten(0, -3), strict=True):
                encode_matrix(rows_of(matrix), cast, target, None, False)
            return out, None
        rows = rows_of(x)
        return out, encode_matrix(rows, cast, out.view(rows.shape), None, False)


# ---------------------------------------------------------------------------------------------- dequantize


def dequantize(operand: Operand, dtype: torch.dtype) -> Tensor:
    """``reference.decode`` of operands on a CUDA device."""
    check_sizes(operand, strided=True)
    format, shape, global_scale = operand.format, operand.shape, operand.global_scale
    code = format_code(format, triton_launch.instructions_of(operand.data.device), global_scale is not None)
    out = torch.empty(shape, dtype=dtype, device=operand.data.device)
    data, scale = operand.data.view(torch.uint8), operand.scale
    high, wide, warps = DECODE_TILES[code.bits]
    block_rows, block_cols = (0 if b == FULL else b for b in format.block)

    def decode(data: Tensor, scale: Tensor, out: Tensor, global_scale: Tensor | None = global_scale) -> None:
        rows, cols = out.shape
        launch(
            device_code("quantize.dequantize_tiles"),
            ceil_div(rows, high) * ceil_div(cols, wide),
            (data, scale, global_scale, out, rows, cols, data.stride(0), scale.stride(0) if scale.dim() > 1 else 0),
            (code, block_rows, block_cols, high, wide, rows % high == 0 and cols % wide == 0),
            warps,
        )

    with on(out.device):
        if operand.has_stack_scales:
            for one, target in zip(operand.matrices(), out.flatten(0, -3), strict=True):
                decode(rows_of(one.data.view(torch.uint8)), rows_of(one.scale), target, one.global_scale)
        elif _one_by_one(out, format):
            for part in zip(*(t.flatten(0, -3) for t in (data, scale, out)), strict=True):
                decode(*map(rows_of, part))
        else:
            decode(rows_of(data), scale if block_rows == 0 else rows_of(scale), rows_of(out))
    return out


# ---------------------------------------------------------------------------------------------- what is refused


def refuses_quantize(spec: Spec, x: Tensor, cast: Cast) -> str | None:
    return cast.why_not_plain or refuses(spec)


def refuses_fake_quantize(spec: Spec, x: Tensor, cast: Cast, dtype: torch.dtype) -> str | None:
    if dtype not in SOURCES:
        return f"not for {dtype_name(dtype)}"
    return cast.why_not_plain or refuses(spec)


def refuses_dequantize(spec: Spec, operand: Operand, dtype: torch.dtype) -> str | None:
    return operand.why_not_plain or refuses(spec)

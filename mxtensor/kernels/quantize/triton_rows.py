"""Casts on CUDA devices in Triton: every format, one pass over the values. Host side of blocks along rows.

Device code: ``triton_device/``. Eager calls use these functions; traced calls use the custom ops of ``triton_ops.py``,
which call them.
"""

from __future__ import annotations

import math
from itertools import repeat

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
    amax_of,
    ceil_div,
    code_of,
    empty,
    format_code,
    in_pairs,
    is_transposed_matrix,
    operand_of,
    power,
    refuses,
    rows_of,
    seed_of,
)

# ---------------------------------------------------------------------------------------------- quantize


def encode_matrix(x: Tensor, cast: Cast, out: Tensor, scale: Tensor | None, swizzled: bool) -> Tensor | None:
    """Cast a matrix with unit stride along its rows into ``out`` and ``scale``; returns the global scale or None.

    If ``scale`` is None, the fake-quantized values are written to ``out``, in its dtype, instead of codes.
    """
    format, code, seed, values = cast.format, code_of(cast, x.device), seed_of(cast, x.device), scale is None
    amax = amax_of(x) if format.has_tensor_scale else None
    global_scale = x.new_empty((), dtype=torch.float32) if format.global_scale else None
    (rows, cols), stride, width, block = x.shape, x.stride(0), out.shape[-1], code.block
    pairs = seed is None and in_pairs(x)
    if block == -1:  # one scale for each row
        span, warps = FULL_ROW_TILE
        wide = min(span * 4, power(cols, 128))
        whole = wide >= cols
        wide, warps = (wide, min(warps, max(1, wide // 512))) if whole else (span, warps)
        launch(
            device_code("quantize.quantize_full_rows"),
            rows,
            (x, out, scale, seed, rows, cols, stride, width),
            (code, 1, wide, cols % wide == 0, whole, values),
            warps,
        )
    elif format.rows_are_blocked and block:  # square blocks
        blocks = max(1, 128 // block)
        wide = blocks * block
        launch(
            device_code("quantize.quantize_tiles"),
            ceil_div(rows, block) * ceil_div(cols, wide),
            (x, out, scale, amax, global_scale, seed, rows, cols, stride, width, ceil_div(cols, block)),
            (code, blocks, rows % block == 0 and cols % wide == 0, values),
            4 if block < 128 else 8,
        )
    elif values and pairs and rounds_in_words(code, out):
        round_tiles(x, code, out, None)
    elif not values and pairs and code.bits == 4:  # 4-bit codes of bfloat16 values, two at a time
        high, wide, warps = PAIR_TILE
        words = cols // 2
        launch(
            device_code("quantize.quantize_rows_fp4"),
            ceil_div(rows, high) * ceil_div(words, wide),
            (x, out, scale, amax, global_scale, rows, words, stride // 2, width, ceil_div(cols, block)),
            (code, high, wide, rows % high == 0 and words % wide == 0, swizzled),
            warps,
        )
    else:  # blocks along rows, or one scale for the tensor
        high, wide, warps = ROW_TILES[x.element_size()]
        launch(
            device_code("quantize.quantize_rows"),
            ceil_div(rows, high) * ceil_div(cols, wide),
            (x, out, scale, amax, global_scale, seed, rows, cols, stride, width, ceil_div(cols, max(block, 1))),
            (code, high, wide, rows % high == 0 and cols % wide == 0, swizzled, values),
            warps,
        )
    return global_scale


def _one_by_one(x: Tensor, format: Format) -> bool:
    """Whether the matrices of a stack must be cast one by one: a square block would cross from one into the next."""
    square = format.rows_are_blocked and format.block[0] != FULL
    return x.dim() > 2 and square and x.shape[-2] % format.block[0] != 0


def _encode(x: Tensor, cast: Cast, out: Tensor, scale: Tensor | None) -> Tensor | None:
    """``encode_matrix`` of a tensor. If x is the transpose of a row-major matrix, fake-quantized values are stored as
    that matrix."""
    with on(x.device):
        if is_transposed_matrix(x, cast.format):
            return encode_columns(x.t(), cast, None, (out, scale))
        if _one_by_one(x, cast.format):
            outs, scales = out.flatten(0, -3), repeat(None) if scale is None else scale.flatten(0, -3)
            for matrix, codes, scale_of_one in zip(x.flatten(0, -3), outs, scales, strict=False):
                encode_matrix(rows_of(matrix), cast, codes, scale_of_one, False)
            return None
        rows = rows_of(x)
        return encode_matrix(rows, cast, out if rows is x else out.view(rows.shape[0], -1), scale, False)


@by_matrix
def quantize(x: Tensor, cast: Cast) -> Operand:
    """``reference.encode`` of a CUDA tensor."""
    format, shape = cast.format, tuple(x.shape)
    components = empty(x, format, shape)
    global_scale = _encode(x, cast, *components)
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
    is_transposed = is_transposed_matrix(x, cast.format)
    out = torch.empty(x.t().shape if is_transposed else x.shape, dtype=dtype, device=x.device)
    global_scale = _encode(x, cast, out, None)
    return out.t() if is_transposed else out, global_scale


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


def refuses_quantize(spec: Spec, x: Tensor, cast: Cast, dtype: torch.dtype = torch.float32) -> str | None:
    """``dtype``: of fake-quantized values."""
    if dtype not in SOURCES:
        return f"not for {dtype_name(dtype)}"
    return cast.why_not_plain or refuses(spec)


def refuses_dequantize(spec: Spec, operand: Operand, dtype: torch.dtype) -> str | None:
    return operand.why_not_plain or refuses(spec)

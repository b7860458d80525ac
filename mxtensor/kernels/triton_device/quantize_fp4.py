"""Rows of bfloat16 to four bits, two values at a time: one word of x becomes one byte of codes.

The general cast needs 20 instructions a value here and is then limited by instructions, not by memory. Two values in
one word need half as many.
"""

import triton
import triton.language as tl

from .elements import float_of, round_float, scales_of
from .quantize import encode_scale, load_tile, scale_offset, store_tile
from .words import MAGNITUDES, e2m1_byte, largest


@triton.jit
def sign_of(moved, magnitude, BIT: tl.constexpr, C: tl.constexpr):
    """The sign of a value, moved to BIT; that of a zero ``magnitude`` only if the format keeps it."""
    sign = moved & BIT
    if C.signed_zero:
        return sign
    else:
        return tl.where(magnitude == 0.0, 0, sign)


@triton.jit
def quantize_rows_fp4(
    x_ptr, data_ptr, scale_ptr, amax_ptr, global_ptr, rows, words, stride, data_stride, scale_cols,
    C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    """``quantize_rows`` for this cast: x (rows, words) int32; ``stride`` and BK are in words."""
    PAIRS: tl.constexpr = C.block // 2
    NB: tl.constexpr = BK // PAIRS
    tiles = tl.cdiv(words, BK)
    pid = tl.program_id(0)
    if C.reverse:
        pid = tl.num_programs(0) - 1 - pid
    row = (pid // tiles) * BM + tl.arange(0, BM)[:, None]
    col = (pid % tiles) * BK + tl.arange(0, BK)[None, :]
    inside = (row < rows) & (col < words)
    word = load_tile(x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row.to(tl.int64) * stride + col, inside, EVEN)
    encode = encode_scale(amax_ptr, global_ptr, pid, C)
    pair = largest(tl.reshape(word & MAGNITUDES, (BM, NB, PAIRS)), 2, C)
    amax = tl.maximum(pair << 16, pair & 0x7FFF0000)
    stored, multiplier, _, finite = scales_of(amax, encode, C)
    each = tl.reshape(tl.broadcast_to(multiplier[:, :, None], (BM, NB, PAIRS)), (BM, BK))
    if C.pairs and C.signed_zero and C.scale == "e8m0" and C.exponent_bits == 2 and C.bias == 1 and C.max == 6.0:
        byte = e2m1_byte(word, each, C)
    else:
        low = float_of((word << 16) & 0x7FFF0000) * each
        low_sign = sign_of(word >> 12, low, 8, C)
        low = round_float(low, C.exponent_bits, C.mantissa_bits, C.bias, C.max)
        high = float_of(word & 0x7FFF0000) * each
        high_sign = sign_of(word >> 24, high, 0x80, C)
        high = round_float(high, C.exponent_bits, C.mantissa_bits, C.bias, C.max)
        byte = low | low_sign | (high << 4) | high_sign
    mask = tl.broadcast_to(tl.where(finite, 0xFF, 0)[:, :, None], (BM, NB, PAIRS))
    byte = (byte & tl.reshape(mask, (BM, BK))).to(tl.uint8)
    store_tile(data_ptr + row.to(tl.int64) * data_stride + col, byte, inside, EVEN)
    block = (pid % tiles) * NB + tl.arange(0, NB)[None, :]
    to = scale_offset(row, block, scale_cols, SWIZZLED)
    store_tile(scale_ptr + to, stored, (row < rows) & (block < scale_cols), EVEN)

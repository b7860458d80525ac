"""Rows of bfloat16 to e2m1, two values at a time: a word of x holds the pair that one byte of codes does.

The general cast spends 20 instructions a value here, which is more than the memory takes; two values that share their
word, their signs and their byte need half of that.
"""

import triton
import triton.language as tl

from .elements import TO_INTEGER, bits_of, float_of, scales_of
from .quantize import load_tile, store_tile, swizzled_offset, tensor_factor
from .words import MAGNITUDES, e2m1_byte, largest

LAST = tl.constexpr(TO_INTEGER.value + 7.0)


@triton.jit
def magnitude_code(a):
    """The code of a >= 0 in the low bits (``elements.round_float``, with minima of bits, three in one instruction)."""
    first, second = bits_of(tl.fma(a, 2.0, TO_INTEGER)), bits_of(tl.fma(a, 1.0, TO_INTEGER + 2.0))
    third = bits_of(tl.fma(a, 0.5, TO_INTEGER + 4.0))
    return tl.minimum(tl.minimum(tl.minimum(first, second), third), bits_of(tl.full(a.shape, LAST, tl.float32)))


@triton.jit
def quantize_rows_fp4(
    x_ptr, data_ptr, scale_ptr, amax_ptr, global_ptr, rows, words, stride, data_stride, scale_cols,
    C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    """``quantize_rows`` for such a cast: x (rows, words) int32, ``stride`` and BK in words, BK // 2 to a block."""
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
    encode, undo = tensor_factor(amax_ptr, C)
    if pid == 0 and C.global_scale:
        tl.store(global_ptr, undo)
    pair = largest(tl.reshape(word & MAGNITUDES, (BM, NB, PAIRS)), 2, C)
    amax = tl.maximum(pair << 16, pair & 0x7FFF0000)
    stored, multiplier, _, finite = scales_of(amax, encode, C)
    factor = tl.reshape(tl.broadcast_to(multiplier[:, :, None], (BM, NB, PAIRS)), (BM, BK))
    if C.pairs and C.scale == "e8m0":
        byte = e2m1_byte(word, factor, C)
    else:
        low = magnitude_code(float_of((word << 16) & 0x7FFF0000) * factor)
        high = magnitude_code(float_of(word & 0x7FFF0000) * factor)
        byte = (low & 7) | ((word >> 12) & 8) | ((high << 4) & 0x70) | ((word >> 24) & 0x80)
    keep = tl.broadcast_to(tl.where(finite, 0xFF, 0)[:, :, None], (BM, NB, PAIRS))
    byte = (byte & tl.reshape(keep, (BM, BK))).to(tl.uint8)
    store_tile(data_ptr + row.to(tl.int64) * data_stride + col, byte, inside, EVEN)
    block = (pid % tiles) * NB + tl.arange(0, NB)[None, :]
    if SWIZZLED:
        to = swizzled_offset(row, block, scale_cols)
    else:
        to = row.to(tl.int64) * scale_cols + block
    store_tile(scale_ptr + to, stored, (row < rows) & (block < scale_cols), EVEN)

"""Fake quantize bfloat16 to an MX format without codes: words of two values in, words of two values out.

A value is y * 2^s with y rounded to the mantissa bits of the element, and to no finer step than its subnormals have.
Let p be the power of two just below |y|. Adding p * 2^(7 - mantissa bits) in bfloat16 (2^(23 - mantissa bits) in
float32) rounds to those bits, ties to even; subtracting it again is exact. If the device has fused multiply-add of such
words, a word needs eight instructions, and its scale is two words of powers of two.
"""

import triton
import triton.language as tl

from .elements import bits_of, float_of, scales_of
from .quantize import load_tile, store_tile
from .words import MAGNITUDES, high_value, largest, low_value

ROUND_PAIR = tl.constexpr("""{
.reg .b32 y, a, m, t, k, z;
mov.b32 z, 0x80008000;
fma.rn.bf16x2 y, $1, $2, z;
and.b32 a, y, 0x7fff7fff;
and.b32 m, y, 0x7f807f80;
max.u16x2 m, m, $4;
fma.rn.bf16x2 t, m, $5, a;
xor.b32 k, $5, z;
fma.rn.bf16x2 t, m, k, t;
min.u16x2 t, t, $6;
and.b32 y, y, z;
or.b32 t, t, y;
fma.rn.bf16x2 $0, t, $3, $7;
}""")


@triton.jit
def rounded_value(x, multiplier, scale, C: tl.constexpr):
    """``round_words`` of a float32 x, in float32."""
    y = x * multiplier
    lowest: tl.constexpr = 1 - C.bias if C.exponent_bits > 0 else 0
    power = float_of(tl.maximum(bits_of(y) & 0x7F800000, (127 + lowest) << 23))
    far = power * (2.0 ** (23 - C.mantissa_bits))
    near = tl.minimum(tl.abs(y) + far - far, C.max)
    value = float_of(bits_of(near) | (bits_of(y) & -0x80000000)) * scale
    return value + 0.0 if C.exponent_bits == 0 else value  # int8 has no negative zero


@triton.jit
def round_words(word, multiplier, scale, C: tl.constexpr):
    """Words of two bfloat16 to words of their fake-quantized values.

    multiplier, scale: words of the powers of two 2^-s and 2^s of each half; a NaN in ``scale`` makes the values NaN.
    """
    if C.pairs:
        shape: tl.constexpr = word.shape
        lowest: tl.constexpr = 1 - C.bias if C.exponent_bits > 0 else 0
        floor: tl.constexpr = ((127 + lowest) << 7) * 0x10001
        magic: tl.constexpr = ((127 + 7 - C.mantissa_bits) << 7) * 0x10001
        top = (bits_of(tl.full(shape, C.max, tl.float32)) >> 16) * 0x10001
        zero: tl.constexpr = 0 if C.exponent_bits == 0 else -0x7FFF8000
        return tl.inline_asm_elementwise(
            ROUND_PAIR,
            "=r,r,r,r,r,r,r,r",
            [
                word,
                multiplier,
                scale,
                tl.full(shape, floor, tl.int32),
                tl.full(shape, magic, tl.int32),
                top,
                tl.full(shape, zero, tl.int32),
            ],
            tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low = rounded_value(low_value(word), low_value(multiplier), low_value(scale), C).to(tl.bfloat16)
        high = rounded_value(high_value(word), high_value(multiplier), high_value(scale), C).to(tl.bfloat16)
        low_half = low.to(tl.uint16, bitcast=True).to(tl.int32)
        return low_half | (high.to(tl.uint16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def side_by_side(low, high):
    """Two float32 with bfloat16 values as a word."""
    return ((bits_of(low) >> 16) & 0xFFFF) | (bits_of(high) & -0x10000)


@triton.jit
def words_of_scales(low_amax, high_amax, C: tl.constexpr):
    """``multiplier`` and ``scale`` of ``round_words`` for blocks with these amax bits in the low and high halves."""
    one = tl.full((), 1.0, tl.float32)
    _, low, low_scale, _ = scales_of(low_amax, one, C)
    _, high, high_scale, _ = scales_of(high_amax, one, C)
    return side_by_side(low, high), side_by_side(low_scale, high_scale)


@triton.jit
def words_of_scale(pair, C: tl.constexpr):
    """The same for blocks with both halves of their words: ``pair`` has the largest magnitude of each half."""
    one = tl.full((), 1.0, tl.float32)
    _, multiplier, scale, _ = scales_of(tl.maximum(pair << 16, pair & 0x7FFF0000), one, C)
    return side_by_side(multiplier, multiplier), side_by_side(scale, scale)


@triton.jit
def over_block(t, BLOCK: tl.constexpr, AXIS: tl.constexpr):
    """Repeat the value of each block BLOCK times along AXIS."""
    if AXIS == 0:
        B: tl.constexpr = t.shape[0]
        N: tl.constexpr = t.shape[1]
        return tl.reshape(tl.broadcast_to(t[:, None, :], (B, BLOCK, N)), (B * BLOCK, N))
    else:
        M: tl.constexpr = t.shape[0]
        NB: tl.constexpr = t.shape[1]
        return tl.reshape(tl.broadcast_to(t[:, :, None], (M, NB, BLOCK)), (M, NB * BLOCK))


@triton.jit
def round_along_rows(word, C: tl.constexpr):
    """Fake quantize a matrix of words with blocks along its rows."""
    PAIRS: tl.constexpr = C.block // 2
    M: tl.constexpr = word.shape[0]
    NB: tl.constexpr = word.shape[1] // PAIRS
    multiplier, scale = words_of_scale(largest(tl.reshape(word & MAGNITUDES, (M, NB, PAIRS)), 2, C), C)
    return round_words(word, over_block(multiplier, PAIRS, 1), over_block(scale, PAIRS, 1), C)


@triton.jit
def round_along_columns(word, C: tl.constexpr):
    """Fake quantize a matrix of words with blocks along its columns; a word has two columns."""
    NB: tl.constexpr = word.shape[0] // C.block
    pair = largest(tl.reshape(word & MAGNITUDES, (NB, C.block, word.shape[1])), 1, C)
    multiplier, scale = words_of_scales(pair << 16, pair & 0x7FFF0000, C)
    return round_words(word, over_block(multiplier, C.block, 0), over_block(scale, C.block, 0), C)


@triton.jit
def round_tiles(
    x_ptr, row_ptr, column_ptr, rows, words, stride, out_stride,
    C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Fake quantize with blocks along rows, columns or both in one pass: x and each result (rows, words) int32.

    Strides and BK are in words. Lanes read along rows, so that only the amax of columns crosses warps.
    """
    tiles = tl.cdiv(words, BK)
    pid = tl.program_id(0)
    row = (pid // tiles) * BM + tl.arange(0, BM)[:, None]
    col = (pid % tiles) * BK + tl.arange(0, BK)[None, :]
    inside = (row < rows) & (col < words)
    word = load_tile(x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row.to(tl.int64) * stride + col, inside, EVEN)
    to = row.to(tl.int64) * out_stride + col
    if ROWS:
        store_tile(row_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + to, round_along_rows(word, C), inside, EVEN)
    if COLUMNS:
        column_ptr = column_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        store_tile(column_ptr + to, round_along_columns(word, C), inside, EVEN)

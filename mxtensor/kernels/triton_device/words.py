"""Words of two neighbouring bfloat16 values: half the registers and, on sm_90, half the max instructions.

If ``C.pairs``, the device has max and multiply of such words in one instruction; the other branch of each function
computes the same with integers and floats.

Fake quantizing to an MX format needs no codes: a value is y * 2^s with y rounded to the mantissa bits of the element,
and to no finer step than its subnormals have. Let p be the power of two just below |y|. Adding
p * 2^(7 - mantissa bits) in bfloat16 (2^(23 - mantissa bits) in float32) rounds to those bits, ties to even;
subtracting it again is exact. If the device has fused multiply-add of such words, a word needs eight instructions, and
its scale is two words of powers of two.
"""

import triton
import triton.language as tl

from .elements import bits_of, float_of, scales_of, to_codes

MAGNITUDES = tl.constexpr(0x7FFF7FFF)

E4M3_COLUMNS = tl.constexpr("""{
.reg .b32 l0, l1, l2, l3, h0, h1, h2, h3;
.reg .b16 p, q;
shl.b32 l0, $2, 16;
shl.b32 l1, $3, 16;
shl.b32 l2, $4, 16;
shl.b32 l3, $5, 16;
and.b32 h0, $2, 0xffff0000;
and.b32 h1, $3, 0xffff0000;
and.b32 h2, $4, 0xffff0000;
and.b32 h3, $5, 0xffff0000;
mul.f32 l0, l0, $6;
mul.f32 l1, l1, $6;
mul.f32 l2, l2, $6;
mul.f32 l3, l3, $6;
mul.f32 h0, h0, $7;
mul.f32 h1, h1, $7;
mul.f32 h2, h2, $7;
mul.f32 h3, h3, $7;
cvt.rn.satfinite.e4m3x2.f32 p, l1, l0;
cvt.rn.satfinite.e4m3x2.f32 q, l3, l2;
mov.b32 $0, {p, q};
cvt.rn.satfinite.e4m3x2.f32 p, h1, h0;
cvt.rn.satfinite.e4m3x2.f32 q, h3, h2;
mov.b32 $1, {p, q};
}""")
E5M2_COLUMNS = tl.constexpr(E4M3_COLUMNS.value.replace("e4m3", "e5m2"))

E4M3_ROW = tl.constexpr("""{
.reg .b32 l0, l1, h0, h1;
.reg .b16 p, q;
shl.b32 l0, $1, 16;
and.b32 h0, $1, 0xffff0000;
shl.b32 l1, $2, 16;
and.b32 h1, $2, 0xffff0000;
mul.f32 l0, l0, $3;
mul.f32 h0, h0, $3;
mul.f32 l1, l1, $4;
mul.f32 h1, h1, $4;
cvt.rn.satfinite.e4m3x2.f32 p, h0, l0;
cvt.rn.satfinite.e4m3x2.f32 q, h1, l1;
mov.b32 $0, {p, q};
}""")
E5M2_ROW = tl.constexpr(E4M3_ROW.value.replace("e4m3", "e5m2"))

# y = w * 2^-s, exactly; the three linear functions of ``elements.round_float`` in bfloat16, where adding 192 leaves
# integers in the low bits; their minimum is the code; then the signs, and both nibbles in one byte.
E2M1_PAIR = tl.constexpr("""{
.reg .b32 y, a, t, u, s, c;
mov.b32 c, 0x80008000;
fma.rn.bf16x2 y, $1, $2, c;
and.b32 a, y, 0x7fff7fff;
mov.b32 c, 0x40004000;
mov.b32 u, 0x43404340;
fma.rn.bf16x2 t, a, c, u;
mov.b32 c, 0x3f803f80;
mov.b32 u, 0x43424342;
fma.rn.bf16x2 u, a, c, u;
min.u16x2 t, t, u;
mov.b32 c, 0x3f003f00;
mov.b32 u, 0x43444344;
fma.rn.bf16x2 u, a, c, u;
min.u16x2 t, t, u;
mov.b32 c, 0x43474347;
min.u16x2 t, t, c;
shr.u32 s, $1, 12;
mov.b32 c, 0x00070007;
lop3.b32 t, c, t, s, 0xca;
and.b32 t, t, 0x000f000f;
shr.u32 s, t, 12;
or.b32 $0, t, s;
}""")


@triton.jit
def low_value(word):
    """The value in the low half, in float32."""
    return float_of(word << 16)


@triton.jit
def high_value(word):
    """The value in the high half, in float32."""
    return float_of(word & -0x10000)


@triton.jit
def _larger_pair(a, b):
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _larger_halves(a, b):
    return tl.maximum(a & 0x7FFF0000, b & 0x7FFF0000) | tl.maximum(a & 0x7FFF, b & 0x7FFF)


@triton.jit
def larger(a, b, C: tl.constexpr):
    """The larger magnitudes of two words, for each half."""
    if C.pairs:
        return _larger_pair(a, b)
    else:
        return _larger_halves(a, b)


@triton.jit
def largest(word, axis: tl.constexpr, C: tl.constexpr):
    """The largest magnitudes along an axis, for each half."""
    if C.pairs:
        return tl.reduce(word, axis, _larger_pair)
    else:
        return tl.reduce(word, axis, _larger_halves)


@triton.jit
def column_codes(words, low, high, C: tl.constexpr):
    """Scaled float8 codes of four rows of words: one int32 of their low columns, one of their high columns."""
    w0, w1, w2, w3 = words
    if C.float8 == "e4m3":
        return tl.inline_asm_elementwise(
            E4M3_COLUMNS, "=r,=r,r,r,r,r,r,r", [w0, w1, w2, w3, low, high], (tl.int32, tl.int32), is_pure=True, pack=1
        )
    elif C.float8 == "e5m2":
        return tl.inline_asm_elementwise(
            E5M2_COLUMNS, "=r,=r,r,r,r,r,r,r", [w0, w1, w2, w3, low, high], (tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        l0, h0 = to_codes(low_value(w0) * low, C).to(tl.int32), to_codes(high_value(w0) * high, C).to(tl.int32)
        l1, h1 = to_codes(low_value(w1) * low, C).to(tl.int32), to_codes(high_value(w1) * high, C).to(tl.int32)
        l2, h2 = to_codes(low_value(w2) * low, C).to(tl.int32), to_codes(high_value(w2) * high, C).to(tl.int32)
        l3, h3 = to_codes(low_value(w3) * low, C).to(tl.int32), to_codes(high_value(w3) * high, C).to(tl.int32)
        return l0 | (l1 << 8) | (l2 << 16) | (l3 << 24), h0 | (h1 << 8) | (h2 << 16) | (h3 << 24)


@triton.jit
def row_codes(word, multiplier, C: tl.constexpr):
    """Float8 codes of both values of a word, int16, the low value in the low byte."""
    if C.float8 == "e4m3":
        return tl.inline_asm_elementwise(E4M3_ROW, "=r,r,r,r,r", [word, multiplier], tl.int16, is_pure=True, pack=2)
    elif C.float8 == "e5m2":
        return tl.inline_asm_elementwise(E5M2_ROW, "=r,r,r,r,r", [word, multiplier], tl.int16, is_pure=True, pack=2)
    else:
        low, high = to_codes(low_value(word) * multiplier, C), to_codes(high_value(word) * multiplier, C)
        return (low.to(tl.int32) | (high.to(tl.int32) << 8)).to(tl.int16)


@triton.jit
def e2m1_byte(word, multiplier, C: tl.constexpr):
    """Codes of both values of a word times a float32 power of two, in the low byte of an int32."""
    halves = bits_of(multiplier) >> 16
    return tl.inline_asm_elementwise(
        E2M1_PAIR, "=r,r,r", [word, halves | (halves << 16)], tl.int32, is_pure=True, pack=1
    )


# ---------------------------------------------------------------------------------------------- fake quantize


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

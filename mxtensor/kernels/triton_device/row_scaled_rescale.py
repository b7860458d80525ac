"""Rescales 8-bit codes from the scale of their block to that of their row or column, several codes in an int32 word.

``row_scaled_both`` casts values to E4M3 or E5M2 codes and rescales these, in one kernel. The words (shift, row
exponent, out of range) are those of the glossary in ``numerics/row_scaled.py``.
"""

import triton
import triton.language as tl

from .elements import float_of, from_codes
from .row_scaled import exponent_of, to_e4m3

E4M3_RESCALE_TWO = tl.constexpr("""{
.reg .b16 p, q;
.reg .b32 a, b;
mov.b32 {p, q}, $1;
cvt.rn.f16x2.e4m3x2 a, p;
cvt.rn.f16x2.e4m3x2 b, q;
mul.rn.f16x2 a, a, $2;
mul.rn.f16x2 b, b, $3;
cvt.rn.satfinite.e4m3x2.f16x2 p, a;
cvt.rn.satfinite.e4m3x2.f16x2 q, b;
mov.b32 $0, {p, q};
}""")
E4M3_RESCALE_FOUR = tl.constexpr(E4M3_RESCALE_TWO.value.replace("$3", "$2"))
"""Two words of two codes have a shift each; the four codes of one word share one."""
_E5M2_TO_E4M3 = """mov.b32 {p, q}, $1;
cvt.rn.f16x2.e5m2x2 a, p;
cvt.rn.f16x2.e5m2x2 b, q;
mov.b32 c, 0x1C001C00;
mul.rn.f16x2 a, a, c;
mul.rn.f16x2 b, b, c;
mul.rn.f16x2 a, a, $2;
mul.rn.f16x2 b, b, $3;
cvt.rn.satfinite.e4m3x2.f16x2 r, a;
cvt.rn.satfinite.e4m3x2.f16x2 s, b;"""
E5M2_RESCALE_TWO = tl.constexpr(f"""{{
.reg .pred keep, keep_other;
.reg .b16 p, q, r, s;
.reg .b32 a, b, c;
setp.eq.s32 keep, $2, -1;
setp.eq.s32 keep_other, $3, -1;
{_E5M2_TO_E4M3}
selp.b16 p, p, r, keep;
selp.b16 q, q, s, keep_other;
mov.b32 $0, {{p, q}};
}}""")
E5M2_RESCALE_FOUR = tl.constexpr(f"""{{
.reg .pred keep;
.reg .b16 p, q, r, s;
.reg .b32 a, b, c;
setp.eq.s32 keep, $2, -1;
{_E5M2_TO_E4M3.replace("$3", "$2")}
mov.b32 c, {{r, s}};
selp.b32 $0, $1, c, keep;
}}""")
E5M2_PRESCALE = tl.constexpr(8)
"""E5M2 codes are multiplied by 2^-8 (0x1C00 in float16) first, which is exact, and then by 2^(shift + 8). Codes
above 2^15 are not zero after a shift of -25, and float16 cannot represent 2^-25."""
UNCHANGED_EXPONENT = tl.constexpr(1 << 20)
"""In place of the exponent of a row out of range, whose codes stay unchanged. A mask of such rows does not work: in
tiles that are masked too, Triton 3.6 broadcasts it wrongly (sm_90)."""
UNCHANGED_SHIFT = tl.constexpr(1 << 10)
"""In place of the shift of codes that stay unchanged. With float8 instructions the word of the shift is then -1."""


@triton.jit
def shift_word(stored, row_exponent, C: tl.constexpr, R: tl.constexpr):
    """The shift of blocks with these stored scales; with float8 instructions 2^shift as float16, in both halves of an
    int32 word. ``row_exponent`` is that of their row, or UNCHANGED_EXPONENT."""
    exponent, _special = exponent_of(stored, C)
    shift = exponent - row_exponent + R.offset
    unchanged = shift < -UNCHANGED_EXPONENT // 2
    shift = tl.minimum(tl.maximum(shift, -126), 15)
    if C.mantissa_bits != 2:
        shift = tl.where(unchanged, 0, shift)  # E4M3 times one
    if C.float8 == "":
        return tl.where(unchanged, UNCHANGED_SHIFT, shift) if C.mantissa_bits == 2 else shift
    else:
        if C.float8 == "e5m2":
            shift += E5M2_PRESCALE
        small = tl.where(shift >= -24, 1 << tl.maximum(shift + 24, 0), 0)  # a smaller power gives zeros
        half = tl.where(shift >= -14, (shift + 15) << 10, small)
        word = half | (half << 16)
        return tl.where(unchanged, -1, word) if C.mantissa_bits == 2 else word


@triton.jit
def rescale_one(code, shift, C: tl.constexpr, R: tl.constexpr):
    """A code in the low byte of an int32, rescaled."""
    value = from_codes((code & 0xFF).to(tl.uint8), C) * float_of((shift + 127) << 23)
    rescaled = to_e4m3(value, R).to(tl.int32)
    return tl.where(shift == UNCHANGED_SHIFT, code & 0xFF, rescaled) if C.mantissa_bits == 2 else rescaled


@triton.jit
def rescale_four(word, shift, C: tl.constexpr, R: tl.constexpr):
    """Four codes in an int32, rescaled."""
    if C.float8 == "e4m3":
        return tl.inline_asm_elementwise(E4M3_RESCALE_FOUR, "=r,r,r", [word, shift], tl.int32, is_pure=True, pack=1)
    elif C.float8 == "e5m2":
        return tl.inline_asm_elementwise(E5M2_RESCALE_FOUR, "=r,r,r", [word, shift], tl.int32, is_pure=True, pack=1)
    else:
        low = rescale_one(word, shift, C, R) | (rescale_one(word >> 8, shift, C, R) << 8)
        return low | (rescale_one(word >> 16, shift, C, R) << 16) | (rescale_one(word >> 24, shift, C, R) << 24)


@triton.jit
def rescale_two(code, shift, C: tl.constexpr, R: tl.constexpr):
    """Two codes in an int16, rescaled."""
    if C.float8 == "e4m3":
        return tl.inline_asm_elementwise(E4M3_RESCALE_TWO, "=r,r,r,r", [code, shift], tl.int16, is_pure=True, pack=2)
    elif C.float8 == "e5m2":
        return tl.inline_asm_elementwise(E5M2_RESCALE_TWO, "=r,r,r,r", [code, shift], tl.int16, is_pure=True, pack=2)
    else:
        wide = code.to(tl.int32)
        return (rescale_one(wide, shift, C, R) | (rescale_one(wide >> 8, shift, C, R) << 8)).to(tl.int16)

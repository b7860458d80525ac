"""Moves 8-bit codes from the scale of their block to that of their row or column, several codes in an int32 word.

``row_scaled_both`` casts values to E4M3 or E5M2 codes and moves these, in one kernel.
"""

import triton
import triton.language as tl

from .elements import float_of, from_codes
from .row_scaled import exponent_of, to_e4m3

E4M3_MOVED_TWO = tl.constexpr("""{
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
E4M3_MOVED_FOUR = tl.constexpr(E4M3_MOVED_TWO.value.replace("$3", "$2"))
"""Two words of two codes have a shift each; four codes of one word share one."""
E5M2_MOVED_FOUR = tl.constexpr("""{
.reg .pred own;
.reg .b16 p, q;
.reg .b32 a, b, c;
setp.eq.s32 own, $2, -1;
mov.b32 {p, q}, $1;
cvt.rn.f16x2.e5m2x2 a, p;
cvt.rn.f16x2.e5m2x2 b, q;
mov.b32 c, 0x1C001C00;
mul.rn.f16x2 a, a, c;
mul.rn.f16x2 b, b, c;
mul.rn.f16x2 a, a, $2;
mul.rn.f16x2 b, b, $2;
cvt.rn.satfinite.e4m3x2.f16x2 p, a;
cvt.rn.satfinite.e4m3x2.f16x2 q, b;
mov.b32 c, {p, q};
selp.b32 $0, $1, c, own;
}""")
E5M2_MOVED_TWO = tl.constexpr("""{
.reg .pred own, other;
.reg .b16 p, q, r, s;
.reg .b32 a, b, c;
setp.eq.s32 own, $2, -1;
setp.eq.s32 other, $3, -1;
mov.b32 {p, q}, $1;
cvt.rn.f16x2.e5m2x2 a, p;
cvt.rn.f16x2.e5m2x2 b, q;
mov.b32 c, 0x1C001C00;
mul.rn.f16x2 a, a, c;
mul.rn.f16x2 b, b, c;
mul.rn.f16x2 a, a, $2;
mul.rn.f16x2 b, b, $3;
cvt.rn.satfinite.e4m3x2.f16x2 r, a;
cvt.rn.satfinite.e4m3x2.f16x2 s, b;
selp.b16 p, p, r, own;
selp.b16 q, q, s, other;
mov.b32 $0, {p, q};
}""")
E5M2_DOWN = tl.constexpr(8)
"""E5M2 codes are multiplied by 2^-8 (0x1C00 in float16) first, which is exact. Those that a shift of -25 moves to the
least E4M3 number are 2^15 and more, and float16 has no 2^-25."""
OWN_TOP = tl.constexpr(1 << 20)
"""In place of the exponent of a row beyond the bound, whose codes stay as they are. A mask of such rows does not do: in
tiles that are masked too, Triton 3.6 spreads it over their values wrongly (sm_90)."""
OWN_UP = tl.constexpr(1 << 10)
"""The exponent of their shift without float8 instructions, and -1 is the word of their shift with them."""


@triton.jit
def shift_word(stored, top, C: tl.constexpr, R: tl.constexpr):
    """What codes of blocks with these stored scales are multiplied by: a power of two, in both halves of a word as
    float16; without float8 instructions its exponent. ``top`` is that of their row, or OWN_TOP."""
    e, _kind = exponent_of(stored, C)
    up = e - top + R.up
    own = up < -OWN_TOP // 2
    up = tl.minimum(tl.maximum(up, -126), 15)
    if C.mantissa_bits != 2:
        up = tl.where(own, 0, up)  # E4M3 times one
    if C.float8 == "":
        return tl.where(own, OWN_UP, up) if C.mantissa_bits == 2 else up
    else:
        if C.float8 == "e5m2":
            up += E5M2_DOWN
        small = tl.where(up >= -24, 1 << tl.maximum(up + 24, 0), 0)  # what is smaller gives zeros
        half = tl.where(up >= -14, (up + 15) << 10, small)
        word = half | (half << 16)
        return tl.where(own, -1, word) if C.mantissa_bits == 2 else word


@triton.jit
def one_moved(code, up, C: tl.constexpr, R: tl.constexpr):
    """A code in the low byte of an int32, moved by 2^up."""
    value = from_codes((code & 0xFF).to(tl.uint8), C) * float_of((up + 127) << 23)
    moved = to_e4m3(value, R).to(tl.int32)
    return tl.where(up == OWN_UP, code & 0xFF, moved) if C.mantissa_bits == 2 else moved


@triton.jit
def moved_four(word, shift, C: tl.constexpr, R: tl.constexpr):
    """Four codes in an int32, moved."""
    if C.float8 == "e4m3":
        return tl.inline_asm_elementwise(E4M3_MOVED_FOUR, "=r,r,r", [word, shift], tl.int32, is_pure=True, pack=1)
    elif C.float8 == "e5m2":
        return tl.inline_asm_elementwise(E5M2_MOVED_FOUR, "=r,r,r", [word, shift], tl.int32, is_pure=True, pack=1)
    else:
        low = one_moved(word, shift, C, R) | (one_moved(word >> 8, shift, C, R) << 8)
        return low | (one_moved(word >> 16, shift, C, R) << 16) | (one_moved(word >> 24, shift, C, R) << 24)


@triton.jit
def moved_two(code, shift, C: tl.constexpr, R: tl.constexpr):
    """Two codes in an int16, moved."""
    if C.float8 == "e4m3":
        return tl.inline_asm_elementwise(E4M3_MOVED_TWO, "=r,r,r,r", [code, shift], tl.int16, is_pure=True, pack=2)
    elif C.float8 == "e5m2":
        return tl.inline_asm_elementwise(E5M2_MOVED_TWO, "=r,r,r,r", [code, shift], tl.int16, is_pure=True, pack=2)
    else:
        wide = code.to(tl.int32)
        return (one_moved(wide, shift, C, R) | (one_moved(wide >> 8, shift, C, R) << 8)).to(tl.int16)

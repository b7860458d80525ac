"""Row-scaled E4M3 in Triton: stored codes that are rescaled, and a cast that writes rescaled codes.

``numerics/row_scaled.py`` is the definition, with a glossary. ``C`` is the ``CastCode`` of the operand, ``R`` a
``RowCode``. One program takes BM rows. It finds the highest and the lowest block exponent of a row, then writes the
row. WHOLE: BK covers a row, which stays in registers; otherwise it is read twice, the second time from a cache. Codes
past the logical K are zero (or NaN at the end of a block of NaN), and rows past the logical rows are zero with the
scale 1, up to the padded sizes.

``row_scaled_both`` uses the second half: it casts values to E4M3 or E5M2 codes in int32 words and rescales these, or
rounds values to a sub-byte element and scales them for their row, without a code between.
"""

import triton
import triton.language as tl

from .elements import (
    E4M3_WORD,
    amax_bits,
    bits_of,
    dither,
    float_of,
    from_codes,
    magnitude_bits,
    round_float,
    to_codes,
    widened,
)
from .quantize import block_scales, finish_codes, load_codes, load_tile, nothing_of, random_words
from .words import E4M3_COLUMNS, E4M3_ROW, high_value, low_value, round_words, side_by_side


@triton.jit
def to_e4m3(y, R: tl.constexpr):
    """float32 to E4M3 codes."""
    if R.float8:
        return tl.inline_asm_elementwise(E4M3_WORD, "=r,r,r,r,r", [y], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        code = round_float(tl.abs(y), 4, 3, 7, 448.0) | ((bits_of(y) >> 24) & 0x80)
        return tl.where(y == y, code, 0x7F).to(tl.uint8)


@triton.jit
def exponent_of(stored, C: tl.constexpr):
    """(biased exponent, special) of stored scales 2^(exponent - 127); special is 2 for NaN, 1 for a scale that is not a
    power of two, 0 otherwise."""
    if C.scale == "e8m0":
        exponent = stored.to(tl.int32)
        return exponent, tl.where(exponent == 255, 2, 0)
    else:
        bits = bits_of(stored)
        power = (((bits & 0x007FFFFF) == 0) & (bits > 0)) | (bits == 0x00400000)
        nan = (bits & 0x7FFFFFFF) >= 0x7F800000
        return (bits >> 23) & 0xFF, tl.where(nan, 2, tl.where(power, 0, 1))


@triton.jit
def choose_row_scale(highest, lowest, special, R: tl.constexpr):
    """(row exponent, whether the row is out of range, row scale) from the highest and the lowest exponent of its
    nonzero blocks, and the largest ``special`` of its blocks."""
    zero_row = highest < 0
    if R.unlimited_range:
        lowest = highest
    row_exponent = tl.maximum(highest, 127 + R.offset - R.max_scale_exponent)
    out_of_range = (
        (row_exponent - lowest > R.max_range) | (row_exponent - 127 - R.offset > R.max_scale_exponent) | (special == 1)
    )
    out_of_range = out_of_range & (special < 2) & (row_exponent >= 0) & (zero_row == 0)
    power = float_of(tl.minimum(tl.maximum(row_exponent - R.offset, 1), 254) << 23)
    scale = tl.where((special >= 2) | out_of_range, float("nan"), tl.where(zero_row, 1.0, power))
    return row_exponent, out_of_range, scale


@triton.jit
def rescale(code, exponent, row_exponent, out_of_range, C: tl.constexpr, R: tl.constexpr):
    """Codes (BM, NB, G) under the exponent of their row; exponent (BM, NB), row_exponent and out_of_range (BM).

    In a row that is out of range they are the same elements, one byte each. Those of fewer than 8 bits are E4M3
    numbers: they are rounded times one, because a second rounding for such rows would double the work on all rows.
    """
    shift = tl.minimum(tl.maximum(exponent - row_exponent[:, None] + R.offset, -126), 127)
    if C.bits < 8:
        shift = tl.where(out_of_range[:, None], 0, shift)
    out = to_e4m3(from_codes(code, C) * float_of((shift + 127) << 23)[:, :, None], R)
    if C.bits == 8:
        out = tl.where(out_of_range[:, None, None], code, out)
    return out


# ---------------------------------------------------------------------------------------------- a stored operand


@triton.jit
def load_exponents(
    scale_ptr, row, tile, rows_in, cols, scale_stride, C: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    G: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """``exponent_of`` the groups of G columns of a tile: (BM, NB). 0 stands for the whole extent in ROWS and COLS."""
    group = tile * NB + tl.arange(0, NB)[None, :]
    block = group * G // COLS if COLS > 0 else group * 0
    line = row // ROWS if ROWS > 0 else row * 0
    at = scale_ptr + line.to(tl.int64) * scale_stride + block
    stored = tl.load(at, mask=rows_in & (group * G < cols), other=0)
    return exponent_of(stored, C)


@triton.jit
def no_exponents(BM: tl.constexpr):
    """(highest, lowest, special) of rows of which no block has been seen."""
    return tl.full((BM,), -1, tl.int32), tl.full((BM,), 1000, tl.int32), tl.full((BM,), 0, tl.int32)


@triton.jit
def add_exponents(highest, lowest, row_special, exponent, special, nonzero):
    """(highest, lowest, special) of rows with more blocks (BM, NB): the highest and the lowest exponent of the nonzero
    blocks, and the largest ``special``."""
    highest = tl.maximum(highest, tl.max(tl.where(nonzero, exponent, -1), axis=1))
    lowest = tl.minimum(lowest, tl.min(tl.where(nonzero, exponent, 1000), axis=1))
    found = tl.max(tl.where(nonzero | (special == 2), special, 0), axis=1)
    return highest, lowest, tl.maximum(row_special, found)


@triton.jit
def classify_codes(code, special, C: tl.constexpr):
    """(special, whether a code is not zero) of blocks with these codes (BM, NB, G); E4M3 has no infinity."""
    magnitude = tl.max((code & ((1 << (C.bits - 1)) - 1)).to(tl.int32), axis=2)
    if C.bits == 8 and C.mantissa_bits == 2:
        special = tl.maximum(special, tl.where(magnitude >= 0x7C, 1, 0))
    return special, (magnitude > 0) & (special < 2)


@triton.jit
def operand_to_rows(
    data_ptr, scale_ptr, codes_ptr, row_scale_ptr, flags_ptr, rows, cols, data_stride, scale_stride, padded_rows,
    width, C: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, G: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of a matrix (rows, cols) to codes (padded_rows, width), row scales and flags."""
    NB: tl.constexpr = BK // G
    row = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    rows_in = row < rows
    start = row.to(tl.int64) * data_stride
    to = codes_ptr + row.to(tl.int64) * width
    tiles = tl.cdiv(width, BK)
    highest, lowest, row_special = no_exponents(BM)
    if WHOLE:
        code = tl.reshape(load_codes(data_ptr, start, rows_in, 0, cols, C, BK, False), (BM, NB, G))
        exponent, special = load_exponents(scale_ptr, row, 0, rows_in, cols, scale_stride, C, ROWS, COLS, G, NB)
        special, nonzero = classify_codes(code, special, C)
        highest, lowest, row_special = add_exponents(highest, lowest, row_special, exponent, special, nonzero)
        row_exponent, out_of_range, scale = choose_row_scale(highest, lowest, row_special, R)
        out = rescale(code, exponent, row_exponent, out_of_range, C, R)
        col = tl.arange(0, BK)[None, :]
        tl.store(to + col, tl.reshape(out, (BM, BK)), mask=(row < padded_rows) & (col < width))
    else:
        for i in range(0, tiles):
            code = tl.reshape(load_codes(data_ptr, start, rows_in, i, cols, C, BK, False), (BM, NB, G))
            exponent, special = load_exponents(scale_ptr, row, i, rows_in, cols, scale_stride, C, ROWS, COLS, G, NB)
            special, nonzero = classify_codes(code, special, C)
            highest, lowest, row_special = add_exponents(highest, lowest, row_special, exponent, special, nonzero)
        row_exponent, out_of_range, scale = choose_row_scale(highest, lowest, row_special, R)
        for i in range(0, tiles):
            code = tl.reshape(load_codes(data_ptr, start, rows_in, i, cols, C, BK, False), (BM, NB, G))
            exponent, special = load_exponents(scale_ptr, row, i, rows_in, cols, scale_stride, C, ROWS, COLS, G, NB)
            out = rescale(code, exponent, row_exponent, out_of_range, C, R)
            col = i * BK + tl.arange(0, BK)[None, :]
            tl.store(to + col, tl.reshape(out, (BM, BK)), mask=(row < padded_rows) & (col < width))
    each = tl.program_id(0) * BM + tl.arange(0, BM)
    tl.store(row_scale_ptr + each, scale, mask=each < padded_rows)
    tl.store(flags_ptr + each, out_of_range.to(tl.uint8), mask=each < padded_rows)


# ---------------------------------------------------------------------------------------------- a cast


@triton.jit
def block_exponents(x, C: tl.constexpr, R: tl.constexpr):
    """(stored scale, multiplier, exponent, finite, whether a code is not zero) of blocks x (BM, NB, block)."""
    amax = amax_bits(tl.max(magnitude_bits(x), axis=2), x)
    stored, multiplier, _, finite = block_scales(amax, tl.full((), 1.0, tl.float32), C)
    exponent, _ = exponent_of(stored, C)
    nonzero = finite & (float_of(amax) * multiplier > R.half_smallest)
    return stored, multiplier, exponent, finite, nonzero


@triton.jit
def load_blocks(x_row, i, rows_in, cols, C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """Column tile i of x as blocks (BM, NB, block)."""
    col = i * BK + tl.arange(0, BK)[None, :]
    return tl.reshape(load_tile(x_row + col, rows_in & (col < cols), EVEN), (BM, BK // C.block, C.block))


@triton.jit
def write_blocks(
    x, stored, multiplier, exponent, finite, row_exponent, out_of_range, to, at, i, rows_in, width, scale_cols,
    C: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Round blocks x to codes and store them rescaled; in rows out of range unchanged, with their scales."""
    code = finish_codes(to_codes(widened(x) * multiplier[:, :, None], C), finite[:, :, None], C)
    out = rescale(code, exponent, row_exponent, out_of_range, C, R)
    col = i * BK + tl.arange(0, BK)[None, :]
    tl.store(to + col, tl.reshape(out, (BM, BK)), mask=rows_in & (col < width))
    block = i * (BK // C.block) + tl.arange(0, BK // C.block)[None, :]
    tl.store(at + block, stored, mask=rows_in & out_of_range[:, None] & (block < scale_cols))


@triton.jit
def cast_to_rows(
    x_ptr, codes_ptr, row_scale_ptr, flags_ptr, scale_ptr, rows, cols, stride, width, scale_cols,
    C: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Quantize x (rows, cols), blocks along rows, and rescale in the same pass. EVEN: all tiles are whole.

    The scales of blocks, (rows, scale_cols), are written in rows out of range only.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    rows_in = row < rows
    x_row = x_ptr + row.to(tl.int64) * stride
    to = codes_ptr + row.to(tl.int64) * width
    at = scale_ptr + row.to(tl.int64) * scale_cols
    tiles = tl.cdiv(width, BK)
    highest, lowest, row_special = no_exponents(BM)
    if WHOLE:
        x = load_blocks(x_row, 0, rows_in, cols, C, BM, BK, EVEN)
        stored, multiplier, exponent, finite, nonzero = block_exponents(x, C, R)
        highest, lowest, row_special = add_exponents(
            highest, lowest, row_special, exponent, tl.where(finite, 0, 2), nonzero
        )
        row_exponent, out_of_range, scale = choose_row_scale(highest, lowest, row_special, R)
        write_blocks(
            x, stored, multiplier, exponent, finite, row_exponent, out_of_range, to, at, 0,
            rows_in, width, scale_cols, C, R, BM, BK,
        )  # fmt: skip
    else:
        for i in range(0, tiles):
            x = load_blocks(x_row, i, rows_in, cols, C, BM, BK, EVEN)
            stored, multiplier, exponent, finite, nonzero = block_exponents(x, C, R)
            highest, lowest, row_special = add_exponents(
                highest, lowest, row_special, exponent, tl.where(finite, 0, 2), nonzero
            )
        row_exponent, out_of_range, scale = choose_row_scale(highest, lowest, row_special, R)
        for i in range(0, tiles):
            x = load_blocks(x_row, i, rows_in, cols, C, BM, BK, EVEN)
            stored, multiplier, exponent, finite, nonzero = block_exponents(x, C, R)
            write_blocks(
                x, stored, multiplier, exponent, finite, row_exponent, out_of_range, to, at, i,
                rows_in, width, scale_cols, C, R, BM, BK,
            )  # fmt: skip
    each = tl.program_id(0) * BM + tl.arange(0, BM)
    tl.store(row_scale_ptr + each, scale, mask=each < rows)
    tl.store(flags_ptr + each, out_of_range.to(tl.uint8), mask=each < rows)


# ---------------------------------------------------------------------------------------------- codes in words


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


# ---------------------------------------------------------------------------------------------- sub-byte elements


def _without_products(ptx):
    """The instructions of ``words`` for values that need no multiplier."""
    return tl.constexpr("\n".join(line for line in ptx.value.split("\n") if not line.startswith("mul")))


E4M3_OF_COLUMNS, E4M3_OF_ROW = _without_products(E4M3_COLUMNS), _without_products(E4M3_ROW)


@triton.jit
def shift_power(stored, row_exponent, C: tl.constexpr, R: tl.constexpr):
    """2^shift of blocks with these stored scales, float32: rounded values are multiplied by it. ``row_exponent`` is
    that of their row, or UNCHANGED_EXPONENT."""
    exponent, _special = exponent_of(stored, C)
    shift = exponent - row_exponent + R.offset
    shift = tl.where(shift < -UNCHANGED_EXPONENT // 2, 0, tl.minimum(tl.maximum(shift, -126), 15))
    return float_of((shift + 127) << 23)


@triton.jit
def rounded_by(x, multiplier, power, random, C: tl.constexpr):
    """float32 x * multiplier, rounded stochastically to a value of the element, * power."""
    y = dither(x * multiplier, random.to(tl.uint32), C)
    return tl.minimum(tl.maximum(y, -C.max), C.max) * power


@triton.jit
def rounded_word(word, low, high, low_power, high_power, low_random, high_random, C: tl.constexpr):
    """A word of two values, each times its multiplier, rounded and times its power. The random words count if the cast
    rounds stochastically."""
    if C.stochastic:
        return side_by_side(
            rounded_by(low_value(word), low, low_power, low_random, C),
            rounded_by(high_value(word), high, high_power, high_random, C),
        )
    else:
        return round_words(word, side_by_side(low, high), side_by_side(low_power, high_power), C)


@triton.jit
def e4m3_columns(words, R: tl.constexpr):
    """E4M3 codes of four rows of words: one int32 of their low columns, one of their high columns."""
    w0, w1, w2, w3 = words
    if R.float8:
        return tl.inline_asm_elementwise(
            E4M3_OF_COLUMNS, "=r,=r,r,r,r,r", [w0, w1, w2, w3], (tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        l0, h0 = to_e4m3(low_value(w0), R).to(tl.int32), to_e4m3(high_value(w0), R).to(tl.int32)
        l1, h1 = to_e4m3(low_value(w1), R).to(tl.int32), to_e4m3(high_value(w1), R).to(tl.int32)
        l2, h2 = to_e4m3(low_value(w2), R).to(tl.int32), to_e4m3(high_value(w2), R).to(tl.int32)
        l3, h3 = to_e4m3(low_value(w3), R).to(tl.int32), to_e4m3(high_value(w3), R).to(tl.int32)
        return l0 | (l1 << 8) | (l2 << 16) | (l3 << 24), h0 | (h1 << 8) | (h2 << 16) | (h3 << 24)


@triton.jit
def e4m3_row(word, R: tl.constexpr):
    """E4M3 codes of both values of a word, int16, the low value in the low byte."""
    if R.float8:
        return tl.inline_asm_elementwise(E4M3_OF_ROW, "=r,r,r", [word], tl.int16, is_pure=True, pack=2)
    else:
        low, high = to_e4m3(low_value(word), R).to(tl.int32), to_e4m3(high_value(word), R).to(tl.int32)
        return (low | (high << 8)).to(tl.int16)


# ---------------------------------------------------------------------------------------------- four values a thread


@triton.jit
def rescaled_row_codes(word, multiplier, power, four, seed_ptr, C: tl.constexpr, R: tl.constexpr):
    """Codes of words (Q, W, J, 2) with four values of a row each; multiplier, power (Q, W, J, 1); four (Q, W, J): their
    number in the operand."""
    shape: tl.constexpr = word.shape
    multiplier, power = tl.broadcast_to(multiplier, shape), tl.broadcast_to(power, shape)
    if C.stochastic:
        r0, r1, r2, r3 = random_words(four + tl.max(nothing_of(word), axis=3), seed_ptr, 0, C)
        low_random, high_random = tl.join(r0, r2), tl.join(r1, r3)
    else:
        low_random, high_random = word, word
    return e4m3_row(rounded_word(word, multiplier, multiplier, power, power, low_random, high_random, C), R)


@triton.jit
def rescaled_column_codes(
    words, low, high, low_power, high_power, four, next_four, seed_ptr, C: tl.constexpr, R: tl.constexpr
):
    """Codes of four rows of words: one int32 of their low columns, one of their high columns; four, next_four: the
    numbers of these in the operand of the transpose."""
    w0, w1, w2, w3 = words
    l0, l1, l2, l3 = random_words(four + nothing_of(w0), seed_ptr, 1, C)
    h0, h1, h2, h3 = random_words(next_four + nothing_of(w0), seed_ptr, 1, C)
    w0 = rounded_word(w0, low, high, low_power, high_power, l0, h0, C)
    w1 = rounded_word(w1, low, high, low_power, high_power, l1, h1, C)
    w2 = rounded_word(w2, low, high, low_power, high_power, l2, h2, C)
    w3 = rounded_word(w3, low, high, low_power, high_power, l3, h3, C)
    return e4m3_columns((w0, w1, w2, w3), R)

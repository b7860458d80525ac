"""Row-scaled E4M3 in Triton: stored codes that are rescaled, and a cast that writes rescaled codes.

``numerics/row_scaled.py`` is the definition, with a glossary. ``C`` is the ``CastCode`` of the operand, ``R`` a
``RowCode``. One program takes BM rows. It finds the highest and the lowest block exponent of a row, then writes the
row. WHOLE: BK covers a row, which stays in registers; otherwise it is read twice, the second time from a cache. Codes
past the logical K are zero (or NaN at the end of a block of NaN), and rows past the logical rows are zero with the
scale 1, up to the padded sizes.
"""

import triton
import triton.language as tl

from .dequantize import load_codes
from .elements import (
    E4M3_WORD,
    amax_bits,
    bits_of,
    float_of,
    from_codes,
    magnitude_bits,
    round_float,
    to_codes,
    widened,
)
from .quantize import block_scales, finish_codes, load_tile


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

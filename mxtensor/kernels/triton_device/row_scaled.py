"""Row-scaled E4M3 in Triton: an operand re-expressed, and a cast that writes it. ``numerics/row_scaled.py`` in kernels.

``C`` is the ``CastCode`` of the operand, ``R`` a ``RowCode``. One program takes BM rows. It looks at all blocks of a
row for the largest and the smallest exponent, then writes the row. ONE: BK covers a row, which stays in registers;
otherwise it is read twice, the second time from a cache. Codes past the logical K are zero (or NaN at the end of a
block of NaN), and rows past the logical rows are zero with the scale 1, up to the padded sizes.
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
    """(e, 2 for NaN, 1 for no power of two, else 0) of stored scales 2^(e - 127)."""
    if C.scale == "e8m0":
        e = stored.to(tl.int32)
        return e, tl.where(e == 255, 2, 0)
    else:
        bits = bits_of(stored)
        power = (((bits & 0x007FFFFF) == 0) & (bits > 0)) | (bits == 0x00400000)
        nan = (bits & 0x7FFFFFFF) >= 0x7F800000
        return (bits >> 23) & 0xFF, tl.where(nan, 2, tl.where(power, 0, 1))


@triton.jit
def decide(top, low, bad, R: tl.constexpr):
    """(exponent of the row that blocks are moved under, whether beyond the bound, row scale) from the extremes of e."""
    zero = top < 0
    if R.any_distance:
        low = top
    top = tl.maximum(top, 127 + R.up - R.most)
    beyond = (top - low > R.octaves) | (top - 127 - R.up > R.most) | (bad == 1)
    beyond = beyond & (bad < 2) & (top >= 0) & (zero == 0)
    power = float_of(tl.minimum(tl.maximum(top - R.up, 1), 254) << 23)
    scale = tl.where((bad >= 2) | beyond, float("nan"), tl.where(zero, 1.0, power))
    return top, beyond, scale


@triton.jit
def moved(code, e, top, beyond, C: tl.constexpr, R: tl.constexpr):
    """Codes (BM, NB, G) under the exponent of their row; e (BM, NB), top and beyond (BM).

    In a row beyond the bound they are the same elements, one byte each. Those of fewer than 8 bits are E4M3 numbers:
    they are rounded times one, because a second rounding for such rows would double the work on all rows.
    """
    up = tl.minimum(tl.maximum(e - top[:, None] + R.up, -126), 127)
    if C.bits < 8:
        up = tl.where(beyond[:, None], 0, up)
    out = to_e4m3(from_codes(code, C) * float_of((up + 127) << 23)[:, :, None], R)
    if C.bits == 8:
        out = tl.where(beyond[:, None, None], code, out)
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
def no_extremes(BM: tl.constexpr):
    """(top, low, bad) of rows of which nothing has been seen."""
    return tl.full((BM,), -1, tl.int32), tl.full((BM,), 1000, tl.int32), tl.full((BM,), 0, tl.int32)


@triton.jit
def extremes(top, low, bad, e, kind, live):
    """(top, low, bad) with blocks (BM, NB) more: largest and smallest e of live blocks, the worst ``exponent_of``."""
    top = tl.maximum(top, tl.max(tl.where(live, e, -1), axis=1))
    low = tl.minimum(low, tl.min(tl.where(live, e, 1000), axis=1))
    return top, low, tl.maximum(bad, tl.max(tl.where(live | (kind == 2), kind, 0), axis=1))


@triton.jit
def stored_facts(code, kind, C: tl.constexpr):
    """(kind, whether a code is not zero) of blocks with these codes (BM, NB, G); E4M3 has no infinity."""
    magnitude = tl.max((code & ((1 << (C.bits - 1)) - 1)).to(tl.int32), axis=2)
    if C.bits == 8 and C.mantissa_bits == 2:
        kind = tl.maximum(kind, tl.where(magnitude >= 0x7C, 1, 0))
    return kind, (magnitude > 0) & (kind < 2)


@triton.jit
def operand_to_rows(
    data_ptr, scale_ptr, codes_ptr, row_scale_ptr, beyond_ptr, rows, cols, data_stride, scale_stride, whole_rows,
    width, C: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, G: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of a matrix (rows, cols) to codes (whole_rows, width), row scales and marks."""
    NB: tl.constexpr = BK // G
    row = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    rows_in = row < rows
    start = row.to(tl.int64) * data_stride
    to = codes_ptr + row.to(tl.int64) * width
    tiles = tl.cdiv(width, BK)
    top, low, bad = no_extremes(BM)
    if ONE:
        code = tl.reshape(load_codes(data_ptr, start, rows_in, 0, cols, C, BK, False), (BM, NB, G))
        e, kind = load_exponents(scale_ptr, row, 0, rows_in, cols, scale_stride, C, ROWS, COLS, G, NB)
        kind, live = stored_facts(code, kind, C)
        top, low, bad = extremes(top, low, bad, e, kind, live)
        top, beyond, scale = decide(top, low, bad, R)
        out = moved(code, e, top, beyond, C, R)
        col = tl.arange(0, BK)[None, :]
        tl.store(to + col, tl.reshape(out, (BM, BK)), mask=(row < whole_rows) & (col < width))
    else:
        for i in range(0, tiles):
            code = tl.reshape(load_codes(data_ptr, start, rows_in, i, cols, C, BK, False), (BM, NB, G))
            e, kind = load_exponents(scale_ptr, row, i, rows_in, cols, scale_stride, C, ROWS, COLS, G, NB)
            kind, live = stored_facts(code, kind, C)
            top, low, bad = extremes(top, low, bad, e, kind, live)
        top, beyond, scale = decide(top, low, bad, R)
        for i in range(0, tiles):
            code = tl.reshape(load_codes(data_ptr, start, rows_in, i, cols, C, BK, False), (BM, NB, G))
            e, kind = load_exponents(scale_ptr, row, i, rows_in, cols, scale_stride, C, ROWS, COLS, G, NB)
            out = moved(code, e, top, beyond, C, R)
            col = i * BK + tl.arange(0, BK)[None, :]
            tl.store(to + col, tl.reshape(out, (BM, BK)), mask=(row < whole_rows) & (col < width))
    one = tl.program_id(0) * BM + tl.arange(0, BM)
    tl.store(row_scale_ptr + one, scale, mask=one < whole_rows)
    tl.store(beyond_ptr + one, beyond.to(tl.uint8), mask=one < whole_rows)


# ---------------------------------------------------------------------------------------------- a cast


@triton.jit
def block_facts(x, C: tl.constexpr, R: tl.constexpr):
    """(stored scale, multiplier, e, finite, whether a code is not zero) of blocks x (BM, NB, block)."""
    amax = amax_bits(tl.max(magnitude_bits(x), axis=2), x)
    stored, multiplier, _, finite = block_scales(amax, tl.full((), 1.0, tl.float32), C)
    e, _ = exponent_of(stored, C)
    live = finite & (float_of(amax) * multiplier > R.half)
    return stored, multiplier, e, finite, live


@triton.jit
def load_blocks(x_row, i, rows_in, cols, C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """Column tile i of x as blocks (BM, NB, block)."""
    col = i * BK + tl.arange(0, BK)[None, :]
    return tl.reshape(load_tile(x_row + col, rows_in & (col < cols), EVEN), (BM, BK // C.block, C.block))


@triton.jit
def write_blocks(
    x, stored, multiplier, e, finite, top, beyond, to, at, i, rows_in, width, scale_cols,
    C: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Round blocks x to codes and store them under their row; in rows beyond the bound as they are, with scales."""
    code = finish_codes(to_codes(widened(x) * multiplier[:, :, None], C), finite[:, :, None], C)
    out = moved(code, e, top, beyond, C, R)
    col = i * BK + tl.arange(0, BK)[None, :]
    tl.store(to + col, tl.reshape(out, (BM, BK)), mask=rows_in & (col < width))
    block = i * (BK // C.block) + tl.arange(0, BK // C.block)[None, :]
    tl.store(at + block, stored, mask=rows_in & beyond[:, None] & (block < scale_cols))


@triton.jit
def cast_to_rows(
    x_ptr, codes_ptr, row_scale_ptr, beyond_ptr, scale_ptr, rows, cols, stride, width, scale_cols,
    C: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Quantize x (rows, cols), blocks along rows, and re-express at once. EVEN: all tiles are whole.

    The scales of blocks, (rows, scale_cols), are written in rows beyond the bound only.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    rows_in = row < rows
    x_row = x_ptr + row.to(tl.int64) * stride
    to = codes_ptr + row.to(tl.int64) * width
    at = scale_ptr + row.to(tl.int64) * scale_cols
    tiles = tl.cdiv(width, BK)
    top, low, bad = no_extremes(BM)
    if ONE:
        x = load_blocks(x_row, 0, rows_in, cols, C, BM, BK, EVEN)
        stored, multiplier, e, finite, live = block_facts(x, C, R)
        top, low, bad = extremes(top, low, bad, e, tl.where(finite, 0, 2), live)
        top, beyond, scale = decide(top, low, bad, R)
        write_blocks(x, stored, multiplier, e, finite, top, beyond, to, at, 0, rows_in, width, scale_cols, C, R, BM, BK)
    else:
        for i in range(0, tiles):
            x = load_blocks(x_row, i, rows_in, cols, C, BM, BK, EVEN)
            stored, multiplier, e, finite, live = block_facts(x, C, R)
            top, low, bad = extremes(top, low, bad, e, tl.where(finite, 0, 2), live)
        top, beyond, scale = decide(top, low, bad, R)
        for i in range(0, tiles):
            x = load_blocks(x_row, i, rows_in, cols, C, BM, BK, EVEN)
            stored, multiplier, e, finite, live = block_facts(x, C, R)
            write_blocks(
                x, stored, multiplier, e, finite, top, beyond, to, at, i, rows_in, width, scale_cols, C, R, BM, BK
            )
    one = tl.program_id(0) * BM + tl.arange(0, BM)
    tl.store(row_scale_ptr + one, scale, mask=one < rows)
    tl.store(beyond_ptr + one, beyond.to(tl.uint8), mask=one < rows)

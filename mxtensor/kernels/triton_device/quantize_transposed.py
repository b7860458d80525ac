"""One scale for the tensor: codes, the same codes transposed, and the amax for a later scale, in one pass over x.

The four rows of a word of transposed codes are in four registers, as in ``quantize_columns``.
"""

import triton
import triton.language as tl

from .elements import INFINITY_BITS, amax_bits, bits_of, magnitude_bits, scales_of, to_codes, widened
from .quantize import rounded, store_tile, words_of_tile
from .quantize_columns import largest_of_groups, load_groups, word_of


@triton.jit
def scaled(x, row, tile, multiplier, finite, seed_ptr, cols, C: tl.constexpr, GIVEN: tl.constexpr):
    """Scaled values; all NaN unless ``finite``, and with GIVEN each value that is not finite is NaN."""
    BK: tl.constexpr = x.shape[1]
    y = rounded(widened(x) * multiplier, words_of_tile(row, tile, cols, seed_ptr, BK, C), C)
    if GIVEN:
        finite = finite & (amax_bits(magnitude_bits(x), x) < INFINITY_BITS)
    return tl.where(finite, y, float("nan"))


@triton.jit
def codes_of(y, C: tl.constexpr):
    """Codes of one byte; a NaN gets the NaN code of the format."""
    if C.float8 != "":
        return to_codes(y, C)
    else:
        return tl.where(y == y, to_codes(y, C), C.nan_code).to(tl.uint8)


@triton.jit
def codes_in_word(y, C: tl.constexpr):
    """The codes of four rows in one int32, the first in the low byte."""
    y0, y1, y2, y3 = y
    if C.float8 != "":
        return word_of(y, y0 == y0, C)
    else:
        low = codes_of(y0, C).to(tl.int32) | (codes_of(y1, C).to(tl.int32) << 8)
        return low | (codes_of(y2, C).to(tl.int32) << 16) | (codes_of(y3, C).to(tl.int32) << 24)


@triton.jit
def quantize_transposed(
    x_ptr, data_ptr, scale_ptr, tdata_ptr, tscale_ptr, amax_ptr, record_ptr, seed_ptr, rows, cols, stride, fours,
    C: tl.constexpr, J: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GIVEN: tl.constexpr, RECORD: tl.constexpr, EVEN: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """ROWS: codes (rows, cols), COLUMNS: codes (cols, rows), each with the scale; 4 * J rows to a program.

    GIVEN: ``amax_ptr`` has a float32 that need not be the amax of x; otherwise it has the amax bits of x. RECORD: the
    float32 at ``record_ptr`` becomes the larger of itself and the amax of x. WORDS: a row of the transpose is ``fours``
    whole words.
    """
    tiles = tl.cdiv(cols, BK)
    pid = tl.program_id(0)
    if not GIVEN:
        pid = tl.num_programs(0) - 1 - pid  # start with the values that the pass for the amax left in the cache
    first_four, first_col = (pid // tiles) * J, (pid % tiles) * BK
    four = first_four + tl.arange(0, J)[:, None]
    row, col = four * 4, first_col + tl.arange(0, BK)[None, :]
    x = load_groups(x_ptr, row, col, rows, cols, stride, EVEN)
    if GIVEN:
        given = tl.load(amax_ptr)
        amax = tl.where(given == given, bits_of(given), 0x7FC00000)
    else:
        amax = tl.load(amax_ptr)
    stored, multiplier, _, finite = scales_of(amax, tl.full((), 1.0, tl.float32), C)
    if pid == 0:
        if ROWS:
            tl.store(scale_ptr, stored)
        if COLUMNS:
            tl.store(tscale_ptr, stored)
    if RECORD:
        record_ptr = record_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        if GIVEN:
            own = amax_bits(tl.max(tl.max(largest_of_groups(x), axis=1), axis=0), x[0])
            tl.atomic_max(record_ptr, own, sem="relaxed")
        elif pid == 0:
            tl.atomic_max(record_ptr, amax, sem="relaxed")
    y0 = scaled(x[0], row, pid % tiles, multiplier, finite, seed_ptr, cols, C, GIVEN)
    y1 = scaled(x[1], row + 1, pid % tiles, multiplier, finite, seed_ptr, cols, C, GIVEN)
    y2 = scaled(x[2], row + 2, pid % tiles, multiplier, finite, seed_ptr, cols, C, GIVEN)
    y3 = scaled(x[3], row + 3, pid % tiles, multiplier, finite, seed_ptr, cols, C, GIVEN)
    y = (y0, y1, y2, y3)
    if ROWS:
        for i in tl.static_range(4):
            to = data_ptr + (row + i).to(tl.int64) * cols + col
            store_tile(to, codes_of(y[i], C), (row + i < rows) & (col < cols), EVEN)
    if COLUMNS:
        word = codes_in_word(y, C)
        if WORDS:
            to = tdata_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + col.to(tl.int64) * fours + four
            store_tile(to, word, (four < fours) & (col < cols), EVEN)
        else:
            to = tdata_ptr + col.to(tl.int64) * rows + four * 4
            for i in tl.static_range(4):
                tl.store(to + i, ((word >> (8 * i)) & 0xFF).to(tl.uint8), mask=(four * 4 + i < rows) & (col < cols))

"""A matrix of bfloat16 as row-scaled E4M3, and the exponents of its columns for the cast of its transpose: one read.

The rows are bitwise those of ``row_scaled.cast_to_rows``, the exponents of columns are the words of
``row_scaled_exponents.exponents_of_both``. A row stays in registers until its scale is known; beside it is the amax of
each column so far. The terms are those of the glossary in ``numerics/row_scaled.py``.
"""

import triton
import triton.language as tl

from .quantize import block_scales, load_tile
from .row_scaled_exponents import exponent_words, in_tile, row_scale_of_word
from .row_scaled_rescale import UNCHANGED_EXPONENT, rescale_two, shift_word
from .row_scaled_sub_byte import e4m3_row, rounded_word, shift_power
from .row_scaled_tile_map import locate_tile
from .words import MAGNITUDES, larger, largest, row_codes


@triton.jit
def codes_of_rows(word, stored, multiplier, finite, row_exponent, C: tl.constexpr, R: tl.constexpr):
    """Rescaled codes of words (BM, BK), in pairs. ``row_exponent`` is (BM, 1), as of ``shift_word``; what is known of
    blocks is (BM, NB)."""
    BK: tl.constexpr = word.shape[1]
    multiplier = over_blocks(multiplier, BK)
    if C.bits < 8:
        power = over_blocks(shift_power(stored, row_exponent, C, R), BK)
        return e4m3_row(rounded_word(word, multiplier, multiplier, power, power, word, word, C), R)
    else:
        code = row_codes(word, multiplier, C)
        if C.float8 == "":
            code = tl.where(over_blocks(finite.to(tl.int32), BK) != 0, code, C.nan_code * 0x101).to(tl.int16)
        return rescale_two(code, over_blocks(shift_word(stored, row_exponent, C, R), BK), C, R)


@triton.jit
def over_blocks(t, BK: tl.constexpr):
    """Repeat the value of each block (BM, NB) for its words: (BM, BK)."""
    BM: tl.constexpr = t.shape[0]
    NB: tl.constexpr = t.shape[1]
    return tl.reshape(tl.broadcast_to(t[:, :, None], (BM, NB, BK // NB)), (BM, BK))


@triton.jit
def rows_and_column_exponents(
    x_ptr, column_ptr, codes_ptr, row_scale_ptr, flags_ptr, scale_ptr, tile_map_ptr, count, rows, words, stride,
    scale_cols,
    C: tl.constexpr, R: tl.constexpr, HIGH: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """x (all rows, words) int32; a program takes a block of rows of a tile of HIGH rows, BM at a time; BK words are a
    whole row. column_ptr (count, 2 * words): exponent words. ``tile_map_ptr``, ``rows`` and PAD: see ``locate_tile``,
    of ``count`` matrices. EVEN: all tiles are whole; WIDE: a row has BK words."""
    NB: tl.constexpr = 2 * BK // C.block
    BLOCKS: tl.constexpr = HIGH // C.block
    tile = locate_tile(tl.program_id(0) // BLOCKS, tile_map_ptr, rows, HIGH, PAD)
    rows_before = tl.program_id(0) % BLOCKS * C.block
    rows_left = tl.minimum(tile.rows_left - rows_before, C.block)
    if rows_left <= 0:
        return
    first_row = tile.first_row + rows_before
    col, block, line = tl.arange(0, BK)[None, :], tl.arange(0, NB)[None, :], tl.arange(0, BM)
    at = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + first_row.to(tl.int64) * stride + col
    to = codes_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + first_row.to(tl.int64) * words + col
    down = line[:, None]
    following = load_tile(at + down * stride, in_tile(down, rows_left, col, words, WIDE), EVEN)
    column_amax = tl.zeros((BM, BK), tl.int32)
    for start in range(0, C.block, BM):
        word, row, down = following, first_row + start + line, start + line[:, None]
        following = tl.load(
            at + (down + BM) * stride, mask=in_tile(down + BM, rows_left, col, words, WIDE), other=0
        )  # in flight while this row is cast
        magnitude = word & MAGNITUDES
        column_amax = larger(column_amax, magnitude, C)
        pair = largest(tl.reshape(magnitude, (BM, NB, C.block // 2)), 2, C)
        bits = tl.maximum(pair << 16, pair & 0x7FFF0000)
        stored, multiplier, _, finite = block_scales(bits, tl.full((), 1.0, tl.float32), C)
        exponent_word = tl.max(exponent_words(bits, bits, C, R), axis=1)
        row_exponent, out_of_range, scale = row_scale_of_word(exponent_word, R)
        row_exponent = tl.where(out_of_range, UNCHANGED_EXPONENT, row_exponent)[:, None]
        code = codes_of_rows(word, stored, multiplier, finite, row_exponent, C, R)
        tl.store(to + down * words, code, mask=in_tile(down, rows_left, col, words, WIDE))
        inside = start + line < rows_left
        tl.store(row_scale_ptr + row, scale, mask=inside)
        tl.store(flags_ptr + row, out_of_range.to(tl.uint8), mask=inside)
        of_blocks = scale_ptr + row[:, None].to(tl.int64) * scale_cols + block
        tl.store(of_blocks, stored, mask=(inside & out_of_range)[:, None] & (block < scale_cols))
    pair = largest(column_amax, 0, C)
    low, high = pair << 16, pair & 0x7FFF0000
    pairs = tl.arange(0, BK)
    inside = (pairs < words) & (tile.matrix < count)
    to_column = column_ptr + tile.matrix * (2 * words) + 2 * pairs
    tl.atomic_max(to_column, exponent_words(low, low, C, R), mask=inside, sem="relaxed")
    tl.atomic_max(to_column + 1, exponent_words(high, high, C, R), mask=inside, sem="relaxed")

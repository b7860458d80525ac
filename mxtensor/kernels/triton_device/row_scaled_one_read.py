"""A matrix of bfloat16 as row-scaled E4M3, and the extremes of its columns for the cast of its transpose: one read.

The rows are bitwise those of ``row_scaled.cast_to_rows``, the extremes those of ``row_scaled_both.extremes_of_both``.
A row stays in registers until its scale is known; beside it are the largest magnitudes of each column so far.
"""

import triton
import triton.language as tl

from .quantize import block_scales, load_tile
from .row_scaled_both import decided, extreme_words, in_tile
from .row_scaled_few_bits import e4m3_row, power_of_shift, rounded_word
from .row_scaled_moved import OWN_TOP, moved_two, shift_word
from .row_scaled_places import place
from .words import MAGNITUDES, larger, largest, row_codes


@triton.jit
def codes_of_rows(word, stored, multiplier, finite, top, C: tl.constexpr, R: tl.constexpr):
    """Codes of words (BM, BK), in pairs, under the exponents of their rows (BM, 1); the rest is of blocks (BM, NB)."""
    BK: tl.constexpr = word.shape[1]
    multiplier = over_blocks(multiplier, BK)
    if C.bits < 8:
        power = over_blocks(power_of_shift(stored, top, C, R), BK)
        return e4m3_row(rounded_word(word, multiplier, multiplier, power, power, word, word, C), R)
    else:
        code = row_codes(word, multiplier, C)
        if C.float8 == "":
            code = tl.where(over_blocks(finite.to(tl.int32), BK) != 0, code, C.nan_code * 0x101).to(tl.int16)
        return moved_two(code, over_blocks(shift_word(stored, top, C, R), BK), C, R)


@triton.jit
def over_blocks(t, BK: tl.constexpr):
    """Repeat the value of each block (BM, NB) for its words: (BM, BK)."""
    BM: tl.constexpr = t.shape[0]
    NB: tl.constexpr = t.shape[1]
    return tl.reshape(tl.broadcast_to(t[:, :, None], (BM, NB, BK // NB)), (BM, BK))


@triton.jit
def rows_and_extremes(
    x_ptr, column_ptr, codes_ptr, row_scale_ptr, beyond_ptr, scale_ptr, places_ptr, count, rows, words, stride,
    scale_cols,
    C: tl.constexpr, R: tl.constexpr, HIGH: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """x (all rows, words) int32; a program takes a block of rows of a tile of HIGH rows, BM at a time; BK words are a
    whole row. column_ptr (count, 2 * words). ``places_ptr`` to ``rows`` and PAD: see ``place``, of ``count`` matrices.
    EVEN: all tiles are whole; WIDE: a row has BK words."""
    NB: tl.constexpr = 2 * BK // C.block
    BLOCKS: tl.constexpr = HIGH // C.block
    matrix, _inner, first, there, _to, _left = place(tl.program_id(0) // BLOCKS, places_ptr, rows, HIGH, PAD)
    before = tl.program_id(0) % BLOCKS * C.block
    there = tl.minimum(there - before, C.block)
    if there <= 0:
        return
    first += before
    col, block, line = tl.arange(0, BK)[None, :], tl.arange(0, NB)[None, :], tl.arange(0, BM)
    at = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + first.to(tl.int64) * stride + col
    to = codes_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + first.to(tl.int64) * words + col
    down = line[:, None]
    following = load_tile(at + down * stride, in_tile(down, there, col, words, WIDE), EVEN)
    most = tl.zeros((BM, BK), tl.int32)
    for start in range(0, C.block, BM):
        word, row, down = following, first + start + line, start + line[:, None]
        following = tl.load(
            at + (down + BM) * stride, mask=in_tile(down + BM, there, col, words, WIDE), other=0
        )  # is under way while this row is cast
        magnitude = word & MAGNITUDES
        most = larger(most, magnitude, C)
        pair = largest(tl.reshape(magnitude, (BM, NB, C.block // 2)), 2, C)
        bits = tl.maximum(pair << 16, pair & 0x7FFF0000)
        stored, multiplier, _, finite = block_scales(bits, tl.full((), 1.0, tl.float32), C)
        top, beyond, scale = decided(tl.max(extreme_words(bits, bits, C, R), axis=1), R)
        own = tl.where(beyond, OWN_TOP, top)[:, None]
        code = codes_of_rows(word, stored, multiplier, finite, own, C, R)
        tl.store(to + down * words, code, mask=in_tile(down, there, col, words, WIDE))
        inside = start + line < there
        tl.store(row_scale_ptr + row, scale, mask=inside)
        tl.store(beyond_ptr + row, beyond.to(tl.uint8), mask=inside)
        of_blocks = scale_ptr + row[:, None].to(tl.int64) * scale_cols + block
        tl.store(of_blocks, stored, mask=(inside & beyond)[:, None] & (block < scale_cols))
    pair = largest(most, 0, C)
    low, high = pair << 16, pair & 0x7FFF0000
    pairs = tl.arange(0, BK)
    inside = (pairs < words) & (matrix < count)
    own_column = column_ptr + matrix * (2 * words) + 2 * pairs
    tl.atomic_max(own_column, extreme_words(low, low, C, R), mask=inside, sem="relaxed")
    tl.atomic_max(own_column + 1, extreme_words(high, high, C, R), mask=inside, sem="relaxed")

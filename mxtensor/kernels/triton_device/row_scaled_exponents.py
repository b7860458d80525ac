"""The exponents of the rows and columns of a matrix, for its cast to row-scaled E4M3, and the row scales that follow.

An exponent is collected as an int32 word by atomic max: the largest biased exponent + 1 of the nonzero blocks of a row
or column, 0 if there is none, NOT_FINITE if a block is not finite. The terms are those of the glossary in
``numerics/row_scaled.py``; the range is unlimited. Values are read as words of two bfloat16 columns.
"""

import triton
import triton.language as tl

from .elements import float_of
from .quantize import block_scales, load_tile
from .row_scaled import choose_row_scale, exponent_of
from .row_scaled_rescale import UNCHANGED_EXPONENT
from .row_scaled_tile_map import locate_tile
from .words import MAGNITUDES, largest

NOT_FINITE = tl.constexpr(1 << 20)

# ---------------------------------------------------------------------------------------------- collecting exponents


@triton.jit
def exponent_words(bits, line_bits, C: tl.constexpr, R: tl.constexpr):
    """The exponent words of blocks with these amax bits. ``line_bits`` are the amax bits of the line (row or column) of
    the block, which differ in square blocks: its word is 0 if they give a code of zero."""
    stored, multiplier, _, finite = block_scales(bits, tl.full((), 1.0, tl.float32), C)
    exponent, _special = exponent_of(stored, C)
    nonzero = finite & (float_of(line_bits) * multiplier > R.half_smallest)
    return tl.where(finite, tl.where(nonzero, exponent + 1, 0), NOT_FINITE)


@triton.jit
def in_tile(row, rows, col, cols, WIDE: tl.constexpr):
    """Whether a value exists: one of ``rows`` rows and, unless all columns do (WIDE), of ``cols`` columns."""
    if WIDE:
        return row < rows
    else:
        return (row < rows) & (col < cols)


@triton.jit
def exponents_of_both(
    x_ptr, row_ptr, column_ptr, tile_map_ptr, count, rows, words, stride,
    C: tl.constexpr, R: tl.constexpr, HIGH: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, PAD: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """x (all rows, words) int32; a program takes HIGH rows and BK words. row_ptr (all rows,), column_ptr (count,
    2 * words): exponent words. ``tile_map_ptr``, ``rows`` and PAD: see ``locate_tile``, of ``count`` matrices. ROWS:
    those of rows, too. EVEN: all tiles are whole; WIDE: all have whole rows.

    Tiles come from the end of the matrix to its start: what wrote the matrix left its end in the L2 cache, and this
    pass leaves the start there for the cast, which begins with it."""
    tiles = tl.cdiv(words, BK)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    down, right = program // tiles, program % tiles
    tile = locate_tile(down, tile_map_ptr, rows, HIGH, PAD)
    if tile.rows_left <= 0:
        return
    row, col = tl.arange(0, HIGH)[:, None], right * BK + tl.arange(0, BK)[None, :]
    tile_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + tile.first_row.to(tl.int64) * stride
    tile_ptr += row * stride + col
    word = load_tile(tile_ptr, in_tile(row, tile.rows_left, col, words, WIDE), EVEN) & MAGNITUDES
    NB: tl.constexpr = 2 * BK // C.block
    HB: tl.constexpr = HIGH // C.block
    pair = largest(tl.reshape(word, (HB, C.block, BK)), 1, C)
    low, high = pair << 16, pair & 0x7FFF0000
    low_block, high_block = low, high
    if SQUARE:
        block = tl.max(tl.reshape(tl.maximum(low, high), (HB, NB, C.block // 2)), axis=2)
        low_block = tl.reshape(tl.broadcast_to(block[:, :, None], (HB, NB, C.block // 2)), (HB, BK))
        high_block = low_block
    if ROWS:
        row_amax = largest(tl.reshape(word, (HIGH, NB, C.block // 2)), 2, C)
        row_amax = tl.maximum(row_amax << 16, row_amax & 0x7FFF0000)
        block_amax = row_amax
        if SQUARE:
            block_amax = tl.reshape(tl.broadcast_to(block[:, None, :], (HB, C.block, NB)), (HIGH, NB))
        at = tl.arange(0, HIGH)
        row_word = tl.max(exponent_words(block_amax, row_amax, C, R), axis=1)
        tl.atomic_max(row_ptr + tile.first_row + at, row_word, mask=at < tile.rows_left, sem="relaxed")
    low_word, high_word = exponent_words(low_block, low, C, R), exponent_words(high_block, high, C, R)
    at = 2 * (right * BK + tl.arange(0, BK))
    inside = (right * BK + tl.arange(0, BK) < words) & (tile.matrix < count)
    to = column_ptr + tile.matrix * (2 * words) + at
    tl.atomic_max(to, tl.max(low_word, axis=0), mask=inside, sem="relaxed")
    tl.atomic_max(to + 1, tl.max(high_word, axis=0), mask=inside, sem="relaxed")


# ---------------------------------------------------------------------------------------------- row scales of exponents


@triton.jit
def row_scale_of_word(word, R: tl.constexpr):
    """``choose_row_scale`` for rows with these exponent words: (row exponent, whether out of range, row scale)."""
    special = tl.where(word >= NOT_FINITE, 2, 0)
    highest = tl.where(word >= NOT_FINITE, 127, word) - 1
    return choose_row_scale(highest, highest, special, R)


@triton.jit
def load_row_scale(exponents_ptr, at, inside, R: tl.constexpr):
    """``row_scale_of_word`` of rows ``at``."""
    return row_scale_of_word(tl.load(exponents_ptr + at, mask=inside, other=0), R)


@triton.jit
def load_row_exponent(exponents_ptr, at, inside, R: tl.constexpr):
    """The exponents of rows ``at``; UNCHANGED_EXPONENT for rows out of range."""
    row_exponent, out_of_range, _scale = load_row_scale(exponents_ptr, at, inside, R)
    return tl.where(out_of_range, UNCHANGED_EXPONENT, row_exponent)


@triton.jit
def store_row_scales(exponents_ptr, scale_ptr, flags_ptr, at, inside, R: tl.constexpr):
    """Store the row scales and flags of rows ``at``."""
    _exponent, out_of_range, scale = load_row_scale(exponents_ptr, at, inside, R)
    tl.store(scale_ptr + at, scale, mask=inside)
    tl.store(flags_ptr + at, out_of_range.to(tl.uint8), mask=inside)

"""A matrix of bfloat16 and its transpose as row-scaled E4M3: two reads of the values.

The first read finds exponents. ``rows_and_column_exponents`` casts the rows, too: a row stays in registers until its
scale is known. ``exponents_of_both`` only finds the exponents of rows and columns. The second read,
``cast_both_to_rows``, casts the columns, and the rows if the first has not.

An exponent is collected as an int32 word by atomic max: the largest biased exponent + 1 of the nonzero blocks of a row
or column, 0 if there is none, NOT_FINITE if a block is not finite. The result is bitwise that of
``row_scaled.cast_to_rows`` of the matrix and of its transpose, with unlimited range (``numerics/row_scaled.py``, which
has a glossary). Kernels work on words of two columns, as ``quantize_columns_words``, with blocks of 32 or more values.
E4M3 and E5M2 are cast to codes, which are rescaled; sub-byte elements are rounded and scaled at once.

The matrix is a stack of matrices, each with its own transpose, or one whose rows are in groups: then the transpose has
each group padded, and each group has scales of its own. ``row_scaled_tile_map`` says which rows a program takes.

"low" and "high" are the columns in the low and the high halves of words.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .elements import float_of
from .quantize import block_scales, load_tile, store_tile
from .quantize_columns import amax_pairs, as_matrix, checked_column_codes, for_each_word, in_row_order, over_columns
from .row_scaled import (
    UNCHANGED_EXPONENT,
    choose_row_scale,
    e4m3_row,
    exponent_of,
    rescale_four,
    rescale_two,
    rescaled_column_codes,
    rescaled_row_codes,
    rounded_word,
    shift_power,
    shift_word,
)
from .row_scaled_tile_map import locate_tile
from .words import MAGNITUDES, larger, largest, row_codes

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


# ---------------------------------------------------------------------------------------------- rows first


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


# ---------------------------------------------------------------------------------------------- rows and columns


SPAN = tl.constexpr(32)
"""Rows of a span: four in each of eight threads."""


class Output(NamedTuple):
    """A row-scaled operand that is written; its exponents are read."""

    exponents_ptr: tl.tensor
    """exponent words of its rows"""
    codes_ptr: tl.tensor
    row_scale_ptr: tl.tensor
    flags_ptr: tl.tensor
    scale_ptr: tl.tensor
    """scales of blocks, written in rows out of range only"""
    width: tl.tensor
    """of a row of codes: in pairs rowwise, in fours columnwise"""
    scale_cols: tl.tensor
    """scales in a row"""


@triton.jit
def shift_of_blocks(stored, row_exponent, C: tl.constexpr, R: tl.constexpr):
    """``shift_power`` of blocks with these stored scales, or ``shift_word``."""
    if C.bits < 8:
        return shift_power(stored, row_exponent, C, R)
    else:
        return shift_word(stored, row_exponent, C, R)


# ---------------------------------------------------------------------------------------------- the rows


@triton.jit
def cast_rows(
    word, row, col, tile, right, words, rowwise, square_bits, seed_ptr,
    C: tl.constexpr, R: tl.constexpr, NB: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """Store the codes of one group of rows of words (Q, W, J, V); returns the scales of its blocks (NB, W, J).
    ``square_bits``: with SQUARE the amax bits of the blocks (NB, W, J), which have rows of other groups."""
    Q: tl.constexpr = word.shape[0]
    W: tl.constexpr = word.shape[1]
    J: tl.constexpr = word.shape[2]
    V: tl.constexpr = word.shape[3]
    first_word = right * (Q * V)
    tile_ptr = rowwise.codes_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    tile_ptr += tile.first_row.to(tl.int64) * rowwise.width + first_word
    first_four = first_word // V
    if SQUARE:
        bits = square_bits
    else:
        pair = largest(tl.reshape(largest(word & MAGNITUDES, 3, C), (NB, Q // NB, W, J)), 1, C)
        bits = tl.maximum(pair << 16, pair & 0x7FFF0000)
    stored, multiplier, _, finite = block_scales(bits, tl.full((), 1.0, tl.float32), C)
    line = tl.reshape(row, (1, W, J))
    row_exponent = load_row_exponent(rowwise.exponents_ptr, tile.first_row + line, line < tile.rows_left, R)
    shift = over_columns(shift_of_blocks(stored, row_exponent, C, R), Q)
    if C.bits < 8:
        four = (tile.first_row + line).to(tl.int64) * (rowwise.width // V)
        four += first_four + tl.arange(0, Q)[:, None, None]
        out = rescaled_row_codes(word, over_columns(multiplier, Q), shift, four, seed_ptr, C, R)
    else:
        shape: tl.constexpr = (Q, W, J, V)
        code = row_codes(word, tl.broadcast_to(over_columns(multiplier, Q), shape), C)
        if C.float8 == "":
            code = tl.where(over_columns(finite.to(tl.int32), Q) != 0, code, C.nan_code * 0x101).to(tl.int16)
        out = rescale_two(code, tl.broadcast_to(shift, shape), C, R)
    to = tile_ptr + (row * rowwise.width + col)
    store_tile(to, out, in_tile(row, tile.rows_left, col, words - first_word, WIDE), EVEN)
    return stored


@triton.jit
def cast_rows_of_tile(
    group, row, col, tile, right, words, rowwise, square_bits, seed_ptr,
    C: tl.constexpr, R: tl.constexpr, NB: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """Store the codes of four groups of rows of words (Q, W, J, V), their row scales and flags, and the scales of
    blocks in rows that are out of range. ``right``: the number of the tile in its rows."""
    w0, w1, w2, w3 = group
    s0 = cast_rows(w0, row, col, tile, right, words, rowwise, square_bits, seed_ptr, C, R, NB, EVEN, WIDE, SQUARE)
    row += 1
    s1 = cast_rows(w1, row, col, tile, right, words, rowwise, square_bits, seed_ptr, C, R, NB, EVEN, WIDE, SQUARE)
    row += 1
    s2 = cast_rows(w2, row, col, tile, right, words, rowwise, square_bits, seed_ptr, C, R, NB, EVEN, WIDE, SQUARE)
    row += 1
    s3 = cast_rows(w3, row, col, tile, right, words, rowwise, square_bits, seed_ptr, C, R, NB, EVEN, WIDE, SQUARE)
    line = tl.arange(0, w0.shape[1] * SPAN)
    each, inside = tile.first_row + line[:, None], line[:, None] < tile.rows_left
    block = right * NB + tl.arange(0, NB)[None, :]
    _exponent, out_of_range, _scale = load_row_scale(rowwise.exponents_ptr, each, inside, R)
    scale_row = each // C.block if SQUARE else each
    to = rowwise.scale_ptr + scale_row.to(tl.int64) * rowwise.scale_cols + block
    tl.store(to, in_row_order((s0, s1, s2, s3)), mask=inside & out_of_range & (block < rowwise.scale_cols))
    if right == 0:
        store_row_scales(
            rowwise.exponents_ptr, rowwise.row_scale_ptr, rowwise.flags_ptr, tile.first_row + line,
            line < tile.rows_left, R,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------- the columns


@triton.jit
def column_amax(group, C: tl.constexpr, NB: tl.constexpr, SQUARE: tl.constexpr):
    """(low, high, square) amax bits of four groups of rows of words (Q, W, J, V): of the blocks of the low and the high
    columns (Q, W / G, V) and, with SQUARE, of the blocks of rows (NB, W, J)."""
    Q: tl.constexpr = group[0].shape[0]
    W: tl.constexpr = group[0].shape[1]
    J: tl.constexpr = group[0].shape[2]
    V: tl.constexpr = group[0].shape[3]
    G: tl.constexpr = C.block // SPAN
    pair = amax_pairs(group, C)
    low_bits, high_bits, square_bits = pair << 16, pair & 0x7FFF0000, pair
    if SQUARE:
        B: tl.constexpr = W // G
        square = tl.max(tl.reshape(tl.max(tl.maximum(low_bits, high_bits), axis=2), (NB, Q // NB, B)), axis=1)
        low_bits = tl.reshape(tl.broadcast_to(square[:, None, :], (NB, Q // NB, B)), (Q, B))
        low_bits = tl.broadcast_to(low_bits[:, :, None], (Q, B, V))
        high_bits = low_bits
        square_bits = tl.reshape(tl.broadcast_to(square[:, :, None], (NB, B, G)), (NB, W))
        square_bits = tl.broadcast_to(square_bits[:, :, None], (NB, W, J))
    return low_bits, high_bits, square_bits


@triton.jit
def column_exponents(
    low_stored, high_stored, column, cols, tile, first_tcolumn, in_matrix, columnwise,
    C: tl.constexpr, R: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """Exponents of the low columns ``column`` (Q, 1, V) and of the high ones beside them; UNCHANGED_EXPONENT for those
    out of range, of which the scales of blocks (Q, W / G, V) are stored."""
    BLOCKS: tl.constexpr = low_stored.shape[1]
    of_matrix, known = tile.matrix * cols + column, (column < cols) & in_matrix
    low_exponent, low_out_of_range, _s0 = load_row_scale(columnwise.exponents_ptr, of_matrix, known, R)
    high_exponent, high_out_of_range, _s1 = load_row_scale(columnwise.exponents_ptr, of_matrix + 1, known, R)
    block = tl.arange(0, BLOCKS)[None, :, None]
    inside = known & (block * C.block < tile.cols_left)
    scale_row = first_tcolumn + column
    if SQUARE:
        scale_row = scale_row // C.block
    to = columnwise.scale_ptr + scale_row.to(tl.int64) * columnwise.scale_cols + (tile.to_col // C.block + block)
    tl.store(to, low_stored, mask=inside & low_out_of_range)
    tl.store(to if SQUARE else to + columnwise.scale_cols, high_stored, mask=inside & high_out_of_range)
    low_exponent = tl.where(low_out_of_range, UNCHANGED_EXPONENT, low_exponent)
    high_exponent = tl.where(high_out_of_range, UNCHANGED_EXPONENT, high_exponent)
    return low_exponent, high_exponent


@triton.jit
def cast_columns(
    group, low, high, low_shift, high_shift, low_finite, high_finite, four, fours, seed_ptr,
    C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Rescaled codes of four groups of rows of words (Q, W, J, V): an int32 of the low columns of four rows, and one of
    the high columns. ``low``, ``high``: their multipliers; ``four``: the number of the four low codes in the operand of
    the transpose, whose rows have ``fours`` of them."""
    if C.bits < 8:
        return rescaled_column_codes(group, low, high, low_shift, high_shift, four, four + fours, seed_ptr, C, R)
    else:
        low_code, high_code = checked_column_codes(group, low, high, low_finite, high_finite, C)
        return rescale_four(low_code, low_shift, C, R), rescale_four(high_code, high_shift, C, R)


@triton.jit
def store_transposed(
    four, first_word, cols, tile, first_tcolumn, in_matrix, columnwise,
    R: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Store codes (fours of rows, columns of the tile) as rows of the transpose; with the first tile of a matrix the
    row scales and flags of these rows, too."""
    HIGH: tl.constexpr = four.shape[0]
    COLUMNS: tl.constexpr = four.shape[1]
    if PAD > 0:
        four = tl.where(in_matrix, four, 0)
    four_row = tl.arange(0, HIGH)[:, None]
    tile_ptr = columnwise.codes_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tile_ptr += (first_tcolumn + 2 * first_word).to(tl.int64) * columnwise.width + tile.to_col // 16 * 4
    across = tl.arange(0, COLUMNS)[None, :]
    to = tile_ptr + (across * columnwise.width + four_row)
    store_tile(to, four, in_tile(four_row, tile.cols_left // 16 * 4, across, cols - 2 * first_word, WIDE), EVEN)
    if tile.rows_before == 0:
        each = 2 * first_word + tl.arange(0, COLUMNS)
        trow, exists = tile.matrix * cols + each, (each < cols) & in_matrix
        store_row_scales(
            columnwise.exponents_ptr, columnwise.row_scale_ptr, columnwise.flags_ptr, trow, exists, R
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------- both


@triton.jit
def cast_both_to_rows(
    x_ptr, row_exponents_ptr, column_exponents_ptr, codes_ptr, row_scale_ptr, flags_ptr, scale_ptr, tcodes_ptr,
    trow_scale_ptr, tflags_ptr, tscale_ptr, seed_ptr, tile_map_ptr, count, rows, words, stride, width,
    scale_cols, tscale_cols, sixteens,
    C: tl.constexpr, R: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, PAD: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """x (all rows, words) int32, BK words and W spans of 32 rows to a program; ``stride`` and ``width`` are in words
    and in pairs of codes. ``sixteens``: the length of a row of transposed codes over 16. ROWS: the rows are cast, too.

    ``tile_map_ptr``, ``rows`` and PAD: see ``locate_tile``, of ``count`` matrices. Of a stack, codes, scales and flags
    of the transposes come one after the other; of groups, codes and scales of blocks are those of one padded matrix,
    row scales and flags come group by group."""
    V: tl.constexpr = 2
    J: tl.constexpr = SPAN // 4
    NB: tl.constexpr = 2 * BK // C.block
    Q: tl.constexpr = BK // V
    tiles = tl.cdiv(words, BK)
    down, right = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    tile = locate_tile(down, tile_map_ptr, rows, W * SPAN, PAD)
    if tile.matrix > count:
        return
    first_word, fours, cols = right * BK, sixteens * 4, 2 * words
    words_left = words - first_word
    in_matrix = tile.matrix < count if PAD > 0 else True  # of a stack every tile belongs to a matrix
    first_tcolumn = tile.matrix * cols if PAD == 0 else 0  # rows of transposed codes
    rowwise = Output(row_exponents_ptr, codes_ptr, row_scale_ptr, flags_ptr, scale_ptr, width, scale_cols)
    columnwise = Output(column_exponents_ptr, tcodes_ptr, trow_scale_ptr, tflags_ptr, tscale_ptr, fours, tscale_cols)
    j = tl.arange(0, J)[None, None, :, None]
    w = tl.arange(0, W)[None, :, None, None]
    col = tl.arange(0, Q)[:, None, None, None] * V + tl.arange(0, V)[None, None, None, :]
    row = w * SPAN + j * 4
    tile_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (tile.first_row.to(tl.int64) * stride + first_word)
    at = tile_ptr + (row * stride + col)
    w0 = load_tile(at, in_tile(row, tile.rows_left, col, words_left, WIDE), EVEN)
    w1 = load_tile(at + stride, in_tile(row + 1, tile.rows_left, col, words_left, WIDE), EVEN)
    w2 = load_tile(at + 2 * stride, in_tile(row + 2, tile.rows_left, col, words_left, WIDE), EVEN)
    w3 = load_tile(at + 3 * stride, in_tile(row + 3, tile.rows_left, col, words_left, WIDE), EVEN)
    group = (w0, w1, w2, w3)

    low_bits, high_bits, square_bits = column_amax(group, C, NB, SQUARE)
    one = tl.full((), 1.0, tl.float32)
    low_stored, low, _, low_finite = block_scales(low_bits, one, C)
    high_stored, high, _, high_finite = block_scales(high_bits, one, C)
    column = 2 * (first_word + tl.arange(0, Q)[:, None, None] * V + tl.arange(0, V)[None, None, :])
    low_exponent, high_exponent = column_exponents(
        low_stored, high_stored, column, cols, tile, first_tcolumn, in_matrix, columnwise, C, R, SQUARE
    )
    low_shift = shift_of_blocks(low_stored, low_exponent, C, R)
    high_shift = shift_of_blocks(high_stored, high_exponent, C, R)
    shape: tl.constexpr = (Q, W, J, V)
    low, high = for_each_word(low, shape, C), for_each_word(high, shape, C)
    low_shift, high_shift = for_each_word(low_shift, shape, C), for_each_word(high_shift, shape, C)
    number = (first_tcolumn + 2 * (first_word + col)).to(tl.int64) * fours + (tile.to_col // 4 + w * (SPAN // 4) + j)
    low_four, high_four = cast_columns(
        group, low, high, low_shift, high_shift, low_finite, high_finite, number, fours, seed_ptr, C, R
    )
    four = as_matrix(tl.reshape(tl.join(low_four, high_four), (Q, W, J, 2 * V)))
    store_transposed(four, first_word, cols, tile, first_tcolumn, in_matrix, columnwise, R, EVEN, WIDE, PAD)
    if ROWS:
        cast_rows_of_tile(
            group, row, col, tile, right, words, rowwise, square_bits, seed_ptr, C, R, NB, EVEN, WIDE, SQUARE
        )

"""The cast of a matrix of bfloat16 and of its transpose to row-scaled E4M3, once the exponents of both are known.

``row_scaled_exponents`` finds these first. The result is bitwise that of ``row_scaled.cast_to_rows`` of the matrix and
of its transpose, with unlimited range (``numerics/row_scaled.py``, which has a glossary). Both kernels work on words of
two columns, as ``quantize_columns_words``, with blocks of 32 or more values. E4M3 and E5M2 are cast to codes, which are
rescaled (``row_scaled_rescale``); sub-byte elements are rounded and scaled at once (``row_scaled_sub_byte``).

The matrix is a stack of matrices, each with its own transpose, or one whose rows are in groups: then the transpose has
each group padded, and each group has scales of its own. ``row_scaled_tile_map`` says which rows a program takes.

"low" and "high" are the columns in the low and the high halves of words.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .quantize import block_scales, load_tile, store_tile
from .quantize_columns import as_matrix, in_row_order, over_columns
from .quantize_columns_words import amax_pairs, checked_column_codes, for_each_word
from .row_scaled_exponents import in_tile, load_row_exponent, load_row_scale, store_row_scales
from .row_scaled_rescale import UNCHANGED_EXPONENT, rescale_four, rescale_two, shift_word
from .row_scaled_sub_byte import rescaled_column_codes, rescaled_row_codes, shift_power
from .row_scaled_tile_map import locate_tile
from .words import MAGNITUDES, largest, row_codes

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

"""The cast of a matrix of bfloat16 and of its transpose to row-scaled E4M3, once the exponents of both are known.

``row_scaled_exponents`` finds these first. The result is bitwise that of ``row_scaled.cast_to_rows`` of the matrix and
of its transpose, with unlimited range (``numerics/row_scaled.py``, which has a glossary). Both kernels work on words of
two columns, as ``quantize_columns_words``, with blocks of 32 or more values. E4M3 and E5M2 are cast to codes, which are
rescaled (``row_scaled_rescale``); sub-byte elements are rounded and scaled at once (``row_scaled_sub_byte``).

The matrix is a stack of matrices, each with its own transpose, or one whose rows are in groups: then the transpose has
each group padded, and each group has scales of its own. ``row_scaled_tile_map`` says which rows a program takes.

"low" and "high" are the columns in the low and the high halves of words.
"""

import triton
import triton.language as tl

from .quantize import block_scales, load_tile, store_tile
from .quantize_columns import as_matrix, in_row_order, over_columns, over_spans
from .row_scaled_exponents import in_tile, load_row_exponent, load_row_scale, store_row_scales
from .row_scaled_rescale import UNCHANGED_EXPONENT, rescale_four, rescale_two, shift_word
from .row_scaled_sub_byte import rescaled_column_codes, rescaled_row_codes, shift_power
from .row_scaled_tile_map import locate_tile
from .words import MAGNITUDES, column_codes, larger, largest, row_codes

SPAN = tl.constexpr(32)
"""Rows of a span: four in each of eight threads."""

# ---------------------------------------------------------------------------------------------- the rows


@triton.jit
def cast_rows(
    word, row, col, to_ptr, rows, words, width, row_exponents_ptr, first_row, first_four, seed_ptr, square_bits,
    C: tl.constexpr, R: tl.constexpr, NB: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """Store the codes of one group of rows of words (Q, W, J, V); returns the scales of its blocks (NB, W, J).
    ``first_four``: the number of the first four values of the tile, in its row; ``square_bits``: with SQUARE the amax
    bits of the blocks (NB, W, J), which have rows of other groups."""
    Q: tl.constexpr = word.shape[0]
    W: tl.constexpr = word.shape[1]
    J: tl.constexpr = word.shape[2]
    V: tl.constexpr = word.shape[3]
    if SQUARE:
        bits = square_bits
    else:
        pair = largest(tl.reshape(largest(word & MAGNITUDES, 3, C), (NB, Q // NB, W, J)), 1, C)
        bits = tl.maximum(pair << 16, pair & 0x7FFF0000)
    stored, multiplier, _, finite = block_scales(bits, tl.full((), 1.0, tl.float32), C)
    line = tl.reshape(row, (1, W, J))
    row_exponent = load_row_exponent(row_exponents_ptr, first_row + line, line < rows, R)
    if C.bits < 8:
        power = over_columns(shift_power(stored, row_exponent, C, R), Q)
        four = (first_row + line).to(tl.int64) * (width // V) + (first_four + tl.arange(0, Q)[:, None, None])
        out = rescaled_row_codes(word, over_columns(multiplier, Q), power, four, seed_ptr, C, R)
    else:
        shift = shift_word(stored, row_exponent, C, R)
        shape: tl.constexpr = (Q, W, J, V)
        code = row_codes(word, tl.broadcast_to(over_columns(multiplier, Q), shape), C)
        if C.float8 == "":
            code = tl.where(over_columns(finite.to(tl.int32), Q) != 0, code, C.nan_code * 0x101).to(tl.int16)
        out = rescale_two(code, tl.broadcast_to(over_columns(shift, Q), shape), C, R)
    store_tile(to_ptr + (row * width + col), out, in_tile(row, rows, col, words, WIDE), EVEN)
    return stored


@triton.jit
def cast_rows_of_tile(
    w0, w1, w2, w3, row, col, row_exponents_ptr, codes_ptr, row_scale_ptr, flags_ptr, scale_ptr, seed_ptr,
    square_bits, first_row, first_word, rows_left, words_left, right, width, scale_cols,
    C: tl.constexpr, R: tl.constexpr, NB: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """Store the codes of four groups of rows of words (Q, W, J, V), their row scales and flags, and the scales of
    blocks in rows that are out of range. ``right``: the number of the tile in its rows."""
    row_ptr = codes_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + (first_row.to(tl.int64) * width + first_word)
    first_four = first_word // w0.shape[3]
    s0 = cast_rows(
        w0, row, col, row_ptr, rows_left, words_left, width, row_exponents_ptr, first_row, first_four,
        seed_ptr, square_bits, C, R, NB, EVEN, WIDE, SQUARE,
    )  # fmt: skip
    s1 = cast_rows(
        w1, row + 1, col, row_ptr, rows_left, words_left, width, row_exponents_ptr, first_row, first_four,
        seed_ptr, square_bits, C, R, NB, EVEN, WIDE, SQUARE,
    )  # fmt: skip
    s2 = cast_rows(
        w2, row + 2, col, row_ptr, rows_left, words_left, width, row_exponents_ptr, first_row, first_four,
        seed_ptr, square_bits, C, R, NB, EVEN, WIDE, SQUARE,
    )  # fmt: skip
    s3 = cast_rows(
        w3, row + 3, col, row_ptr, rows_left, words_left, width, row_exponents_ptr, first_row, first_four,
        seed_ptr, square_bits, C, R, NB, EVEN, WIDE, SQUARE,
    )  # fmt: skip
    line = tl.arange(0, w0.shape[1] * SPAN)
    tile, inside = first_row + line[:, None], line[:, None] < rows_left
    block = right * NB + tl.arange(0, NB)[None, :]
    _exponent, out_of_range, _scale = load_row_scale(row_exponents_ptr, tile, inside, R)
    scale_row = tile // C.block if SQUARE else tile
    to = scale_ptr + scale_row.to(tl.int64) * scale_cols + block
    tl.store(to, in_row_order(s0, s1, s2, s3), mask=inside & out_of_range & (block < scale_cols))
    if right == 0:
        store_row_scales(row_exponents_ptr, row_scale_ptr, flags_ptr, first_row + line, line < rows_left, R)


# ---------------------------------------------------------------------------------------------- the columns


@triton.jit
def column_amax(w0, w1, w2, w3, C: tl.constexpr, NB: tl.constexpr, SQUARE: tl.constexpr):
    """(low, high, square) amax bits of four groups of rows of words (Q, W, J, V): of the blocks of the low and the high
    columns (Q, W / G, V) and, with SQUARE, of the blocks of rows (NB, W, J)."""
    Q: tl.constexpr = w0.shape[0]
    W: tl.constexpr = w0.shape[1]
    J: tl.constexpr = w0.shape[2]
    V: tl.constexpr = w0.shape[3]
    G: tl.constexpr = C.block // SPAN
    upper, lower = larger(w0 & MAGNITUDES, w1 & MAGNITUDES, C), larger(w2 & MAGNITUDES, w3 & MAGNITUDES, C)
    pair = largest(larger(upper, lower, C), 2, C)
    if G > 1:
        pair = largest(tl.reshape(pair, (Q, W // G, G, V)), 2, C)
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
def shift_of_blocks(stored, row_exponent, C: tl.constexpr, R: tl.constexpr):
    """``shift_power`` of blocks with these stored scales, or ``shift_word``."""
    if C.bits < 8:
        return shift_power(stored, row_exponent, C, R)
    else:
        return shift_word(stored, row_exponent, C, R)


@triton.jit
def nan_of_blocks(code, finite, C: tl.constexpr):
    """Words of four codes (Q, W, J, V), with NaN codes in blocks (Q, W / G, V) that are not finite."""
    G: tl.constexpr = C.block // SPAN
    whole = finite.to(tl.int32)
    if G > 1:
        whole = over_spans(whole, G)
    return tl.where(whole[:, :, None, :] != 0, code, C.nan_code * 0x1010101)


@triton.jit
def for_each_word(t, SHAPE: tl.constexpr, C: tl.constexpr):
    """Repeat the value of each block of columns (Q, W / G, V) for its words: (Q, W, J, V)."""
    G: tl.constexpr = C.block // SPAN
    if G > 1:
        t = over_spans(t, G)
    return tl.broadcast_to(t[:, :, None, :], SHAPE)


@triton.jit
def cast_columns(
    w0, w1, w2, w3, low, high, low_shift, high_shift, low_finite, high_finite, four, fours, seed_ptr,
    C: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Rescaled codes of four groups of rows of words (Q, W, J, V): an int32 of the low columns of four rows, and one of
    the high columns. ``low``, ``high``: their multipliers; ``four``: the number of the four low codes in the operand of
    the transpose, whose rows have ``fours`` of them."""
    if C.bits < 8:
        return rescaled_column_codes(
            w0, w1, w2, w3, low, high, low_shift, high_shift, four, four + fours, seed_ptr, C, R
        )  # fmt: skip
    else:
        low_code, high_code = column_codes(w0, w1, w2, w3, low, high, C)
        if C.float8 == "":
            low_code, high_code = nan_of_blocks(low_code, low_finite, C), nan_of_blocks(high_code, high_finite, C)
        return rescale_four(low_code, low_shift, C, R), rescale_four(high_code, high_shift, C, R)


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
    G: tl.constexpr = C.block // SPAN
    NB: tl.constexpr = 2 * BK // C.block
    Q: tl.constexpr = BK // V
    tiles = tl.cdiv(words, BK)
    down, right = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    matrix, rows_before, first_row, rows_left, to_col, cols_left = locate_tile(down, tile_map_ptr, rows, W * SPAN, PAD)
    if matrix > count:
        return
    first_word, fours, cols = right * BK, sixteens * 4, 2 * words
    words_left = words - first_word
    in_matrix = matrix < count if PAD > 0 else True  # of a stack every tile belongs to a matrix
    first_tcolumn = matrix * cols if PAD == 0 else 0  # rows of transposed codes
    j = tl.arange(0, J)[None, None, :, None]
    w = tl.arange(0, W)[None, :, None, None]
    col = tl.arange(0, Q)[:, None, None, None] * V + tl.arange(0, V)[None, None, None, :]
    row = w * SPAN + j * 4
    tile_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (first_row.to(tl.int64) * stride + first_word)
    at = tile_ptr + (row * stride + col)
    w0 = load_tile(at, in_tile(row, rows_left, col, words_left, WIDE), EVEN)
    w1 = load_tile(at + stride, in_tile(row + 1, rows_left, col, words_left, WIDE), EVEN)
    w2 = load_tile(at + 2 * stride, in_tile(row + 2, rows_left, col, words_left, WIDE), EVEN)
    w3 = load_tile(at + 3 * stride, in_tile(row + 3, rows_left, col, words_left, WIDE), EVEN)

    low_bits, high_bits, square_bits = column_amax(w0, w1, w2, w3, C, NB, SQUARE)
    one = tl.full((), 1.0, tl.float32)
    low_stored, low, _, low_finite = block_scales(low_bits, one, C)
    high_stored, high, _, high_finite = block_scales(high_bits, one, C)
    column = 2 * (first_word + tl.arange(0, Q)[:, None, None] * V + tl.arange(0, V)[None, None, :])
    of_matrix, known = matrix * cols + column, (column < cols) & in_matrix
    low_exponent, low_out_of_range, _s0 = load_row_scale(column_exponents_ptr, of_matrix, known, R)
    high_exponent, high_out_of_range, _s1 = load_row_scale(column_exponents_ptr, of_matrix + 1, known, R)
    block = tl.arange(0, W // G)[None, :, None]
    inside = known & (block * C.block < cols_left)
    scale_row = first_tcolumn + column
    if SQUARE:
        scale_row = scale_row // C.block
    to = tscale_ptr + scale_row.to(tl.int64) * tscale_cols + (to_col // C.block + block)
    tl.store(to, low_stored, mask=inside & low_out_of_range)
    tl.store(to if SQUARE else to + tscale_cols, high_stored, mask=inside & high_out_of_range)
    low_exponent = tl.where(low_out_of_range, UNCHANGED_EXPONENT, low_exponent)
    high_exponent = tl.where(high_out_of_range, UNCHANGED_EXPONENT, high_exponent)
    low_shift = shift_of_blocks(low_stored, low_exponent, C, R)
    high_shift = shift_of_blocks(high_stored, high_exponent, C, R)
    shape: tl.constexpr = (Q, W, J, V)
    low, high = for_each_word(low, shape, C), for_each_word(high, shape, C)
    low_shift, high_shift = for_each_word(low_shift, shape, C), for_each_word(high_shift, shape, C)
    number = (first_tcolumn + 2 * (first_word + col)).to(tl.int64) * fours + (to_col // 4 + w * (SPAN // 4) + j)
    low_four, high_four = cast_columns(
        w0, w1, w2, w3, low, high, low_shift, high_shift, low_finite, high_finite, number, fours, seed_ptr, C, R
    )
    four = as_matrix(tl.reshape(tl.join(low_four, high_four), (Q, W, J, 2 * V)))
    if PAD > 0:
        four = tl.where(in_matrix, four, 0)
    four_row = tl.arange(0, W * J)[:, None]
    transposed_ptr = tcodes_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    transposed_ptr += (first_tcolumn + 2 * first_word).to(tl.int64) * fours + to_col // 16 * 4
    across_four = tl.arange(0, 2 * BK)[None, :]
    pointer = transposed_ptr + (across_four * fours + four_row)
    store_tile(pointer, four, in_tile(four_row, cols_left // 16 * 4, across_four, cols - 2 * first_word, WIDE), EVEN)
    if rows_before == 0:
        each = 2 * first_word + tl.arange(0, 2 * BK)
        trow, exists = matrix * cols + each, (each < cols) & in_matrix
        store_row_scales(column_exponents_ptr, trow_scale_ptr, tflags_ptr, trow, exists, R)
    if ROWS:
        cast_rows_of_tile(
            w0, w1, w2, w3, row, col, row_exponents_ptr, codes_ptr, row_scale_ptr, flags_ptr, scale_ptr, seed_ptr,
            square_bits, first_row, first_word, rows_left, words_left, right, width, scale_cols,
            C, R, NB, EVEN, WIDE, SQUARE,
        )  # fmt: skip

"""A matrix of bfloat16 and its transpose as row-scaled E4M3: one pass for extremes, one to cast.

The result is bitwise that of ``row_scaled.cast_to_rows`` of the matrix and of its transpose. Both kernels work on words
of two columns, as ``quantize_columns_words``, with blocks of 32 or more values. E4M3 and E5M2 are cast to codes, which
are moved (``row_scaled_moved``); elements of fewer bits are rounded and moved at once (``row_scaled_few_bits``).

The matrix is a stack of matrices, each with its own transpose, or one whose rows are in groups: then the transpose has
each group padded, and each group has scales of its own. ``row_scaled_places`` says which rows a program takes.

Extremes are int32 and start as zero: of a row or column the largest of e + 1 over the scales 2^(e - 127) of its blocks
that are not zero; HUGE if a block is not finite. Blocks may be any distance apart (``row_scaled(any_distance)``).
"""

import triton
import triton.language as tl

from .elements import float_of
from .quantize import block_scales, load_tile, store_tile
from .quantize_columns import as_matrix, in_row_order, over_columns, over_spans
from .row_scaled import decide, exponent_of
from .row_scaled_few_bits import column_codes_moved, power_of_shift, row_codes_moved
from .row_scaled_moved import OWN_TOP, moved_four, moved_two, shift_word
from .row_scaled_places import place
from .words import MAGNITUDES, column_codes, larger, largest, row_codes

HUGE = tl.constexpr(1 << 20)

# ---------------------------------------------------------------------------------------------- extremes


@triton.jit
def extreme_words(bits, own, C: tl.constexpr, R: tl.constexpr):
    """e + 1 or HUGE of blocks with these amax bits; 0 where the code of ``own``, the amax of a row of the block, is
    zero."""
    stored, multiplier, _, finite = block_scales(bits, tl.full((), 1.0, tl.float32), C)
    e, _kind = exponent_of(stored, C)
    live = finite & (float_of(own) * multiplier > R.half)
    return tl.where(finite, tl.where(live, e + 1, 0), HUGE)


@triton.jit
def in_tile(row, rows, col, cols, WIDE: tl.constexpr):
    """Whether a value exists: one of ``rows`` rows and, unless all columns do (WIDE), of ``cols`` columns."""
    if WIDE:
        return row < rows
    else:
        return (row < rows) & (col < cols)


@triton.jit
def extremes_of_both(
    x_ptr, row_ptr, column_ptr, places_ptr, count, rows, words, stride,
    C: tl.constexpr, R: tl.constexpr, HIGH: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, PAD: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """x (all rows, words) int32; a program takes HIGH rows and BK words. row_ptr (all rows,), column_ptr (count,
    2 * words). ``places_ptr`` to ``rows`` and PAD: see ``place``, of ``count`` matrices. EVEN: all tiles are whole;
    WIDE: all have whole rows.

    Tiles come from the end of the matrix to its start: what wrote the matrix left its end in the L2 cache, and this
    pass leaves the start there for the cast, which begins with it."""
    tiles = tl.cdiv(words, BK)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    down, right = program // tiles, program % tiles
    matrix, _inner, first, there, _to, _left = place(down, places_ptr, rows, HIGH, PAD)
    if there <= 0:
        return
    row, col = tl.arange(0, HIGH)[:, None], right * BK + tl.arange(0, BK)[None, :]
    tile_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + first.to(tl.int64) * stride + (row * stride + col)
    word = tl.load(tile_ptr) if EVEN else tl.load(tile_ptr, mask=in_tile(row, there, col, words, WIDE), other=0)
    word = word & MAGNITUDES
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
        of_row = largest(tl.reshape(word, (HIGH, NB, C.block // 2)), 2, C)
        of_row = tl.maximum(of_row << 16, of_row & 0x7FFF0000)
        of_block = of_row
        if SQUARE:
            of_block = tl.reshape(tl.broadcast_to(block[:, None, :], (HB, C.block, NB)), (HIGH, NB))
        at = tl.arange(0, HIGH)
        top = tl.max(extreme_words(of_block, of_row, C, R), axis=1)
        tl.atomic_max(row_ptr + first + at, top, mask=at < there, sem="relaxed")
    low_top, high_top = extreme_words(low_block, low, C, R), extreme_words(high_block, high, C, R)
    at = 2 * (right * BK + tl.arange(0, BK))
    inside = (right * BK + tl.arange(0, BK) < words) & (matrix < count)
    to = column_ptr + matrix * (2 * words) + at
    tl.atomic_max(to, tl.max(low_top, axis=0), mask=inside, sem="relaxed")
    tl.atomic_max(to + 1, tl.max(high_top, axis=0), mask=inside, sem="relaxed")


@triton.jit
def decided(extreme, R: tl.constexpr):
    """``decide`` for rows with these extremes: (exponent, whether beyond the bound, row scale)."""
    bad = tl.where(extreme >= HUGE, 2, 0)
    top = tl.where(extreme >= HUGE, 127, extreme) - 1
    return decide(top, top, bad, R)


@triton.jit
def load_decided(extremes_ptr, at, inside, R: tl.constexpr):
    """``decided`` for rows ``at``."""
    return decided(tl.load(extremes_ptr + at, mask=inside, other=0), R)


@triton.jit
def own_or_top(extremes_ptr, at, inside, R: tl.constexpr):
    """The exponent of rows ``at``, or OWN_TOP for rows beyond the bound."""
    top, beyond, _scale = load_decided(extremes_ptr, at, inside, R)
    return tl.where(beyond, OWN_TOP, top)


# ---------------------------------------------------------------------------------------------- the cast


@triton.jit
def cast_rows(
    word, row, col, to_ptr, rows, words, width, row_extremes_ptr, first_row, first_four, seed_ptr, square_bits,
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
    top = own_or_top(row_extremes_ptr, first_row + line, line < rows, R)
    if C.bits < 8:
        power = over_columns(power_of_shift(stored, top, C, R), Q)
        four = (first_row + line).to(tl.int64) * (width // V) + (first_four + tl.arange(0, Q)[:, None, None])
        out = row_codes_moved(word, over_columns(multiplier, Q), power, four, seed_ptr, C, R)
    else:
        shift = shift_word(stored, top, C, R)
        shape: tl.constexpr = (Q, W, J, V)
        code = row_codes(word, tl.broadcast_to(over_columns(multiplier, Q), shape), C)
        if C.float8 == "":
            code = tl.where(over_columns(finite.to(tl.int32), Q) != 0, code, C.nan_code * 0x101).to(tl.int16)
        out = moved_two(code, tl.broadcast_to(over_columns(shift, Q), shape), C, R)
    store_tile(to_ptr + (row * width + col), out, in_tile(row, rows, col, words, WIDE), EVEN)
    return stored


@triton.jit
def store_facts(extremes_ptr, scale_ptr, beyond_ptr, at, inside, R: tl.constexpr):
    """Store the row scales and marks of rows ``at``."""
    _top, beyond, scale = load_decided(extremes_ptr, at, inside, R)
    tl.store(scale_ptr + at, scale, mask=inside)
    tl.store(beyond_ptr + at, beyond.to(tl.uint8), mask=inside)


@triton.jit
def cast_both_to_rows(
    x_ptr, row_extremes_ptr, column_extremes_ptr, codes_ptr, row_scale_ptr, beyond_ptr, scale_ptr, tcodes_ptr,
    trow_scale_ptr, tbeyond_ptr, tscale_ptr, seed_ptr, places_ptr, count, rows, words, stride, width, scale_cols,
    tscale_cols, sixteens,
    C: tl.constexpr, R: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, PAD: tl.constexpr, SQUARE: tl.constexpr,
):  # fmt: skip
    """x (all rows, words) int32, BK words and W spans of 32 rows to a program; ``stride`` and ``width`` are in words
    and in pairs of codes. ``sixteens``: the length of a row of transposed codes over 16. ROWS: the rows are cast, too.

    ``places_ptr`` to ``rows`` and PAD: see ``place``, of ``count`` matrices. Of a stack, codes, scales and marks of the
    transposes come one after the other; of groups, codes and scales of blocks are those of one padded matrix, row
    scales and marks come group by group."""
    V: tl.constexpr = 2
    SPAN: tl.constexpr = 32
    J: tl.constexpr = SPAN // 4
    G: tl.constexpr = C.block // SPAN
    NB: tl.constexpr = 2 * BK // C.block
    Q: tl.constexpr = BK // V
    tiles = tl.cdiv(words, BK)
    down, right = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    matrix, inner, tile_row, there, to_col, left = place(down, places_ptr, rows, W * SPAN, PAD)
    if matrix > count:
        return
    first, fours, cols = right * BK, sixteens * 4, 2 * words
    across = words - first
    live = matrix < count if PAD > 0 else True  # of a stack every tile belongs to a matrix
    before = matrix * cols if PAD == 0 else 0  # rows of transposed codes
    j = tl.arange(0, J)[None, None, :, None]
    w = tl.arange(0, W)[None, :, None, None]
    col = tl.arange(0, Q)[:, None, None, None] * V + tl.arange(0, V)[None, None, None, :]
    row = w * SPAN + j * 4
    tile_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (tile_row.to(tl.int64) * stride + first)
    at = tile_ptr + (row * stride + col)
    w0 = load_tile(at, in_tile(row, there, col, across, WIDE), EVEN)
    w1 = load_tile(at + stride, in_tile(row + 1, there, col, across, WIDE), EVEN)
    w2 = load_tile(at + 2 * stride, in_tile(row + 2, there, col, across, WIDE), EVEN)
    w3 = load_tile(at + 3 * stride, in_tile(row + 3, there, col, across, WIDE), EVEN)

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
    one = tl.full((), 1.0, tl.float32)
    low_stored, low, _, low_finite = block_scales(low_bits, one, C)
    high_stored, high, _, high_finite = block_scales(high_bits, one, C)
    column = 2 * (first + tl.arange(0, Q)[:, None, None] * V + tl.arange(0, V)[None, None, :])
    of_matrix, known = matrix * cols + column, (column < cols) & live
    low_top, low_beyond, _s0 = load_decided(column_extremes_ptr, of_matrix, known, R)
    high_top, high_beyond, _s1 = load_decided(column_extremes_ptr, of_matrix + 1, known, R)
    block = tl.arange(0, W // G)[None, :, None]
    inside = known & (block * C.block < left)
    scale_row = before + column
    if SQUARE:
        scale_row = scale_row // C.block
    to = tscale_ptr + scale_row.to(tl.int64) * tscale_cols + (to_col // C.block + block)
    tl.store(to, low_stored, mask=inside & low_beyond)
    tl.store(to if SQUARE else to + tscale_cols, high_stored, mask=inside & high_beyond)
    low_top, high_top = tl.where(low_beyond, OWN_TOP, low_top), tl.where(high_beyond, OWN_TOP, high_top)
    if C.bits < 8:
        low_shift, high_shift = power_of_shift(low_stored, low_top, C, R), power_of_shift(high_stored, high_top, C, R)
    else:
        low_shift, high_shift = shift_word(low_stored, low_top, C, R), shift_word(high_stored, high_top, C, R)
    if G > 1:
        low, high = over_spans(low, G), over_spans(high, G)
        low_shift, high_shift = over_spans(low_shift, G), over_spans(high_shift, G)
    shape: tl.constexpr = (Q, W, J, V)
    low, high = tl.broadcast_to(low[:, :, None, :], shape), tl.broadcast_to(high[:, :, None, :], shape)
    low_shift = tl.broadcast_to(low_shift[:, :, None, :], shape)
    high_shift = tl.broadcast_to(high_shift[:, :, None, :], shape)
    if C.bits < 8:
        number = (before + 2 * (first + col)).to(tl.int64) * fours + (to_col // 4 + w * (SPAN // 4) + j)
        low_four, high_four = column_codes_moved(
            w0, w1, w2, w3, low, high, low_shift, high_shift, number, number + fours, seed_ptr, C, R
        )
    else:
        low_code, high_code = column_codes(w0, w1, w2, w3, low, high, C)
        if C.float8 == "":
            low_whole, high_whole = low_finite.to(tl.int32), high_finite.to(tl.int32)
            if G > 1:
                low_whole, high_whole = over_spans(low_whole, G), over_spans(high_whole, G)
            low_code = tl.where(low_whole[:, :, None, :] != 0, low_code, C.nan_code * 0x1010101)
            high_code = tl.where(high_whole[:, :, None, :] != 0, high_code, C.nan_code * 0x1010101)
        low_four, high_four = moved_four(low_code, low_shift, C, R), moved_four(high_code, high_shift, C, R)
    four = as_matrix(tl.reshape(tl.join(low_four, high_four), (Q, W, J, 2 * V)))
    if PAD > 0:
        four = tl.where(live, four, 0)
    four_row = tl.arange(0, W * J)[:, None]
    transposed_ptr = tcodes_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    transposed_ptr += (before + 2 * first).to(tl.int64) * fours + to_col // 16 * 4
    across_four = tl.arange(0, 2 * BK)[None, :]
    pointer = transposed_ptr + (across_four * fours + four_row)
    store_tile(pointer, four, in_tile(four_row, left // 16 * 4, across_four, cols - 2 * first, WIDE), EVEN)
    if inner == 0:
        each = 2 * first + tl.arange(0, 2 * BK)
        store_facts(column_extremes_ptr, trow_scale_ptr, tbeyond_ptr, matrix * cols + each, (each < cols) & live, R)
    if ROWS:
        of_rows = row_extremes_ptr
        row_ptr = codes_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + (tile_row.to(tl.int64) * width + first)
        at = first // V
        s0 = cast_rows(
            w0, row, col, row_ptr, there, across, width, of_rows, tile_row, at, seed_ptr, square_bits,
            C, R, NB, EVEN, WIDE, SQUARE,
        )  # fmt: skip
        s1 = cast_rows(
            w1, row + 1, col, row_ptr, there, across, width, of_rows, tile_row, at, seed_ptr, square_bits,
            C, R, NB, EVEN, WIDE, SQUARE,
        )  # fmt: skip
        s2 = cast_rows(
            w2, row + 2, col, row_ptr, there, across, width, of_rows, tile_row, at, seed_ptr, square_bits,
            C, R, NB, EVEN, WIDE, SQUARE,
        )  # fmt: skip
        s3 = cast_rows(
            w3, row + 3, col, row_ptr, there, across, width, of_rows, tile_row, at, seed_ptr, square_bits,
            C, R, NB, EVEN, WIDE, SQUARE,
        )  # fmt: skip
        line = tl.arange(0, W * SPAN)
        tile, inside = tile_row + line[:, None], line[:, None] < there
        block = right * NB + tl.arange(0, NB)[None, :]
        _top, beyond, _scale = load_decided(row_extremes_ptr, tile, inside, R)
        scale_row = tile // C.block if SQUARE else tile
        to = scale_ptr + scale_row.to(tl.int64) * scale_cols + block
        tl.store(to, in_row_order(s0, s1, s2, s3), mask=inside & beyond & (block < scale_cols))
        if right == 0:
            store_facts(row_extremes_ptr, row_scale_ptr, beyond_ptr, tile_row + line, line < there, R)

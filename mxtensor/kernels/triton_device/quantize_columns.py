"""Casts in Triton with blocks along columns, or along columns and rows in one pass over x.

Columnwise codes are stored transposed, columnwise values in the layout of x. A thread has whole columns of a block: 32
rows of 4 neighbouring columns, loaded as four groups of rows, so that the codes of rows 4j to 4j + 3 are in four
registers that become one word. The amax of a column block then needs no other thread, and the transposed store moves
words through shared memory, a quarter as many as codes.

``quantize_columns_words`` does it from bfloat16 to float8 on words of two columns: half the registers, twice the
programs. ``quantize_transposed`` has one scale for the tensor: codes, the same codes transposed, and the amax for a
later scale.
"""

import triton
import triton.language as tl

from .elements import (
    E4M3_WORD,
    E5M2_WORD,
    INFINITY_BITS,
    amax_bits,
    bits_of,
    from_codes,
    magnitude_bits,
    scales_of,
    signed,
    to_codes,
    widened,
)
from .quantize import (
    block_scales,
    encode_scale,
    finish_codes,
    in_fours,
    load_tile,
    nothing,
    random_words,
    rounded,
    scale_offset,
    store_codes,
    store_tile,
    words_of_tile,
)
from .words import MAGNITUDES, column_codes, larger, largest, round_words, row_codes, words_of_scale


@triton.jit
def word_of(y, finite, C: tl.constexpr):
    """The codes of four rows y, C.bits each, in one int32, the first in the low bits."""
    y0, y1, y2, y3 = y
    if C.float8 != "":
        y0, y1, y2, y3 = signed(y0, C), signed(y1, C), signed(y2, C), signed(y3, C)
    if C.float8 == "e4m3":
        return tl.inline_asm_elementwise(E4M3_WORD, "=r,f,f,f,f", [y0, y1, y2, y3], tl.int32, is_pure=True, pack=1)
    elif C.float8 == "e5m2":
        return tl.inline_asm_elementwise(E5M2_WORD, "=r,f,f,f,f", [y0, y1, y2, y3], tl.int32, is_pure=True, pack=1)
    else:
        c0 = finish_codes(to_codes(y0, C), finite, C).to(tl.int32)
        c1 = finish_codes(to_codes(y1, C), finite, C).to(tl.int32)
        c2 = finish_codes(to_codes(y2, C), finite, C).to(tl.int32)
        c3 = finish_codes(to_codes(y3, C), finite, C).to(tl.int32)
        return c0 | (c1 << C.bits) | (c2 << (2 * C.bits)) | (c3 << (3 * C.bits))


@triton.jit
def load_group(x_ptr, row, col, rows, cols, stride, EVEN: tl.constexpr):
    """One group of rows of x at ``row`` and ``col``."""
    return load_tile(x_ptr + row.to(tl.int64) * stride + col, (row < rows) & (col < cols), EVEN)


@triton.jit
def load_groups(x_ptr, row, col, rows, cols, stride, EVEN: tl.constexpr):
    """The four groups of rows of x at ``row``, ``row`` + 1, ``row`` + 2 and ``row`` + 3."""
    x0 = load_group(x_ptr, row, col, rows, cols, stride, EVEN)
    x1 = load_group(x_ptr, row + 1, col, rows, cols, stride, EVEN)
    x2 = load_group(x_ptr, row + 2, col, rows, cols, stride, EVEN)
    x3 = load_group(x_ptr, row + 3, col, rows, cols, stride, EVEN)
    return x0, x1, x2, x3


@triton.jit
def largest_of_groups(x):
    """The largest magnitude bits of the values in the same place of four groups of rows."""
    upper = tl.maximum(magnitude_bits(x[0]), magnitude_bits(x[1]))
    lower = tl.maximum(magnitude_bits(x[2]), magnitude_bits(x[3]))
    return tl.maximum(upper, lower)


@triton.jit
def as_matrix(t):
    """(Q, W, J, V) of a group of rows as a matrix (W * J, Q * V) with the rows in order."""
    Q: tl.constexpr = t.shape[0]
    W: tl.constexpr = t.shape[1]
    J: tl.constexpr = t.shape[2]
    V: tl.constexpr = t.shape[3]
    return tl.reshape(tl.permute(t, (1, 2, 0, 3)), (W * J, Q * V))


@triton.jit
def over_spans(t, G: tl.constexpr):
    """Repeat the value of each block (Q, W / G, V) for the G spans of the block: (Q, W, V)."""
    Q: tl.constexpr = t.shape[0]
    B: tl.constexpr = t.shape[1]
    V: tl.constexpr = t.shape[2]
    return tl.reshape(tl.broadcast_to(t[:, :, None, :], (Q, B, G, V)), (Q, B * G, V))


@triton.jit
def over_columns(t, Q: tl.constexpr):
    """Repeat the value of each block of a row (NB, W, J) for the columns of the block: (Q, W, J, 1)."""
    NB: tl.constexpr = t.shape[0]
    W: tl.constexpr = t.shape[1]
    J: tl.constexpr = t.shape[2]
    return tl.reshape(tl.broadcast_to(t[:, None, :, :], (NB, Q // NB, W, J)), (Q, W, J, 1))


@triton.jit
def store_values(code, scale, row, col, out_ptr, rows, cols, stride, C: tl.constexpr, EVEN: tl.constexpr):
    """Store the values of codes of one byte times ``scale``, which broadcasts, in the layout of x."""
    value = (from_codes(code, C) * scale).to(out_ptr.dtype.element_ty)
    store_tile(out_ptr + row.to(tl.int64) * stride + col, value, (row < rows) & (col < cols), EVEN)


# ---------------------------------------------------------------------------------------------- the columns


@triton.jit
def scales_of_whole_columns(col, cols, down, tscale_ptr, amax_ptr, encode, C: tl.constexpr, COLUMNS: tl.constexpr):
    """(multiplier, value, finite), each (Q, 1, V), of the scales of columns ``col``, whose amax bits are in
    ``amax_ptr``; the programs of the first tiles (``down`` = 0) store the scales of codes."""
    Q: tl.constexpr = col.shape[0]
    V: tl.constexpr = col.shape[3]
    column = tl.reshape(col, (Q, 1, V))
    amax = tl.load(amax_ptr + column, mask=column < cols, other=0) & 0x7FFFFFFF
    stored, multiplier, value, finite = block_scales(amax, encode, C)
    if COLUMNS == "codes" and down == 0:
        tl.store(tscale_ptr + column, stored, mask=column < cols)
    return multiplier, value, finite


@triton.jit
def scales_of_blocks(
    x, column, cols, down, tscale_ptr, tscale_cols, encode, C: tl.constexpr, G: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """(multiplier, value, finite), each (Q, W, V), of the scales of blocks along columns; stores the scales of codes.
    x: four groups of rows (Q, W, J, V); ``column``: (1, BK); ``down``: the number of the tile in its columns."""
    Q: tl.constexpr = x[0].shape[0]
    BLOCKS: tl.constexpr = x[0].shape[1] // G
    V: tl.constexpr = x[0].shape[3]
    amax = amax_bits(tl.max(largest_of_groups(x), axis=2), x[0])
    if G > 1:
        amax = tl.max(tl.reshape(amax, (Q, BLOCKS, G, V)), axis=2)
    stored, multiplier, value, finite = block_scales(amax, encode, C)
    if COLUMNS == "codes":
        block = down * BLOCKS + tl.arange(0, BLOCKS)[:, None]
        to = scale_offset(column, block, tscale_cols, False)
        inside = (column < cols) & (block < tscale_cols)
        store_tile(tscale_ptr + to, tl.reshape(tl.permute(stored, (1, 0, 2)), (BLOCKS, Q * V)), inside, EVEN)
    if G > 1:
        multiplier, finite = over_spans(multiplier, G), over_spans(finite.to(tl.int32), G) != 0
        value = over_spans(value, G)
    return multiplier, value, finite


@triton.jit
def store_transposed(
    word, column, down, tdata_ptr, rows, cols, tdata_stride, words, C: tl.constexpr, EVEN: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Store words (W * J, BK), each with the codes of four rows of a ``column``, as rows of the transpose."""
    HIGH: tl.constexpr = word.shape[0]
    word_row = down * HIGH + tl.arange(0, HIGH)[:, None]
    if WORDS and C.bits != 6:
        to = column.to(tl.int64) * words + word_row
        inside = (word_row < words) & (column < cols)
        if C.bits == 8:
            store_tile(tdata_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + to, word, inside, EVEN)
        else:
            store_tile(tdata_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + to, word.to(tl.int16), inside, EVEN)
    else:
        BYTES: tl.constexpr = C.bits // 2
        to = tdata_ptr + column.to(tl.int64) * tdata_stride + word_row * BYTES
        for i in tl.static_range(BYTES):
            # A byte exists if the first row with a bit in it exists; 6-bit codes come in groups of three bytes.
            inside = (word_row * 4 + (8 * i // C.bits if C.bits != 6 else 0) < rows) & (column < cols)
            tl.store(to + i, ((word >> (8 * i)) & 0xFF).to(tl.uint8), mask=inside)


@triton.jit
def store_column_values(
    x, word, row, col, multiplier, value, finite, out_ptr, rows, cols, stride, C: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store the columnwise values of one group of rows, x (Q, W, J, V) at ``row`` and ``col``."""
    y = rounded(widened(x) * multiplier, word, C)
    store_values(finish_codes(to_codes(y, C), finite, C), value, row, col, out_ptr, rows, cols, stride, C, EVEN)


# ---------------------------------------------------------------------------------------------- the rows


@triton.jit
def store_rows(
    x, row, col, tile, data_ptr, encode, seed_ptr, rows, cols, data_stride,
    C: tl.constexpr, NB: tl.constexpr, VALUES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store the rowwise codes (VALUES: values) of one group of rows x (Q, W, J, V); returns its scales (NB, W, J)."""
    Q: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    J: tl.constexpr = x.shape[2]
    largest = tl.max(tl.reshape(tl.max(magnitude_bits(x), axis=3), (NB, Q // NB, W, J)), axis=1)
    stored, multiplier, value, finite = block_scales(amax_bits(largest, x), encode, C)
    y = widened(x) * over_columns(multiplier, Q)
    if C.stochastic:
        four = tile * Q + tl.arange(0, Q)[:, None, None]  # V = 4 columns in a thread
        at = tl.reshape(row, (1, W, J)).to(tl.int64) * tl.cdiv(cols, 4) + four
        r0, r1, r2, r3 = random_words(at + tl.max(nothing(x), axis=3), seed_ptr, 0, C)
        y = rounded(y, tl.reshape(in_fours(r0, r1, r2, r3), (Q, W, J, 4)), C)
    code = finish_codes(to_codes(y, C), over_columns(finite.to(tl.int32), Q) != 0, C)
    if VALUES:
        store_values(code, over_columns(value, Q), row, col, data_ptr, rows, cols, data_stride, C, EVEN)
    elif C.bits == 8:
        store_tile(data_ptr + row.to(tl.int64) * data_stride + col, code, (row < rows) & (col < cols), EVEN)
    else:
        flat_row = tl.reshape(row, (W * J, 1))
        start = flat_row.to(tl.int64) * data_stride
        store_codes(as_matrix(code), data_ptr, start, tile, flat_row < rows, cols, C, EVEN)
    return stored


@triton.jit
def in_row_order(stored):
    """The scales (NB, W, J) of the four groups as (rows of the tile, NB): row w * 4J + 4j + i is from group i."""
    NB: tl.constexpr = stored[0].shape[0]
    W: tl.constexpr = stored[0].shape[1]
    J: tl.constexpr = stored[0].shape[2]
    four = tl.join(tl.join(stored[0], stored[1]), tl.join(stored[2], stored[3]))  # (NB, W, J, i % 2, i // 2)
    return tl.reshape(tl.permute(four, (1, 2, 4, 3, 0)), (W * J * 4, NB))


@triton.jit
def store_row_scales(stored, first_row, right, scale_ptr, rows, scale_cols, EVEN: tl.constexpr):
    """Store the scales (NB, W, J) of the blocks of rows of a tile, from ``first_row`` on; ``right``: the number of the
    tile in its rows."""
    NB: tl.constexpr = stored[0].shape[0]
    HIGH: tl.constexpr = stored[0].shape[1] * stored[0].shape[2] * 4
    row = first_row + tl.arange(0, HIGH)[:, None]
    block = right * NB + tl.arange(0, NB)[None, :]
    to = scale_offset(row, block, scale_cols, False)
    store_tile(scale_ptr + to, in_row_order(stored), (row < rows) & (block < scale_cols), EVEN)


# ---------------------------------------------------------------------------------------------- both


@triton.jit
def quantize_columns(
    x_ptr, data_ptr, scale_ptr, tdata_ptr, tscale_ptr, amax_ptr, global_ptr, seed_ptr,
    rows, cols, stride, data_stride, scale_cols, tdata_stride, tscale_cols, words,
    C: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Codes (cols, rows) and scales (cols, rows / block) of the columns of x, and the rowwise result that ROWS names.

    ROWS: "", "codes" (with scales) or "values". COLUMNS: "codes" or "values"; for "values" ``tdata`` has the layout of
    x and there are no scales.
    W: spans of 32 rows (16 if a block has 16) in a program, G spans in a block; V: adjacent columns in a thread. WORDS:
    a row of transposed codes is ``words`` whole words. Axes are (Q, W, J, V) = (columns / V, spans, groups of four
    rows, V): Triton distributes threads along V, then Q, W and J, so that a warp reads along rows and a thread has
    all of J.
    """
    V: tl.constexpr = 4
    BLOCK: tl.constexpr = C.block if C.block > 0 else 32
    SPAN: tl.constexpr = min(BLOCK, 32)
    G: tl.constexpr = BLOCK // SPAN
    NB: tl.constexpr = BK // BLOCK
    tiles = tl.cdiv(cols, BK)
    pid = tl.program_id(0)
    if C.reverse:
        pid = tl.num_programs(0) - 1 - pid
    down = pid // tiles
    tile_row = down * (W * SPAN)
    right = pid % tiles
    first_col = right * BK
    j = tl.arange(0, SPAN // 4)[None, None, :, None]
    w = tl.arange(0, W)[None, :, None, None]
    col = first_col + tl.arange(0, BK // V)[:, None, None, None] * V + tl.arange(0, V)[None, None, None, :]
    row = tile_row + w * SPAN + j * 4
    x = load_groups(x_ptr, row, col, rows, cols, stride, EVEN)
    encode = encode_scale(amax_ptr, global_ptr, pid, C)

    column = first_col + tl.arange(0, BK)[None, :]
    if C.block == -1:
        multiplier, value, finite = scales_of_whole_columns(col, cols, down, tscale_ptr, amax_ptr, encode, C, COLUMNS)
    else:
        multiplier, value, finite = scales_of_blocks(
            x, column, cols, down, tscale_ptr, tscale_cols, encode, C, G, COLUMNS, EVEN
        )
    multiplier, finite, value = multiplier[:, :, None, :], finite[:, :, None, :], value[:, :, None, :]
    STREAM: tl.constexpr = 0 if ROWS == "" else 1
    # The four rows are four neighbours in a row of the transposed operand.
    four = col.to(tl.int64) * tl.cdiv(rows, 4) + row // 4
    random = random_words(four + nothing(x[0]), seed_ptr, STREAM, C)
    if COLUMNS == "values":
        for i in tl.static_range(4):
            store_column_values(
                x[i], random[i], row + i, col, multiplier, value, finite, tdata_ptr, rows, cols, tdata_stride, C, EVEN
            )
    else:
        y0 = rounded(widened(x[0]) * multiplier, random[0], C)
        y1 = rounded(widened(x[1]) * multiplier, random[1], C)
        y2 = rounded(widened(x[2]) * multiplier, random[2], C)
        y3 = rounded(widened(x[3]) * multiplier, random[3], C)
        # As a matrix, a row of transposed codes is one run of W * J words, stored as whole cache lines.
        word = as_matrix(word_of((y0, y1, y2, y3), finite, C))
        store_transposed(word, column, down, tdata_ptr, rows, cols, tdata_stride, words, C, EVEN, WORDS)
    if ROWS != "":
        VALUES: tl.constexpr = ROWS == "values"
        s0 = store_rows(x[0], row, col, right, data_ptr, encode, seed_ptr, rows, cols, data_stride, C, NB, VALUES, EVEN)
        row += 1
        s1 = store_rows(x[1], row, col, right, data_ptr, encode, seed_ptr, rows, cols, data_stride, C, NB, VALUES, EVEN)
        row += 1
        s2 = store_rows(x[2], row, col, right, data_ptr, encode, seed_ptr, rows, cols, data_stride, C, NB, VALUES, EVEN)
        row += 1
        s3 = store_rows(x[3], row, col, right, data_ptr, encode, seed_ptr, rows, cols, data_stride, C, NB, VALUES, EVEN)
        if ROWS == "codes":
            store_row_scales((s0, s1, s2, s3), tile_row, right, scale_ptr, rows, scale_cols, EVEN)


# ---------------------------------------------------------------------------------------------- words of bfloat16


@triton.jit
def load_words(tile_ptr, row, col, rows, words, stride, EVEN: tl.constexpr):
    """Words at ``row`` and ``col`` of the tile; ``rows`` rows of ``words`` words exist."""
    return load_tile(tile_ptr + (row * stride + col), (row < rows) & (col < words), EVEN)


# ---------------------------------------------------------------------------------------------- the columns


@triton.jit
def amax_pairs(words, C: tl.constexpr):
    """Words (Q, W / G, V) of the amax of the block of the low columns and of the high ones: of four groups of rows of
    words (Q, W, J, V), G spans to a block."""
    Q: tl.constexpr = words[0].shape[0]
    W: tl.constexpr = words[0].shape[1]
    V: tl.constexpr = words[0].shape[3]
    G: tl.constexpr = C.block // min(C.block, 32)
    upper = larger(words[0] & MAGNITUDES, words[1] & MAGNITUDES, C)
    lower = larger(words[2] & MAGNITUDES, words[3] & MAGNITUDES, C)
    pair = largest(larger(upper, lower, C), 2, C)
    if G > 1:
        pair = largest(tl.reshape(pair, (Q, W // G, G, V)), 2, C)
    return pair


@triton.jit
def for_each_word(t, SHAPE: tl.constexpr, C: tl.constexpr):
    """Repeat the value of each block of columns (Q, W / G, V) for its words: (Q, W, J, V)."""
    G: tl.constexpr = C.block // min(C.block, 32)
    if G > 1:
        t = over_spans(t, G)
    return tl.broadcast_to(t[:, :, None, :], SHAPE)


@triton.jit
def nan_of_blocks(code, finite, C: tl.constexpr):
    """Words of four codes (Q, W, J, V), with NaN codes in blocks (Q, W / G, V) that are not finite."""
    G: tl.constexpr = C.block // min(C.block, 32)
    whole = finite.to(tl.int32)
    if G > 1:
        whole = over_spans(whole, G)
    return tl.where(whole[:, :, None, :] != 0, code, C.nan_code * 0x1010101)


@triton.jit
def checked_column_codes(words, low, high, low_finite, high_finite, C: tl.constexpr):
    """``column_codes`` of four groups of rows of words, with NaN codes in blocks that are not finite."""
    low_four, high_four = column_codes(words, low, high, C)
    if C.float8 == "":
        low_four, high_four = nan_of_blocks(low_four, low_finite, C), nan_of_blocks(high_four, high_finite, C)
    return low_four, high_four


@triton.jit
def store_column_scales(low_stored, high_stored, down, right, tscale_ptr, words, tscale_cols, EVEN: tl.constexpr):
    """Store the scales (Q, W / G, V) of the blocks of the low and the high columns of the tile ``down``, ``right``."""
    BLOCKS: tl.constexpr = low_stored.shape[1]
    COLUMNS: tl.constexpr = 2 * low_stored.shape[0] * low_stored.shape[2]
    stored = tl.reshape(tl.permute(tl.join(low_stored, high_stored), (1, 0, 2, 3)), (BLOCKS, COLUMNS))
    block = down * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    column = right * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    to = scale_offset(column, block, tscale_cols, False)
    store_tile(tscale_ptr + to, stored, (column < 2 * words) & (block < tscale_cols), EVEN)


@triton.jit
def store_words_transposed(four, down, right, tdata_ptr, words, fours, EVEN: tl.constexpr):
    """Store codes (fours of rows, columns) of the tile ``down``, ``right`` as rows of the transpose."""
    HIGH: tl.constexpr = four.shape[0]
    COLUMNS: tl.constexpr = four.shape[1]
    four_row = down * HIGH + tl.arange(0, HIGH)[:, None]
    tile_ptr = tdata_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tile_ptr += (right * COLUMNS).to(tl.int64) * fours + down * HIGH
    to = tile_ptr + (tl.arange(0, COLUMNS)[None, :] * fours + tl.arange(0, HIGH)[:, None])
    column = right * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    store_tile(to, four, (four_row < fours) & (column < 2 * words), EVEN)


# ---------------------------------------------------------------------------------------------- the rows


@triton.jit
def store_rows_of_words(
    word, row, col, tile_ptr, rows, words, data_stride, C: tl.constexpr, NB: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store the rowwise codes of one group of rows of words (Q, W, J, V); returns its scales (NB, W, J)."""
    Q: tl.constexpr = word.shape[0]
    W: tl.constexpr = word.shape[1]
    J: tl.constexpr = word.shape[2]
    V: tl.constexpr = word.shape[3]
    pair = largest(tl.reshape(largest(word & MAGNITUDES, 3, C), (NB, Q // NB, W, J)), 1, C)
    one = tl.full((), 1.0, tl.float32)
    stored, multiplier, _, finite = block_scales(tl.maximum(pair << 16, pair & 0x7FFF0000), one, C)
    code = row_codes(word, tl.broadcast_to(over_columns(multiplier, Q), (Q, W, J, V)), C)
    if C.float8 == "":
        code = tl.where(over_columns(finite.to(tl.int32), Q) != 0, code, C.nan_code * 0x101).to(tl.int16)
    store_tile(tile_ptr + (row * data_stride + col), code, (row < rows) & (col < words), EVEN)
    return stored


@triton.jit
def row_values(word, C: tl.constexpr, NB: tl.constexpr):
    """Rowwise values of one group of rows of words (Q, W, J, V)."""
    Q: tl.constexpr = word.shape[0]
    W: tl.constexpr = word.shape[1]
    J: tl.constexpr = word.shape[2]
    V: tl.constexpr = word.shape[3]
    pair = largest(tl.reshape(largest(word & MAGNITUDES, 3, C), (NB, Q // NB, W, J)), 1, C)
    multiplier, scale = words_of_scale(pair, C)
    shape: tl.constexpr = (Q, W, J, V)
    multiplier = tl.broadcast_to(over_columns(multiplier, Q), shape)
    return round_words(word, multiplier, tl.broadcast_to(over_columns(scale, Q), shape), C)


# ---------------------------------------------------------------------------------------------- both


@triton.jit
def quantize_columns_words(
    x_ptr, data_ptr, scale_ptr, tdata_ptr, tscale_ptr, rows, words, stride, data_stride, scale_cols, tscale_cols,
    fours,
    C: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """x (rows, words) int32, BK words to a program; ``stride`` is in words, ``data_stride`` in pairs of values.

    ROWS: "", "codes" (with scales) or "values" (bfloat16, power-of-two scales). ``fours``: rows / 4, which is also the
    length of a row of transposed codes in words. Axes are those of ``quantize_columns``.
    """
    V: tl.constexpr = 2
    SPAN: tl.constexpr = min(C.block, 32)
    J: tl.constexpr = SPAN // 4
    NB: tl.constexpr = 2 * BK // C.block
    Q: tl.constexpr = BK // V
    tiles = tl.cdiv(words, BK)
    down, right = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    tile_row, first = down * (W * SPAN), right * BK
    rows_left, words_left = rows - tile_row, words - first
    j = tl.arange(0, J)[None, None, :, None]
    w = tl.arange(0, W)[None, :, None, None]
    col = tl.arange(0, Q)[:, None, None, None] * V + tl.arange(0, V)[None, None, None, :]
    row = w * SPAN + j * 4
    tile_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (tile_row.to(tl.int64) * stride + first)
    w0 = load_words(tile_ptr, row, col, rows_left, words_left, stride, EVEN)
    w1 = load_words(tile_ptr, row + 1, col, rows_left, words_left, stride, EVEN)
    w2 = load_words(tile_ptr, row + 2, col, rows_left, words_left, stride, EVEN)
    w3 = load_words(tile_ptr, row + 3, col, rows_left, words_left, stride, EVEN)
    group = (w0, w1, w2, w3)

    pair = amax_pairs(group, C)
    one = tl.full((), 1.0, tl.float32)
    low_stored, low, _, low_finite = block_scales(pair << 16, one, C)
    high_stored, high, _, high_finite = block_scales(pair & 0x7FFF0000, one, C)
    store_column_scales(low_stored, high_stored, down, right, tscale_ptr, words, tscale_cols, EVEN)
    shape: tl.constexpr = (Q, W, J, V)
    low, high = for_each_word(low, shape, C), for_each_word(high, shape, C)
    low_four, high_four = checked_column_codes(group, low, high, low_finite, high_finite, C)
    four = as_matrix(tl.reshape(tl.join(low_four, high_four), (Q, W, J, 2 * V)))
    store_words_transposed(four, down, right, tdata_ptr, words, fours, EVEN)
    if ROWS == "values":
        value_ptr = data_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (tile_row.to(tl.int64) * data_stride + first)
        for i in tl.static_range(4):
            inside = (row + i < rows_left) & (col < words_left)
            store_tile(value_ptr + ((row + i) * data_stride + col), row_values(group[i], C, NB), inside, EVEN)
    elif ROWS == "codes":
        row_ptr = data_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + (tile_row.to(tl.int64) * data_stride + first)
        s0 = store_rows_of_words(w0, row, col, row_ptr, rows_left, words_left, data_stride, C, NB, EVEN)
        s1 = store_rows_of_words(w1, row + 1, col, row_ptr, rows_left, words_left, data_stride, C, NB, EVEN)
        s2 = store_rows_of_words(w2, row + 2, col, row_ptr, rows_left, words_left, data_stride, C, NB, EVEN)
        s3 = store_rows_of_words(w3, row + 3, col, row_ptr, rows_left, words_left, data_stride, C, NB, EVEN)
        store_row_scales((s0, s1, s2, s3), tile_row, right, scale_ptr, rows, scale_cols, EVEN)


# ---------------------------------------------------------------------------------------------- one scale


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

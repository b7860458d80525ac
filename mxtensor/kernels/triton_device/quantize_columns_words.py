"""``quantize_columns`` from bfloat16 to float8 on words of two columns: half the registers, twice the programs."""

import triton
import triton.language as tl

from .quantize import block_scales, load_tile, scale_offset, store_tile
from .quantize_columns import as_matrix, over_columns, over_spans, store_row_scales
from .values import round_words, words_of_scale
from .words import MAGNITUDES, column_codes, larger, largest, row_codes


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
def store_transposed(four, down, right, tdata_ptr, words, fours, EVEN: tl.constexpr):
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
def store_rows(
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
    store_transposed(four, down, right, tdata_ptr, words, fours, EVEN)
    if ROWS == "values":
        value_ptr = data_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (tile_row.to(tl.int64) * data_stride + first)
        for i in tl.static_range(4):
            inside = (row + i < rows_left) & (col < words_left)
            store_tile(value_ptr + ((row + i) * data_stride + col), row_values(group[i], C, NB), inside, EVEN)
    elif ROWS == "codes":
        row_ptr = data_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + (tile_row.to(tl.int64) * data_stride + first)
        s0 = store_rows(w0, row, col, row_ptr, rows_left, words_left, data_stride, C, NB, EVEN)
        s1 = store_rows(w1, row + 1, col, row_ptr, rows_left, words_left, data_stride, C, NB, EVEN)
        s2 = store_rows(w2, row + 2, col, row_ptr, rows_left, words_left, data_stride, C, NB, EVEN)
        s3 = store_rows(w3, row + 3, col, row_ptr, rows_left, words_left, data_stride, C, NB, EVEN)
        store_row_scales((s0, s1, s2, s3), tile_row, right, scale_ptr, rows, scale_cols, EVEN)

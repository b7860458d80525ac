"""``quantize_columns`` from bfloat16 to float8 on words of two columns: half the registers, twice the programs."""

import triton
import triton.language as tl

from .quantize import block_scales, load_tile, scale_offset, store_tile
from .quantize_columns import as_matrix, in_row_order, over_columns, over_spans
from .values import round_words, words_of_scale
from .words import MAGNITUDES, column_codes, larger, largest, row_codes


@triton.jit
def load_words(tile_ptr, row, col, rows, words, stride, EVEN: tl.constexpr):
    """Words at ``row`` and ``col`` of the tile; ``rows`` rows of ``words`` words exist."""
    return load_tile(tile_ptr + (row * stride + col), (row < rows) & (col < words), EVEN)


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


@triton.jit
def quantize_columns_words(
    x_ptr, data_ptr, scale_ptr, tdata_ptr, tscale_ptr, rows, words, stride, data_stride, scale_cols, tscale_cols,
    fours,
    C: tl.constexpr, W: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """x (rows, words) int32, BK words to a program; ``stride`` is in words, ``data_stride`` in pairs of values.

    ROWS: "", "codes" (with scales) or "values" (bfloat16, power-of-two scales). ``fours``: rows / 4, which is also the
    length of a row of transposed codes in words.
    """
    V: tl.constexpr = 2
    SPAN: tl.constexpr = min(C.block, 32)
    J: tl.constexpr = SPAN // 4
    G: tl.constexpr = C.block // SPAN
    NB: tl.constexpr = 2 * BK // C.block
    Q: tl.constexpr = BK // V
    tiles = tl.cdiv(words, BK)
    down, right = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    tile_row, first = down * (W * SPAN), right * BK
    there, across = rows - tile_row, words - first
    j = tl.arange(0, J)[None, None, :, None]
    w = tl.arange(0, W)[None, :, None, None]
    col = tl.arange(0, Q)[:, None, None, None] * V + tl.arange(0, V)[None, None, None, :]
    row = w * SPAN + j * 4
    tile_ptr = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (tile_row.to(tl.int64) * stride + first)
    w0 = load_words(tile_ptr, row, col, there, across, stride, EVEN)
    w1 = load_words(tile_ptr, row + 1, col, there, across, stride, EVEN)
    w2 = load_words(tile_ptr, row + 2, col, there, across, stride, EVEN)
    w3 = load_words(tile_ptr, row + 3, col, there, across, stride, EVEN)

    upper, lower = larger(w0 & MAGNITUDES, w1 & MAGNITUDES, C), larger(w2 & MAGNITUDES, w3 & MAGNITUDES, C)
    pair = largest(larger(upper, lower, C), 2, C)
    if G > 1:
        pair = largest(tl.reshape(pair, (Q, W // G, G, V)), 2, C)
    one = tl.full((), 1.0, tl.float32)
    low_stored, low, _, low_finite = block_scales(pair << 16, one, C)
    high_stored, high, _, high_finite = block_scales(pair & 0x7FFF0000, one, C)
    stored = tl.reshape(tl.permute(tl.join(low_stored, high_stored), (1, 0, 2, 3)), (W // G, 2 * BK))
    block = down * (W // G) + tl.arange(0, W // G)[:, None]
    column = first * 2 + tl.arange(0, 2 * BK)[None, :]
    to = scale_offset(column, block, tscale_cols, False)
    store_tile(tscale_ptr + to, stored, (column < 2 * words) & (block < tscale_cols), EVEN)
    if G > 1:
        low, high = over_spans(low, G), over_spans(high, G)
    shape: tl.constexpr = (Q, W, J, V)
    low, high = tl.broadcast_to(low[:, :, None, :], shape), tl.broadcast_to(high[:, :, None, :], shape)
    low_four, high_four = column_codes(w0, w1, w2, w3, low, high, C)
    if C.float8 == "":
        low_whole, high_whole = low_finite.to(tl.int32), high_finite.to(tl.int32)
        if G > 1:
            low_whole, high_whole = over_spans(low_whole, G), over_spans(high_whole, G)
        low_four = tl.where(low_whole[:, :, None, :] != 0, low_four, C.nan_code * 0x1010101)
        high_four = tl.where(high_whole[:, :, None, :] != 0, high_four, C.nan_code * 0x1010101)
    four = tl.reshape(tl.join(low_four, high_four), (Q, W, J, 2 * V))
    four_row = down * (W * J) + tl.arange(0, W * J)[:, None]
    transposed_ptr = tdata_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    transposed_ptr += (2 * first).to(tl.int64) * fours + down * (W * J)
    pointer = transposed_ptr + (tl.arange(0, 2 * BK)[None, :] * fours + tl.arange(0, W * J)[:, None])
    store_tile(pointer, as_matrix(four), (four_row < fours) & (column < 2 * words), EVEN)
    if ROWS == "values":
        value_ptr = data_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (tile_row.to(tl.int64) * data_stride + first)
        for i in tl.static_range(4):
            group = w0 if i == 0 else w1 if i == 1 else w2 if i == 2 else w3
            inside = (row + i < there) & (col < across)
            store_tile(value_ptr + ((row + i) * data_stride + col), row_values(group, C, NB), inside, EVEN)
    elif ROWS == "codes":
        row_ptr = data_ptr.to(tl.pointer_type(tl.int16), bitcast=True) + (tile_row.to(tl.int64) * data_stride + first)
        s0 = store_rows(w0, row, col, row_ptr, there, across, data_stride, C, NB, EVEN)
        s1 = store_rows(w1, row + 1, col, row_ptr, there, across, data_stride, C, NB, EVEN)
        s2 = store_rows(w2, row + 2, col, row_ptr, there, across, data_stride, C, NB, EVEN)
        s3 = store_rows(w3, row + 3, col, row_ptr, there, across, data_stride, C, NB, EVEN)
        tile = tile_row + tl.arange(0, W * SPAN)[:, None]
        block = right * NB + tl.arange(0, NB)[None, :]
        to = scale_offset(tile, block, scale_cols, False)
        store_tile(scale_ptr + to, in_row_order(s0, s1, s2, s3), (tile < rows) & (block < scale_cols), EVEN)

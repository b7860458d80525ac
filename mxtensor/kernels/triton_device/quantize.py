"""Casts in Triton with blocks along rows, whole rows, square blocks or one scale per tensor, and back.

x is (rows, cols) with unit stride along the last dimension; ``C`` is a ``CastCode``. Values outside x count as zero and
are never written. Row offsets are 64 bits wide. One program casts one tile.

Also here: what all casts share, rows of bfloat16 in words of two values (``words.py``), casts where each group of rows
has a scale of its own, and a step of delayed scaling.
"""

import triton
import triton.language as tl

from .elements import (
    INFINITY_BITS,
    amax_bits,
    bits_of,
    dither,
    float_of,
    from_codes,
    global_encode,
    magnitude_bits,
    round_float,
    scale_value,
    scales_of,
    to_codes,
    widened,
)
from .words import MAGNITUDES, e2m1_byte, largest, round_words, words_of_scale, words_of_scales


@triton.jit
def scale_offset(row, col, scale_cols, SWIZZLED: tl.constexpr):
    """The offset of scale (row, col), row-major with ``scale_cols`` scales in a row or in the 128x4 layout."""
    if SWIZZLED:
        tile = (row // 128).to(tl.int64) * ((scale_cols + 3) // 4) + col // 4
        return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + col % 4
    else:
        return row.to(tl.int64) * scale_cols + col


@triton.jit
def encode_scale(amax_ptr, global_ptr, pid, C: tl.constexpr):
    """S_enc of NVFP4 from the amax bits of the tensor, 1 for other formats; program 0 stores the global scale."""
    if C.global_scale:
        encode, inverse = global_encode(tl.load(amax_ptr).to(tl.float32, bitcast=True), C)
        if pid == 0:
            tl.store(global_ptr, inverse)
        return encode
    else:
        return tl.full((), 1.0, tl.float32)


@triton.jit
def block_scales(amax_bits, encode, C: tl.constexpr):
    """``scales_of``; with float8 instructions the multiplier of a non-finite block is NaN, which gives NaN codes."""
    stored, multiplier, value, finite = scales_of(amax_bits, encode, C)
    if C.float8 != "":
        multiplier = tl.where(finite, multiplier, float("nan"))
    return stored, multiplier, value, finite


@triton.jit
def finish_codes(code, finite, C: tl.constexpr):
    """The NaN code (0 if the format has none) in blocks that are not finite; ``finite`` broadcasts."""
    if C.float8 != "":
        return code
    else:
        return tl.where(finite, code, C.nan_code).to(tl.uint8)


@triton.jit
def random_words(counter, seed_ptr, stream: tl.constexpr, C: tl.constexpr):
    """The four words of ``seed + stream`` and an int64 counter, each for one of four neighbouring values of a row of
    the operand; four times the counter if nothing is rounded by them."""
    if C.stochastic:
        low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
        zero = low * 0
        return tl.philox(tl.load(seed_ptr) + stream, low, high, zero, zero)
    else:
        return counter, counter, counter, counter


@triton.jit
def nothing_of(word):
    """int64 zeros that the compiler takes for a function of an int32 word: what they are added to is computed in the
    registers of the word, and not moved there through shared memory."""
    return ((word.to(tl.uint32, bitcast=True) >> 31) >> 1).to(tl.int64)


@triton.jit
def nothing(x):
    """``nothing_of`` the bits of values."""
    return nothing_of(bits_of(widened(x)))


@triton.jit
def in_fours(r0, r1, r2, r3):
    """(..., n, 2, 2): the four of each place side by side."""
    return tl.join(tl.join(r0, r2), tl.join(r1, r3))


@triton.jit
def words_of_tile(row, tile, cols, seed_ptr, BK: tl.constexpr, C: tl.constexpr):
    """The words (BM, BK) of the values of column tile ``tile`` in rows (BM, 1)."""
    if C.stochastic:
        BM: tl.constexpr = row.shape[0]
        four = tile * (BK // 4) + tl.arange(0, BK // 4)[None, :]
        r0, r1, r2, r3 = random_words(row.to(tl.int64) * tl.cdiv(cols, 4) + four, seed_ptr, 0, C)
        return tl.reshape(in_fours(r0, r1, r2, r3), (BM, BK))
    else:
        return row


@triton.jit
def rounded(y, word, C: tl.constexpr):
    """y; or stochastically rounded by random words of 32 bits."""
    if C.stochastic:
        return tl.where(y == y, dither(y, word.to(tl.uint32), C), y)
    else:
        return y


@triton.jit
def load_tile(at, inside, EVEN: tl.constexpr):
    """The values at ``at``, zero if not ``inside``; EVEN: all are inside."""
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_tile(at, value, inside, EVEN: tl.constexpr):
    """Store ``value`` at ``at`` if ``inside``; EVEN: all are inside."""
    if EVEN:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=inside)


@triton.jit
def store_codes(code, data_ptr, row_start, tile, rows_in, cols, C: tl.constexpr, EVEN: tl.constexpr):
    """Store codes (BM, BK) of column tile ``tile`` as packed bytes; ``row_start`` (BM, 1): the offset of each row."""
    BM: tl.constexpr = code.shape[0]
    BK: tl.constexpr = code.shape[1]
    if C.bits == 8:
        col = tile * BK + tl.arange(0, BK)[None, :]
        store_tile(data_ptr + row_start + col, code, rows_in & (col < cols), EVEN)
    elif C.bits == 4:
        even, odd = tl.split(tl.reshape(code, (BM, BK // 2, 2)))
        pair = tile * (BK // 2) + tl.arange(0, BK // 2)[None, :]
        store_tile(data_ptr + row_start + pair, even | (odd << 4), rows_in & (pair * 2 < cols), EVEN)
    else:
        even, odd = tl.split(tl.reshape(code, (BM, BK // 4, 2, 2)))
        v0, v2 = tl.split(even)
        v1, v3 = tl.split(odd)
        group = tile * (BK // 4) + tl.arange(0, BK // 4)[None, :]
        inside = rows_in & (group * 4 < cols)
        to = data_ptr + row_start + group * 3
        store_tile(to, v0 | (v1 << 6), inside, EVEN)
        store_tile(to + 1, (v1 >> 2) | (v2 << 4), inside, EVEN)
        store_tile(to + 2, (v2 >> 4) | (v3 << 2), inside, EVEN)


@triton.jit
def amax_of_tensor(x_ptr, out_ptr, size, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """The largest magnitude bits of a contiguous x, by atomic max into an int32 that starts as zero."""
    start = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    at = start + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0)
    largest = magnitude_bits(x)
    for i in tl.static_range(1, ROUNDS):
        at = start + i * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, magnitude_bits(tl.load(x_ptr + at, mask=at < size, other=0.0)))
    tl.atomic_max(out_ptr, amax_bits(tl.max(largest, axis=0), x), sem="relaxed")


@triton.jit
def quantize_rows(
    x_ptr, data_ptr, scale_ptr, amax_ptr, global_ptr, seed_ptr, rows, cols, stride, data_stride, scale_cols,
    C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, SWIZZLED: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Blocks along rows, or one scale for the tensor, whose amax is in ``amax_ptr``.

    Writes codes and scales; VALUES: writes the fake-quantized values without the global scale instead.
    """
    tiles = tl.cdiv(cols, BK)
    pid = tl.program_id(0)
    if C.reverse:
        pid = tl.num_programs(0) - 1 - pid  # start with the values that the pass for the amax left in the cache
    row = (pid // tiles) * BM + tl.arange(0, BM)[:, None]
    col = (pid % tiles) * BK + tl.arange(0, BK)[None, :]
    rows_in = row < rows
    x = load_tile(x_ptr + row.to(tl.int64) * stride + col, rows_in & (col < cols), EVEN)
    encode = encode_scale(amax_ptr, global_ptr, pid, C)
    word = words_of_tile(row, pid % tiles, cols, seed_ptr, BK, C)
    if C.block == 0:
        stored, multiplier, value, finite = block_scales(tl.load(amax_ptr), encode, C)
        code = finish_codes(to_codes(rounded(widened(x) * multiplier, word, C), C), finite, C)
        if VALUES:
            decoded = from_codes(code, C) * value
        elif pid == 0:
            tl.store(scale_ptr, stored)
    else:
        NB: tl.constexpr = BK // C.block
        amax = amax_bits(tl.max(magnitude_bits(tl.reshape(x, (BM, NB, C.block))), axis=2), x)
        stored, multiplier, value, finite = block_scales(amax, encode, C)
        y = tl.reshape(widened(tl.reshape(x, (BM, NB, C.block))) * multiplier[:, :, None], (BM, BK))
        code = to_codes(rounded(y, word, C), C)
        code = finish_codes(tl.reshape(code, (BM, NB, C.block)), finite[:, :, None], C)
        if VALUES:
            decoded = tl.reshape(from_codes(code, C) * value[:, :, None], (BM, BK))
        else:
            block = (pid % tiles) * NB + tl.arange(0, NB)[None, :]
            to = scale_offset(row, block, scale_cols, SWIZZLED)
            store_tile(scale_ptr + to, stored, rows_in & (block < scale_cols), EVEN)
            code = tl.reshape(code, (BM, BK))
    if VALUES:
        to = data_ptr + row.to(tl.int64) * data_stride + col
        store_tile(to, decoded.to(data_ptr.dtype.element_ty), rows_in & (col < cols), EVEN)
    else:
        store_codes(code, data_ptr, row.to(tl.int64) * data_stride, pid % tiles, rows_in, cols, C, EVEN)


@triton.jit
def quantize_full_rows(
    x_ptr, data_ptr, scale_ptr, seed_ptr, rows, cols, stride, data_stride,
    C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, ONE: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """One scale per row. ONE: BK covers the row and x is read once; otherwise it is read twice, first for the amax."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    rows_in = row < rows
    x_row, data_row = row.to(tl.int64) * stride, row.to(tl.int64) * data_stride
    col = tl.arange(0, BK)[None, :]
    x = load_tile(x_ptr + x_row + col, rows_in & (col < cols), EVEN)
    largest = magnitude_bits(x)
    tiles = tl.cdiv(cols, BK)
    if not ONE:
        for i in range(1, tiles):
            at = i * BK + col
            largest = tl.maximum(largest, magnitude_bits(load_tile(x_ptr + x_row + at, rows_in & (at < cols), EVEN)))
    amax = amax_bits(tl.max(largest, axis=1), x)
    stored, multiplier, value, finite = block_scales(amax, tl.full((), 1.0, tl.float32), C)
    for i in range(0, 1 if ONE else tiles):
        at = i * BK + col
        if not ONE:
            x = load_tile(x_ptr + x_row + at, rows_in & (at < cols), EVEN)
        y = rounded(widened(x) * multiplier[:, None], words_of_tile(row, i, cols, seed_ptr, BK, C), C)
        code = finish_codes(to_codes(y, C), finite[:, None], C)
        if VALUES:
            decoded = (from_codes(code, C) * value[:, None]).to(data_ptr.dtype.element_ty)
            store_tile(data_ptr + data_row + at, decoded, rows_in & (at < cols), EVEN)
        else:
            store_codes(code, data_ptr, data_row, i, rows_in, cols, C, EVEN)
    if not VALUES:
        one = tl.program_id(0) * BM + tl.arange(0, BM)
        tl.store(scale_ptr + one, stored, mask=one < rows)


@triton.jit
def quantize_tiles(
    x_ptr, data_ptr, scale_ptr, amax_ptr, global_ptr, seed_ptr, rows, cols, stride, data_stride, scale_cols,
    C: tl.constexpr, NB: tl.constexpr, EVEN: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Square blocks of C.block x C.block values; a program casts NB neighbouring blocks."""
    B: tl.constexpr = C.block
    BK: tl.constexpr = NB * B
    tiles = tl.cdiv(cols, BK)
    pid = tl.program_id(0)
    encode = encode_scale(amax_ptr, global_ptr, pid, C)
    row = (pid // tiles) * B + tl.arange(0, B)[:, None]
    col = (pid % tiles) * BK + tl.arange(0, BK)[None, :]
    rows_in = row < rows
    x = load_tile(x_ptr + row.to(tl.int64) * stride + col, rows_in & (col < cols), EVEN)
    amax = amax_bits(tl.max(tl.max(magnitude_bits(tl.reshape(x, (B, NB, B))), axis=2), axis=0), x)
    stored, multiplier, value, finite = block_scales(amax, encode, C)
    y = tl.reshape(widened(tl.reshape(x, (B, NB, B))) * multiplier[None, :, None], (B, BK))
    code = to_codes(rounded(y, words_of_tile(row, pid % tiles, cols, seed_ptr, BK, C), C), C)
    code = finish_codes(tl.reshape(code, (B, NB, B)), finite[None, :, None], C)
    if VALUES:
        decoded = tl.reshape(from_codes(code, C) * value[None, :, None], (B, BK))
        to = data_ptr + row.to(tl.int64) * data_stride + col
        store_tile(to, decoded.to(data_ptr.dtype.element_ty), rows_in & (col < cols), EVEN)
    else:
        block = (pid % tiles) * NB + tl.arange(0, NB)
        tl.store(scale_ptr + (pid // tiles).to(tl.int64) * scale_cols + block, stored, mask=block < scale_cols)
        start = row.to(tl.int64) * data_stride
        store_codes(tl.reshape(code, (B, BK)), data_ptr, start, pid % tiles, rows_in, cols, C, EVEN)


# ---------------------------------------------------------------------------------------------- four bits from bfloat16


@triton.jit
def sign_of(moved, magnitude, BIT: tl.constexpr, C: tl.constexpr):
    """The sign of a value, moved to BIT; that of a zero ``magnitude`` only if the format keeps it."""
    sign = moved & BIT
    if C.signed_zero:
        return sign
    else:
        return tl.where(magnitude == 0.0, 0, sign)


@triton.jit
def quantize_rows_fp4(
    x_ptr, data_ptr, scale_ptr, amax_ptr, global_ptr, rows, words, stride, data_stride, scale_cols,
    C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, SWIZZLED: tl.constexpr,
):  # fmt: skip
    """``quantize_rows`` for this cast: x (rows, words) int32; ``stride`` and BK are in words."""
    PAIRS: tl.constexpr = C.block // 2
    NB: tl.constexpr = BK // PAIRS
    tiles = tl.cdiv(words, BK)
    pid = tl.program_id(0)
    if C.reverse:
        pid = tl.num_programs(0) - 1 - pid
    row = (pid // tiles) * BM + tl.arange(0, BM)[:, None]
    col = (pid % tiles) * BK + tl.arange(0, BK)[None, :]
    inside = (row < rows) & (col < words)
    word = load_tile(x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row.to(tl.int64) * stride + col, inside, EVEN)
    encode = encode_scale(amax_ptr, global_ptr, pid, C)
    pair = largest(tl.reshape(word & MAGNITUDES, (BM, NB, PAIRS)), 2, C)
    amax = tl.maximum(pair << 16, pair & 0x7FFF0000)
    stored, multiplier, _, finite = scales_of(amax, encode, C)
    each = tl.reshape(tl.broadcast_to(multiplier[:, :, None], (BM, NB, PAIRS)), (BM, BK))
    if C.pairs and C.signed_zero and C.scale == "e8m0" and C.exponent_bits == 2 and C.bias == 1 and C.max == 6.0:
        byte = e2m1_byte(word, each, C)
    else:
        low = float_of((word << 16) & 0x7FFF0000) * each
        low_sign = sign_of(word >> 12, low, 8, C)
        low = round_float(low, C.exponent_bits, C.mantissa_bits, C.bias, C.max)
        high = float_of(word & 0x7FFF0000) * each
        high_sign = sign_of(word >> 24, high, 0x80, C)
        high = round_float(high, C.exponent_bits, C.mantissa_bits, C.bias, C.max)
        byte = low | low_sign | (high << 4) | high_sign
    mask = tl.broadcast_to(tl.where(finite, 0xFF, 0)[:, :, None], (BM, NB, PAIRS))
    byte = (byte & tl.reshape(mask, (BM, BK))).to(tl.uint8)
    store_tile(data_ptr + row.to(tl.int64) * data_stride + col, byte, inside, EVEN)
    block = (pid % tiles) * NB + tl.arange(0, NB)[None, :]
    to = scale_offset(row, block, scale_cols, SWIZZLED)
    store_tile(scale_ptr + to, stored, (row < rows) & (block < scale_cols), EVEN)


# ---------------------------------------------------------------------------------------------- fake quantize bfloat16


@triton.jit
def over_block(t, BLOCK: tl.constexpr, AXIS: tl.constexpr):
    """Repeat the value of each block BLOCK times along AXIS."""
    if AXIS == 0:
        B: tl.constexpr = t.shape[0]
        N: tl.constexpr = t.shape[1]
        return tl.reshape(tl.broadcast_to(t[:, None, :], (B, BLOCK, N)), (B * BLOCK, N))
    else:
        M: tl.constexpr = t.shape[0]
        NB: tl.constexpr = t.shape[1]
        return tl.reshape(tl.broadcast_to(t[:, :, None], (M, NB, BLOCK)), (M, NB * BLOCK))


@triton.jit
def round_along_rows(word, C: tl.constexpr):
    """Fake quantize a matrix of words with blocks along its rows."""
    PAIRS: tl.constexpr = C.block // 2
    M: tl.constexpr = word.shape[0]
    NB: tl.constexpr = word.shape[1] // PAIRS
    multiplier, scale = words_of_scale(largest(tl.reshape(word & MAGNITUDES, (M, NB, PAIRS)), 2, C), C)
    return round_words(word, over_block(multiplier, PAIRS, 1), over_block(scale, PAIRS, 1), C)


@triton.jit
def round_along_columns(word, C: tl.constexpr):
    """Fake quantize a matrix of words with blocks along its columns; a word has two columns."""
    NB: tl.constexpr = word.shape[0] // C.block
    pair = largest(tl.reshape(word & MAGNITUDES, (NB, C.block, word.shape[1])), 1, C)
    multiplier, scale = words_of_scales(pair << 16, pair & 0x7FFF0000, C)
    return round_words(word, over_block(multiplier, C.block, 0), over_block(scale, C.block, 0), C)


@triton.jit
def round_tiles(
    x_ptr, row_ptr, column_ptr, rows, words, stride, out_stride,
    C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Fake quantize with blocks along rows, columns or both in one pass: x and each result (rows, words) int32.

    Strides and BK are in words. Lanes read along rows, so that only the amax of columns crosses warps.
    """
    tiles = tl.cdiv(words, BK)
    pid = tl.program_id(0)
    row = (pid // tiles) * BM + tl.arange(0, BM)[:, None]
    col = (pid % tiles) * BK + tl.arange(0, BK)[None, :]
    inside = (row < rows) & (col < words)
    word = load_tile(x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row.to(tl.int64) * stride + col, inside, EVEN)
    to = row.to(tl.int64) * out_stride + col
    if ROWS:
        store_tile(row_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + to, round_along_rows(word, C), inside, EVEN)
    if COLUMNS:
        column_ptr = column_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        store_tile(column_ptr + to, round_along_columns(word, C), inside, EVEN)


# ---------------------------------------------------------------------------------------------- scales of groups


@triton.jit
def load_values(x_ptr, row, col, rows, cols, x_row, x_col, FLIPPED: tl.constexpr):
    """x at rows (BM,) and columns (BK,); FLIPPED: rows are what is contiguous."""
    if FLIPPED:
        at = col.to(tl.int64)[:, None] * x_col + row[None, :] * x_row
        return tl.trans(tl.load(x_ptr + at, mask=(row < rows)[None, :] & (col < cols)[:, None], other=0.0))
    else:
        at = row.to(tl.int64)[:, None] * x_row + col[None, :] * x_col
        return tl.load(x_ptr + at, mask=(row < rows)[:, None] & (col < cols)[None, :], other=0.0)


@triton.jit
def amax_of_blocks(x, B: tl.constexpr, SQUARE: tl.constexpr):
    """The amax bits of blocks of B columns, or of B rows and columns, at each of their rows: x (BM, NB, B)."""
    BM: tl.constexpr = x.shape[0]
    NB: tl.constexpr = x.shape[1]
    largest = tl.max(magnitude_bits(x), axis=2)
    if SQUARE:
        of_rows = tl.max(tl.reshape(largest, (BM // B, B, NB)), axis=1)
        largest = tl.reshape(tl.broadcast_to(of_rows[:, None, :], (BM // B, B, NB)), (BM, NB))
    return amax_bits(largest, x)


@triton.jit
def quantize_by_group(
    x_ptr, out_ptr, amax_ptr, seed_ptr, rows, cols, x_matrix, x_row, x_col, amax_matrix, amax_row, amax_block,
    C: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, B: tl.constexpr, SQUARE: tl.constexpr, FLIPPED: tl.constexpr,
):  # fmt: skip
    """x and out (matrices, rows, cols), amax (matrices, rows, cols / B) by their strides; out is contiguous."""
    NB: tl.constexpr = BK // B
    across = tl.cdiv(cols, BK)
    tiles = across * tl.cdiv(rows, BM)
    matrix, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    row = (tile // across) * BM + tl.arange(0, BM)
    col = (tile % across) * BK + tl.arange(0, BK)
    x = load_values(x_ptr + matrix * x_matrix, row, col, rows, cols, x_row, x_col, FLIPPED)
    x = tl.reshape(x, (BM, NB, B))
    block = (tile % across) * NB + tl.arange(0, NB)
    inside = (row < rows)[:, None] & (block * B < cols)[None, :]
    at = matrix * amax_matrix + row.to(tl.int64)[:, None] * amax_row + block.to(tl.int64)[None, :] * amax_block
    amax = tl.load(amax_ptr + at, mask=inside, other=0.0)
    if C.block == 0:
        _stored, multiplier, value, finite = block_scales(bits_of(amax), tl.full(amax.shape, 1.0, tl.float32), C)
    else:
        encode, _inverse = global_encode(amax, C)
        _stored, multiplier, value, finite = block_scales(amax_of_blocks(x, B, SQUARE), encode, C)
    y = tl.reshape(widened(x) * multiplier[:, :, None], (BM, BK))
    number = (matrix * rows + row)[:, None]
    code = to_codes(rounded(y, words_of_tile(number, tile % across, cols, seed_ptr, BK, C), C), C)
    code = finish_codes(tl.reshape(code, (BM, NB, B)), finite[:, :, None], C)
    to = out_ptr + number * cols + col[None, :]
    stored = (row < rows)[:, None] & (col < cols)[None, :]
    if C.block == 0:
        tl.store(to, tl.reshape(code, (BM, BK)), mask=stored)
    else:
        out = from_codes(code, C) * value[:, :, None]
        tl.store(to, tl.reshape(out, (BM, BK)).to(out_ptr.dtype.element_ty), mask=stored)


# ---------------------------------------------------------------------------------------------- dequantize


@triton.jit
def load_codes(data_ptr, row_start, rows_in, tile, cols, C: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """The codes of column tile ``tile``, one byte each: (BM, BK)."""
    BM: tl.constexpr = row_start.shape[0]
    if C.bits == 8:
        col = tile * BK + tl.arange(0, BK)[None, :]
        return load_tile(data_ptr + row_start + col, rows_in & (col < cols), EVEN)
    elif C.bits == 4:
        pair = tile * (BK // 2) + tl.arange(0, BK // 2)[None, :]
        byte = load_tile(data_ptr + row_start + pair, rows_in & (pair * 2 < cols), EVEN)
        return tl.reshape(tl.join(byte & 0xF, byte >> 4), (BM, BK))
    else:
        group = tile * (BK // 4) + tl.arange(0, BK // 4)[None, :]
        inside = rows_in & (group * 4 < cols)
        at = data_ptr + row_start + group * 3
        b0 = load_tile(at, inside, EVEN)
        b1 = load_tile(at + 1, inside, EVEN)
        b2 = load_tile(at + 2, inside, EVEN)
        even = tl.join(b0 & 0x3F, (b1 >> 4) | ((b2 & 0x3) << 4))
        odd = tl.join((b0 >> 6) | ((b1 & 0xF) << 2), b2 >> 2)
        return tl.reshape(tl.join(even, odd), (BM, BK))


@triton.jit
def dequantize_tiles(
    data_ptr, scale_ptr, global_ptr, out_ptr, rows, cols, data_stride, scale_stride,
    C: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """ROWS x COLS values share a scale; 0 stands for the whole extent. ``out`` (rows, cols) is contiguous."""
    tiles = tl.cdiv(cols, BK)
    pid = tl.program_id(0)
    row = (pid // tiles) * BM + tl.arange(0, BM)[:, None]
    tile = pid % tiles
    rows_in = row < rows
    code = load_codes(data_ptr, row.to(tl.int64) * data_stride, rows_in, tile, cols, C, BK, EVEN)
    value = from_codes(code, C)
    if ROWS == 0:
        value = value * scale_value(tl.load(scale_ptr), C)
    elif COLS == 0:
        place = (row // ROWS).to(tl.int64) * scale_stride
        value = value * scale_value(tl.load(scale_ptr + place, mask=rows_in, other=0), C)
    else:
        NB: tl.constexpr = BK // COLS
        block = tile * NB + tl.arange(0, NB)[None, :]
        inside = rows_in & (block * COLS < cols)
        stored = load_tile(scale_ptr + (row // ROWS).to(tl.int64) * scale_stride + block, inside, EVEN)
        blocks = tl.reshape(value, (BM, NB, COLS)) * scale_value(stored, C)[:, :, None]
        value = tl.reshape(blocks, (BM, BK))
    if C.global_scale:
        value = value * tl.load(global_ptr)
    col = tile * BK + tl.arange(0, BK)[None, :]
    to = out_ptr + row.to(tl.int64) * cols + col
    store_tile(to, value.to(out_ptr.dtype.element_ty), rows_in & (col < cols), EVEN)


# ---------------------------------------------------------------------------------------------- delayed scaling


@triton.jit
def advance_history(
    history_ptr, record_ptr, amax_ptr, out_ptr, next_ptr, rows,
    NEWEST: tl.constexpr, MULTIPLIER: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``record`` and then all rows of history (rows, COLUMNS) but the last to out; write the next amax to next.

    Magnitudes are compared as integers; a NaN is the largest.
    """
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, 4)[None, :]
    inside = (row < rows) & (column < COLUMNS)
    before = tl.load(history_ptr + (row - 1) * COLUMNS + column, mask=inside & (row > 0), other=0.0)
    one = tl.arange(0, 4)
    record = tl.load(record_ptr + one, mask=one < COLUMNS, other=0.0)
    moved = tl.where(row == 0, record[None, :], before)
    tl.store(out_ptr + row * COLUMNS + column, moved, mask=inside)
    largest = bits_of(record) if NEWEST else tl.max(bits_of(moved), axis=0)
    usable = (largest > 0) & (largest < INFINITY_BITS)
    unchanged = tl.load(amax_ptr + one, mask=one < COLUMNS, other=0.0)
    tl.store(next_ptr + one, tl.where(usable, float_of(largest) * MULTIPLIER, unchanged), mask=one < COLUMNS)

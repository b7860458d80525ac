"""Casts in Triton with blocks along rows, whole rows, square blocks or one scale per tensor; what all casts share.

x is (rows, cols) with unit stride along the last dimension; ``C`` is a ``CastCode``. Values outside x count as zero and
are never written. Row offsets are 64 bits wide. One program casts one tile.
"""

import triton
import triton.language as tl

from .elements import (
    amax_bits,
    bits_of,
    dither,
    from_codes,
    global_encode,
    magnitude_bits,
    scales_of,
    to_codes,
    widened,
)


@triton.jit
def swizzled_offset(row, col, scale_cols):
    """The offset of scale (row, col) in the 128x4 layout of a matrix with ``scale_cols`` scales in a row."""
    tile = (row // 128).to(tl.int64) * ((scale_cols + 3) // 4) + col // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + col % 4


@triton.jit
def scale_offset(row, col, scale_cols, SWIZZLED: tl.constexpr):
    """The offset of scale (row, col), row-major with ``scale_cols`` scales in a row or in the 128x4 layout."""
    if SWIZZLED:
        return swizzled_offset(row, col, scale_cols)
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

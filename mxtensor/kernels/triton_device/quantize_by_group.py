"""Casts where each group of rows, or matrix of a stack, has a scale of its own: codes, or values without that scale.

The amax of each group is known before. It is read for each row, each block of columns, or both.
"""

import triton
import triton.language as tl

from .elements import amax_bits, bits_of, from_codes, global_encode, magnitude_bits, to_codes, widened
from .quantize import block_scales, finish_codes, rounded, words_of_tile


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

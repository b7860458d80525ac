"""Products of row-scaled E4M3 in groups, in Triton: groups of rows times a stack, and the columns of each group.

A program computes one tile of one group. It finds the group from the ends, which stay on the device; programs without a
tile return. The tensor cores add up 128 columns, then the sum goes to a float32 in registers: that is as precise as
CUTLASS without fast accumulation (docs/reference/numerics.md). A tile of SPLIT * BN columns adds its pieces of BN
columns one after the other, so that the sum of one is in flight.
"""

import triton
import triton.language as tl

from .row_scaled_tile_map import group_rows, value_of_group


@triton.jit
def in_bands(tile, row_tiles, col_tiles, BAND: tl.constexpr):
    """(row tile, column tile) number ``tile``: down BAND rows of tiles before the next column, for the L2 cache."""
    band = tile // (BAND * col_tiles)
    high = tl.minimum(row_tiles - band * BAND, BAND)
    inner = tile - band * (BAND * col_tiles)
    return band * BAND + inner % high, inner // high


@triton.jit
def product(a, b):
    """The sum over one step of K: codes a (BM, BK) and b (BN, BK)."""
    return tl.dot(a, tl.trans(b), out_dtype=tl.float32)


@triton.jit
def load_codes(pointer, k, K, EVEN: tl.constexpr):
    """Codes (rows, BK); zero from column K on."""
    if EVEN:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=k < K, other=0.0)


@triton.jit
def store_piece(sums, out, row, rows_in, row_scale, col, cols, scale_ptr, width):
    """Multiply by both scales, round once and store."""
    inside = col < cols
    scale = tl.load(scale_ptr + col, mask=inside, other=0.0)
    value = sums * row_scale[:, None] * scale[None, :]
    to = out + row.to(tl.int64)[:, None] * width + col[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=rows_in[:, None] & inside[None, :])


@triton.jit
def accumulate(
    a, a_row, a_stride, b, b_row, b_end, b_stride, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The sums of one tile over K columns, (BM, BN) each: rows ``a_row`` of a; rows ``b_row`` (BN,), and BN further on
    for the second piece, of b, none above ``b_end``. With one piece both are the same."""
    k = tl.arange(0, BK)[None, :]
    left = a + a_row.to(tl.int64)[:, None] * a_stride + k
    right = b + tl.minimum(b_row, b_end).to(tl.int64)[:, None] * b_stride + k
    first = tl.zeros((BM, BN), tl.float32)
    if SPLIT == 1:
        for at in range(0, K, BK):
            first += product(load_codes(left + at, k, K - at, EVEN), load_codes(right + at, k, K - at, EVEN))
        return first, first
    else:
        more = b + tl.minimum(b_row + BN, b_end).to(tl.int64)[:, None] * b_stride + k
        second = tl.zeros((BM, BN), tl.float32)
        for at in range(0, K, BK):
            one = load_codes(left + at, k, K - at, EVEN)
            first += product(one, load_codes(right + at, k, K - at, EVEN))
            second += product(one, load_codes(more + at, k, K - at, EVEN))
        return first, second


@triton.jit
def rows_by_stack(
    a, a_scale, b, b_scale, ends, out, groups, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, BAND: tl.constexpr,
    EVEN: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Rows of a (M, K) times the matrix of their group, b (G, N, K); out (M, N). Rows after the last end are zeros.

    M // BM + G + 1 row tiles are always enough. EVEN: K is a multiple of BK. GROUPS: a power of two above G.
    """
    wide: tl.constexpr = SPLIT * BN
    number, start, size, _blocks = group_rows(ends, groups, M, BM, GROUPS)
    tiles = (size + (BM - 1)) // BM
    tiles_until = tl.cumsum(tiles, 0)
    col_tiles = tl.cdiv(N, wide)
    # all tiles of a group come one after the other
    group = tl.sum((tiles_until * col_tiles <= tl.program_id(0)).to(tl.int32), axis=0)
    if group > groups:
        return
    first_tile = value_of_group(tiles_until - tiles, number, group)
    row_tile, col_tile = in_bands(
        tl.program_id(0) - first_tile * col_tiles, value_of_group(tiles, number, group), col_tiles, BAND
    )
    first = value_of_group(start, number, group)
    end = first + value_of_group(size, number, group) - 1
    row = first + row_tile * BM + tl.arange(0, BM)
    col = col_tile * wide + tl.arange(0, BN)
    in_group = group < groups
    row_inside = tl.minimum(row, end)
    weight = tl.where(in_group, group, 0).to(tl.int64)
    first_sum, second_sum = accumulate(
        a, row_inside, K, b + weight * N * K, col, N - 1, K, tl.where(in_group, K, 0), BM, BN, BK, SPLIT, EVEN
    )
    row_scale = tl.where(in_group, tl.load(a_scale + row_inside), 0.0)
    b_scale += weight * N
    rows_in = row <= end
    if in_group:
        store_piece(first_sum, out, row, rows_in, row_scale, col, N, b_scale, N)
        if SPLIT == 2:
            store_piece(second_sum, out, row, rows_in, row_scale, col + BN, N, b_scale, N)
    else:
        zeros = tl.zeros((BM, BN), out.dtype.element_ty)
        for piece in tl.static_range(SPLIT):
            at = col + piece * BN
            to = out + row.to(tl.int64)[:, None] * N + at[None, :]
            tl.store(to, zeros, mask=rows_in[:, None] & (at < N)[None, :])


@triton.jit
def columns_of_groups(
    a, a_scale, b, b_scale, ends, out, groups, rows, M, N, P,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, BAND: tl.constexpr,
    PAD: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The products over the columns of each group: a (M, P) by b (N, P), out (G, M, N); scales (G, M) and (G, N).

    ``ends`` are those of groups of ``rows`` rows, padded to PAD. A program for each tile.
    """
    wide: tl.constexpr = SPLIT * BN
    row_tiles, col_tiles = tl.cdiv(M, BM), tl.cdiv(N, wide)
    group = tl.program_id(0) // (row_tiles * col_tiles)
    row_tile, col_tile = in_bands(tl.program_id(0) - group * (row_tiles * col_tiles), row_tiles, col_tiles, BAND)
    number, _start, _size, blocks = group_rows(ends, groups, rows, PAD, GROUPS)
    all_blocks = P // PAD
    first_block = tl.minimum(tl.sum(tl.where(number < group, blocks, 0), axis=0), all_blocks)
    depth = tl.minimum(value_of_group(blocks, number, group), all_blocks - first_block) * PAD
    row = row_tile * BM + tl.arange(0, BM)
    col = col_tile * wide + tl.arange(0, BN)
    row_inside = tl.minimum(row, M - 1)
    start = first_block.to(tl.int64) * PAD
    first_sum, second_sum = accumulate(
        a + start, row_inside, P, b + start, col, N - 1, P, depth, BM, BN, BK, SPLIT, PAD % BK == 0
    )
    row_scale = tl.load(a_scale + group * M + row_inside)
    b_scale += group * N
    out += group.to(tl.int64) * M * N
    store_piece(first_sum, out, row, row < M, row_scale, col, N, b_scale, N)
    if SPLIT == 2:
        store_piece(second_sum, out, row, row < M, row_scale, col + BN, N, b_scale, N)


@triton.jit
def zero_after(out, ends, groups, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Write zeros to the rows of out (M, N) after the last end; the programs share the tiles."""
    end = tl.maximum(tl.minimum(tl.load(ends + groups - 1), M), 0)
    col_tiles = tl.cdiv(N, BN)
    zeros = tl.zeros((BM, BN), out.dtype.element_ty)
    for tile in range(tl.program_id(0), tl.cdiv(M - end, BM) * col_tiles, tl.num_programs(0)):
        row = end + (tile // col_tiles) * BM + tl.arange(0, BM)[:, None]
        col = (tile % col_tiles) * BN + tl.arange(0, BN)[None, :]
        tl.store(out + row.to(tl.int64) * N + col, zeros, mask=(row < M) & (col < N))


@triton.jit
def padded_ends(ends, out, groups, rows, all_blocks, PAD: tl.constexpr, GROUPS: tl.constexpr):
    """The end of each padded group, (G,) int32."""
    number, _start, _size, blocks = group_rows(ends, groups, rows, PAD, GROUPS)
    tl.store(out + number, tl.minimum(tl.cumsum(blocks, 0), all_blocks) * PAD, mask=number < groups)

"""Products of row-scaled E4M3 in Triton: groups of rows times a stack, the columns of each group, and flagged rows.

In groups, a program computes one tile of one group. It finds the group from the ends, which stay on the device;
programs without a tile return. The tensor cores add up 128 columns, then the sum goes to a float32 in registers: that
is as precise as CUTLASS without fast accumulation (docs/reference/numerics.md). A tile of SPLIT * BN columns adds its
pieces of BN columns one after the other, so that the sum of one is in flight.

``exact_rows`` multiplies the rows that are out of range, and writes over the result of the others. Nothing waits for
the host: each program counts the flags of all rows, and returns if there is none. Otherwise the programs share the
tiles of two products: flagged rows of a with all rows of b, and all rows of a with flagged rows of b. The
n-th flagged row is found among the flags, so that the time goes with the number of flagged rows. Values are decoded to
bfloat16, which is exact, as in ``gemm/dequant.py``: a flagged row under the scales of its blocks, another one under its
row scale. The terms are those of the glossary in ``numerics/row_scaled.py``.
"""

import triton
import triton.language as tl

from .elements import float_from_code, from_codes, scale_value
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


# ---------------------------------------------------------------------------------------------- exact rows


@triton.jit
def count_flags(flags_ptr, rows, CHUNK: tl.constexpr):
    """How many of the rows are flagged."""
    total = tl.zeros((CHUNK,), tl.int32)
    for i in range(0, tl.cdiv(rows, CHUNK)):
        at = i * CHUNK + tl.arange(0, CHUNK)
        total += tl.load(flags_ptr + at, mask=at < rows, other=0).to(tl.int32)
    return tl.sum(total, axis=0)


@triton.jit
def flagged_rows(flags_ptr, rows, tile, BM: tl.constexpr, STEP: tl.constexpr):
    """The flagged rows number tile * BM and so on, in order; ``rows`` for those that do not exist."""
    wanted = tile * BM + tl.arange(0, BM)
    found = tl.full((BM,), 0, tl.int32) + rows
    before = 0
    for i in range(0, tl.cdiv(rows, STEP)):
        at = i * STEP + tl.arange(0, STEP)
        flagged = tl.load(flags_ptr + at, mask=at < rows, other=0).to(tl.int32)
        count = tl.sum(flagged, axis=0)
        if (before + count > tile * BM) & (before < tile * BM + BM):
            number = before + tl.cumsum(flagged, axis=0) - 1
            here = (number[None, :] == wanted[:, None]) & (flagged > 0)[None, :]
            found = tl.minimum(found, tl.min(tl.where(here, at[None, :], rows), axis=1))
        before += count
    return found


@triton.jit
def e4m3_value(code, NATIVE: tl.constexpr):
    """E4M3 codes to float32."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = code.to(tl.int32)
        value = float_from_code(wide & 0x7F, 4, 3, 7)
        value = tl.where((wide & 0x7F) == 0x7F, float("nan"), value)
        return tl.where(wide > 127, -value, value)


@triton.jit
def side_values(
    codes_ptr, scale_ptr, row, rows_in, row_scale, flagged, col, cols, width, scale_stride,
    C: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """The values (rows, columns) of one side; row (BM, 1), col (1, BK). Not BF16: in float32, for the interpreter."""
    inside = rows_in & (col < cols)
    code = tl.load(codes_ptr + row.to(tl.int64) * width + col, mask=inside, other=0)
    line = row // ROWS if ROWS > 0 else row * 0
    block = col // COLS if COLS > 0 else col * 0
    at = scale_ptr + line.to(tl.int64) * scale_stride + block
    stored = tl.load(at, mask=inside & flagged, other=0)
    scale = tl.where(flagged, scale_value(stored, C), row_scale)
    value = e4m3_value(code, BF16)
    if C.bits == 8 and C.mantissa_bits == 2:
        value = tl.where(flagged, from_codes(code, C), value)
    value = tl.where(inside, value * scale, 0.0)
    return value.to(tl.bfloat16) if BF16 else value


@triton.jit
def exact_rows(
    a_ptr, a_row_ptr, a_flags_ptr, a_scale_ptr, b_ptr, b_row_ptr, b_flags_ptr, b_scale_ptr, bias_ptr,
    out_ptr, M, N, K, a_width, a_scale_stride, b_width, b_scale_stride, out_stride,
    A: tl.constexpr, B: tl.constexpr, A_ROWS: tl.constexpr, A_COLS: tl.constexpr, B_ROWS: tl.constexpr,
    B_COLS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """``a @ b^T + bias`` where a row of a (M, K) or of b (N, K) is flagged; the rest of out (M, N) stays."""
    a_count, b_count = count_flags(a_flags_ptr, M, CHUNK), count_flags(b_flags_ptr, N, CHUNK)
    if a_count + b_count == 0:
        return
    a_tiles = tl.cdiv(a_count, BM) * tl.cdiv(N, BN)  # of flagged rows of a
    b_tiles = tl.cdiv(b_count, BN) * tl.cdiv(M, BM)
    for tile in range(tl.program_id(0), a_tiles + b_tiles, tl.num_programs(0)):
        if tile < a_tiles:
            row = flagged_rows(a_flags_ptr, M, tile // tl.cdiv(N, BN), BM, STEP)
            col = (tile % tl.cdiv(N, BN)) * BN + tl.arange(0, BN)
        else:
            row = ((tile - a_tiles) % tl.cdiv(M, BM)) * BM + tl.arange(0, BM)
            col = flagged_rows(b_flags_ptr, N, (tile - a_tiles) // tl.cdiv(M, BM), BN, STEP)
        a_flag = tl.load(a_flags_ptr + row, mask=row < M, other=0)
        b_flag = tl.load(b_flags_ptr + col, mask=col < N, other=0)
        a_row = tl.load(a_row_ptr + row, mask=row < M, other=0.0)
        b_row = tl.load(b_row_ptr + col, mask=col < N, other=0.0)
        total = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            at = k + tl.arange(0, BK)[None, :]
            a = side_values(
                a_ptr, a_scale_ptr, row[:, None], (row < M)[:, None], a_row[:, None], (a_flag > 0)[:, None],
                at, K, a_width, a_scale_stride, A, A_ROWS, A_COLS, BF16,
            )  # fmt: skip
            b = side_values(
                b_ptr, b_scale_ptr, col[:, None], (col < N)[:, None], b_row[:, None], (b_flag > 0)[:, None],
                at, K, b_width, b_scale_stride, B, B_ROWS, B_COLS, BF16,
            )  # fmt: skip
            total = tl.dot(a, tl.trans(b), total)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        to = out_ptr + row.to(tl.int64)[:, None] * out_stride + col[None, :]
        tl.store(to, total.to(out_ptr.dtype.element_ty), mask=(row < M)[:, None] & (col < N)[None, :])

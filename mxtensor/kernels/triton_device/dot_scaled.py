"""Products of two block-scaled factors in Triton: ``tl.dot_scaled`` over tiles, one epilogue in float32.

Both factors are blocked along K, their last dimension. Codes lie in rows of ``width`` bytes, a multiple of 16, and are
0 past the logical K. Scales lie in rows of ``scale_width * P.unit`` bytes: the compiler has to know what a row is a
multiple of to load more than a byte at a time. Where K is not ``P.even`` a row of scales covers the last tile. What
lies outside reads as code 0 with scale byte 0, which is no NaN in any scale format. ``P`` is a ``Plan``.

A tile is reached from its 64-bit origin by small offsets: 64-bit row numbers in every thread cost registers (spills).
"""

import triton
import triton.language as tl


@triton.jit
def swizzled(pid, row_tiles, col_tiles, P: tl.constexpr):
    """(row tile, column tile) of a program: a band of row tiles at a time, so that neighbours share what L2 holds."""
    first = pid // (P.band * col_tiles) * P.band
    height = min(row_tiles - first, P.band)
    inside = pid % (P.band * col_tiles)
    return first + inside % height, inside // height


@triton.jit
def code_pointers(base, first, width, TILE: tl.constexpr, BYTES: tl.constexpr):
    """Pointers to the first tile (TILE, BYTES) of the rows from ``first``."""
    return base + first * width + tl.arange(0, TILE).to(tl.int64)[:, None] * width + tl.arange(0, BYTES)[None, :]


@triton.jit
def scale_pointers(base, first, width, TILE: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr):
    """Pointers to the scales of that tile, one for ROWS rows."""
    rows = (first % ROWS).to(tl.int32) + tl.arange(0, TILE)
    at = base + first // ROWS * width * P.unit
    block = tl.arange(0, P.tile_k // P.block)
    return at + (rows // ROWS).to(tl.int64)[:, None] * width * P.unit + block[None, :]


@triton.jit
def accumulate(
    a, a_scale, b, b_scale, row, rows, col, cols, K, a_width, a_scale_width, b_width, b_scale_width, P: tl.constexpr
):
    """``a[row :] @ b[col :]^T`` in float32: one tile, of which ``rows`` and ``cols`` are there."""
    TILE_M: tl.constexpr = P.tile_m
    TILE_N: tl.constexpr = P.tile_n
    A: tl.constexpr = tl.constexpr(P.a)
    B: tl.constexpr = tl.constexpr(P.b)
    A_BYTES: tl.constexpr = P.tile_k // P.a_pack
    B_BYTES: tl.constexpr = P.tile_k // P.b_pack
    a = code_pointers(a, row, a_width, TILE_M, A_BYTES)
    b = code_pointers(b, col, b_width, TILE_N, B_BYTES)
    a_scale = scale_pointers(a_scale, row, a_scale_width, TILE_M, P.a_rows, P)
    b_scale = scale_pointers(b_scale, col, b_scale_width, TILE_N, P.b_rows, P)
    a_mask, b_mask = (tl.arange(0, TILE_M) < rows)[:, None], (tl.arange(0, TILE_N) < cols)[:, None]
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, P.tile_k)):
        if P.even:
            x = tl.load(a, mask=a_mask, other=0.0)
            y = tl.load(b, mask=b_mask, other=0.0)
        else:
            a_left, b_left = a_width - k * A_BYTES, b_width - k * B_BYTES
            x = tl.load(a, mask=a_mask & (tl.arange(0, A_BYTES) < a_left)[None, :], other=0.0)
            y = tl.load(b, mask=b_mask & (tl.arange(0, B_BYTES) < b_left)[None, :], other=0.0)
        x_scale = tl.load(a_scale, mask=a_mask, other=0.0)
        y_scale = tl.load(b_scale, mask=b_mask, other=0.0)
        total = tl.dot_scaled(x, x_scale, A, tl.trans(y), y_scale, B, total)
        a += A_BYTES
        b += B_BYTES
        a_scale += P.tile_k // P.block
        b_scale += P.tile_k // P.block
    return total


@triton.jit
def finish(out, total, row, rows, col, cols, N, a_global, b_global, bias, alpha, beta, live, P: tl.constexpr):
    """``alpha * total * global scales + beta * bias``, rounded once; 0 where not ``live``.

    ``bias`` is (N,), or with ``P.bias_rows`` like ``out``, where all is live.
    """
    right = tl.arange(0, P.tile_n)
    origin = row * N + col
    at = tl.arange(0, P.tile_m).to(tl.int64)[:, None] * N + right[None, :]
    mask = (tl.arange(0, P.tile_m) < rows)[:, None] & (right < cols)[None, :]
    gemm_operand = alpha
    if a_global is not None:
        gemm_operand *= tl.load(a_global)
    if b_global is not None:
        gemm_operand *= tl.load(b_global)
    total *= tl.where(live, gemm_operand, 0.0)
    if bias is not None:
        if P.bias_rows:
            total += beta * tl.load(bias + origin + at, mask=mask, other=0.0).to(tl.float32)
        else:
            added = tl.load(bias + col + right, mask=right < tl.where(live, cols, 0), other=0.0)
            total += (beta * added.to(tl.float32))[None, :]
    tl.store(out + origin + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def matrix(
    a, a_scale, b, b_scale, out, a_global, b_global, bias, M, N, K,
    a_width, a_scale_width, b_width, b_scale_width, alpha, beta, P: tl.constexpr,
):  # fmt: skip
    """One tile of (M, N) = a (M, K) @ b (N, K)^T a program."""
    row_tile, col_tile = swizzled(tl.program_id(0), tl.cdiv(M, P.tile_m), tl.cdiv(N, P.tile_n), P)
    row, rows = row_tile.to(tl.int64) * P.tile_m, M - row_tile * P.tile_m
    col, cols = col_tile.to(tl.int64) * P.tile_n, N - col_tile * P.tile_n
    total = accumulate(
        a, a_scale, b, b_scale, row, rows, col, cols, K, a_width, a_scale_width, b_width, b_scale_width, P
    )
    finish(out, total, row, rows, col, cols, N, a_global, b_global, bias, alpha, beta, True, P)


@triton.jit
def group_of(ends, tile, G, M, P: tl.constexpr):
    """(group, first row, rows) of a row tile; the rows after the last end are group G, and more than G is no group."""
    groups = tl.arange(0, P.groups)
    end = tl.minimum(tl.load(ends + groups, mask=groups < G, other=M), M)
    start = tl.minimum(tl.load(ends + groups - 1, mask=(groups > 0) & (groups <= G), other=0), M)
    tiles = tl.cdiv(end - start, P.tile_m)
    until = tl.cumsum(tiles, 0)
    group = tl.sum((until <= tile).to(tl.int32))
    mine = groups == group
    first = tl.sum(tl.where(mine, start + (tile - (until - tiles)) * P.tile_m, 0))
    return group, first, tl.sum(tl.where(mine, end, 0)) - first


@triton.jit
def grouped(
    a, a_scale, b, b_scale, out, a_global, b_global, bias, ends, G, M, N, K,
    a_width, a_scale_width, b_width, b_scale_width, alpha, beta, P: tl.constexpr,
):  # fmt: skip
    """Rows of a (M, K) times the weight of their group, b (G, N, K); one tile of one group's rows a program.

    The host never reads ``ends``: M // tile_m + G + 1 row tiles are enough whatever they are, and the programs left
    over return. Rows after the last end meet nothing. ``P.groups``: a power of two above G.
    """
    row_tile, col_tile = swizzled(tl.program_id(0), M // P.tile_m + G + 1, tl.cdiv(N, P.tile_n), P)
    group, first, rows = group_of(ends, row_tile, G, M, P)
    if group > G:
        return
    row = first.to(tl.int64)
    col, cols = col_tile.to(tl.int64) * P.tile_n, N - col_tile * P.tile_n
    live = group < G
    weight = group.to(tl.int64)
    b += weight * N * b_width
    b_scale += weight * tl.cdiv(N, P.b_rows) * b_scale_width * P.unit
    depth = tl.where(live, K, 0)
    total = accumulate(
        a, a_scale, b, b_scale, row, rows, col, cols, depth, a_width, a_scale_width, b_width, b_scale_width, P
    )
    finish(out, total, row, rows, col, cols, N, a_global, b_global, bias, alpha, beta, live, P)

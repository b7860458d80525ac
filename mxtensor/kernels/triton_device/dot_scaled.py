"""Products of two block-scaled operands in Triton: ``tl.dot_scaled`` over tiles, one epilogue in float32.

Both operands are blocked along K, their last dimension. A row of codes has ``width`` bytes, a multiple of 16, and is 0
past the logical K. A row of scales has ``scale_width * P.unit`` bytes: the compiler needs a known multiple to load more
than one byte at a time. If ``P.even`` is false, a row of scales covers the last tile. Everything outside reads as code
0 with scale byte 0, which is not NaN in any scale format. ``P`` is a ``Constants`` of ``gemm/dot_scaled.py``.

A tile is addressed by small offsets from a 64-bit origin: 64-bit row numbers in every thread spill registers.
"""

import triton
import triton.language as tl


@triton.jit
def swizzled(pid, row_tiles, col_tiles, P: tl.constexpr):
    """(row tile, column tile) of a program, one band of row tiles at a time, so that neighbours share data in L2."""
    first = pid // (P.band * col_tiles) * P.band
    height = min(row_tiles - first, P.band)
    inside = pid % (P.band * col_tiles)
    return first + inside % height, inside // height


@triton.jit
def code_pointers(base, first, width, TILE: tl.constexpr, BYTES: tl.constexpr):
    """Pointers to the first tile (TILE, BYTES) of the rows that start at ``first``."""
    return base + first * width + tl.arange(0, TILE).to(tl.int64)[:, None] * width + tl.arange(0, BYTES)[None, :]


@triton.jit
def scale_pointers(base, first, width, TILE: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr):
    """Pointers to the scales of that tile; ROWS rows share a scale."""
    rows = (first % ROWS).to(tl.int32) + tl.arange(0, TILE)
    at = base + first // ROWS * width * P.unit
    block = tl.arange(0, P.tile_k // P.block)
    return at + (rows // ROWS).to(tl.int64)[:, None] * width * P.unit + block[None, :]


@triton.jit
def accumulate(
    a, a_scale, b, b_scale, row, rows, col, cols, K, a_width, a_scale_width, b_width, b_scale_width, P: tl.constexpr
):
    """``a[row :] @ b[col :]^T`` in float32: one tile, of which ``rows`` rows and ``cols`` columns exist."""
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
    """``alpha * total * global scales + beta * bias``, rounded once; 0 if ``live`` is false.

    ``bias`` is (N,), or with ``P.bias_rows`` (M, N); then ``live`` is always true.
    """
    right = tl.arange(0, P.tile_n)
    origin = row * N + col
    at = tl.arange(0, P.tile_m).to(tl.int64)[:, None] * N + right[None, :]
    mask = (tl.arange(0, P.tile_m) < rows)[:, None] & (right < cols)[None, :]
    multiplier = alpha
    if a_global is not None:
        multiplier *= tl.load(a_global)
    if b_global is not None:
        multiplier *= tl.load(b_global)
    total *= tl.where(live, multiplier, 0.0)
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
    """One program computes one tile of (M, N) = a (M, K) @ b (N, K)^T."""
    row_tile, col_tile = swizzled(tl.program_id(0), tl.cdiv(M, P.tile_m), tl.cdiv(N, P.tile_n), P)
    row, rows = row_tile.to(tl.int64) * P.tile_m, M - row_tile * P.tile_m
    col, cols = col_tile.to(tl.int64) * P.tile_n, N - col_tile * P.tile_n
    total = accumulate(
        a, a_scale, b, b_scale, row, rows, col, cols, K, a_width, a_scale_width, b_width, b_scale_width, P
    )
    finish(out, total, row, rows, col, cols, N, a_global, b_global, bias, alpha, beta, True, P)


@triton.jit
def group_of(ends, tile, G, M, P: tl.constexpr):
    """(group, first row, rows) of a row tile; the rows after the last end are group G, a group above G has no rows."""
    groups = tl.arange(0, P.groups)
    # The ends are data: whatever they are, no row outside of a may be read or written.
    end = tl.maximum(tl.minimum(tl.load(ends + groups, mask=groups < G, other=M), M), 0)
    start = tl.maximum(tl.minimum(tl.load(ends + groups - 1, mask=(groups > 0) & (groups <= G), other=0), M), 0)
    tiles = tl.cdiv(tl.maximum(end - start, 0), P.tile_m)
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
    """Rows of a (M, K) times the weight of their group, b (G, N, K); one program computes one tile of one group.

    The host never reads ``ends``: M // tile_m + G + 1 row tiles are always enough, and programs without a tile return.
    Rows after the last end give zeros. ``P.groups``: a power of two above G.
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

"""The exact product of rows that are out of range of row-scaled E4M3, written over the result of the others.

Programs stay on the device: each counts the flags of all rows, and returns if there is none. Otherwise the programs
share the tiles of two products: flagged rows of a with all rows of b, and all rows of a with flagged rows of b. The
n-th flagged row is found among the flags, so that the time goes with the number of flagged rows. Values are decoded to
bfloat16, which is exact, as in ``gemm/dequant.py``: a flagged row under the scales of its blocks, another one under its
row scale. The terms are those of the glossary in ``numerics/row_scaled.py``.
"""

import triton
import triton.language as tl

from .elements import float_from_code, from_codes, scale_value


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

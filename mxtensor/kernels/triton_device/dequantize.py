"""Dequantize in Triton in one pass: float32(element) * scale (* global scale), rounded once."""

import triton
import triton.language as tl

from .elements import from_codes, scale_value
from .quantize import load_tile, store_tile


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

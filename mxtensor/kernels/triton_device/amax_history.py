"""One step of delayed scaling in one program: the record enters the history, and the next amax is computed."""

import triton
import triton.language as tl

from .elements import bits_of, float_of

INFINITY = tl.constexpr(0x7F800000)


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
    usable = (largest > 0) & (largest < INFINITY)
    unchanged = tl.load(amax_ptr + one, mask=one < COLUMNS, other=0.0)
    tl.store(next_ptr + one, tl.where(usable, float_of(largest) * MULTIPLIER, unchanged), mask=one < COLUMNS)

"""Attention of a few queries over keys and values in high precision in Triton, in ranges of keys as in ``attention``.

Keys are read as a cache stores them, once for all heads of queries that share a head of keys. Where a mask hides all
of a step, neither keys nor values are read: a static cache has places that no token has yet.
"""

import triton
import triton.language as tl

from .attention import range_of, softmax_step, store_sums


@triton.jit
def attend_values(
    q, k, v, mask, sums, stats, out, heads, rows, queries, count, splits, k_size, v_size,
    q_b, q_h, q_q, k_b, k_h, k_s, v_b, v_h, v_s, mask_b, mask_h, mask_q, mask_s, out_b, out_h, out_q,
    K_COLUMNS: tl.constexpr, V_COLUMNS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SCALE: tl.constexpr,
    OWN_DTYPE: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Program (batch, head of keys, range): with ONE range the result in ``out``, else ``sums`` and ``stats`` as of
    ``attend``.

    Rows are the queries of all heads that share the keys. ``mask`` is added to scores, or bool, where False hides a
    key, or None. OWN_DTYPE: products are in the dtype of q, which keys and values have too, else in float32.
    """
    program = tl.program_id(0)
    b, h, begin, end = range_of(program, heads, splits, count, KEYS)
    row = tl.arange(0, ROWS)
    column, out_column = tl.arange(0, K_COLUMNS), tl.arange(0, V_COLUMNS)
    row_in, in_keys, in_values = row < rows, (column < k_size)[None, :], (out_column < v_size)[None, :]
    query_head, query = h * (rows // queries) + row // queries, (row % queries).to(tl.int64)
    from_q = b * q_b + query_head * q_h + query * q_q
    x = tl.load(q + from_q[:, None] + column[None, :], mask=row_in[:, None] & in_keys, other=0.0)
    if not OWN_DTYPE:
        x = x.to(tl.float32)
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    if mask is not None:
        of_row = b * mask_b + query_head * mask_h + query * mask_q
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    added = tl.full((ROWS, V_COLUMNS), 0.0, tl.float32)
    for start in range(begin, end, KEYS):
        key = (start + tl.arange(0, KEYS)).to(tl.int64)
        inside = key < end
        bias = tl.zeros((ROWS, KEYS), tl.float32)
        if mask is not None:
            at, both = mask + of_row[:, None] + key[None, :] * mask_s, row_in[:, None] & inside[None, :]
            if mask.dtype.element_ty == tl.int1:
                bias = tl.where(tl.load(at, mask=both, other=0), 0.0, float("-inf"))
            else:
                bias = tl.load(at, mask=both, other=float("-inf")).to(tl.float32)
        if tl.max(tl.max((bias != float("-inf")).to(tl.int32), 1), 0) > 0:
            keys = tl.load(k + key[:, None] * k_s + column[None, :], mask=inside[:, None] & in_keys, other=0.0)
            values = tl.load(v + key[:, None] * v_s + out_column[None, :], mask=inside[:, None] & in_values, other=0.0)
            top, total, added = softmax_step(
                x, keys.to(x.dtype), values.to(x.dtype), bias, inside, SCALE, top, total, added
            )
    if ONE:
        result = added / tl.where(total == 0.0, 1.0, total)[:, None]
        to = b * out_b + query_head * out_h + query * out_q
        tl.store(out + to[:, None] + out_column[None, :], result.to(out.dtype.element_ty),
                 mask=row_in[:, None] & in_values)  # fmt: skip
    else:
        store_sums(sums, stats, program, rows, v_size, row, out_column, added, top, total)

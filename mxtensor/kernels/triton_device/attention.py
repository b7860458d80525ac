"""Attention of a few queries in Triton: ranges of keys, each with a running softmax, and their sum.

``attend`` reads codes, ``attend_values`` keys and values in high precision as a cache stores them. One program reads
one range of one head of keys for all queries that share this head; ``join`` adds the ranges of a row. The compile-time
constants of ``attend`` are the fields of an ``AttentionCode``: Triton 3.6 takes no field of a tuple in a tuple. Where a
mask hides all of a step, ``attend_values`` reads neither keys nor values: a static cache has places that no token has
yet.
"""

import triton
import triton.language as tl

from .elements import from_codes, scale_value
from .quantize import load_codes


@triton.jit
def values_of(
    first, data, scale, key, start, inside, first_count, data_stride, scale_stride, size,
    C: tl.constexpr, COLS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The values (BN, BK) of keys ``key`` (BN, 1), float32: the first ones as they are, the others from their codes.

    COLS values share a scale; 0: all values of a key.
    """
    BN: tl.constexpr = key.shape[0]
    column = tl.arange(0, BK)[None, :]
    row = (key - first_count).to(tl.int64)
    coded = inside & (key >= first_count)
    value = from_codes(load_codes(data, row * data_stride, coded, 0, size, C, BK, False), C)
    if COLS == 0:
        value = value * scale_value(tl.load(scale + row * scale_stride, mask=coded, other=0), C)
    else:
        NB: tl.constexpr = BK // COLS
        block = tl.arange(0, NB)[None, :]
        stored = tl.load(scale + row * scale_stride + block, mask=coded & (block * COLS < size), other=0)
        value = tl.reshape(tl.reshape(value, (BN, NB, COLS)) * scale_value(stored, C)[:, :, None], (BN, BK))
    if start < first_count:
        plain = inside & (key < first_count) & (column < size)
        value = tl.where(key < first_count, tl.load(first + key * size + column, mask=plain, other=0.0), value)
    return value


@triton.jit
def range_of(program, heads, splits, count, KEYS: tl.constexpr):
    """Batch and head of keys, and the first key of a range and the one after its last, of a program (batch, head,
    range)."""
    head = program // splits
    length = tl.cdiv(tl.cdiv(count, splits), KEYS) * KEYS
    begin = (program % splits) * length
    return (head // heads).to(tl.int64), (head % heads).to(tl.int64), begin, tl.minimum(begin + length, count)


@triton.jit
def store_sums(sums, stats, program, rows, size, row, column, added, top, total):
    """Write what a program has found: ``sums`` (programs, rows, size) and ``stats`` (programs, rows, 2)."""
    row_in = row < rows
    to = program.to(tl.int64) * rows + row
    tl.store(sums + to[:, None] * size + column[None, :], added, mask=row_in[:, None] & (column < size)[None, :])
    tl.store(stats + to * 2, top, mask=row_in)
    tl.store(stats + to * 2 + 1, total, mask=row_in)


@triton.jit
def softmax_step(x, k, v, bias, inside, multiplier, top, total, added):
    """``top``, ``total`` and ``added`` of a running softmax after the keys ``k`` (BN, BK) with values ``v`` (BN, BV).

    x (ROWS, BK) has the dtype of both; ``bias`` (ROWS, BN) is added to the scores; keys count if ``inside``.
    """
    scores = tl.dot(x, tl.trans(k), input_precision="ieee") * multiplier + bias
    scores = tl.where(inside[None, :], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights, before = tl.exp(scores - base[:, None]), tl.exp(top - base)
    product = tl.dot(weights.to(x.dtype), v, input_precision="ieee")
    return higher, total * before + tl.sum(weights, 1), added * before[:, None] + product


@triton.jit
def attend(
    q, k_first, k_data, k_scale, k_global, v_first, v_data, v_scale, mask, sums, stats,
    heads, rows, queries, count, k_count, v_count, splits, k_size, v_size,
    k_data_b, k_data_h, k_data_s, k_scale_b, k_scale_h, k_scale_s,
    v_data_b, v_data_h, v_data_s, v_scale_b, v_scale_h, v_scale_s,
    mask_b, mask_h, mask_g, mask_q, mask_s,
    K: tl.constexpr, V: tl.constexpr, K_COLS: tl.constexpr, V_COLS: tl.constexpr, K_COLUMNS: tl.constexpr,
    V_COLUMNS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, SCALE: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """Program (batch, head, range): ``sums`` (programs, rows, v_size) and ``stats`` (programs, rows, 2), float32.

    ``stats`` has the largest score and the sum of weights. ``mask`` is float32, or None.
    """
    program = tl.program_id(0)
    head = program // splits
    b, h, begin, end = range_of(program, heads, splits, count, KEYS)
    row = tl.arange(0, ROWS)
    column, out_column = tl.arange(0, K_COLUMNS), tl.arange(0, V_COLUMNS)
    row_in = row < rows
    at = (head * rows + row).to(tl.int64)
    x = tl.load(
        q + at[:, None] * k_size + column[None, :], mask=row_in[:, None] & (column < k_size)[None, :], other=0.0
    )
    x = x.to(tl.bfloat16 if BF16 else tl.float32)
    multiplier = SCALE
    if k_global is not None:
        multiplier = multiplier * tl.load(k_global)
    if mask is not None:
        mask += b * mask_b + h * mask_h
        mask_row = (row // queries).to(tl.int64) * mask_g + (row % queries).to(tl.int64) * mask_q
    k_first += head.to(tl.int64) * k_count * k_size
    v_first += head.to(tl.int64) * v_count * v_size
    k_data += b * k_data_b + h * k_data_h
    v_data += b * v_data_b + h * v_data_h
    k_scale += b * k_scale_b + h * k_scale_h
    v_scale += b * v_scale_b + h * v_scale_h
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    added = tl.full((ROWS, V_COLUMNS), 0.0, tl.float32)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < end
        k = values_of(
            k_first, k_data, k_scale, key[:, None], start, inside[:, None], k_count, k_data_s, k_scale_s, k_size,
            K, K_COLS, K_COLUMNS,
        )  # fmt: skip
        bias = tl.zeros((ROWS, KEYS), tl.float32)
        if mask is not None:
            both = row_in[:, None] & inside[None, :]
            bias = tl.load(mask + mask_row[:, None] + key.to(tl.int64)[None, :] * mask_s, mask=both, other=0.0)
        v = values_of(
            v_first, v_data, v_scale, key[:, None], start, inside[:, None], v_count, v_data_s, v_scale_s, v_size,
            V, V_COLS, V_COLUMNS,
        )  # fmt: skip
        top, total, added = softmax_step(x, k.to(x.dtype), v.to(x.dtype), bias, inside, multiplier, top, total, added)
    store_sums(sums, stats, program, rows, v_size, row, out_column, added, top, total)


@triton.jit
def join(
    sums, stats, v_global, out, heads, rows, queries, splits, size, out_b, out_h, out_q,
    MOST: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (batch, head of keys, row): the result of a row from its ranges. MOST: a power of two, at least
    ``splits``."""
    program = tl.program_id(0)
    head, row = program // rows, program % rows
    each, column = tl.arange(0, MOST), tl.arange(0, COLUMNS)
    at = (head * splits + each).to(tl.int64) * rows + row
    top = tl.load(stats + at * 2, mask=each < splits, other=float("-inf"))
    total = tl.load(stats + at * 2 + 1, mask=each < splits, other=0.0)
    highest = tl.max(top, 0)
    weight = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))
    inside = (each < splits)[:, None] & (column < size)[None, :]
    part = tl.load(sums + at[:, None] * size + column[None, :], mask=inside, other=0.0)
    denominator = tl.sum(weight * total, 0)
    result = tl.sum(weight[:, None] * part, 0) / tl.where(denominator == 0.0, 1.0, denominator)
    if v_global is not None:
        result = result * tl.load(v_global)
    query_head = (head % heads) * (rows // queries) + row // queries
    out += (head // heads).to(tl.int64) * out_b + query_head.to(tl.int64) * out_h + (row % queries) * out_q
    tl.store(out + column, result.to(out.dtype.element_ty), mask=column < size)


# ---------------------------------------------------------------------------------------------- without codes


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

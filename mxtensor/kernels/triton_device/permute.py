"""Rows of tokens sorted by expert, and put back: maps of rows, copies, sums in a fixed order, and their gradients.

A choice is an entry of ``row_id_map`` (tokens, PER), numbered ``token * PER + k``: a token and one of its experts. The
row of a choice is its place among the sorted rows, -1 if it has none. Nothing here adds by atomics.
"""

import triton
import triton.language as tl

NONE = tl.constexpr(0x7FFFFFFF)
"""After all rows."""


@triton.jit
def _chosen(mask_ptr, start, end, experts, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """int32 (TOKENS, EXPERTS): 1 where a token goes to an expert, for tokens from ``start`` on and before ``end``."""
    token = start + tl.arange(0, TOKENS)[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    inside = (token < end) & (expert < experts)
    return (tl.load(mask_ptr + token * experts + expert, mask=inside, other=0) != 0).to(tl.int32)


@triton.jit
def count_choices(
    mask_ptr, counts_ptr, tokens, experts, length, TOKENS: tl.constexpr, EXPERTS: tl.constexpr
):  # fmt: skip
    """counts (programs, experts): the tokens of each expert among the ``length`` tokens of this program."""
    first = tl.program_id(0) * length
    end = tl.minimum(first + length, tokens)
    count = tl.zeros((EXPERTS,), tl.int32)
    for start in range(first, end, TOKENS):
        count += tl.sum(_chosen(mask_ptr, start, end, experts, TOKENS, EXPERTS), axis=0)
    expert = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + tl.program_id(0) * experts + expert, count, mask=expert < experts)


@triton.jit
def number_rows(
    mask_ptr, counts_ptr, offsets_ptr, map_ptr, choices_ptr, tokens, experts, length, programs, rows, share,
    HAS_OFFSETS: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The row of each choice, sorted by expert and then by token; and the choice of each row, -1 for a row of none.

    ``counts`` come from ``count_choices`` with the same programs. ``offsets`` (experts,) are added to rows for
    ``choices``, and not for ``map``. Choices whose row is ``rows`` or more have none. Each program also marks those of
    its ``share`` of the rows that no choice has.
    """
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, programs, PROGRAMS):
        part = start + tl.arange(0, PROGRAMS)[:, None]
        inside = (part < programs) & (expert[None, :] < experts)
        count = tl.load(counts_ptr + part * experts + expert[None, :], mask=inside, other=0)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where(part < program, count, 0), axis=0)
    first_row = tl.cumsum(total, axis=0) - total
    offset = tl.zeros((EXPERTS,), tl.int32)
    if HAS_OFFSETS:
        offset = tl.load(offsets_ptr + expert, mask=expert < experts, other=0).to(tl.int32)

    next_row = first_row + before
    first = program * length
    end = tl.minimum(first + length, tokens)
    for start in range(first, end, TOKENS):
        chosen = _chosen(mask_ptr, start, end, experts, TOKENS, EXPERTS)
        row = next_row[None, :] + tl.cumsum(chosen, axis=0) - 1
        place = row + offset[None, :]
        has_row = (chosen != 0) & (place >= 0) & (place < rows)
        token = start + tl.arange(0, TOKENS)[:, None]
        choice = token * experts + expert[None, :]
        inside = (token < end) & (expert[None, :] < experts)
        tl.store(map_ptr + choice, tl.where(has_row, row, -1), mask=inside)
        tl.store(choices_ptr + place, choice, mask=inside & has_row)
        next_row += tl.sum(chosen, axis=0)

    begin = first_row + offset
    stop = tl.minimum(program * share + share, rows)
    for start in range(program * share, stop, ROWS):
        row = start + tl.arange(0, ROWS)
        if HAS_OFFSETS:
            among = (begin[None, :] <= row[:, None]) & (row[:, None] < (begin + total)[None, :])
            taken = tl.sum(among.to(tl.int32), axis=1) > 0
        else:
            taken = row < tl.sum(total, axis=0)
        tl.store(choices_ptr + row, tl.full((ROWS,), -1, tl.int32), mask=(row < stop) & (taken == 0))


@triton.jit
def invert_rows(
    map_ptr, offsets_ptr, choices_ptr, choices, per, rows, HAS_OFFSETS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write each choice to its row in ``choices_ptr`` (rows,), which is full of -1."""
    choice = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(map_ptr + choice, mask=choice < choices, other=-1).to(tl.int32)
    has_row = row >= 0
    if HAS_OFFSETS:
        row += tl.load(offsets_ptr + choice % per, mask=choice < choices, other=0).to(tl.int32)
    tl.store(choices_ptr + row, choice, mask=has_row & (row >= 0) & (row < rows))


@triton.jit
def chunk_rows(
    sizes_ptr, index_ptr, spans_ptr, source_ptr, target_ptr, rows, out_rows, chunks,
    SORTED: tl.constexpr, PADDED: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The source row of each row of the result, -1 for padding, and the target of each source row.

    Chunk i of the result is chunk ``index[i]`` (i itself unless SORTED) of the source, and takes ``spans[i]`` rows
    (as many as it has unless PADDED). Rows after all chunks stay where they are.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    size = tl.load(sizes_ptr + chunk, mask=there, other=0).to(tl.int32)
    span = size
    if SORTED:
        of_chunk = tl.load(index_ptr + chunk, mask=there, other=0).to(tl.int32)
        span = tl.load(sizes_ptr + of_chunk, mask=there, other=0).to(tl.int32)
    if PADDED:
        span = tl.load(spans_ptr + chunk, mask=there, other=0).to(tl.int32)
    place = tl.sum(((tl.cumsum(span, axis=0)[None, :] <= row[:, None]) & there[None, :]).to(tl.int32), axis=1)
    inside = row - tl.sum(tl.where(chunk[None, :] < place[:, None], span[None, :], 0), axis=1)
    found = place < chunks
    source_chunk = place
    if SORTED:
        source_chunk = tl.load(index_ptr + place, mask=found & (row < out_rows), other=0).to(tl.int32)
    earlier = tl.where(chunk[None, :] < source_chunk[:, None], size[None, :], 0)
    source = tl.where(found, tl.sum(earlier, axis=1) + inside, row)
    if PADDED:
        own = tl.sum(tl.where(chunk[None, :] == source_chunk[:, None], size[None, :], 0), axis=1)
        source = tl.where(found & (inside < own), source, -1)
    valid = (source >= 0) & (source < rows)
    tl.store(source_ptr + row, tl.where(valid, source, -1), mask=row < out_rows)
    tl.store(target_ptr + source, row, mask=valid & (row < out_rows))


@triton.jit
def gather_rows(
    x_ptr, choices_ptr, probs_ptr, out_ptr, out_probs_ptr, per, cols, stride, blocks,
    HAS_PROBS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Row r of the result is the token of its choice, and its weight that of its choice; zeros for a row of none."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    col = block * COLS + tl.arange(0, COLS)
    choice = tl.load(choices_ptr + row)
    has_choice = choice >= 0
    token = (tl.where(has_choice, choice, 0) // per).to(tl.int64)
    value = tl.load(x_ptr + token * stride + col, mask=(col < cols) & has_choice, other=0)
    tl.store(out_ptr + row * cols + col, value, mask=col < cols)
    if HAS_PROBS:
        prob = tl.load(probs_ptr + choice, mask=has_choice & (block == 0), other=0)
        tl.store(out_probs_ptr + row, prob, mask=block == 0)


@triton.jit
def _rows_of_token(map_ptr, offsets_ptr, token, per, rows, HAS_OFFSETS: tl.constexpr, PER: tl.constexpr):
    """int32 (PER,): the row of each choice of a token, NONE for a choice without one."""
    k = tl.arange(0, PER)
    row = tl.load(map_ptr + token.to(tl.int64) * per + k, mask=k < per, other=-1).to(tl.int32)
    has_row = row >= 0
    if HAS_OFFSETS:
        row += tl.load(offsets_ptr + k, mask=k < per, other=0).to(tl.int32)
    return tl.where(has_row & (row >= 0) & (row < rows), row, NONE)


@triton.jit
def merge_rows(
    y_ptr, map_ptr, offsets_ptr, weights_ptr, probs_ptr, out_ptr, out_probs_ptr, per, rows, cols, stride, blocks,
    HAS_OFFSETS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_PROBS: tl.constexpr, PER: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """The sum of the rows of a token, times ``weights`` (tokens, per), in float32 in the order of rows, rounded once.

    HAS_PROBS: ``probs`` (rows,) of each choice, 0 for one without a row.
    """
    token = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    col = block * COLS + tl.arange(0, COLS)
    k = tl.arange(0, PER)
    choice = token.to(tl.int64) * per + k
    left = _rows_of_token(map_ptr, offsets_ptr, token, per, rows, HAS_OFFSETS, PER)
    if HAS_PROBS:
        first = (k < per) & (block == 0)
        prob = tl.load(probs_ptr + left, mask=first & (left != NONE), other=0)
        tl.store(out_probs_ptr + choice, prob, mask=first)
    weights = tl.zeros((PER,), tl.float32)
    if HAS_WEIGHTS:
        weights = tl.load(weights_ptr + choice, mask=k < per, other=0).to(tl.float32)
    total = tl.zeros((COLS,), tl.float32)
    for _ in range(tl.sum((left != NONE).to(tl.int32), axis=0)):
        row = tl.min(left, axis=0)
        value = tl.load(y_ptr + row.to(tl.int64) * stride + col, mask=col < cols, other=0).to(tl.float32)
        if HAS_WEIGHTS:
            value = value * tl.sum(tl.where(left == row, weights, 0.0), axis=0)
        total += value
        left = tl.where(left == row, NONE, left)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token.to(tl.int64) * cols + col, out, mask=col < cols)


@triton.jit
def spread_rows(
    grad_ptr, y_ptr, map_ptr, offsets_ptr, choices_ptr, weights_ptr, y_grad_ptr, weights_grad_ptr, per, rows, cols,
    grad_stride, y_stride, blocks, row_programs,
    HAS_OFFSETS: tl.constexpr, PER: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The gradients of ``merge_rows`` with weights: of a block of a row, or of all weights of a token.

    The first ``row_programs`` programs have rows, ``blocks`` for each; the others have tokens.
    """
    program = tl.program_id(0)
    if program < row_programs:
        row = (program // blocks).to(tl.int64)
        col = (program % blocks) * COLS + tl.arange(0, COLS)
        choice = tl.load(choices_ptr + row)
        has_choice = choice >= 0
        choice = tl.where(has_choice, choice, 0)
        weight = tl.load(weights_ptr + choice).to(tl.float32)
        given = (col < cols) & has_choice
        grad = tl.load(grad_ptr + (choice // per).to(tl.int64) * grad_stride + col, mask=given, other=0)
        y_grad = tl.where(has_choice, grad.to(tl.float32) * weight, 0.0)
        tl.store(y_grad_ptr + row * cols + col, y_grad.to(y_grad_ptr.dtype.element_ty), mask=col < cols)
    else:
        token = program - row_programs
        k = tl.arange(0, PER)
        left = _rows_of_token(map_ptr, offsets_ptr, token, per, rows, HAS_OFFSETS, PER)
        out = tl.zeros((PER,), tl.float32)
        for _ in range(tl.sum((left != NONE).to(tl.int32), axis=0)):
            row = tl.min(left, axis=0)
            total = tl.zeros((COLS,), tl.float32)
            for start in range(0, cols, COLS):
                col = start + tl.arange(0, COLS)
                grad = tl.load(grad_ptr + token.to(tl.int64) * grad_stride + col, mask=col < cols, other=0)
                y = tl.load(y_ptr + row.to(tl.int64) * y_stride + col, mask=col < cols, other=0)
                total += grad.to(tl.float32) * y.to(tl.float32)
            out = tl.where(left == row, tl.sum(total, axis=0), out)
            left = tl.where(left == row, NONE, left)
        out = out.to(weights_grad_ptr.dtype.element_ty)
        tl.store(weights_grad_ptr + token.to(tl.int64) * per + k, out, mask=k < per)

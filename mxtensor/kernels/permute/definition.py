"""The definition: rows of tokens sorted by expert and put back, in plain torch, on any device.

A choice is an entry of ``row_id_map`` (tokens, per), numbered ``token * per + k``: a token and one of its experts. Its
row is its place among the sorted rows, -1 if it has none. ``choices`` (rows,) is the inverse: the choice of each row,
-1 for a row of none, such as padding. ``offsets`` (per,), if given, are added to the rows of ``row_id_map``.

Every function is differentiable by torch, so that gradients of gradients need no kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.kernel import Kernel
from ..quantize.definition import refuses


def _places(row_id_map: Tensor, offsets: Tensor | None, rows: int) -> Tensor:
    """int64 (tokens, per): the row of each choice, offsets added; ``rows`` for choices without a row."""
    place = row_id_map.to(torch.int64)
    if offsets is not None:
        place = torch.where(place < 0, -1, place + offsets.to(place.device))
    return torch.where((place < 0) | (place >= rows), rows, place)


def _picked(source: Tensor, where: Tensor) -> Tensor:
    """Entries of ``source`` along its first dimension; zeros where the index is -1."""
    shape = (where.shape[0], *source.shape[1:])
    if 0 in source.shape:
        return source.new_zeros(shape)
    out = source.index_select(0, where.clamp(min=0))
    return torch.where((where >= 0).view(-1, *[1] * (source.dim() - 1)), out, 0)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, and float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def choices_of_rows(row_id_map: Tensor, rows: int, offsets: Tensor | None) -> Tensor:
    """int32 (rows,): the choice of each row."""
    out = torch.full((rows + 1,), -1, dtype=torch.int32, device=row_id_map.device)
    numbers = torch.arange(row_id_map.numel(), dtype=torch.int32, device=row_id_map.device)
    return out.scatter(0, _places(row_id_map, offsets, rows).reshape(-1), numbers)[:rows]


def rows_of_mask(routing_map: Tensor, rows: int, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """(row_id_map, choices): rows sorted by expert, then by token. Choices whose row is ``rows`` or more have none."""
    mask = routing_map.t() != 0
    row = mask.reshape(-1).cumsum(0).view(mask.shape) - 1
    row_id_map = torch.where(mask, row, -1).t()
    row_id_map = torch.where(_places(row_id_map, offsets, rows) < rows, row_id_map, -1).to(torch.int32)
    return row_id_map, choices_of_rows(row_id_map, rows, offsets)


def rows_of_index(index: Tensor) -> Tensor:
    """int32 (tokens, top_k): the row of each choice by ``index``, a stable sort by expert; -1 for expert -1.

    torch sorts on the device. How many experts there are is not known, so that no kernel counts them.
    """
    expert = index.reshape(-1).to(torch.int64)
    expert = torch.where(expert < 0, expert.max() + 1 if expert.shape[0] else 0, expert)  # after all others
    order = expert.argsort(stable=True)
    row = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return torch.where(index < 0, -1, row.view(index.shape)).to(torch.int32)


def chunk_rows(
    sizes: Tensor, index: Tensor | None, spans: Tensor | None, rows: int, out_rows: int
) -> tuple[Tensor, Tensor]:
    """int32 (out_rows,) and (rows,): the source row of each row of the result, -1 for padding; the target of each row.

    The source is chunks of ``sizes`` rows. Chunk i of the result is chunk ``index[i]`` of the source (i itself without
    an index) and takes ``spans[i]`` rows (as many as it has without spans). Rows after all chunks stay where they are.
    """
    start = sizes.cumsum(0) - sizes
    own, begin = (sizes, start) if index is None else (sizes.index_select(0, index), start.index_select(0, index))
    span = own if spans is None else spans
    end = span.cumsum(0)
    row = torch.arange(out_rows, device=sizes.device)
    chunk = torch.searchsorted(end, row, right=True)
    found = chunk < len(end)
    inside = row - F.pad(end - span, (0, 1)).index_select(0, chunk)
    source = torch.where(found, F.pad(begin, (0, 1)).index_select(0, chunk) + inside, row)
    if spans is not None:
        source = torch.where(found & (inside < F.pad(own, (0, 1)).index_select(0, chunk)), source, -1)
    source = torch.where((source >= 0) & (source < rows), source, -1)
    target = torch.full((rows + 1,), -1, dtype=torch.int32, device=row.device)
    target = target.scatter(0, torch.where(source < 0, rows, source), row.to(torch.int32))[:rows]
    return source.to(torch.int32), target


def gather(x: Tensor, choices: Tensor, per: int, probs: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Row r: the token of ``choices[r]`` in x (tokens, cols), and the entry of ``probs`` (tokens, per) for it.

    Zeros for a row of none.
    """
    where = choices.to(torch.int64)
    tokens = torch.where(where < 0, -1, where // max(per, 1))
    return _picked(x, tokens), None if probs is None else _picked(probs.reshape(-1), where)


def merge(
    y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor | None, probs: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(tokens, cols): the sum of the rows of each token in y (rows, cols), times ``weights`` (tokens, per).

    Sums run in ``wide_dtype``, in the order of rows, and are rounded once. Also the entry of ``probs`` (rows,) for each
    choice, 0 for one without a row.
    """
    tokens, per = row_id_map.shape
    where = choices_of_rows(row_id_map, y.shape[0], offsets).to(torch.int64)
    rows = y.to(wide_dtype(y.dtype))
    if weights is not None:
        rows = rows * _picked(weights.to(rows.dtype).reshape(-1), where).unsqueeze(1)
    token = torch.where(where < 0, tokens, where // max(per, 1))
    sums = rows.new_zeros(tokens + 1, y.shape[1]).index_add(0, token, rows)
    out = sums[:tokens].to(y.dtype, copy=True)  # no view: a module under FSDP2 must not return one
    return out, None if probs is None else _of_choices(probs, row_id_map, offsets)


def _of_choices(values: Tensor, row_id_map: Tensor, offsets: Tensor | None) -> Tensor:
    """(tokens, per): the entry of ``values`` (rows,) for each choice, 0 for one without a row."""
    place = _places(row_id_map, offsets, values.shape[0]).reshape(-1)
    return _picked(values, torch.where(place < values.shape[0], place, -1)).view(row_id_map.shape)


def spread(
    grad: Tensor, y: Tensor, row_id_map: Tensor, offsets: Tensor | None, weights: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of y and of weights in ``merge`` with weights, each None if it is not wanted."""
    per = row_id_map.shape[1]
    where = choices_of_rows(row_id_map, y.shape[0], offsets).to(torch.int64)
    wide = wide_dtype(y.dtype)
    grads = _picked(grad.to(wide), torch.where(where < 0, -1, where // max(per, 1)))
    y_grad = weights_grad = None
    if wants[0]:
        y_grad = (grads * _picked(weights.to(wide).reshape(-1), where).unsqueeze(1)).to(y.dtype)
    if wants[1]:
        weights_grad = _of_choices((grads * y.to(wide)).sum(1), row_id_map, offsets).to(weights.dtype)
    return y_grad, weights_grad


CHOICES, MASK, CHUNKS, GATHER, MERGE, SPREAD = (
    Kernel("reference", refuses, run) for run in (choices_of_rows, rows_of_mask, chunk_rows, gather, merge, spread)
)

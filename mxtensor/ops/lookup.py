"""Lookups of rows: embeddings, and bags of them. They decode only the rows that they read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.dispatch import every_argument, implements
from ..kernels.quantize.choose_cast import dequantize_operand
from ..numerics.formats import FULL
from ..numerics.operand import Operand
from ..tensor.mxtensor import MXTensor
from .fallback import read

aten = torch.ops.aten
MAX = 2
"""The ``mode`` of an embedding bag that takes the largest value."""


def _refusal(w: Any) -> str | None:
    """Why single rows of ``w`` cannot be decoded, or None."""
    if isinstance(w, MXTensor) and w.rowwise is None:
        return f"is stored {w.orientation.label}, where a row is not a row of blocks"
    return None


def _rows(w: MXTensor, index: Tensor) -> Tensor:
    """The values of the rows ``index`` (n) of ``w`` (rows, columns): (n, columns), in the outer dtype."""
    rowwise = w.rowwise
    assert rowwise is not None
    block_rows, block_cols = rowwise.format.block
    # rows of a tile are apart in the result, where each gets the scales of its tile
    scales = index if block_rows == 1 else torch.zeros_like(index) if block_rows == FULL else index // block_rows
    data = rowwise.data.view(torch.uint8).index_select(0, index).view(rowwise.data.dtype)
    scale = rowwise.scale.index_select(0, scales)
    format = rowwise.format if block_rows == 1 else replace(rowwise.format, block=(1, block_cols))
    return dequantize_operand(Operand(data, scale, rowwise.global_scale, format, (index.shape[0], w.shape[1])), w.dtype)


@implements(aten.embedding.default)
def embedding(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A lookup decodes only the rows it reads."""
    w, indices = args[:2]
    reason = _refusal(w)
    if reason is not None:
        return read(func, args, kwargs, reason)  # type: ignore[no-any-return]
    return _rows(w, indices.reshape(-1)).view(*indices.shape, w.shape[1])


def _bags(w: MXTensor, indices: Tensor, padding: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """A table with the rows that the bags read, the place of each of their rows in it, the row of ``w`` at each place,
    and the place of the padding (-1: none), which the ops skip."""
    places = torch.arange(indices.shape[0], dtype=indices.dtype, device=indices.device)
    if padding < 0:
        return _rows(w, indices), places, indices, padding
    picked, places = torch.cat([indices.new_full((1,), padding), indices]), places + 1
    return _rows(w, picked), places.masked_fill(indices == padding, 0), picked, 0


@implements(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(func: Any, args: Any, kwargs: Any) -> Any:
    """Bags of rows (sum, mean or max of each) decode only the rows they read."""
    w, indices, offsets, by_frequency, mode, sparse, weights, last, padding = every_argument(func, args, kwargs)
    reason = _refusal(w)
    if reason is not None or not isinstance(w, MXTensor):
        return read(func, args, kwargs, *(() if reason is None else (reason,)))
    rows, places, picked, place = _bags(w, indices, padding)
    out, bags, sizes, largest = func(rows, places, offsets, by_frequency, mode, sparse, weights, last, place)
    if mode == MAX:  # the rows of ``w`` that the backward pass reads; 0 for an empty bag, as in torch
        of_place = torch.cat([picked.new_zeros(1), picked])
        largest = of_place[(largest + 1).masked_fill(sizes.unsqueeze(-1) == 0, 0)].to(largest.dtype)
    return out, bags, sizes, largest


@implements(aten._embedding_bag_per_sample_weights_backward.default)
def weights_of_bags(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The gradient of ``per_sample_weights`` decodes only the rows of the bags."""
    grad, w, indices, offsets, bags, mode, padding = every_argument(func, args, kwargs)
    reason = _refusal(w)
    if reason is not None or not isinstance(w, MXTensor):
        return read(func, args, kwargs, *(() if reason is None else (reason,)))  # type: ignore[no-any-return]
    rows, places, _, place = _bags(w, indices, padding)
    return func(grad, rows, places, offsets, bags, mode, place)  # type: ignore[no-any-return]

"""Nested tensors of torch (``torch.nested``) as the rows that they hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .compat import jagged_like, ragged_dim


def rows_of(x: Tensor) -> Tensor:
    """The rows (..., K) of a nested tensor, those of all its parts together.

    Raises ValueError where the last dimension is the one that differs in length.
    """
    if x.layout is not torch.jagged:
        return torch.cat(x.unbind())
    if ragged_dim(x) == x.dim() - 1:
        raise ValueError(
            f"the last dimension of a nested tensor {tuple(x.shape)} differs in length, so that it has no rows of one "
            "size; transpose it first"
        )
    return x.values()


def over_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function``, which maps rows (..., K) to rows (..., N), of all rows of a nested tensor; nested as ``x`` is."""
    rows = function(rows_of(x))
    if x.layout is torch.jagged:
        return jagged_like(x, rows)
    lengths = [part.shape[0] for part in x.unbind()]
    return torch.nested.as_nested_tensor(list(rows.split(lengths)), layout=torch.strided)

"""Shapes, strides and sizes as plain numbers, and the matrix shape that products take."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from .compat import jagged_like, ragged_dim


def as_matrix(t: Tensor) -> Tensor:
    """(..., K) as (rows, K), also if K is 0."""
    return t if t.dim() == 2 else t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """``shape`` with its last two dimensions exchanged."""
    return (*shape[:-2], shape[-1], shape[-2])


def wrapped_dim(dim: int, ndim: int) -> int:
    """``dim`` counted from the front. Raises IndexError, in torch's words, for a dimension out of range."""
    if not -ndim <= dim < ndim:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got {dim})")
    return dim % ndim


def inferred_shape(shape: Sequence[int], numel: int) -> tuple[int, ...]:
    """``shape`` with its one -1 replaced so that it has ``numel`` values, at least one.

    Raises RuntimeError, in torch's words, if no number does.
    """
    known = math.prod(n for n in shape if n != -1)
    if list(shape).count(-1) != 1 or known == 0 or numel % known:
        raise RuntimeError(f"shape '{list(shape)}' is invalid for input of size {numel}")
    return tuple(numel // known if n == -1 else n for n in shape)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a new dense tensor of ``shape``."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def layout(t: Tensor) -> Hashable:
    """What a launch has to know of strides: those of a tensor that is not contiguous, and True for one that is."""
    return t.is_contiguous() or t.stride()


def readable_size(nbytes: int) -> str:
    """``nbytes`` in B, KiB, MiB or GiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


# ---------------------------------------------------------------------------- nested tensors as the rows that they hold


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

"""Shapes, strides and sizes as plain numbers, and the matrix shape that products take."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from torch import Tensor


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

"""Shapes, strides and sizes as plain numbers, and the one shape that products want."""

from __future__ import annotations

import math

from torch import Tensor


def as_matrix(t: Tensor) -> Tensor:
    """(..., K) as (rows, K), also where K is 0, which says nothing of how many rows there are."""
    return t if t.dim() == 2 else t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    """``shape`` with its last two dimensions exchanged."""
    return (*shape[:-2], shape[-1], shape[-2])


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a fresh dense tensor of ``shape``."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def readable_size(nbytes: int) -> str:
    """``nbytes`` in B, KiB, MiB or GiB."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"

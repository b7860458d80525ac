"""Shapes, strides and sizes as plain numbers."""

from __future__ import annotations


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

"""Checks of codes and scales that users pass in: a wrong layout must raise an error, not give wrong numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .formats import Format
from .operand import Operand


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_components(
    data: Tensor, scale: Tensor, format: Format, shape: tuple[int, ...] | None, global_scale: Tensor | None
) -> Operand:
    """An operand of these tensors. Raises TypeError for a wrong dtype, ValueError for a wrong shape or device."""
    element = format.element
    if data.dtype not in (element.dtype, torch.uint8):
        raise TypeError(f"{format}: data must be {_name(element.dtype)} or uint8, got {_name(data.dtype)}")
    if scale.dtype not in (format.scale.dtype, format.scale.view_dtype):
        kinds = dict.fromkeys([_name(format.scale.dtype), _name(format.scale.view_dtype)])
        raise TypeError(f"{format}: scale must be {' or '.join(kinds)}, got {_name(scale.dtype)}")
    if shape is None:
        values, size = element.packing
        shape = (*data.shape[:-1], data.shape[-1] // size * values)
    if len(shape) == 0 or tuple(data.shape) != format.data_shape(shape):
        expected = format.data_shape(shape) if len(shape) else "at least one dimension"
        raise ValueError(f"{format} of shape {tuple(shape)}: data must have shape {expected}, got {tuple(data.shape)}")
    if tuple(scale.shape) != format.scale_shape(shape):
        raise ValueError(
            f"{format} of shape {tuple(shape)}: scale must have shape {format.scale_shape(shape)} (one for a block of "
            f"{'x'.join('all' if b < 0 else str(b) for b in format.block)}), got {tuple(scale.shape)}"
        )
    if format.global_scale != (global_scale is not None):
        need = "needs a float32 global_scale" if format.global_scale else "has no global_scale"
        raise ValueError(f"{format} {need}")
    if global_scale is not None and (global_scale.dtype != torch.float32 or global_scale.numel() != 1):
        raise TypeError(
            f"{format}: global_scale must be one float32, got {_name(global_scale.dtype)} {tuple(global_scale.shape)}"
        )
    for name, t in (("scale", scale), ("global_scale", global_scale)):
        if t is not None and t.device != data.device:
            raise ValueError(f"{format}: data is on {data.device}, {name} on {t.device}")
    global_scale = None if global_scale is None else global_scale.reshape(())
    return Operand(data.view(element.dtype), scale.view(format.scale.dtype), global_scale, format, tuple(shape))


def known_size(inner: Mapping[str, Tensor], outer: Sequence[int]) -> tuple[int, ...]:
    """``outer``, the size of an outer tensor, as plain integers if the sizes of its inner tensors are plain integers.

    torch.compile gives the outer and the inner sizes separate symbols, as if one could change without the other.
    """
    known = all(type(n) is int for t in inner.values() for n in t.shape)
    return tuple(map(int, outer)) if known else tuple(outer)

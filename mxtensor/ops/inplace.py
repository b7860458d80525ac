"""Writes: the values are quantized again into the buffers that are there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..codec import Operand
from ..dispatch import implements
from ..kernels.cast import quantize_operand
from ..tensor import MXTensor

aten = torch.ops.aten


def _write(target: Operand, source: Operand) -> None:
    target.data.view(torch.uint8).copy_(source.data.view(torch.uint8))
    target.scale.copy_(source.scale)
    if target.global_scale is not None and source.global_scale is not None:
        target.global_scale.copy_(source.global_scale)


def write_back(w: MXTensor, values: Tensor) -> MXTensor:
    """Quantize ``values`` (any dtype, broadcastable to ``w``) into every operand of ``w``."""
    values = values.to(w.device).expand(w.shape)
    if w._rowwise is not None:
        _write(w._rowwise, quantize_operand(values, w.recipe.weight))
    if w._columnwise is not None:
        _write(w._columnwise, quantize_operand(values.transpose(-1, -2), w.recipe.weight))
    return w


def _same_operands(a: MXTensor, b: MXTensor) -> bool:
    """Whether ``b``'s bytes are ``a``'s: equal casts and the same copies held."""
    pairs = ((a._rowwise, b._rowwise), (a._columnwise, b._columnwise))
    return (
        a.recipe.weight == b.recipe.weight and a.shape == b.shape and all((p is None) == (q is None) for p, q in pairs)
    )


@implements(aten.copy_.default)
def copy_(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Into a plain tensor: dequantized. From an equal MXTensor: the bytes. Otherwise the values, quantized again."""
    target, source = args[:2]
    if not isinstance(target, MXTensor):
        return target.copy_(source.dequantize())  # type: ignore[no-any-return]
    if isinstance(source, MXTensor):
        if _same_operands(target, source):
            for mine, theirs in zip(target.held, source.held, strict=True):
                _write(mine, theirs)
            return target
        source = source.dequantize(torch.float32)
    return write_back(target, source)

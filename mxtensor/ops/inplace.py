"""Writes: the values are quantized again into the existing buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.dispatch import implements, implements_function
from ..kernels.quantize.select import quantize_operand
from ..numerics.formats import FULL
from ..numerics.operand import Operand
from ..tensor.mxtensor import MXTensor

aten = torch.ops.aten


def _write(target: Operand, source: Operand) -> None:
    target.data.view(torch.uint8).copy_(source.data.view(torch.uint8))
    target.scale.copy_(source.scale)
    if target.global_scale is not None and source.global_scale is not None:
        target.global_scale.copy_(source.global_scale)


def _needs_base(w: MXTensor, base: Tensor | None) -> bool:
    """Whether ``w`` is a view that shares a scale with values outside it, or whose base has a copy that ``w`` lacks."""
    if not isinstance(base, MXTensor):
        return False
    shared = w.format.global_scale or FULL in w.format.block
    return len(w.operands) != len(base.operands) or (shared and w.numel() != base.numel())


def write_back(w: MXTensor, values: Tensor) -> MXTensor:
    """Quantize ``values`` (any dtype, broadcastable to ``w``) into every operand of ``w``."""
    values = values.to(w.device).expand(w.shape)
    base = w._base
    if _needs_base(w, base):
        dense = base.dequantize()  # type: ignore[union-attr]
        w._view_func(dense).copy_(values)  # type: ignore[attr-defined]
        write_back(base, dense)  # type: ignore[arg-type]
        return w
    if w._rowwise is not None:
        _write(w._rowwise, quantize_operand(values, w.recipe.stored))
    if w._columnwise is not None:
        _write(w._columnwise, quantize_operand(values.transpose(-1, -2), w.recipe.stored))
    return w


def _same_operands(a: MXTensor, b: MXTensor) -> bool:
    """Whether the bytes of ``b`` can be copied to ``a``: equal casts and the same copies."""
    pairs = ((a._rowwise, b._rowwise), (a._columnwise, b._columnwise))
    return (
        a.recipe.stored == b.recipe.stored and a.shape == b.shape and all((p is None) == (q is None) for p, q in pairs)
    )


@implements(aten.copy_.default)
def copy_(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Into a plain tensor: dequantized values. From an equal MXTensor: bytes. Otherwise values, quantized again."""
    target, source = args[:2]
    if not isinstance(target, MXTensor):
        return target.copy_(source.dequantize())  # type: ignore[no-any-return]
    if isinstance(source, MXTensor):
        if _same_operands(target, source) and not _needs_base(target, target._base):
            for mine, theirs in zip(target.operands, source.operands, strict=True):
                _write(mine, theirs)
            return target
        source = source.dequantize(torch.float32)
    return write_back(target, source)


@implements_function(Tensor.__setitem__)
def setitem(target: Tensor, index: Any, value: Any) -> None:
    """``w[index] = value``: a view of whole blocks is written in place; other indices quantize all of ``w`` again."""
    if not isinstance(target, MXTensor):
        target[index] = value.dequantize()
        return
    with torch.no_grad():
        view = target[index]
    if isinstance(view, MXTensor) and view._is_view():
        view.copy_(value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=target.dtype))
        return
    values = target.detach().dequantize()
    values[index] = value.dequantize() if isinstance(value, MXTensor) else value
    target.copy_(values)


@implements_function(Tensor.data.__set__)  # type: ignore[attr-defined]
def set_data(target: Tensor, value: Tensor) -> None:
    """``w.data = values``: torch would change the outer tensor only; here the values are quantized into ``w``."""
    if not isinstance(target, MXTensor):
        target.data = value.dequantize()
        return
    if value.shape != target.shape:
        raise ValueError(f"cannot set the data of {target!r} to values of shape {tuple(value.shape)}")
    copy_(None, (target, value), {})

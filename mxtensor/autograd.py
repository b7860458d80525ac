"""The one derivative torch lacks: that of a change of representation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return torch.ops.aten.dequantize.self(w)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def dequantize_with_gradient(w: Tensor) -> Tensor:
    """``w`` as plain values; the gradient passes through unchanged. aten's own dequantize has no derivative."""
    if w.requires_grad and torch.is_grad_enabled():
        return _Dequantize.apply(w)  # type: ignore[no-any-return]
    return torch.ops.aten.dequantize.self(w)  # type: ignore[no-any-return]

"""The derivative of ``dequantize``, and the mode in which views of a wrapper are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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


@contextmanager
def _outside_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def mode_of_views(func: Any, base: Any) -> AbstractContextManager[None]:
    """The context for ``func`` of ``base``: torch accepts a view only if base and view are both inference tensors or
    neither is, and a wrapper that is made in inference mode is one."""
    if not torch.is_inference_mode_enabled() or not getattr(func, "is_view", False) or base.is_inference():
        return nullcontext()
    return _outside_inference()

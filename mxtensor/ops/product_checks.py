"""Checks of the operands of a product, before any kernel sees them.

Each raises RuntimeError, as torch does for plain tensors, with the shapes, the format and the way out. (``@`` would
replace a TypeError by "unsupported operand type(s)".)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.arguments import described


def has_other_layout(t: Any) -> bool:
    """Whether ``t`` is a tensor whose values are not at the strides of one memory: sparse, nested, of oneDNN.

    Not a subclass, which defines its own products; for an MXTensor, reading the layout would take microseconds.
    """
    if not isinstance(t, Tensor) or type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    return t.layout is not torch.strided or t.is_nested


def check_dims(op: str, *wanted: tuple[Tensor, int]) -> None:
    """Raise unless each tensor has its number of dimensions."""
    if any(t.dim() != dims for t, dims in wanted):
        given = " and ".join(described(t) for t, _ in wanted)
        dims = " and ".join(str(dims) for _, dims in wanted)
        raise RuntimeError(f"{op}: needs tensors of {dims} dimensions, got {given}; reshape them, or use torch.matmul")


def check_product(op: str, a: Tensor, b: Tensor, transposed: bool, bias: Tensor | None) -> None:
    """Raise unless ``a`` (..., M, K) and ``b``, (..., K, N) if ``transposed`` and else (..., N, K), make a product.

    ``bias`` is None or broadcasts to the product.
    """
    if a.dtype != b.dtype:
        raise RuntimeError(
            f"{op}: the operands must have one dtype, got {a.dtype} and {b.dtype}; convert one with .to() "
            f"({_both(a, b)})"
        )
    if a.device != b.device:
        raise RuntimeError(
            f"{op}: left operand on {a.device}, right operand on {b.device}; move one with .to() ({_both(a, b)})"
        )
    if a.shape[:-2] != b.shape[:-2]:
        raise RuntimeError(
            f"{op}: the dimensions before the last two must be equal, got {tuple(a.shape)} and {tuple(b.shape)} "
            f"({_both(a, b)})"
        )
    n, k = (b.shape[-1], b.shape[-2]) if transposed else (b.shape[-2], b.shape[-1])
    if a.shape[-1] != k:
        raise RuntimeError(
            f"{op}: the contracted dimensions differ: {tuple(a.shape)} has {a.shape[-1]} columns, the other operand "
            f"{k} rows ({_both(a, b)})"
        )
    if bias is not None:
        _check_bias(op, a, b, n, bias)


def _check_bias(op: str, a: Tensor, b: Tensor, n: Any, bias: Tensor) -> None:
    if bias.dtype != a.dtype:
        raise RuntimeError(
            f"{op}: the bias is {described(bias)}, and must have the operands' dtype, {a.dtype}; convert it with .to() "
            f"({_both(a, b)})"
        )
    if bias.device != a.device:
        raise RuntimeError(
            f"{op}: bias on {bias.device}, right operand on {b.device}; move one with .to() ({_both(a, b)})"
        )
    shape = (*a.shape[:-1], n)
    if bias.dim() > len(shape) or any(
        have != 1 and have != want for have, want in zip(reversed(bias.shape), reversed(shape), strict=False)
    ):
        raise RuntimeError(
            f"{op}: the bias is {described(bias)} and does not broadcast to the result {shape}; use one of ({n},) "
            f"({_both(a, b)})"
        )


def _both(a: Tensor, b: Tensor) -> str:
    """Both operands, with formats; a matrix that was transposed for the product has its shape in the product."""
    return f"of {described(a)} and {described(b)}"

"""Products: the tuples of product kernels, fastest first, and the one way through each."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.dispatch import KERNEL_NAMES, Kernel, Spec, accepting, perform
from ...core.tracing import is_traced
from ..gemm import dequant, dot_scaled, emulated, scaled_grouped_mm, scaled_mm
from ..small_m import kernel as small_m
from .spec import GemmArgs, GemmOperand, data_of, facts_of, format_of

GEMM: tuple[Kernel, ...] = (
    scaled_mm.KERNEL, dot_scaled.KERNEL, small_m.KERNEL, dequant.KERNEL, emulated.KERNEL,
)  # fmt: skip
GROUPED: tuple[Kernel, ...] = (
    scaled_grouped_mm.KERNEL, dot_scaled.GROUPED, small_m.GROUPED, dequant.GROUPED, emulated.GROUPED,
)  # fmt: skip
"""The same kernels for a stack of weights, each with rows of its own."""
VALUES = {dequant.KERNEL.name: dequant.values_dtype, emulated.KERNEL.name: emulated.values_dtype}
"""Kernels that multiply values rather than codes -> the dtype they want them in, by the product's arguments."""
KERNEL_NAMES.update(kernel.name for kernel in GEMM)


def _spec(op: str, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Spec:
    left, right = data_of(a), data_of(b)
    formats, shapes = (format_of(a), format_of(b)), (tuple(a.shape), tuple(b.shape))
    return Spec(op, shapes, formats, args.out_dtype, right.device, is_traced(left, right))


def _check_devices(
    op: str, device: torch.device, left: Tensor, bias: Tensor | None, ends: Tensor | None = None
) -> None:
    """Raise ValueError unless all are on the right factor's device: a kernel takes them by their addresses there."""
    for name, t in (("left factor", left), ("bias", bias), ("group ends", ends)):
        if t is not None and t.device != device:
            raise ValueError(f"{op}: {name} on {t.device}, right factor on {device}; move one with .to()")


def gemm(op: str, a: GemmOperand, b: GemmOperand, args: GemmArgs, prefer: str | None = None) -> Tensor:
    """``alpha * a @ b^T + beta * bias``: a (..., M, K), b (..., N, K), both blocked along K; result (..., M, N).

    Accumulated in float32 and rounded once to ``args.out_dtype``. ``op`` names the caller in ``explain()``; ``prefer``
    names the kernel that must run. Raises ValueError where shapes or devices do not fit.
    """
    spec = _spec(op, a, b, args)
    _check_devices(op, spec.device, data_of(a), args.bias)
    left, right = spec.shapes
    if left[-1] != right[-1]:
        raise ValueError(
            f"{op}: the contracted dimensions differ: {left} has {left[-1]} columns, the other operand {right[-1]} rows"
        )
    return perform(GEMM, spec, a, b, args, prefer=prefer, facts=facts_of(a, b, args))  # type: ignore[no-any-return]


def values_dtype(
    op: str, a: GemmOperand, b: GemmOperand, args: GemmArgs, prefer: str | None = None
) -> torch.dtype | None:
    """The dtype in which the kernel for this product wants ``FakeQuantized`` factors; None if it wants codes."""
    wanted = VALUES.get(kernel_for(op, a, b, args, prefer) or "")
    return None if wanted is None else wanted(args)


def kernel_for(op: str, a: GemmOperand, b: GemmOperand, args: GemmArgs, prefer: str | None = None) -> str | None:
    """The name of the kernel that ``gemm`` would run; nothing is logged."""
    kernel, _ = accepting(GEMM, _spec(op, a, b, args), a, b, args, prefer=prefer)
    return None if kernel is None else kernel.name


def grouped_gemm(
    op: str, a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs, prefer: str | None = None
) -> Tensor:
    """Rows of a (M, K) times the weight of their group, b (G, N, K): row ``ends[g - 1]`` to ``ends[g]`` meet b[g].

    ``ends``: int32 (G,), never decreasing; a group may have no rows; rows after the last end give zeros. A cast of
    ``a`` sees all its rows at once. Result (M, N). Raises ValueError where shapes or devices do not fit, TypeError for
    ends of another dtype.
    """
    if len(a.shape) != 2 or len(b.shape) != 3 or a.shape[1] != b.shape[2] or tuple(ends.shape) != (b.shape[0],):
        raise ValueError(
            f"{op}: needs rows (M, K), weights (G, N, K) and G group ends, got {tuple(a.shape)}, {tuple(b.shape)} and "
            f"{tuple(ends.shape)}"
        )
    if ends.dtype is not torch.int32:
        kind = str(ends.dtype).removeprefix("torch.")
        raise TypeError(f"{op}: the group ends must be int32, got {kind}; convert them with .to(torch.int32)")
    spec = _spec(op, a, b, args)
    _check_devices(op, spec.device, data_of(a), args.bias, ends)
    return perform(GROUPED, spec, a, b, ends, args, prefer=prefer)  # type: ignore[no-any-return]

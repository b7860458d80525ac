"""Products: the tuple of product kernels, fastest first, and the one way through it."""

from __future__ import annotations

from torch import Tensor

from ..codec import Operand
from ..dispatch import KERNEL_NAMES, Kernel, Spec, choose, is_traced
from . import dequant, emulated
from .gemm_spec import Factor, GemmArgs

GEMM: tuple[Kernel, ...] = (dequant.KERNEL, emulated.KERNEL)
KERNEL_NAMES.update(kernel.name for kernel in GEMM)


def _format(factor: Factor) -> object:
    return factor.format if isinstance(factor, Operand) else factor.dtype


def _data(factor: Factor) -> Tensor:
    return factor.data if isinstance(factor, Operand) else factor


def gemm(op: str, a: Factor, b: Factor, args: GemmArgs, prefer: str | None = None) -> Tensor:
    """``alpha * a @ b^T + beta * bias``: a (..., M, K), b (..., N, K), both blocked along K; result (..., M, N).

    Accumulated in float32 and rounded once to ``args.out_dtype``. ``op`` names the caller in ``explain()``; ``prefer``
    names the kernel that must run. Raises ValueError where the shapes do not fit.
    """
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"{op}: the contracted dimensions differ: {tuple(a.shape)} has {a.shape[-1]} columns, the other operand "
            f"{b.shape[-1]} rows"
        )
    shapes = (tuple(a.shape), tuple(b.shape))
    data = _data(b)
    spec = Spec(op, shapes, (_format(a), _format(b)), args.out_dtype, data.device, is_traced(_data(a), data))
    return choose(GEMM, spec, a, b, args, prefer=prefer).run(a, b, args)  # type: ignore[no-any-return]

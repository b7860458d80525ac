"""The arguments of products by codes of a weight, for the kernels ``small_m`` (CUDA) and ``cpu_codes`` (CPU)."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from ...numerics.operand import Operand
from .spec import GemmArgs, flat_bias


def as_rows(x: Tensor, dense: bool = False) -> Tensor:
    """Activations (..., K) as a matrix (M, K) of contiguous rows; ``dense``: without gaps between them, too."""
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    if not x.is_contiguous() and (dense or x.stride(1) != 1 or x.stride(0) < x.shape[1]):
        x = x.contiguous()
    return x


def readable_bias(args: GemmArgs, shape: tuple[int, ...], dtypes: Container[torch.dtype]) -> Tensor | None:
    """``flat_bias`` of a product of this shape, in float32 if its dtype is none of those that the kernel reads."""
    bias = flat_bias(args, shape)
    return bias.float() if bias is not None and bias.dtype not in dtypes else bias


def fits_one_launch(x: Tensor, b: Operand, args: GemmArgs, dtypes: Container[torch.dtype]) -> bool:
    """Whether one launch computes ``alpha * x @ b^T + beta * bias`` from these tensors as they are in memory.

    ``dtypes``: those of a bias that the kernel reads.
    """
    bias = args.bias
    simple = bias is None or (bias.shape == b.shape[-2:-1] and bias.is_contiguous() and bias.dtype in dtypes)
    plain = args.alpha == 1 and args.beta == 1 and args.out_dtype is x.dtype
    return simple and plain and all(t.is_contiguous() for t in (x, b.data, b.scale))

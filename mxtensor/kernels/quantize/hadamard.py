"""The random Hadamard transform of NVFP4 training: it spreads outliers over 16 values before they are cast."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import recording
from ...core.tracing import is_traced

GROUP = 16


def _matrix(signs: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """diag(signs) @ H16 / 4; row i is negated if bit i of ``signs`` is set."""
    rows = [[(-1) ** ((i & j).bit_count() + (signs >> i)) / 4 for j in range(GROUP)] for i in range(GROUP)]
    return torch.tensor(rows, dtype=dtype, device=device)


_cached_matrix = cache(_matrix)


def rotated(x: Tensor, signs: int) -> Tensor:
    """Groups of 16 values of the last dimension times an orthogonal matrix, in float32, rounded to bfloat16.

    (..., K) to (..., K rounded up to a multiple of 16); absent values count as zero. If both operands of a product are
    rotated along the contraction, the product stays the same. The transpose of a row-major matrix is rotated without
    a copy, and the result has its layout. Source: "Pretraining LLMs with NVFP4", NVIDIA 2025.
    """
    pad = -x.shape[-1] % GROUP
    if pad:
        x = F.pad(x, (0, pad))
    # Entries of 1/4 are exact in bfloat16, and CUDA accumulates bfloat16 products in float32.
    in_bfloat16 = x.dtype is torch.bfloat16 and x.device.type == "cuda"
    compute = torch.bfloat16 if in_bfloat16 else torch.float32
    make = _matrix if is_traced(x) else _cached_matrix
    matrix = recording.constant(make, signs, x.device, compute)
    if x.dim() == 2 and x.stride(0) == 1 and x.stride(1) != 1 and x.numel():
        groups = x.t().unflatten(0, (-1, GROUP)).to(compute)
        transposed = torch.bmm(matrix.t().expand(groups.shape[0], GROUP, GROUP), groups)
        return transposed.to(torch.bfloat16).flatten(0, 1).t()
    return (x.reshape(-1, GROUP).to(compute) @ matrix).to(torch.bfloat16).view(x.shape)

"""The random Hadamard transform of NVFP4 training: it spreads outliers over 16 values before they are cast."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.tracing import is_traced

GROUP = 16


def _matrix(signs: int, device: torch.device) -> Tensor:
    """diag(signs) @ H16 / 4, float32; bit i of ``signs`` set: row i is negated."""
    rows = [[(-1) ** ((i & j).bit_count() + (signs >> i)) / 4 for j in range(GROUP)] for i in range(GROUP)]
    return torch.tensor(rows, dtype=torch.float32, device=device)


_kept_matrix = cache(_matrix)


def rotated(x: Tensor, signs: int) -> Tensor:
    """Each 16 values of the last dimension times an orthogonal matrix, in float32, rounded to bfloat16.

    (..., K) to (..., K rounded up to a multiple of 16): absent values count as zero. A product of two factors that were
    both rotated along the contraction is what it was. The transpose of a matrix stored by rows is rotated where it
    lies, and the result lies as it does. Source: "Pretraining LLMs with NVFP4", NVIDIA 2025.
    """
    pad = -x.shape[-1] % GROUP
    if pad:
        x = F.pad(x, (0, pad))
    matrix = (_matrix if is_traced(x) else _kept_matrix)(signs, x.device)
    # Entries of 1/4 are exact in bfloat16, and CUDA adds products of bfloat16 in float32.
    in_bfloat16 = x.dtype is torch.bfloat16 and x.device.type == "cuda"
    compute = torch.bfloat16 if in_bfloat16 else torch.float32
    matrix = matrix.to(compute)
    if x.dim() == 2 and x.stride(0) == 1 and x.stride(1) != 1 and x.numel():
        groups = x.t().unflatten(0, (-1, GROUP)).to(compute)
        transposed = torch.bmm(matrix.t().expand(groups.shape[0], GROUP, GROUP), groups)
        return transposed.to(torch.bfloat16).flatten(0, 1).t()
    return (x.reshape(-1, GROUP).to(compute) @ matrix).to(torch.bfloat16).view(x.shape)

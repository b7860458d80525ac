"""The random Hadamard transform of NVFP4 training: it spreads outliers over 16 values before they are cast."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import recording
from ...core.devices import staying
from ...core.tracing import is_traced
from ...numerics.cast import Cast
from ...numerics.operand import Rotated
from .choose_cast import quantize_operand

GROUP = 16


def _matrix(signs: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """diag(signs) @ H16 / 4; row i is negated if bit i of ``signs`` is set."""
    # A branch for each bit: with dynamic=True Dynamo makes the signs a symbol, and a branch makes it a constant.
    is_negated = [True if signs >> i & 1 else False for i in range(GROUP)]  # noqa: SIM210
    rows = [[(-1) ** ((i & j).bit_count() + is_negated[i]) / 4 for j in range(GROUP)] for i in range(GROUP)]
    return torch.tensor(rows, dtype=dtype, device=device)


@cache
def _cached_matrix(signs: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return staying(device, lambda: _matrix(signs, device, dtype))


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
    is_transposed = x.dim() == 2 and x.stride(0) == 1 and x.stride(1) != 1 and bool(x.numel())
    if is_transposed:
        groups = x.t().unflatten(0, (-1, GROUP)).to(compute)
        product = torch.bmm(matrix.t().expand(groups.shape[0], GROUP, GROUP), groups)
    else:
        product = x.reshape(-1, GROUP).to(compute) @ matrix
    out = product.to(torch.bfloat16)
    if is_traced(out):  # makes inductor store it: inside a kernel it keeps float32 and does not round
        out = out.as_strided(out.shape, out.stride())
    return out.flatten(0, 1).t() if is_transposed else out.view(x.shape)


def rotated_back(x: Tensor, signs: int) -> Tensor:
    """The inverse of ``rotated``, in float32: the matrix is orthogonal. The last dimension is whole groups of 16."""
    matrix = (_matrix if is_traced(x) else _cached_matrix)(signs, x.device, torch.float32)
    return (x.to(torch.float32).reshape(-1, GROUP) @ matrix.t()).view(x.shape)


def quantize_rotated(x: Tensor, cast: Cast, signs: int) -> Rotated:
    """The rotated columnwise copy of x (..., rows, cols), cast with an amax of its own."""
    return Rotated(quantize_operand(rotated(x.transpose(-1, -2), signs), cast), signs)

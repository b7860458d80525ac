"""What every product kernel is called with: ``run(a, b, args)`` computes ``alpha * a @ b^T + beta * bias``."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..codec import Operand

Factor: TypeAlias = Operand | Tensor
"""One side of a product, (..., rows, K): an operand blocked along K, or plain values."""


class GemmArgs(NamedTuple):
    """The rest of a product: the bias broadcasts to (..., M, N) and is added in float32 before the one rounding."""

    out_dtype: torch.dtype
    bias: Tensor | None = None
    alpha: float = 1
    beta: float = 1

"""How far a product of row-scaled E4M3 may be from the product of its operands: the contract of ``fp8_rows``.

Three errors add up: the rounding of values that are rescaled to E4M3 (``row_scaled.py``), the sums of the
tensor cores, and the one rounding of the result.

Hopper's FP8 instructions add 32 products to a sum with 13 bits behind the leading one: each of the 33 addends loses
less than 2^-13 of the largest ("FP22", e8m13: DeepSeek-V3 technical report, section 3.5.2). Without fast accumulation
the sum goes to a float32 after four instructions, 128 columns (CUTLASS, ``mma_promotion_interval``; cuBLAS says that it
does the same, and not how often). So 4 * 33 addends lose less than 2^-13 of sum |a||b| each: ``HOPPER_SUMS``. That is
reached where one product is 2^13 times each of the other 127. Random values stay below 2^-11 of sum |a||b|.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .operand import Operand
from .reference import decode_local
from .row_scaled import MAX_ERROR, is_exact, row_scaled

HOPPER_SUMS = 4 * 33 * 2.0**-13
"""What sums on Hopper lose at most, of sum |a||b|."""
FLOAT32_SUMS = 2.0**-18
"""The same for float32 sums of up to 16 thousand products by pairs, or of tensor cores for 16 bits."""


def _rescaling_error(operand: Operand) -> Tensor:
    """How much each value of a row may change when it is rescaled, float64 (rows, 1)."""
    rows = row_scaled(operand)
    no_error = rows.out_of_range.bool().unsqueeze(1) | rows.scale.isnan()
    return torch.where(no_error, 0.0, (0.0 if is_exact(operand.format.element) else MAX_ERROR) * rows.scale.double())


def product_bound(a: Operand, b: Operand, out_dtype: torch.dtype, sums: float, bias: Tensor | None = None) -> Tensor:
    """The largest error of each value of ``a @ b^T + bias``: float64 (M, N); NaN where the product is not a number.

    a (M, K), b (N, K). The product itself is ``exact_product``. ``sums``: what the sums lose, such as HOPPER_SUMS. A
    result below the normal numbers of ``out_dtype``, or of float32, may be zero.
    """
    left, right = decode_local(a).double().abs(), decode_local(b).double().abs()
    errors = _rescaling_error(a), _rescaling_error(b)
    from_rescaling = errors[0] * right.sum(1) + left.sum(1, keepdim=True) * errors[1].t()
    from_rescaling = from_rescaling + a.shape[1] * errors[0] * errors[1].t()
    before = from_rescaling + sums * (left @ right.t() + from_rescaling)
    limits = torch.finfo(out_dtype)
    return before + limits.eps / 2 * (exact_product(a, b, bias).abs() + before) + 2 * limits.smallest_normal


def exact_product(a: Operand, b: Operand, bias: Tensor | None = None) -> Tensor:
    """``a @ b^T + bias`` of the values of the operands in float64: (M, N)."""
    out = decode_local(a).double() @ decode_local(b).double().t()
    return out if bias is None else out + bias.double()

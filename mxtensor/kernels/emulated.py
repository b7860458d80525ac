"""The definition of a product: decode both operands to float32, multiply and add in float32, round once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..codec import Operand
from ..dispatch import Kernel, Spec
from .cast import dequantize_operand
from .gemm_spec import Factor, GemmArgs


def refuses(spec: Spec, a: Factor, b: Factor, args: GemmArgs) -> str | None:
    return None


def values(factor: Factor, dtype: torch.dtype) -> Tensor:
    """The factor as a plain tensor of ``dtype``."""
    return dequantize_operand(factor, dtype) if isinstance(factor, Operand) else factor.to(dtype)


def run(a: Factor, b: Factor, args: GemmArgs) -> Tensor:
    compute = torch.float64 if args.out_dtype is torch.float64 else torch.float32
    left, right = values(a, compute), values(b, compute)
    if left.dim() == 2 and args.alpha == 1 and (args.bias is None or (args.bias.dim() == 1 and args.beta == 1)):
        bias = None if args.bias is None else args.bias.to(compute)
        return F.linear(left, right, bias).to(args.out_dtype)
    product = torch.matmul(left, right.transpose(-1, -2))
    if args.alpha != 1:
        product = product * args.alpha
    if args.bias is not None and args.beta != 0:  # as addmm has it, not even a NaN of the bias enters then
        bias = args.bias.to(compute)
        product = product + (bias * args.beta if args.beta != 1 else bias)
    return product.to(args.out_dtype)


KERNEL = Kernel("emulated", refuses, run)

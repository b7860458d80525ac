"""The definition of a product: decode both operands to float32, multiply and add in float32, round once."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import Kernel, Spec
from .cast import dequantize_operand, operand_of
from .gemm_spec import Factor, GemmArgs, data_of


def refuses(spec: Spec, a: Factor, b: Factor, args: GemmArgs) -> str | None:
    return None


def values(factor: Factor, dtype: torch.dtype) -> Tensor:
    """The factor as a plain tensor of ``dtype``."""
    return factor.to(dtype) if isinstance(factor, Tensor) else dequantize_operand(operand_of(factor), dtype)


def multiply(left: Tensor, right: Tensor, args: GemmArgs) -> Tensor:
    """``alpha * left @ right^T + beta * bias`` of factors that are plain already, rounded once."""
    if left.dim() == 2 and args.alpha == 1 and (args.bias is None or (args.bias.dim() == 1 and args.beta == 1)):
        bias = None if args.bias is None else args.bias.to(left.dtype)
        return F.linear(left, right, bias).to(args.out_dtype)
    product = torch.matmul(left, right.transpose(-1, -2))
    if args.alpha != 1:
        product = product * args.alpha
    if args.bias is not None and args.beta != 0:  # as addmm has it, not even a NaN of the bias enters then
        bias = args.bias.to(left.dtype)
        product = product + (bias * args.beta if args.beta != 1 else bias)
    return product.to(args.out_dtype)


def _compute_dtype(args: GemmArgs) -> torch.dtype:
    return torch.float64 if args.out_dtype is torch.float64 else torch.float32


def run(a: Factor, b: Factor, args: GemmArgs) -> Tensor:
    compute = _compute_dtype(args)
    return multiply(values(a, compute), values(b, compute), args)


def refuses_grouped(spec: Spec, a: Factor, b: Factor, ends: Tensor, args: GemmArgs) -> str | None:
    return "the ends of the groups are being traced: they have no values" if spec.traced else None


def run_grouped(a: Factor, b: Factor, ends: Tensor, args: GemmArgs) -> Tensor:
    compute = _compute_dtype(args)
    left, right = values(a, compute), values(b, compute)
    out = torch.zeros(left.shape[0], right.shape[1], dtype=args.out_dtype, device=data_of(a).device)
    for weight, (start, end) in zip(right, pairwise([0, *ends.tolist()]), strict=True):
        out[start:end] = multiply(left[start:end], weight, args)
    return out


KERNEL = Kernel("emulated", refuses, run)
GROUPED = Kernel("emulated", refuses_grouped, run_grouped)

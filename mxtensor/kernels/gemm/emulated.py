"""The definition of a product: dequantize both operands to float32, multiply and add in float32, round once."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ...core.kernel import Kernel, Spec
from ..quantize.select import dequantize_operand, operand_of
from .row_operand import RowOperand, values_of_rows
from .spec import FakeQuantized, GemmArgs, GemmOperand, data_of, finish


def refuses(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> str | None:
    return None


def values(side: GemmOperand, dtype: torch.dtype) -> Tensor:
    """One side of the product as a plain tensor of ``dtype``."""
    if isinstance(side, Tensor):
        return side.to(dtype)
    if isinstance(side, FakeQuantized):
        plain: Tensor = side.values.to(dtype)
        return plain if side.global_scale is None else plain * side.global_scale
    if isinstance(side, RowOperand):
        return values_of_rows(side).to(dtype)
    return dequantize_operand(operand_of(side), dtype)


def multiply(left: Tensor, right: Tensor, args: GemmArgs) -> Tensor:
    """``alpha * left @ right^T + beta * bias`` of plain tensors, rounded once."""
    if left.dim() == 2 and args.alpha == 1 and (args.bias is None or (args.bias.dim() == 1 and args.beta == 1)):
        bias = None if args.bias is None else args.bias.to(left.dtype)
        product: Tensor = torch.ops.aten.linear.default(left, right, bias)
        return product.to(args.out_dtype)
    return finish(torch.matmul(left, right.transpose(-1, -2)), args)


def values_dtype(args: GemmArgs) -> torch.dtype:
    """The dtype in which the product is computed."""
    return torch.float64 if args.out_dtype is torch.float64 else torch.float32


def run(a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Tensor:
    compute = values_dtype(args)
    return multiply(values(a, compute), values(b, compute), args)


def refuses_grouped(spec: Spec, a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> str | None:
    return "the ends of the groups are being traced and have no values" if spec.traced else None


def run_grouped(a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> Tensor:
    compute = values_dtype(args)
    left, right = values(a, compute), values(b, compute)
    out = torch.zeros(left.shape[0], right.shape[1], dtype=args.out_dtype, device=data_of(a).device)
    for weight, (start, end) in zip(right, pairwise([0, *ends.tolist()]), strict=True):
        out[start:end] = multiply(left[start:end], weight, args)
    return out


KERNEL = Kernel("emulated", refuses, run)
GROUPED = Kernel("emulated", refuses_grouped, run_grouped)

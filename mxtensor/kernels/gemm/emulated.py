"""The definition of a product: dequantize both operands to float32, multiply and add in float32, round once."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.kernel import Kernel, Spec
from ...numerics.groups import Groups
from ..quantize.select import dequantize_operand, operand_of
from . import plain
from .plain import multiply
from .row_operand import RowOperand, values_of_rows
from .spec import FakeQuantized, GemmArgs, GemmOperand


def refuses(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> str | None:
    return None


def values(side: GemmOperand, dtype: torch.dtype) -> Tensor:
    """One side of the product as a plain tensor of ``dtype``."""
    if isinstance(side, Tensor):
        return side.to(dtype)
    if isinstance(side, FakeQuantized):
        rounded: Tensor = side.values.to(dtype)
        return rounded if side.global_scale is None else rounded * side.global_scale
    if isinstance(side, RowOperand):
        return values_of_rows(side).to(dtype)
    return dequantize_operand(operand_of(side), dtype)


def values_dtype(args: GemmArgs) -> torch.dtype:
    """The dtype in which the product is computed."""
    return torch.float64 if args.out_dtype is torch.float64 else torch.float32


def run(a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Tensor:
    compute = values_dtype(args)
    return multiply(values(a, compute), values(b, compute), args)


def refuses_grouped(spec: Spec, a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> str | None:
    return plain.why_not_traced(args) if spec.traced else None


def run_grouped(a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> Tensor:
    compute = values_dtype(args)
    return plain.grouped_mm(values(a, compute), values(b, compute), ends, args)


def refuses_wgrad(spec: Spec, a: GemmOperand, b: GemmOperand, groups: Groups, args: GemmArgs) -> str | None:
    return plain.why_not_traced(args) if spec.traced else None


def run_wgrad(a: GemmOperand, b: GemmOperand, groups: Groups, args: GemmArgs) -> Tensor:
    compute = values_dtype(args)
    return plain.grouped_wgrad(values(a, compute), values(b, compute), groups.padded_ends, args)


KERNEL = Kernel("emulated", refuses, run)
GROUPED = Kernel("emulated", refuses_grouped, run_grouped)
GROUPED_WGRAD = Kernel("emulated", refuses_wgrad, run_wgrad)

"""The definition of a product: dequantize both operands to float32, multiply and add in float32, round once.

``multiply``, ``grouped_mm`` and ``grouped_wgrad`` are the products of plain values: of matrices, of rows in groups, and
of the columns of groups. The host reads the ends of the groups. A traced graph has no values to read, so that it holds
the grouped products as ops.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.kernel import Kernel, Spec
from ...core.tracing import is_traced
from ...numerics.groups import Groups
from ..operands import FakeQuantized, GemmOperand, RowOperand, values_of_rows
from ..quantize.choose_cast import dequantize_operand, operand_of
from ..runtime.custom_op import check_argument
from .spec import GemmArgs, finish


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


def refuses_grouped(spec: Spec, a: GemmOperand, b: GemmOperand, ends: Tensor | Groups, args: GemmArgs) -> str | None:
    """Also of the products over the columns of groups."""
    return why_not_traced(args) if spec.traced else None


def run_grouped(a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> Tensor:
    compute = values_dtype(args)
    return grouped_mm(values(a, compute), values(b, compute), ends, args)


def run_wgrad(a: GemmOperand, b: GemmOperand, groups: Groups, args: GemmArgs) -> Tensor:
    compute = values_dtype(args)
    return grouped_wgrad(values(a, compute), values(b, compute), groups.padded_ends, args)


# ---------------------------------------------------------------------------------------------- plain values

PLAIN = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def multiply(left: Tensor, right: Tensor, args: GemmArgs) -> Tensor:
    """``alpha * left @ right^T + beta * bias`` of plain tensors, rounded once."""
    if left.dim() == 2 and args.alpha == 1 and (args.bias is None or (args.bias.dim() == 1 and args.beta == 1)):
        bias = None if args.bias is None else args.bias.to(left.dtype)
        product: Tensor = torch.ops.aten.linear.default(left, right, bias)
        return product.to(args.out_dtype)
    return finish(torch.matmul(left, right.transpose(-1, -2)), args)


# ---------------------------------------------------------------------------------------------- group by group


def grouped_mm_loop(left: Tensor, right: Tensor, ends: Tensor, args: GemmArgs) -> Tensor:
    """left (M, K) by right (G, N, K): (M, N), each group of rows times its matrix; zeros after the last group."""
    out = left.new_zeros(left.shape[0], right.shape[1], dtype=args.out_dtype)
    for i, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        if start < end:
            out[start:end] = multiply(left[start:end], right[i], args)
    return out


def grouped_wgrad_loop(left: Tensor, right: Tensor, padded_ends: Tensor, args: GemmArgs) -> Tensor:
    """left (N, P) by right (K, P): (G, N, K), the product over the columns of each group.

    Padding is multiplied too: it is zeros, unless groups of 16 values were rotated.
    """
    out = left.new_empty(padded_ends.shape[0], left.shape[0], right.shape[0], dtype=args.out_dtype)
    for i, (start, end) in enumerate(pairwise([0, *padded_ends.tolist()])):
        out[i] = multiply(left[:, start:end], right[:, start:end], args)
    return out


def why_not_traced(args: GemmArgs) -> str | None:
    """Why a traced product of groups is refused: the ops take no bias."""
    plain = args.alpha == 1 and (args.bias is None or args.beta == 0)
    return None if plain else "a traced product of groups takes no alpha and no bias"


def grouped_mm(left: Tensor, right: Tensor, ends: Tensor, args: GemmArgs) -> Tensor:
    """``grouped_mm_loop``, as one op if it is traced."""
    if is_traced(left, right, ends) and 0 not in (*left.shape, *right.shape):
        out: Tensor = grouped_rows(left, right, ends, args.out_dtype)
        return out
    return grouped_mm_loop(left, right, ends, args)


def grouped_wgrad(left: Tensor, right: Tensor, padded_ends: Tensor, args: GemmArgs) -> Tensor:
    """``grouped_wgrad_loop``, as one op if it is traced."""
    if is_traced(left, right, padded_ends) and 0 not in (*left.shape, *right.shape):
        out: Tensor = grouped_columns(left, right, padded_ends, args.out_dtype)
        return out
    return grouped_wgrad_loop(left, right, padded_ends, args)


# ---------------------------------------------------------------------------------------------- ops


def _check(op: str, left: Tensor, right: Tensor, ends: Tensor, groups: int) -> None:
    check_argument(op, "left", left, PLAIN, (None, None), left.device)
    check_argument(op, "right", right, (left.dtype,), (None,) * right.dim(), left.device)
    if left.shape[1] != right.shape[-1]:
        raise ValueError(
            f"{op}: left and right must have rows of one length, got {tuple(left.shape)} and {tuple(right.shape)}"
        )
    check_argument(op, "ends", ends, (torch.int32,), (groups,), left.device)


@custom_ops.define("mxtensor::grouped_rows")
def grouped_rows(left: Tensor, right: Tensor, ends: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``grouped_mm_loop`` of checked arguments."""
    _check("mxtensor::grouped_rows", left, right, ends, right.shape[0])
    return grouped_mm_loop(left, right, ends, GemmArgs(out_dtype))


@custom_ops.fake_of(grouped_rows)
def _(left, right, ends, out_dtype):  # type: ignore[no-untyped-def]
    return left.new_empty(left.shape[0], right.shape[1], dtype=out_dtype)


@custom_ops.define("mxtensor::grouped_columns")
def grouped_columns(left: Tensor, right: Tensor, padded_ends: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``grouped_wgrad_loop`` of checked arguments."""
    _check("mxtensor::grouped_columns", left, right, padded_ends, padded_ends.shape[0])
    return grouped_wgrad_loop(left, right, padded_ends, GemmArgs(out_dtype))


@custom_ops.fake_of(grouped_columns)
def _(left, right, padded_ends, out_dtype):  # type: ignore[no-untyped-def]
    return left.new_empty(padded_ends.shape[0], left.shape[0], right.shape[0], dtype=out_dtype)


KERNEL = Kernel("emulated", refuses, run)
GROUPED = Kernel("emulated", refuses_grouped, run_grouped)
GROUPED_WGRAD = Kernel("emulated", refuses_grouped, run_wgrad)

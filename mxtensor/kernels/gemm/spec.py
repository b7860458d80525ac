"""What product kernels are called with: ``run(a, b, args)`` computes ``alpha * a @ b^T + beta * bias``.

Also what several of them ask of a call, in one place: reasons to refuse it, and the arguments of those that read codes
(``small_m``, ``cpu_codes``).
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.kernel import Spec
from ...core.shapes import as_matrix
from ...core.tracing import is_captured
from ...numerics.operand import Operand
from ..operands import FakeQuantized, GemmOperand, RowOperand, Unquantized, data_of, has_group_scales
from ..quantize.to_row_scaled_both import wants_rows
from .fp8_rows_cache import is_known


class GemmArgs(NamedTuple):
    """The other arguments of a product. The bias broadcasts to (..., M, N) and is added in float32, before the one
    rounding."""

    out_dtype: torch.dtype
    bias: Tensor | None = None
    alpha: float = 1
    beta: float = 1


def without_lazy_signs(a: GemmOperand, b: GemmOperand, args: GemmArgs) -> tuple[GemmOperand, GemmOperand, GemmArgs]:
    """The arguments of a product with torch's lazy minus signs carried out: kernels read memory."""
    if args.bias is not None and _may_be_negated(args.bias):
        args = args._replace(bias=args.bias.resolve_neg())
    return _resolved(a), _resolved(b), args


def _may_be_negated(t: Tensor) -> bool:
    """Whether ``t`` has a lazy minus sign; Dynamo cannot ask it, but traces the op that resolves it."""
    return torch.compiler.is_dynamo_compiling() or t.is_neg()


def _resolved(operand: GemmOperand) -> GemmOperand:
    if isinstance(operand, (Operand, RowOperand)) or not _may_be_negated(data_of(operand)):
        return operand
    if isinstance(operand, Tensor):
        return operand.resolve_neg()
    if isinstance(operand, Unquantized):
        return replace(operand, x=operand.x.resolve_neg())
    return replace(operand, values=operand.values.resolve_neg())


def facts_of(a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Hashable:
    """All that refusals of product kernels look at beside the spec, for ``plan_for``."""
    bias, data = args.bias, data_of(b)
    added = None if bias is None else (bias.dtype, tuple(bias.shape))
    # Kernels on a CPU decode a weight a few rows at a time only if it is contiguous. A CUDA graph reads a form of it
    # that was there before.
    layout = data.device.type == "cpu" and isinstance(b, Operand) and data.is_contiguous() and b.scale.is_contiguous()
    captured = is_captured(data)
    known = captured and isinstance(b, Operand) and is_known(b)
    by_group = has_group_scales(a), has_group_scales(b)
    return (
        type(a),
        data_of(a).dtype,
        type(b),
        data.dtype,
        by_group,
        added,
        args.alpha,
        args.beta,
        layout,
        captured,
        known,
    )


FRESH = ("fprop", "dgrad", "wgrad")
"""Products whose right operand is cast anew in each step, so that no form of it is cached."""


def is_cast_for_training(spec: Spec, a: GemmOperand, b: GemmOperand) -> bool:
    """Whether both operands are cast in this step to the row-scaled form, each for two products."""
    return spec.op in FRESH and wants_rows(a, b)


def needs_codes(a: GemmOperand, b: GemmOperand, or_rows: bool = False) -> str | None:
    """Why a kernel that reads codes refuses operands of which one has none; ``or_rows``: it reads row-scaled ones."""
    if isinstance(a, FakeQuantized) or isinstance(b, FakeQuantized):
        return "needs codes, an operand is rounded values"
    return None if or_rows else not_row_scaled(a, b)


def not_row_scaled(a: GemmOperand, b: GemmOperand) -> str | None:
    """Why all kernels but ``fp8_rows`` refuse operands that were cast for it."""
    if isinstance(a, RowOperand) or isinstance(b, RowOperand):
        return "an operand was cast to row-scaled E4M3 for fp8_rows"
    return None


def not_rows_by_matrix(spec: Spec, a: GemmOperand) -> str | None:
    """Why a kernel for rows (..., M, K) times one matrix (N, K) refuses; None if that is the product."""
    left, right = spec.shapes
    if len(right) != 2 or len(left) < 2:
        return f"multiplies rows with one matrix, not {left} with {right}"
    if not isinstance(a, Tensor) and len(left) > 2 and a.format.rows_are_blocked:
        return f"the rows of {left} cannot be flattened: {a.format} shares scales between rows"
    return None


def not_a_bias_of_groups(args: GemmArgs) -> str | None:
    """Why a grouped kernel refuses a bias that is not the same for every row."""
    if args.bias is not None and args.bias.dim() > 1:
        return f"a bias of groups is one value a column, not {tuple(args.bias.shape)}"
    return None


def flat_bias(args: GemmArgs, shape: tuple[int, ...]) -> Tensor | None:
    """The bias of a product of this shape: (N,) if it is the same for every row, else (M, N); contiguous.

    None if ``beta`` is 0: not even a NaN of the bias enters then.
    """
    bias = args.bias
    if bias is None or args.beta == 0:
        return None
    if bias.shape == shape[-1:]:
        return bias.contiguous()
    if math.prod(bias.shape[:-1]) == 1:
        return bias.reshape(-1).expand(shape[-1]).contiguous()
    return bias.expand(shape).flatten(0, -2).contiguous()


def finish(product: Tensor, args: GemmArgs) -> Tensor:
    """Multiply a product in float32 or float64 by alpha, add the bias and round once."""
    if args.alpha != 1:
        product = product * args.alpha
    if args.bias is not None and args.beta != 0:  # as in torch.addmm, not even a NaN of the bias enters then
        bias = args.bias.to(product.dtype)
        product = product + (bias * args.beta if args.beta != 1 else bias)
    return product.to(args.out_dtype)


def zero_after(out: Tensor, ends: Tensor) -> Tensor:
    """A grouped product with zeros in the rows after the end of the last group, which stays on the device."""
    row = torch.arange(out.shape[0], device=out.device)
    return torch.where((row < ends.narrow(0, ends.shape[0] - 1, 1)).unsqueeze(-1), out, 0)


def as_rows(x: Tensor, dense: bool = False) -> Tensor:
    """Activations (..., K) as a matrix (M, K) of contiguous rows; ``dense``: without gaps between them, too."""
    if x.dim() != 2:
        x = as_matrix(x)
    if not x.is_contiguous() and (dense or x.stride(1) != 1 or x.stride(0) < x.shape[1]):
        x = x.contiguous()
    return x


def readable_bias(args: GemmArgs, shape: tuple[int, ...], dtypes: Container[torch.dtype]) -> Tensor | None:
    """``flat_bias`` of a product of this shape, in float32 if its dtype is none of those that the kernel reads."""
    bias = flat_bias(args, shape)
    return bias.float() if bias is not None and bias.dtype not in dtypes else bias

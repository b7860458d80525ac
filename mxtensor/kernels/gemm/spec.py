"""What product kernels are called with: ``run(a, b, args)`` computes ``alpha * a @ b^T + beta * bias``."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...core.kernel import Spec
from ...core.tracing import is_captured
from ...numerics.cast import Cast
from ...numerics.formats import Format
from ...numerics.operand import Operand
from .fp8_rows_cache import is_known
from .row_operand import RowOperand


@dataclass(frozen=True)
class Unquantized:
    """Plain values and the cast that they still need: each kernel casts them in the form that costs it least.

    Most kernels want codes with scales in a layout of their own, or the rounded values and never the codes.
    """

    x: Tensor
    cast: Cast

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.x.shape)

    @property
    def format(self) -> Format:
        return self.cast.format


class Form(Enum):
    """What a cast writes: the form in which the product kernels of a device want an operand."""

    CODES = "codes"
    """an Operand: codes and scales"""
    VALUES = "values"
    """a FakeQuantized: the values that the codes stand for"""
    ROWS = "rows"
    """a RowOperand: E4M3 codes with one power of two for each row"""


@dataclass(frozen=True)
class FakeQuantized:
    """Values that a cast to ``format`` has rounded already, not multiplied by the global scale.

    ``values``: (..., rows, K) with any strides; ``global_scale``: see below, or None.
    """

    values: Tensor
    global_scale: Tensor | None
    """float32: a scalar, or the scales of groups or of matrices of a stack, which broadcast to the values"""
    format: Format

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)


GemmOperand: TypeAlias = Operand | Unquantized | FakeQuantized | RowOperand | Tensor
"""One operand of a product, (..., rows, K): codes blocked along K, values that still need a cast, values that a cast
has rounded, codes under the scales of rows, or plain values."""


class GemmArgs(NamedTuple):
    """The other arguments of a product. The bias broadcasts to (..., M, N) and is added in float32, before the one
    rounding."""

    out_dtype: torch.dtype
    bias: Tensor | None = None
    alpha: float = 1
    beta: float = 1


def format_of(operand: GemmOperand) -> Format | torch.dtype:
    """The format in which an operand enters the product; the dtype of plain values."""
    return operand.dtype if isinstance(operand, Tensor) else operand.format


def data_of(operand: GemmOperand) -> Tensor:
    """The tensor of an operand that has its device, and that is traced if the operand is."""
    if isinstance(operand, Tensor):
        return operand
    if isinstance(operand, Unquantized):
        return operand.x
    if isinstance(operand, RowOperand):
        return operand.codes
    return operand.data if isinstance(operand, Operand) else operand.values


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


def has_group_scales(side: GemmOperand) -> bool:
    """Whether groups of an operand, or matrices of a stack, have global scales of their own."""
    return isinstance(side, FakeQuantized) and side.global_scale is not None and side.global_scale.dim() > 0


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

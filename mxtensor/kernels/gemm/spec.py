"""What product kernels are called with: ``run(a, b, args)`` computes ``alpha * a @ b^T + beta * bias``."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...core.dispatch import Spec
from ...numerics.cast import Cast
from ...numerics.formats import Format
from ...numerics.operand import Operand


@dataclass(frozen=True)
class Unquantized:
    """Plain values and the cast they are to go through: each kernel takes it in the form that costs it least.

    Most products want codes with scales in a layout of their own, or the rounded values and never the codes.
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
    """What a cast leaves behind of a factor: what the product kernels of a device will ask for."""

    CODES = "codes"
    """an Operand: codes and scales"""
    VALUES = "values"
    """a Rounded: the values that the codes stand for"""


@dataclass(frozen=True)
class FakeQuantized:
    """Values that a cast to ``format`` has rounded already, without the global scale.

    ``values``: (..., rows, K) with any strides; ``global_scale``: a float32 scalar or None.
    """

    values: Tensor
    global_scale: Tensor | None
    format: Format

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)


GemmOperand: TypeAlias = Operand | Unquantized | FakeQuantized | Tensor
"""One side of a product, (..., rows, K): an operand blocked along K, values to be cast to one or rounded as one, or
plain values."""


class GemmArgs(NamedTuple):
    """The rest of a product: the bias broadcasts to (..., M, N) and is added in float32 before the one rounding."""

    out_dtype: torch.dtype
    bias: Tensor | None = None
    alpha: float = 1
    beta: float = 1


def format_of(gemm_operand: GemmOperand) -> Format | torch.dtype:
    """The format in which a factor enters the product; the dtype of plain values."""
    return gemm_operand.dtype if isinstance(gemm_operand, Tensor) else gemm_operand.format


def data_of(gemm_operand: GemmOperand) -> Tensor:
    """The tensor that says where a factor lives and whether it is being traced."""
    if isinstance(gemm_operand, Tensor):
        return gemm_operand
    if isinstance(gemm_operand, Unquantized):
        return gemm_operand.x
    return gemm_operand.data if isinstance(gemm_operand, Operand) else gemm_operand.values


def facts_of(a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Hashable:
    """All that refusals of product kernels look at beside the spec; None on a CPU, where they see how codes lie too."""
    bias, data = args.bias, data_of(b)
    if not data.is_cuda:
        return None
    added = None if bias is None else (bias.dtype, tuple(bias.shape))
    return type(a), data_of(a).dtype, type(b), data.dtype, added, args.alpha, args.beta


def needs_codes(a: GemmOperand, b: GemmOperand) -> str | None:
    """Why a kernel that reads codes refuses factors of which one has none."""
    return (
        "needs codes, a factor is rounded values"
        if isinstance(a, FakeQuantized) or isinstance(b, FakeQuantized)
        else None
    )


def not_rows_by_matrix(spec: Spec, a: GemmOperand) -> str | None:
    """Why a kernel for rows (..., M, K) times one matrix (N, K) refuses; None for those."""
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
    """The bias of a product of this shape: (N,) where it is the same for every row, else (M, N); contiguous.

    A factor of 0 keeps even its NaNs out.
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
    """Alpha and the bias on a product in float32 or float64, rounded once."""
    if args.alpha != 1:
        product = product * args.alpha
    if args.bias is not None and args.beta != 0:  # as addmm has it, not even a NaN of the bias enters then
        bias = args.bias.to(product.dtype)
        product = product + (bias * args.beta if args.beta != 1 else bias)
    return product.to(args.out_dtype)


def zero_after(out: Tensor, ends: Tensor) -> Tensor:
    """A grouped product with zeros in the rows after the last group's end, which stays on the device."""
    row = torch.arange(out.shape[0], device=out.device)
    return torch.where((row < ends.narrow(0, ends.shape[0] - 1, 1)).unsqueeze(-1), out, 0)

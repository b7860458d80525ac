"""What a cast does to the values of an operand: five sums that stay on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.explain import LOGS
from ..core.torch_autocast import without_autocast
from ..kernels.gemm.spec import Form
from ..kernels.quantize.select import dequantize_operand
from ..kernels.quantize.select_pair import cast_pair
from ..numerics.cast import Cast
from ..numerics.formats import Rounding
from ..numerics.operand import Operand
from ..numerics.reference import crop, join_blocks, scale_to_float, split_blocks, spread
from ..recipe.linear_recipe import TensorCasts
from ..training.operands import columnwise_source
from .model_report import decibels

SIDES = ("rowwise", "columnwise")
SEED = 20240613
"""Of stochastic rounding while it is measured, so that the generator of the training goes on undisturbed."""


class CastStats(NamedTuple):
    """What a cast did to the values of one operand, in numbers of the host."""

    saturated: float
    """Fraction of the values above the largest one that their block represents."""
    underflowed: float
    """Fraction of the values that became zero and were not."""
    sqnr_db: float
    """10 log10 of the sum of squares over that of the errors; inf without errors."""

    @classmethod
    def of(cls, sums: list[float]) -> CastStats:
        """From the five sums of ``sums_of``, or from sums of such sums."""
        values, saturated, underflowed, signal, noise = sums
        return cls(saturated / max(values, 1), underflowed / max(values, 1), decibels(signal, noise))


def largest_values(operand: Operand) -> Tensor:
    """The largest magnitude that each value of an operand can have, in float32: that of its element times its scale."""
    format, shape = operand.format, operand.shape
    whole = operand.scale.new_full(shape, format.element.max, dtype=torch.float32)
    blocks, dims = split_blocks(whole, format)
    values = join_blocks(blocks * spread(scale_to_float(operand.scale, format.scale), dims), dims)
    values = crop(values, shape[-2] if dims == (-3, -1) else None, shape[-1])
    return values if operand.global_scale is None else values * operand.global_scale


def sums_of(x: Tensor, operand: Operand) -> Tensor:
    """float64 (5,) on the device of x: the number of values, how many saturated, how many underflowed, the sum of their
    squares, and that of the errors. ``operand``: x after its cast."""
    wanted, values = x.to(torch.float32), dequantize_operand(operand, torch.float32)
    sums = (
        torch.full((), wanted.numel(), dtype=torch.float64, device=x.device),
        (wanted.abs() > largest_values(operand)).sum(dtype=torch.float64),
        ((values == 0) & (wanted != 0)).sum(dtype=torch.float64),
        wanted.square().sum(dtype=torch.float64),
        (wanted - values).square().sum(dtype=torch.float64),
    )
    return torch.stack(sums)


def _one(x: Tensor, cast: Cast, side: int, amax: Tensor | None) -> Operand:
    """One copy of a matrix as codes."""
    if cast.rounding is Rounding.STOCHASTIC and cast.seed is None:
        cast = replace(cast, seed=SEED)
    row, column = (Form.CODES, None) if side == 0 else (None, Form.CODES)
    operand = cast_pair(x, cast, row, column, torch.bfloat16, amax)[side]
    assert isinstance(operand, Operand)
    return operand


def measured(
    x: Tensor, casts: TensorCasts, amax: Tensor | None = None, sides: tuple[str, ...] = SIDES
) -> Iterator[tuple[str, str, Tensor]]:
    """(side, format, ``sums_of``) of each copy of a matrix, or of a stack, that a layer casts.

    ``amax``: that of delayed scaling, a float32 scalar. A rotated copy is compared with the rotated values, and one
    that is cast from the other copy with the values before both casts. Nothing waits for the device, nothing is logged,
    and no random number is drawn.
    """
    row, column = casts.rowwise, casts.columnwise
    with torch.no_grad(), LOGS.block(None), without_autocast(x.device):
        operand = None
        if row is not None:
            operand = _one(x, row, 0, amax)
            if "rowwise" in sides:
                yield "rowwise", row.format.name, sums_of(x, operand)
        if column is None or "columnwise" not in sides:
            return
        source, side = columnwise_source(x, casts, operand)
        wanted = x.transpose(-1, -2) if side == 1 else source
        yield "columnwise", column.format.name, sums_of(wanted, _one(source, column, side, amax))

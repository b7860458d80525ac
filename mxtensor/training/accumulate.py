"""``accumulate``: several forward and backward passes before one write of the weights, which are cast once for all.

    with mx.accumulate():
        for batch in batches:
            loss_of(model(batch)).backward()
    optimizer.step()

What a cast writes stays until the block ends: for each of the two orientations about one byte a value where products
take codes, and two where they take values. Nothing is cached outside of a block: torch does not count every write of a
weight, such as one by a replayed CUDA graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import ContextDecorator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.tracing import is_captured, is_traced
from ..numerics.formats import Rounding
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from .casts import SavedOperand, saved
from .training_weight import values_of


class WeightOperands(NamedTuple):
    """The rowwise and the columnwise operand of a weight, as tensors and how to read them. A program takes tensors."""

    row: SavedOperand
    column: SavedOperand
    tensors: tuple[Tensor, ...]

    def operands(self) -> tuple[Any, Any]:
        """Both operands; None for one that was not made."""
        tensors = iter(self.tensors)
        return self.row.gemm_operand(tensors), self.column.gemm_operand(tensors)

    @classmethod
    def of(cls, row: Any, column: Any) -> WeightOperands:
        """The tensors of two operands."""
        (row, first), (column, second) = saved(row), saved(column)
        return cls(row, column, (*first, *second))


class _Store:
    """The operands of one block, by weight and kind of product. Threads of autograd share it with the one of the
    block."""

    def __init__(self) -> None:
        self._operands: dict[Hashable, tuple[weakref.ref[Tensor], int, WeightOperands]] = {}

    def get(self, weight: Tensor, kind: Hashable, make: Callable[[], WeightOperands]) -> WeightOperands:
        """The operands of a weight: those that are stored if they are of its version, else what ``make`` gives.

        Writes count at the weight: torch counts none of those that reach the tensor inside. A view, such as the
        transpose of a stack, is a new tensor in each call: it is known by the parameter that it views, and counts its
        writes.
        """
        base = weight._base
        whole = weight if base is None else base
        key = id(whole), weight.shape, weight.stride(), weight.storage_offset(), kind
        found = self._operands.get(key)
        if found is None or found[0]() is not whole or found[1] != weight._version:
            found = self._operands[key] = weakref.ref(whole), weight._version, make()
        return found[2]


_open: list[_Store] = []
"""The store of the blocks that are open, and how many they are: one entry for each."""


class accumulate(ContextDecorator):  # noqa: N801
    """Inside the block, layers that train with a recipe cast each weight once for all forward passes.

    For gradient accumulation. Do not write to the weights inside the block: in-place operations are detected, writes
    through ``.data`` are not. Can also be used as a decorator. No effect on weights with delayed scaling, stochastic
    rounding or random signs, on stacks of weights with a scale for each weight (NVFP4, float8 with current scaling), on
    weights that FSDP2 has gathered, and in compiled graphs: these are cast each time. Blocks may be nested: the cache
    lasts until the outermost one ends.
    """

    def __enter__(self) -> None:
        _open.append(_open[0] if _open else _Store())

    def __exit__(self, *error: object) -> None:
        _open.pop()


def cached_in_block(
    weight: Tensor,
    recipe: LinearRecipe,
    kind: Hashable,
    tensors: tuple[Tensor | None, ...],
    make: Callable[[], WeightOperands],
) -> WeightOperands | None:
    """The operands of a weight in the block that is open; None: the layer casts it. ``kind`` and the recipe are all
    that ``make`` depends on beside the weight; ``tensors`` are the other inputs of the layer."""
    if not _open:
        return None
    values = values_of(weight)
    if values is weight or isinstance(values, MXTensor) or weight.refilled or not _is_fixed(recipe):  # type: ignore[attr-defined]
        return None
    if weight.dim() > 2 and recipe.has_tensor_scales:  # its operands are float32 values
        return None
    if is_traced(values, *tensors) or weight.is_inference() or is_captured(values):
        return None
    with torch.no_grad():
        return _open[0].get(weight, (recipe.key, kind), make)


def _is_fixed(recipe: LinearRecipe) -> bool:
    """Whether the casts of a weight depend on its values alone."""
    casts = recipe.weight
    nearest = all(c is not None and c.rounding is Rounding.NEAREST for c in (casts.rowwise, casts.columnwise))
    return nearest and casts.signs is None and recipe.delayed is None

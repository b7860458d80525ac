"""The layers that are calibrated: those whose one weight is a matrix, in either layout.

Methods work on matrices (out, in). A linear layer stores its weight so; transformers' Conv1D stores (in, out).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..convert.changes import Change
from ..convert.weights import KINDS
from ..numerics.formats import Orientation
from ..numerics.operand import Operand, transposed
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor


def orientation_of(module: nn.Module) -> Orientation | None:
    """The layout of the weight of a layer that multiplies its input by one matrix; None for any other module."""
    kind = next((kind for kind in KINDS if kind.matches(module)), None)
    if kind is None or not kind.multiplies or kind.names != ("weight",):
        return None
    weight: Tensor = module.weight  # type: ignore[assignment]
    return kind.orientation if weight.dim() == 2 else None


def calibrated(change: Change) -> nn.Module | None:
    """The layer that multiplies by the weight; None for an embedding alone and others."""
    for module, name in change.places:
        if name == "weight" and orientation_of(module) is change.orientation:
            return module
    return None


def oriented(weight: Tensor, orientation: Orientation | None) -> Tensor:
    """A weight with this layout as (out, in), and the other way around."""
    return weight.mT if orientation is Orientation.COLUMNWISE else weight


def matrix_of(layer: nn.Module) -> Tensor:
    """The weight of a layer as (out, in), without a gradient."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return oriented(weight.detach(), orientation_of(layer))


def stored_as(operand: Operand, orientation: Orientation, recipe: LinearRecipe, dtype: torch.dtype) -> MXTensor:
    """The MXTensor whose matrix (out, in) is ``operand``, with the copy that ``quantize_`` would store."""
    if orientation is Orientation.ROWWISE:
        return MXTensor(operand, None, recipe, dtype)
    if operand.format.square:
        return MXTensor(transposed(operand).map(Tensor.contiguous), None, recipe, dtype)
    return MXTensor(None, operand, recipe, dtype)

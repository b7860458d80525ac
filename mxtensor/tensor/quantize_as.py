"""``quantize_as``: a plain tensor becomes an MXTensor that carries a given recipe."""

from __future__ import annotations

from torch import Tensor

from ..numerics.formats import Orientation
from ..recipe.linear_recipe import LinearRecipe
from .mxtensor import MXTensor


def quantize_as(x: Tensor, recipe: LinearRecipe, orientation: Orientation = Orientation.ROWWISE) -> MXTensor:
    """Quantize ``x`` by the weight cast of ``recipe`` to an MXTensor that carries it; see :func:`mxtensor.quantize`."""
    return MXTensor._quantized(x, recipe, orientation)

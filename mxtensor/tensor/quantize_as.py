"""``quantize_as``: a plain tensor becomes an MXTensor that carries a given recipe."""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from ..core.compat import is_sharded
from ..numerics.formats import Orientation
from ..recipe.linear_recipe import LinearRecipe
from .mxtensor import MXTensor


def quantize_as(x: Tensor, recipe: LinearRecipe, orientation: Orientation = Orientation.ROWWISE) -> MXTensor:
    """Quantize ``x`` by the weight cast of ``recipe`` to an MXTensor that carries it; see :func:`mxtensor.quantize`.

    A DTensor gives a DTensor of MXTensors, or NotImplementedError.
    """
    if is_sharded(x):
        return import_module(".quantize_shards", __package__).quantize_shards(x, recipe, orientation)  # type: ignore[no-any-return]
    return MXTensor._quantized(x, recipe, orientation)

"""``quantize_as``: a plain tensor becomes an MXTensor that carries a given recipe."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from torch import Tensor

from ..numerics.formats import Orientation
from ..recipe.linear_recipe import LinearRecipe
from .mxtensor import MXTensor


def quantize_as(x: Tensor, recipe: LinearRecipe, orientation: Orientation = Orientation.ROWWISE) -> MXTensor:
    """Quantize ``x`` by the weight cast of ``recipe`` to an MXTensor that carries it; see :func:`mxtensor.quantize`.

    A DTensor gives a DTensor of MXTensors, or NotImplementedError.
    """
    distributed: Any = sys.modules.get("torch.distributed.tensor")  # a DTensor exists only after this import
    if distributed is not None and isinstance(x, distributed.DTensor):
        return import_module(".quantize_shards", __package__).quantize_shards(x, recipe, orientation)  # type: ignore[no-any-return]
    return MXTensor._quantized(x, recipe, orientation)

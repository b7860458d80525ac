"""CustomRecipe: any format for each tensor of a linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..numerics.cast import Cast
from ..numerics.formats import Format as FormatRow
from .base import BackwardOptions, parse_field
from .linear_recipe import LinearRecipe, TensorCasts

__all__ = ["CustomRecipe"]

CastLike: TypeAlias = str | torch.dtype | FormatRow | Cast | TensorCasts | None
"""What CustomRecipe accepts for one tensor."""


@dataclass(repr=False)
class CustomRecipe(BackwardOptions):
    """Any format for each tensor: ``CustomRecipe("mxfp8", "mxfp6", grad="mxfp8_e5m2")``.

    ``input``, ``weight``, ``grad``: the name of a format, a Cast, TensorCasts with one cast for each copy, or None for
    high precision.
    """

    input: CastLike = "mxfp8_e4m3"
    weight: CastLike = "mxfp8_e4m3"
    grad: CastLike = "mxfp8_e4m3"
    _kinds = frozenset({"custom"})
    _shown = (("input", "input"), ("weight", "weight"), ("grad", "grad"))

    def _linear_recipe(self) -> LinearRecipe:
        return self.with_options(
            parse_field(self, "input", TensorCasts.of),
            parse_field(self, "weight", TensorCasts.of),
            parse_field(self, "grad", TensorCasts.of),
        )

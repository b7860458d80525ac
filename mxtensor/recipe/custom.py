"""CustomRecipe: any format for each tensor of a linear layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ..numerics.cast import Cast
from ..numerics.formats import Format as FormatRow
from .base import BackwardOptions, parse_field
from .linear_recipe import LinearRecipe, TensorCasts

__all__ = ["CustomRecipe"]

CastLike: TypeAlias = str | torch.dtype | FormatRow | Cast | TensorCasts | None
"""What CustomRecipe accepts for one tensor."""


@dataclass(frozen=True)
class QuantizerRole:
    """Which tensor a factory makes a quantizer for: TransformerEngine's class of this name."""

    module_type: str = "linear"
    tensor_type: str = ""
    """``input``, ``weight`` or ``grad_output``."""
    name: str = ""
    """Empty: a recipe is the same for all layers."""


@dataclass(repr=False)
class CustomRecipe(BackwardOptions):
    """Any format for each tensor: ``CustomRecipe("mxfp8", "mxfp6", grad="mxfp8_e5m2")``.

    ``input``, ``weight``, ``grad``: the name of a format, a Cast, TensorCasts with one cast for each copy, or None for
    high precision.

    ``qfactory``: TransformerEngine's argument, a function of a ``QuantizerRole``. It is called once for each of the
    three tensors and returns a quantizer, any of the above, or None, but not None for all; their casts replace the
    other fields.
    """

    input: CastLike = "mxfp8_e4m3"
    weight: CastLike = "mxfp8_e4m3"
    grad: CastLike = "mxfp8_e4m3"
    qfactory: Callable[..., Any] | None = None
    _kinds = frozenset({"custom"})
    _shown = (("input", "input"), ("weight", "weight"), ("grad", "grad"))

    def _linear_recipe(self) -> LinearRecipe:
        if self.qfactory is not None:
            input, weight, grad = (self._made(tensor) for tensor in ("input", "weight", "grad_output"))
            if not any(casts.rowwise or casts.columnwise for casts in (input, weight, grad)):
                raise ValueError(
                    "CustomRecipe: qfactory returned None for input, weight and grad_output, so that nothing would be "
                    "quantized; compare the tensor_type of its QuantizerRole with these names"
                )
            return self.with_options(input, weight, grad)
        return self.with_options(
            parse_field(self, "input", TensorCasts.of),
            parse_field(self, "weight", TensorCasts.of),
            parse_field(self, "grad", TensorCasts.of),
        )

    def _made(self, tensor: str) -> TensorCasts:
        """The casts of the quantizer that the factory makes for one tensor."""
        assert self.qfactory is not None
        quantizer = self.qfactory(QuantizerRole(tensor_type=tensor))
        cast = getattr(quantizer, "cast", None)
        if not isinstance(cast, Cast):
            return parse_field(self, "qfactory", lambda _: TensorCasts.of(quantizer))
        if hasattr(quantizer, "scale"):
            raise ValueError(
                f"CustomRecipe: qfactory returned a {type(quantizer).__name__} for {tensor}, whose scale you set; "
                "return a Float8CurrentScalingQuantizer, or use DelayedScaling()"
            )
        return TensorCasts(cast, cast, quantizer.signs)

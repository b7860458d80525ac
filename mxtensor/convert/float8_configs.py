"""torchao's configs of float8 inference: one scale for a tensor, a row or a block of 128 values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..numerics.cast import Cast
from ..recipe.kernel_preference import KernelPreference
from ..recipe.known_fields import KnownFields
from ..recipe.linear_recipe import LinearRecipe

BLOCKS = {"PerTensor": "tensor", "PerRow": "row", "(1, 128)": "1x128", "(128, 128)": "128x128"}
"""torchao's granularity, by the name of its class or its block -> the end of the name of a format."""


def _cast(owner: Any, dtype: Any, granularity: Any) -> Cast:
    """The cast to ``dtype`` with a scale for each part. A granularity is torchao's object, or the name of its class."""
    element = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}.get(dtype)
    name = granularity if isinstance(granularity, str) else type(granularity).__name__
    if name == "PerGroup":
        name = f"(1, {granularity.group_size})"
    elif name == "PerBlock":
        name = str(tuple(granularity.block_size))
    if element is None:
        raise ValueError(
            f"{type(owner).__name__}: {dtype} is not available; choose torch.float8_e4m3fn or torch.float8_e5m2"
        )
    if name not in BLOCKS:
        raise ValueError(
            f"{type(owner).__name__}: granularity {granularity!r} is not available; choose PerTensor, PerRow, or "
            "blocks of (1, 128) or (128, 128)"
        )
    return Cast.of(f"float8_{element}_{BLOCKS[name]}")


@dataclass
class Float8WeightOnlyConfig(KnownFields):
    """Float8 weights and high-precision activations (torchao's fields)."""

    weight_dtype: torch.dtype = torch.float8_e4m3fn
    set_inductor_config: bool = True
    """Accepted for compatibility with torchao; no setting of the compiler is changed."""
    version: int = 2
    granularity: Any = "PerRow"
    """torchao's object, or the name of its class: one scale for a tensor (PerTensor) or for each row (PerRow)."""

    def linear_recipe(self) -> LinearRecipe:
        """The cast of the weight as a recipe. Raises ValueError for an unknown dtype or granularity."""
        return LinearRecipe.inference(_cast(self, self.weight_dtype, self.granularity))


@dataclass
class Float8DynamicActivationFloat8WeightConfig(KnownFields):
    """Float8 weights, and activations cast to float8 on the fly (torchao's fields)."""

    activation_dtype: torch.dtype = torch.float8_e4m3fn
    weight_dtype: torch.dtype = torch.float8_e4m3fn
    granularity: Any = None
    """torchao's object, the name of its class, or two of them, for activations and weights. None: PerTensor."""
    packing_format: Any = "plain"
    mm_config: Any = None
    """Accepted for compatibility with torchao; products accumulate in float32."""
    activation_value_lb: float | None = None
    activation_value_ub: float | None = None
    kernel_preference: KernelPreference | str = KernelPreference.AUTO
    set_inductor_config: bool = True
    """Accepted for compatibility with torchao; no setting of the compiler is changed."""
    version: int = 2
    alg_id: int = 0

    def linear_recipe(self) -> LinearRecipe:
        """The casts of weight and activation as a recipe. Raises ValueError for what is not available."""
        bounds = (self.activation_value_lb, self.activation_value_ub)
        if bounds != (None, None) or str(getattr(self.packing_format, "value", self.packing_format)) != "plain":
            raise ValueError(
                f"{type(self).__name__}: bounds of activations {bounds} and packing_format {self.packing_format!r} are "
                "not available; leave them at None and 'plain'"
            )
        both = self.granularity
        both = "PerTensor" if both is None else both
        activation, weight = both if isinstance(both, (list, tuple)) else (both, both)
        return LinearRecipe.inference(
            _cast(self, self.weight_dtype, weight),
            _cast(self, self.activation_dtype, activation),
            KernelPreference.of(self.kernel_preference),
        )

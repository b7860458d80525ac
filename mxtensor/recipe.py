"""Recipes: which format and which scale rule each role of a product gets. Frozen rows, hashable, free of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from .formats import Format, ScaleCalculationMode, get_format


class KernelPreference(Enum):
    """Which product kernel a tensor asks for (names and values as torchao has them)."""

    AUTO = "auto"
    """the fastest kernel that accepts the product"""
    EMULATED = "emulated"
    """the definition: decode to float32, multiply, round once"""

    @classmethod
    def of(cls, value: KernelPreference | str) -> KernelPreference:
        """The member named by ``value``; torchao's own enum members are accepted by their value."""
        try:
            return cls(str(getattr(value, "value", value)).lower())
        except ValueError:
            raise ValueError(
                f"unknown kernel_preference {value!r}; choose one of {', '.join(m.value for m in cls)}"
            ) from None


@dataclass(frozen=True)
class Cast:
    """How high-precision values become an operand."""

    format: Format
    scaling: ScaleCalculationMode = ScaleCalculationMode.RCEIL
    """For power-of-two scales; NVFP4 and float32 scales have one rule each."""

    @classmethod
    def of(
        cls, format: Format | str | torch.dtype | Cast, scaling: ScaleCalculationMode | str = ScaleCalculationMode.RCEIL
    ) -> Cast:
        if isinstance(format, Cast):
            return format
        return cls(get_format(format), ScaleCalculationMode.of(scaling))


@dataclass(frozen=True)
class LinearRecipe:
    """What a quantized weight does in a product with a plain tensor."""

    weight: Cast
    activation: Cast | None = None
    """The cast applied to the other operand on the fly; None keeps it in high precision (weight-only)."""
    kernel_preference: KernelPreference = KernelPreference.AUTO


def recipe_to_row(recipe: LinearRecipe) -> dict[str, str | None]:
    """The recipe as words, for files: names outlive classes."""
    act = recipe.activation
    return {
        "weight": recipe.weight.format.name,
        "weight_scaling": recipe.weight.scaling.value,
        "activation": act.format.name if act else None,
        "activation_scaling": act.scaling.value if act else None,
        "kernel_preference": recipe.kernel_preference.value,
    }


def recipe_from_row(row: dict[str, str | None]) -> LinearRecipe:
    """The inverse of ``recipe_to_row``. Raises ValueError for names this version does not know."""

    def cast(role: str) -> Cast | None:
        name, scaling = row[role], row[f"{role}_scaling"]
        return None if name is None or scaling is None else Cast.of(name, scaling)

    weight = cast("weight")
    if weight is None:
        raise ValueError(f"this row names no weight format: {row}")
    return LinearRecipe(weight, cast("activation"), KernelPreference.of(row["kernel_preference"] or "auto"))

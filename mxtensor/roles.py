"""Recipes: which format and which scale rule each role of a product gets. Frozen rows, hashable, free of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from .formats import Format, Rounding, ScaleCalculationMode, get_format, member


class KernelPreference(Enum):
    """Which product kernel a tensor asks for (names and values as torchao has them)."""

    AUTO = "auto"
    """the fastest kernel that accepts the product"""
    EMULATED = "emulated"
    """the definition: decode to float32, multiply, round once"""

    @classmethod
    def of(cls, value: KernelPreference | str) -> KernelPreference:
        """The member named by ``value``; torchao's own enum members are accepted by their value."""
        return member(cls, "kernel_preference", value)


@dataclass(frozen=True)
class Cast:
    """How high-precision values become an operand."""

    format: Format
    scaling: ScaleCalculationMode = ScaleCalculationMode.RCEIL
    """For power-of-two scales; NVFP4 and float32 scales have one rule each."""
    rounding: Rounding = Rounding.NEAREST
    """Stochastic rounding draws from torch's generator of the tensor's device, or from ``seed``."""
    seed: int | None = None
    """With one, stochastic rounding gives the same bits on every kernel and device, and the same at every call."""

    @classmethod
    def of(
        cls,
        format: Format | str | torch.dtype | Cast,
        scaling: ScaleCalculationMode | str = ScaleCalculationMode.RCEIL,
        rounding: Rounding | str = Rounding.NEAREST,
        seed: int | None = None,
    ) -> Cast:
        """A cast from words. Raises ValueError for one it does not know."""
        if isinstance(format, Cast):
            return format
        return cls(get_format(format), ScaleCalculationMode.of(scaling), Rounding.of(rounding), seed)


@dataclass(frozen=True)
class LinearRecipe:
    """What a quantized weight does in a product with a plain tensor."""

    weight: Cast
    activation: Cast | None = None
    """The cast applied to the other operand on the fly; None keeps it in high precision (weight-only)."""
    kernel_preference: KernelPreference = KernelPreference.AUTO


def recipe_to_row(recipe: LinearRecipe) -> dict[str, str | None]:
    """The recipe as words, for files: names outlive classes."""
    row: dict[str, str | None] = {"kernel_preference": recipe.kernel_preference.value}
    for role, cast in (("weight", recipe.weight), ("activation", recipe.activation)):
        row[role] = cast.format.name if cast else None
        row[f"{role}_scaling"] = cast.scaling.value if cast else None
        row[f"{role}_rounding"] = cast.rounding.value if cast else None
        if cast and cast.seed is not None:
            row[f"{role}_seed"] = str(cast.seed)
    return row


def recipe_from_row(row: dict[str, str | None]) -> LinearRecipe:
    """The inverse of ``recipe_to_row``. Raises ValueError for names this version does not know."""

    def cast(role: str) -> Cast | None:
        name, scaling, rounding = row[role], row[f"{role}_scaling"], row[f"{role}_rounding"]
        if name is None or scaling is None or rounding is None:
            return None
        seed = row.get(f"{role}_seed")
        return Cast.of(name, scaling, rounding, None if seed is None else int(seed))

    weight = cast("weight")
    if weight is None:
        raise ValueError(f"this row names no weight format: {row}")
    return LinearRecipe(weight, cast("activation"), KernelPreference.of(row["kernel_preference"] or "auto"))

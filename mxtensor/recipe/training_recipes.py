"""Recipes for training by the names and with the fields that TransformerEngine's users know.

A recipe is a plain dataclass that may be edited at any time; ``linear_recipe()`` turns what it says now into frozen ``LinearRecipe``,
and every forward pass asks for them anew. Numerics as NVIDIA's MXFP8 and NVFP4 pre-training papers recommend: RCEIL
scales, E4M3 for all operands, 16x16 tiles for NVFP4 weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from ..numerics.cast import Cast
from ..numerics.formats import FORMATS, Rounding, ScaleCalculationMode
from ..numerics.formats import Format as FormatRow
from .base import BackwardOptions, Format, Recipe, choice, no_attention, parsed
from .linear_recipe import Delayed, LinearRecipe, TensorCasts

__all__ = [
    "CustomRecipe", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format", "MXFP4BlockScaling",
    "MXFP6BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "Recipe",
]  # fmt: skip

Mode: TypeAlias = ScaleCalculationMode | str
Part: TypeAlias = str | torch.dtype | FormatRow | Cast | TensorCasts | None
"""What a role of a CustomRecipe may be given as."""

RANDOM_SIGNS = 0xA6D5
"""The signs of the rotation of NVFP4's columnwise copies: any fixed 16 bits, the same for both factors of wgrad."""


@dataclass(repr=False, kw_only=True)
class _MXOptions(BackwardOptions):
    """The options that all MX recipes take: power-of-two scales of 32 values."""

    input_scaling: Mode = ScaleCalculationMode.RCEIL
    weight_scaling: Mode = ScaleCalculationMode.RCEIL
    grad_scaling: Mode = ScaleCalculationMode.RCEIL
    two_dimensional_weights: bool = False
    """32x32 tiles for weights: one copy serves fprop and dgrad, so that both multiply by the same values."""

    def _mx_recipe(self, forward: str, backward: str) -> LinearRecipe:
        """The casts by names of formats: that of inputs and weights, that of gradients."""
        weight = FORMATS[forward].with_block((32, 32)) if self.two_dimensional_weights else FORMATS[forward]

        def casts(format: FormatRow, name: str) -> TensorCasts:
            return TensorCasts.of(Cast(format, parsed(self, name, ScaleCalculationMode.of)))

        return self.finished(
            casts(FORMATS[forward], "input_scaling"),
            casts(weight, "weight_scaling"),
            casts(FORMATS[backward], "grad_scaling"),
        )


@dataclass(repr=False)
class MXFP8BlockScaling(_MXOptions):
    """MXFP8: 32 values share a power-of-two scale; both copies of a tensor come from its high-precision values.

    ``fp8_format``: E4M3 for everything (the default, and the paper's advice), HYBRID for E5M2 gradients, or E5M2.
    """

    margin: int = 0
    """Accepted for TransformerEngine's sake: a block's own scale leaves no margin, so that only 0 is possible."""
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    _kinds = frozenset({"mxfp8", "block_scaling"})
    _shown = (("margin", "margin"), ("fp8_format", "format"))

    def _linear_recipe(self) -> LinearRecipe:
        no_attention(self)
        choice(self, "margin", (0,))
        choice(self, "fp8_format", (Format.E4M3, Format.HYBRID, Format.E5M2))
        return self._mx_recipe(f"mxfp8_{self.fp8_format.fwd}", f"mxfp8_{self.fp8_format.bwd}")


@dataclass(repr=False)
class MXFP6BlockScaling(_MXOptions):
    """MXFP6: as MXFP8 with six bits a value, ``e2m3`` (more precision) or ``e3m2`` (more range)."""

    fp6_format: str = "e2m3"
    fp6_format_grad: str = "e2m3"
    _kinds = frozenset({"block_scaling"})
    _shown = (("fp6_format", "format"),)

    def _linear_recipe(self) -> LinearRecipe:
        for name in ("fp6_format", "fp6_format_grad"):
            choice(self, name, ("e2m3", "e3m2"))
        return self._mx_recipe(f"mxfp6_{self.fp6_format}", f"mxfp6_{self.fp6_format_grad}")


@dataclass(repr=False)
class MXFP4BlockScaling(_MXOptions):
    """MXFP4: as MXFP8 with four bits a value; ``grad_format`` may be an MXFP8 or MXFP6 format by name."""

    fp4_format: Format = Format.E2M1
    grad_format: str = "mxfp4_e2m1"
    stochastic_rounding: bool = True
    """Of gradients, which nearest rounding to four bits would bias."""
    _kinds = frozenset({"block_scaling"})
    _shown = (("fp4_format", "format"),)

    def _linear_recipe(self) -> LinearRecipe:
        choice(self, "fp4_format", (Format.E2M1,))
        choice(self, "grad_format", tuple(name for name in FORMATS if name.startswith("mx")))
        linear_recipe = self._mx_recipe("mxfp4_e2m1", self.grad_format)
        if not self.stochastic_rounding:
            return linear_recipe
        rowwise, columnwise = (
            c and replace(c, rounding=Rounding.STOCHASTIC)
            for c in (linear_recipe.grad.rowwise, linear_recipe.grad.columnwise)
        )
        return replace(linear_recipe, grad=TensorCasts(rowwise, columnwise))


@dataclass(repr=False)
class NVFP4BlockScaling(BackwardOptions):
    """NVFP4 as NVIDIA's pre-training paper has it: 16 values share an E4M3 scale, the tensor a float32 one.

    Weights share scales in 16x16 tiles; the columnwise copies of inputs and gradients, wgrad's factors, are rotated by
    a random Hadamard transform; gradients round stochastically. Each can be switched off.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    """Of the scales."""
    fp8_dpa: bool = False
    fp8_mha: bool = False
    _kinds = frozenset({"nvfp4", "block_scaling"})
    _shown = (("fp4_format", "fp4_format"), ("fp8_format", "fp8_format"))

    def _linear_recipe(self) -> LinearRecipe:
        no_attention(self)
        choice(self, "fp4_format", (Format.E2M1,))
        choice(self, "fp8_format", (Format.E4M3,))
        signs = None if self.disable_rht else RANDOM_SIGNS
        nearest = Cast(FORMATS["nvfp4"])
        grad = nearest if self.disable_stochastic_rounding else replace(nearest, rounding=Rounding.STOCHASTIC)
        weight = nearest if self.disable_2d_quantization else Cast(FORMATS["nvfp4"].with_block((16, 16)))
        return self.finished(
            TensorCasts(nearest, nearest, signs), TensorCasts.of(weight), TensorCasts(grad, grad, signs)
        )


# ---------------------------------------------------------------------------------------------- float8


@dataclass(repr=False)
class Float8CurrentScaling(BackwardOptions):
    """Float8 with one scale a tensor, from the tensor's own amax."""

    fp8_format: Format = Format.HYBRID
    use_power_2_scales: bool = False
    fp8_dpa: bool = False
    fp8_mha: bool = False
    _kinds = frozenset({"float8_current_scaling"})
    _shown = (("fp8_format", "format"), ("use_power_2_scales", "use_power_2_scales"))

    def _linear_recipe(self) -> LinearRecipe:
        no_attention(self)
        choice(self, "fp8_format", (Format.HYBRID, Format.E4M3, Format.E5M2))
        suffix = "_pow2" if self.use_power_2_scales else ""
        forward, backward = (f"float8_{e}_tensor{suffix}" for e in self.fp8_format.value)
        return self.finished(TensorCasts.of(forward), TensorCasts.of(forward), TensorCasts.of(backward))


@dataclass(repr=False)
class DelayedScaling(BackwardOptions):
    """Float8 with one scale a tensor, from the amax of earlier steps: one pass over each tensor, the fastest recipe.

    The scale of the first step is 1, as TransformerEngine has it.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    """``max``, ``most_recent``, or a function of the history (newest first) to an amax."""
    scaling_factor_compute_algo: Callable[..., Tensor] | None = None
    """(amax, scale, fp8_max, recipe) -> scale, the factor that takes amax to fp8_max."""
    reduce_amax: bool = True
    """Whether ``autocast(amax_reduction_group=...)`` takes the largest amax of the group."""
    fp8_dpa: bool = False
    fp8_mha: bool = False
    _kinds = frozenset({"delayed"})
    _shown = (
        ("margin", "margin"), ("fp8_format", "format"), ("amax_history_len", "amax_history_len"),
        ("reduce_amax", "reduce_amax"), ("fp8_dpa", "fp8_dpa"), ("fp8_mha", "fp8_mha"),
    )  # fmt: skip

    def _linear_recipe(self) -> LinearRecipe:
        no_attention(self)
        choice(self, "fp8_format", (Format.HYBRID, Format.E4M3, Format.E5M2))
        if not callable(self.amax_compute_algo):
            choice(self, "amax_compute_algo", ("max", "most_recent"))
        if not isinstance(self.amax_history_len, int) or self.amax_history_len < 1:
            raise ValueError(f"DelayedScaling: amax_history_len is {self.amax_history_len!r}; a history has 1 or more")
        if not isinstance(self.margin, (int, float)):
            raise ValueError(f"DelayedScaling: margin is {self.margin!r}; it is a number, a power of two")
        if not (self.scaling_factor_compute_algo is None or callable(self.scaling_factor_compute_algo)):
            raise ValueError(
                f"DelayedScaling: scaling_factor_compute_algo is {self.scaling_factor_compute_algo!r}; it is a "
                "function or None"
            )
        forward, backward = (f"float8_{e}_tensor" for e in self.fp8_format.value)
        delayed = Delayed(
            self.margin,
            self.amax_history_len,
            self.amax_compute_algo,
            self.scaling_factor_compute_algo,
            self.reduce_amax,
        )
        return self.finished(TensorCasts.of(forward), TensorCasts.of(forward), TensorCasts.of(backward), delayed)


@dataclass(repr=False)
class Float8BlockScaling(BackwardOptions):
    """Float8 with float32 scales: 1x128 vectors of inputs and gradients, 128x128 tiles of weights (as DeepSeek-V3).

    The ``*_block_scaling_dim`` fields: 1 for vectors along the contraction, 2 for tiles.
    """

    fp8_format: Format = Format.E4M3
    use_f32_scales: bool = False
    """Any float32 as a scale; else powers of two."""
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_dpa: bool = False
    fp8_mha: bool = False
    _kinds = frozenset({"float8_block_scaling", "block_scaling"})
    _shown = (("fp8_format", "format"), ("use_f32_scales", "use_f32_scales"))

    def _linear_recipe(self) -> LinearRecipe:
        no_attention(self)
        choice(self, "fp8_format", (Format.E4M3, Format.HYBRID, Format.E5M2))
        suffix = "" if self.use_f32_scales else "_pow2"

        def casts(element: str, name: str) -> TensorCasts:
            choice(self, name, (1, 2))
            block = "1x128" if getattr(self, name) == 1 else "128x128"
            return TensorCasts.of(f"float8_{element}_{block}{suffix}")

        forward, backward = self.fp8_format.value
        return self.finished(
            casts(forward, "x_block_scaling_dim"),
            casts(forward, "w_block_scaling_dim"),
            casts(backward, "grad_block_scaling_dim"),
        )


# ---------------------------------------------------------------------------------------------- any format


@dataclass(repr=False)
class CustomRecipe(BackwardOptions):
    """Any format for each role: ``CustomRecipe("mxfp8", "mxfp6", grad="mxfp8_e5m2")``.

    ``input``, ``weight``, ``grad``: a format by name, a Cast, a Role with a cast for each copy, or None for high
    precision.
    """

    input: Part = "mxfp8_e4m3"
    weight: Part = "mxfp8_e4m3"
    grad: Part = "mxfp8_e4m3"
    _kinds = frozenset({"custom"})
    _shown = (("input", "input"), ("weight", "weight"), ("grad", "grad"))

    def _linear_recipe(self) -> LinearRecipe:
        return self.finished(
            parsed(self, "input", TensorCasts.of),
            parsed(self, "weight", TensorCasts.of),
            parsed(self, "grad", TensorCasts.of),
        )


# ---------------------------------------------------------------------------------------------- what blocks are given


def chosen(owner: str, enabled: bool, recipe: Recipe | None) -> Recipe | None:
    """The recipe of a block that is called ``owner``: the one given or MXFP8BlockScaling(); None where not enabled.

    Raises TypeError for what is no recipe, and for a recipe in the place of ``enabled``.
    """
    if isinstance(enabled, (str, Recipe)):
        raise TypeError(f"{owner}: enabled is {enabled!r}; it is True or False, a recipe goes to recipe=")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"{owner}: {recipe!r} is no recipe; pass an instance of one of mxtensor.recipe, such as MXFP8BlockScaling()"
        )
    return (recipe or MXFP8BlockScaling()) if enabled else None

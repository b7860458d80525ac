"""Recipes whose formats have a one-byte scale per block: MXFP8, MXFP6, MXFP4 and NVFP4.

The defaults follow NVIDIA's MXFP8 and NVFP4 pre-training papers: RCEIL scales, E4M3 for all operands, 16x16 tiles for
NVFP4 weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from ..core.arguments import FLAG, check, described
from ..numerics.cast import Cast
from ..numerics.choices import FourOverSix
from ..numerics.formats import E8M0, FORMATS, Rounding, ScaleCalculationMode
from ..numerics.formats import Format as FormatRow
from .base import BackwardOptions, Format, Recipe, check_choice, check_no_attention, matching_choice, parse_field
from .linear_recipe import LinearRecipe, TensorCasts

__all__ = ["MXFP4BlockScaling", "MXFP6BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling"]

Mode: TypeAlias = ScaleCalculationMode | str

RANDOM_SIGNS = 0xD7E8
"""The signs of the Hadamard transform of NVFP4's columnwise copies: TransformerEngine's fixed random sign mask."""


@dataclass(repr=False, kw_only=True)
class _MXOptions(BackwardOptions):
    """The options that all MX recipes take: 32 values share a power-of-two scale."""

    input_scaling: Mode = ScaleCalculationMode.RCEIL
    weight_scaling: Mode = ScaleCalculationMode.RCEIL
    grad_scaling: Mode = ScaleCalculationMode.RCEIL
    two_dimensional_weights: bool = False
    """Use 32x32 tiles for weights: one copy serves fprop and dgrad, so that both multiply by the same values."""

    def _mx_recipe(self, forward: str, backward: str) -> LinearRecipe:
        """The recipe with the format ``forward`` for inputs and weights, ``backward`` for gradients (names)."""
        tiles = self.two_dimensional_weights or getattr(self, "enable_2d_quantization", False)
        weight = FORMATS[forward].with_block((32, 32)) if tiles else FORMATS[forward]

        def casts(format: FormatRow, name: str) -> TensorCasts:
            return TensorCasts.of(Cast(format, parse_field(self, name, ScaleCalculationMode.of)))

        return self.with_options(
            casts(FORMATS[forward], "input_scaling"),
            casts(weight, "weight_scaling"),
            casts(FORMATS[backward], "grad_scaling"),
        )


@dataclass(repr=False)
class MXFP8BlockScaling(_MXOptions):
    """MXFP8: 32 values share a power-of-two scale; both copies of a tensor are cast from its high-precision values.

    ``fp8_format``: E4M3 for all tensors (the default, and the paper's advice), HYBRID for E5M2 gradients, or E5M2.
    """

    margin: int = 0
    """A field of TransformerEngine; only 0 is possible, since each block has its own scale."""
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    enable_2d_quantization: bool = False
    """TransformerEngine's name of ``two_dimensional_weights``."""
    _kinds = frozenset({"mxfp8", "block_scaling"})
    _shown = (("margin", "margin"), ("fp8_format", "format"))

    def _linear_recipe(self) -> LinearRecipe:
        check_no_attention(self)
        check_choice(self, "margin", (0,))
        check_choice(self, "fp8_format", (Format.E4M3, Format.HYBRID, Format.E5M2))
        return self._mx_recipe(f"mxfp8_{self.fp8_format.fwd}", f"mxfp8_{self.fp8_format.bwd}")


@dataclass(repr=False)
class MXFP6BlockScaling(_MXOptions):
    """MXFP6: like MXFP8 with six bits per value, ``e2m3`` (more precision) or ``e3m2`` (more range)."""

    fp6_format: str = "e2m3"
    fp6_format_grad: str = "e2m3"
    _kinds = frozenset({"block_scaling"})
    _shown = (("fp6_format", "format"),)

    def _linear_recipe(self) -> LinearRecipe:
        forward, backward = (
            matching_choice(self, name, ("e2m3", "e3m2")) for name in ("fp6_format", "fp6_format_grad")
        )
        return self._mx_recipe(f"mxfp6_{forward}", f"mxfp6_{backward}")


@dataclass(repr=False)
class MXFP4BlockScaling(_MXOptions):
    """MXFP4: like MXFP8 with four bits per value; ``grad_format`` may be the name of any MX format."""

    fp4_format: Format = Format.E2M1
    grad_format: str = "mxfp4_e2m1"
    stochastic_rounding: bool = True
    """Round gradients stochastically: rounding them to the nearest of four bits would bias them."""
    _kinds = frozenset({"block_scaling"})
    _shown = (("fp4_format", "format"),)

    def _linear_recipe(self) -> LinearRecipe:
        check_choice(self, "fp4_format", (Format.E2M1,))
        grad_format = matching_choice(self, "grad_format", (name for name, row in FORMATS.items() if row.scale is E8M0))
        nearest = self._mx_recipe("mxfp4_e2m1", grad_format)
        if not self.stochastic_rounding:
            return nearest
        grad = nearest.grad
        rowwise, columnwise = (c and replace(c, rounding=Rounding.STOCHASTIC) for c in (grad.rowwise, grad.columnwise))
        return replace(nearest, grad=TensorCasts(rowwise, columnwise))


@dataclass(repr=False)
class NVFP4BlockScaling(BackwardOptions):
    """NVFP4 as in NVIDIA's pre-training paper: 16 values share an E4M3 scale, the tensor has a float32 global scale.

    16x16 tiles of weights share a scale. A random Hadamard transform rotates the columnwise copies of inputs and
    gradients, the operands of wgrad. Gradients round stochastically. Each of the three can be disabled.

    Two options of TransformerEngine, with its names and values; those for inputs need ``disable_rht=True``:
    ``nvfp4_4over6`` and ``row_scaled_activation``. Gradients have neither.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    """The format of the block scales."""
    row_scaled_activation: bool = False
    """Each row of an input has a global scale of its own, from its own amax; so has each row of its transpose."""
    nvfp4_4over6: str = "none"
    """``weights``, ``activations`` or ``all``: the amax of each of their blocks becomes 6 or 4, whichever errs less."""
    nvfp4_4over6_e4m3_use_256: str = "all"
    """Of the tensors that ``nvfp4_4over6`` names, those whose largest block scale for 6 is 256 and not 448. With 448
    the blocks with the largest values have no scale for 4."""
    nvfp4_4over6_err_mode: str = "MAE"
    """The error: ``MAE``, the sum of absolute differences, or ``MSE``, of squared ones."""
    fp8_dpa: bool = False
    fp8_mha: bool = False
    _kinds = frozenset({"nvfp4", "block_scaling"})
    _shown = (("fp4_format", "fp4_format"), ("fp8_format", "fp8_format"))

    def _linear_recipe(self) -> LinearRecipe:
        check_no_attention(self)
        check_choice(self, "fp4_format", (Format.E2M1,))
        check_choice(self, "fp8_format", (Format.E4M3,))
        signs = None if self.disable_rht else RANDOM_SIGNS
        nearest = Cast(FORMATS["nvfp4"])
        grad = nearest if self.disable_stochastic_rounding else replace(nearest, rounding=Rounding.STOCHASTIC)
        weight = nearest if self.disable_2d_quantization else Cast(FORMATS["nvfp4"].with_block((16, 16)))
        input, weight = self._input(nearest), replace(weight, four_over_six=self._four_over_six("weights"))
        return self.with_options(
            TensorCasts(input, input, signs), TensorCasts.of(weight), TensorCasts(grad, grad, signs)
        )

    def _input(self, nearest: Cast) -> Cast:
        """The cast of inputs."""
        check(type(self).__name__, "row_scaled_activation", self.row_scaled_activation, FLAG)
        four = self._four_over_six("activations")
        for name, given in (("row_scaled_activation", self.row_scaled_activation), ("nvfp4_4over6", four is not None)):
            if given and not self.disable_rht:
                raise ValueError(
                    f"{type(self).__name__}: {name}={getattr(self, name)!r} is for inputs that are not rotated, and "
                    "disable_rht=False rotates them for wgrad; set disable_rht=True"
                )
        format = nearest.format.with_row_scales() if self.row_scaled_activation else nearest.format
        return replace(nearest, format=format, four_over_six=four)

    def _four_over_six(self, scope: str) -> FourOverSix | None:
        """How the tensors of ``scope``, weights or activations, choose the scales of their blocks."""
        wanted, bounded = (
            matching_choice(self, name, ("none", "weights", "activations", "all")) in (scope, "all")
            for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256")
        )
        error = matching_choice(self, "nvfp4_4over6_err_mode", ("MAE", "MSE")).lower()
        return FourOverSix.of(error if bounded else f"{error}_448") if wanted else None


def recipe_or_default(owner: str, enabled: bool, recipe: Recipe | None) -> Recipe | None:
    """``recipe``, or ``MXFP8BlockScaling()`` if it is None; None if not ``enabled``: that of ``autocast`` and others.

    ``owner`` names the caller.

    Raises TypeError for an object that is not a Recipe, and for an ``enabled`` that is not True or False.
    """
    if isinstance(enabled, (str, Recipe)):
        raise TypeError(f"{owner}: enabled is {enabled!r}; pass True or False, and the recipe as recipe=")
    if enabled is not True and enabled is not False:
        check(owner, "enabled", enabled, FLAG)
    if isinstance(recipe, LinearRecipe):
        raise TypeError(
            f"{owner}: a LinearRecipe is for quantize_; pass an instance of a class of mxtensor.recipe, such as "
            "MXFP8BlockScaling(), or CustomRecipe for other casts"
        )
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"{owner}: {described(recipe)} is not a recipe; pass an instance of a class of mxtensor.recipe, such as "
            "MXFP8BlockScaling()"
        )
    return (recipe or MXFP8BlockScaling()) if enabled else None

"""The arms of ``benchmarks.parity``: what each changes beside its parent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from mxtensor.recipe import (
    Float8CurrentScaling,
    Format,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from mxtensor.recipe.block_scaling import RANDOM_SIGNS
from mxtensor.recipe.linear_recipe import LinearRecipe

BASE = "bf16"


@dataclass(frozen=True)
class Arm:
    """One way to train the model."""

    what: str
    """The arm in words."""
    recipe: Callable[[], Recipe | LinearRecipe] | None = None
    """None: unquantized, under torch.autocast in bfloat16, as the unquantized operations of all arms are."""
    kernel: str | None = None
    """The product kernel that all products must take; None: the one that mxtensor chooses."""
    last: float = 0.0
    """The share of the steps, at the end, that run unquantized."""
    blocks: int = 0
    """The last blocks of the model that stay unquantized."""


def _mxfp8_floor() -> MXFP8BlockScaling:
    return MXFP8BlockScaling(input_scaling="floor", weight_scaling="floor", grad_scaling="floor")


def _mxfp8_backward() -> LinearRecipe:
    recipe = MXFP8BlockScaling().linear_recipe()
    x, weight = (replace(casts, rowwise=None) for casts in (recipe.input, recipe.weight))
    return replace(recipe, input=x, weight=weight, name="MXFP8, dgrad and wgrad")


def _mxfp4_rotated() -> LinearRecipe:
    recipe = MXFP4BlockScaling().linear_recipe()
    x, grad = (replace(casts, signs=RANDOM_SIGNS) for casts in (recipe.input, recipe.grad))
    return replace(recipe, input=x, grad=grad, name="MXFP4, rotated")


LAST = 0.1
ARMS: dict[str, Arm] = {
    BASE: Arm("not quantized"),
    "mxfp8": Arm("E4M3, RCEIL scales", MXFP8BlockScaling),
    "mxfp8-floor": Arm("FLOOR scales, the rule of the OCP specification", _mxfp8_floor),
    "mxfp8-e5m2": Arm("E5M2 gradients", partial(MXFP8BlockScaling, fp8_format=Format.HYBRID)),
    "mxfp8-32x32": Arm("32x32 tiles of weights", partial(MXFP8BlockScaling, two_dimensional_weights=True)),
    "mxfp8-dequant": Arm("products of dequantized values in bfloat16", MXFP8BlockScaling, kernel="dequant"),
    "mxfp8-fprop": Arm(
        "fprop quantized, not dgrad and wgrad", partial(MXFP8BlockScaling, backward_override="high_precision")
    ),
    "mxfp8-backward": Arm("dgrad and wgrad quantized, not fprop", _mxfp8_backward),
    "mxfp8-same": Arm(
        "dgrad and wgrad with the values of fprop", partial(MXFP8BlockScaling, backward_override="dequantized")
    ),
    "float8-current": Arm("float8, one scale per tensor, E5M2 gradients", Float8CurrentScaling),
    "float8-e4m3": Arm("float8, one scale per tensor, E4M3 gradients", partial(Float8CurrentScaling, Format.E4M3)),
    "float8-power-2": Arm(
        "float8, one scale per tensor, a power of two", partial(Float8CurrentScaling, use_power_2_scales=True)
    ),
    "mxfp6": Arm("E2M3", MXFP6BlockScaling),
    "nvfp4": Arm("rotation, stochastic rounding, 16x16 tiles of weights", NVFP4BlockScaling),
    "nvfp4-no-rotation": Arm("NVFP4 without rotation", partial(NVFP4BlockScaling, disable_rht=True)),
    "nvfp4-nearest": Arm(
        "NVFP4 without stochastic rounding", partial(NVFP4BlockScaling, disable_stochastic_rounding=True)
    ),
    "nvfp4-1d": Arm("NVFP4 without tiles of weights", partial(NVFP4BlockScaling, disable_2d_quantization=True)),
    "nvfp4-last-bf16": Arm(f"NVFP4, the last {LAST:.0%} of the steps in bfloat16", NVFP4BlockScaling, last=LAST),
    "nvfp4-two-blocks": Arm(
        "the same, and the last two blocks in bfloat16 in all steps", NVFP4BlockScaling, last=LAST, blocks=2
    ),
    "mxfp4": Arm("stochastic rounding", MXFP4BlockScaling),
    "mxfp4-rotation": Arm("MXFP4 with the rotation of NVFP4", _mxfp4_rotated),
    "mxfp4-nearest": Arm("MXFP4 without stochastic rounding", partial(MXFP4BlockScaling, stochastic_rounding=False)),
    "mxfp4-32x32": Arm(
        "MXFP4 with 32x32 tiles of weights", partial(MXFP4BlockScaling, two_dimensional_weights=True)
    ),
    "mxfp4-last-bf16": Arm(f"MXFP4, the last {LAST:.0%} of the steps in bfloat16", MXFP4BlockScaling, last=LAST),
}  # fmt: skip
"""Name -> arm, in the order of the tables."""

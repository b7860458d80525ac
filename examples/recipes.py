"""The recipes of ``examples.train_lm``, by name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from mxtensor import recipe as recipes
from mxtensor.core.names import find

RECIPES: dict[str, Callable[[], recipes.Recipe] | None] = {
    "none": None,
    "bf16": None,
    "mxfp8": recipes.MXFP8BlockScaling,
    "mxfp8-hybrid": partial(recipes.MXFP8BlockScaling, fp8_format=recipes.Format.HYBRID),
    "mxfp6": recipes.MXFP6BlockScaling,
    "mxfp4": recipes.MXFP4BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
    "float8-current": recipes.Float8CurrentScaling,
    "float8-delayed": recipes.DelayedScaling,
    "float8-block": recipes.Float8BlockScaling,
}
"""``none``: float32; ``bf16``: torch.autocast. With the others, unquantized ops are float32 on a CPU, else bf16."""


def recipe_of(name: str) -> recipes.Recipe | None:
    """A row of RECIPES, or a format by name for inputs, weights and gradients, in any spelling.

    Raises ValueError for other names.
    """
    known = find(name, RECIPES)
    if known is None:
        return recipes.CustomRecipe(name, name, name)
    make = RECIPES[known]
    return None if make is None else make()


def recipe_name(name: str) -> str:
    """Check that ``recipe_of`` accepts the argument."""
    try:
        recipe_of(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{', '.join(RECIPES)}, or any format by name; {error}") from error
    return name

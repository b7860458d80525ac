"""The recipe that ``autocast`` and ``quantized_model_init`` use if they are given none."""

from __future__ import annotations

from ..core.arguments import FLAG, check, described
from .base import Recipe
from .block_scaling import MXFP8BlockScaling
from .linear_recipe import LinearRecipe


def recipe_or_default(owner: str, enabled: bool, recipe: Recipe | None) -> Recipe | None:
    """``recipe``, or ``MXFP8BlockScaling()`` if it is None; None if not ``enabled``. ``owner`` names the caller.

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

"""The table of recipes of docs/guide/recipes.md, made from the recipes themselves."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from docs.markdown import table

ATTENTION = ("fp8_dpa", "fp8_mha")
"""Fields of TransformerEngine that must be False here."""


def _casts(casts: Any, delayed: bool) -> str:
    """The casts of one tensor in words."""
    cast = casts.rowwise
    if cast is None:
        return "high precision"
    words = [f"`{cast.format.name}`"]
    if cast.rounding.value != "nearest":
        words.append(cast.rounding.value)
    if casts.signs is not None:
        words.append("rotated for wgrad")
    if delayed:
        words.append("scale of earlier steps")
    return ", ".join(words)


def _value(value: Any) -> str:
    if type(value).__name__ == "Format":
        return str(value.name)
    value = getattr(value, "value", value)
    return f'"{value}"' if isinstance(value, str) else str(value)


def recipes() -> str:
    """Every recipe with what it does by default, and its own options."""
    from mxtensor.recipe import RECIPES

    body = []
    for kind in RECIPES:
        linear_recipe = kind().linear_recipe()
        mine = inspect.get_annotations(kind).keys() - set(ATTENTION)
        options = [f"`{f.name}={_value(f.default)}`" for f in fields(kind) if f.name in mine]
        casts = [
            _casts(casts, linear_recipe.delayed is not None)
            for casts in (linear_recipe.weight, linear_recipe.input, linear_recipe.grad)
        ]
        body.append((f"`{kind.__name__}`", *casts, ", ".join(options)))
    return table("recipe, weights, inputs, gradients, options of its own", body)

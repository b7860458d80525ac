"""Which recipe ``quantize_`` gives to each weight: one for all, or that of its name."""

from __future__ import annotations

import re
import warnings
from typing import Any

from torch import nn

from ..recipe.linear_recipe import LinearRecipe
from .configs import by_name, recipe_of
from .fqn_config import DEFAULT, FqnToConfig
from .sharded import Sharded, never
from .weights import FilterFn, Weight, default_filter, names_of_weights, weights_to_quantize, without_heads


def choose(
    model: nn.Module, config: Any, filter_fn: FilterFn | None, include_head: bool = False, sharded: Sharded = never
) -> tuple[list[tuple[Weight, LinearRecipe]], LinearRecipe | None]:
    """Every weight to quantize, with its recipe, and the recipe of weights that no key names (None: left as they are).

    Raises what ``recipe_of`` and ``weights_to_quantize`` raise, ValueError for a filter beside an ``FqnToConfig``.
    """
    table = by_name(config)
    if table is None:
        recipe = recipe_of(config)
        return [(weight, recipe) for weight in weights_to_quantize(model, filter_fn, include_head, sharded)], recipe
    if filter_fn is not None or include_head:
        name = "filter_fn" if filter_fn is not None else "include_head"
        raise ValueError(f"quantize_: an FqnToConfig chooses the layers itself; leave {name} out")
    recipes = {key: None if value is None else _recipe(key, value) for key, value in table.table().items()}
    _warn_of_unmatched(model, table, recipes)
    general = recipes.get(DEFAULT)
    usual = default_filter(model)
    skipped = {key for key, recipe in recipes.items() if recipe is None}

    def wanted(module: nn.Module, fqn: str) -> bool:
        names = [f"{fqn}.{name}" if fqn else name for name in module._parameters]
        keys = [table.key_of(fqn, name) for name in names]
        by_default = general is not None and None in keys and usual(module, fqn)
        return by_default or any(key is not None and key not in skipped for key in keys)

    weights = weights_to_quantize(model, wanted, sharded=sharded)
    found = [(weight, table.key_of(weight.module_name, weight.fqn)) for weight in weights]
    rest = [weight for weight, key in found if key is None and usual(weight.module, weight.module_name)]
    default = {(id(weight.module), weight.name) for weight in without_heads(model, rest)}
    chosen: list[tuple[Weight, LinearRecipe]] = []
    for weight, key in found:
        of_default = general if (id(weight.module), weight.name) in default else None
        recipe_for = of_default if key is None else recipes[key]
        if recipe_for is not None:
            chosen.append((weight, recipe_for))
    return chosen, general


def _recipe(key: str, config: Any) -> LinearRecipe:
    if by_name(config) is not None:
        raise TypeError(f"FqnToConfig, {key!r}: its values are single configs or None, not an FqnToConfig")
    try:
        return recipe_of(config)
    except (ValueError, TypeError) as error:
        raise type(error)(f"FqnToConfig, {key!r}: {error}") from error


def _warn_of_unmatched(model: nn.Module, table: FqnToConfig, recipes: dict[str, LinearRecipe | None]) -> None:
    """Warn of keys that match nothing: a misspelt name would leave a layer as it is, or quantize it, without a word."""
    every: list[str] = []
    names: list[str] = []
    for fqn, module in model.named_modules(remove_duplicate=False):
        if module._parameters or next(module.parameters(), None) is None:  # not one that only holds others
            every.append(fqn)
        known = names_of_weights(module)
        for name in module._parameters:
            every.append(f"{fqn}.{name}" if fqn else name)
            if name in known:
                names += [fqn, every[-1]]
    unmatched = [
        key
        for key, recipe in recipes.items()
        if key != DEFAULT and not any(table.matches(key, name) for name in (every if recipe is None else names))
    ]
    if unmatched:
        modules = {fqn for fqn, _ in model.named_modules(remove_duplicate=False)}
        holder = next((key for key in unmatched if key in modules), None)
        more = "" if holder is None else f"; for all that is inside {holder}, pass 're:{re.escape(holder)}\\..*'"
        warnings.warn(
            f"quantize_: no weight that can be quantized has the name {', '.join(map(repr, unmatched))} of the "
            f"FqnToConfig; names are those of model.named_modules() and model.named_parameters(){more}",
            UserWarning,
            stacklevel=4,
        )

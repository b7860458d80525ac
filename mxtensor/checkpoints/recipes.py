"""Which recipe ``convert`` quantizes a tensor of a checkpoint by, from its name alone."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence

from ..convert.configs import Config, by_name, recipe_of
from ..convert.fqn_config import DEFAULT
from ..convert.weights import is_left_out
from ..recipe.linear_recipe import LinearRecipe
from .known import Known

EMBEDDINGS = ("_embedding", "_embeddings")
"""Endings of module names of embeddings."""


def is_skipped(module: str, skip: Iterable[str]) -> bool:
    """Whether the name of a module ends in one of ``skip``, as whole components."""
    return any(module == name or module.endswith(f".{name}") for name in skip)


def stays(module: str, skip: Iterable[str]) -> bool:
    """Whether a module stays in high precision: as ``quantize_`` decides by its name, or because ``skip`` names it."""
    return is_left_out(module) or is_skipped(module, skip) or module.endswith(EMBEDDINGS)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


class Recipes:
    """The recipes of ``format``: one for all tensors, or, for an ``FqnToConfig``, one for each name.

    ``usually``: modules that one recipe for all leaves out if ``known`` does not decide; ``always``: those that are
    left out in any case. Names are those in the files, or those of transformers' modules. Raises what ``recipe_of``
    raises, and ValueError for a recipe that trains.
    """

    def __init__(self, format: Config | None, usually: Sequence[str], always: Sequence[str], known: Known) -> None:
        self._usually, self._always, self._table, self._known = usually, always, by_name(format), known
        configs = {DEFAULT: format} if self._table is None else self._table.table()
        self._recipes = {key: None if config is None else recipe_of(config) for key, config in configs.items()}
        for recipe in self.every:
            if recipe.trains:
                raise ValueError(
                    f"convert: {recipe} trains, and stores no codes; pass a format such as 'mxfp8-weight-only'"
                )

    @property
    def every(self) -> list[LinearRecipe]:
        """All recipes."""
        return [recipe for recipe in self._recipes.values() if recipe is not None]

    def of(self, name: str) -> tuple[LinearRecipe | None, bool]:
        """The recipe of a tensor (None: it is not quantized), and whether it stays exactly as it is."""
        names, key = self._every(name), None
        skipped = any(is_skipped(_module(other), self._always) for other in names)
        if self._table is not None and not skipped:
            keys = (self._table.key_of(_module(other), other) for other in names)
            key = next((found for found in keys if found is not None), None)
        if key is not None:
            return self._recipes[key], self._recipes[key] is None
        taken = self._known.quantizes(name)
        left_out = stays(_module(name), self._usually) if taken is None else not taken
        return self._recipes.get(DEFAULT), skipped or left_out

    def _every(self, name: str) -> tuple[str, ...]:
        """The names of a tensor: in the files, and of the parameters that transformers makes of it."""
        return name, *self._known.loaded(name).parameters

    def warn_of_unmatched(self, names: Collection[str]) -> None:
        """Warn of keys of a table that match no tensor: the names of a plan may be those of another checkpoint."""
        if self._table is None:
            return
        parameters = {other for name in names for other in self._every(name)}
        every = {*parameters, *map(_module, parameters)}
        unmatched = [k for k in self._recipes if k != DEFAULT and not any(self._table.matches(k, n) for n in every)]
        if unmatched:
            more = f" and {len(unmatched) - 3} more" if len(unmatched) > 3 else ""
            warnings.warn(
                f"convert: no tensor of the checkpoint has the name {', '.join(map(repr, unmatched[:3]))}{more} of the "
                "FqnToConfig",
                UserWarning,
                stacklevel=3,
            )

"""Which recipe ``convert`` quantizes a tensor of a checkpoint by, from its name alone."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence

from ..convert.configs import Config, by_name, recipe_of
from ..convert.fqn_config import DEFAULT
from ..convert.weights import is_left_out
from ..recipe.linear_recipe import LinearRecipe


def is_skipped(module: str, skip: Iterable[str]) -> bool:
    """Whether the name of a module ends in one of ``skip``, as whole components."""
    return any(module == name or module.endswith(f".{name}") for name in skip)


def stays(module: str, skip: Iterable[str]) -> bool:
    """Whether a module stays in high precision: as ``quantize_`` decides by its name, or because ``skip`` names it."""
    return is_left_out(module) or is_skipped(module, skip)


class Recipes:
    """The recipes of ``format``: one for all tensors, or, for an ``FqnToConfig``, one for each name.

    ``usually``: modules that one recipe for all leaves out; ``always``: those that a table leaves out too. Raises what
    ``recipe_of`` raises, and ValueError for a recipe that trains.
    """

    def __init__(self, format: Config | None, usually: Sequence[str], always: Sequence[str]) -> None:
        self._usually, self._always, self._table = usually, always, by_name(format)
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
        module = name.removesuffix(".weight")
        key = None if self._table is None else self._table.key_of(module, name)
        if key is not None and not is_skipped(module, self._always):
            return self._recipes[key], self._recipes[key] is None
        return self._recipes.get(DEFAULT), stays(module, self._usually)

    def warn_of_unmatched(self, names: Collection[str]) -> None:
        """Warn of keys of a table that match no tensor: the names of a plan may be those of another checkpoint."""
        if self._table is None:
            return
        every = {*names, *(name.removesuffix(".weight") for name in names)}
        unmatched = [k for k in self._recipes if k != DEFAULT and not any(self._table.matches(k, n) for n in every)]
        if unmatched:
            more = f" and {len(unmatched) - 3} more" if len(unmatched) > 3 else ""
            warnings.warn(
                f"convert: no tensor of the checkpoint has the name {', '.join(map(repr, unmatched[:3]))}{more} of the "
                "FqnToConfig",
                UserWarning,
                stacklevel=3,
            )

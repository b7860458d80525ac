"""Which recipe ``convert`` quantizes a tensor of a checkpoint by, from its name alone."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from torch import nn

from ..convert.configs import Config, by_name, recipe_of
from ..convert.fqn_config import DEFAULT
from ..convert.weights import is_left_out
from ..recipe.linear_recipe import LinearRecipe
from .layout import Layout

SHAPES = {2: "matrices", 3: "stacked experts"}
"""Dimensions of a tensor -> what it is."""


def is_skipped(module: str, skip: Iterable[str]) -> bool:
    """Whether the name of a module ends in one of ``skip``, as whole components."""
    return any(module == name or module.endswith(f".{name}") for name in skip)


def stays(module: str, skip: Iterable[str]) -> bool:
    """Whether a module stays in high precision: as ``quantize_`` decides by its name, or because ``skip`` names it."""
    return is_left_out(module) or is_skipped(module, skip)


def with_parameters(model: nn.Module | None) -> list[str]:
    """The names of modules that have parameters of their own."""
    return [] if model is None else [name for name, module in model.named_modules() if module._parameters]


def warn_of_unmatched_skip(function: str, skip: Iterable[str], modules: Collection[str]) -> None:
    """Warn of names in ``skip`` that match no module, except for those of heads and routers, which stay anyway."""
    for name in skip:
        if not is_left_out(name) and not any(is_skipped(module, (name,)) for module in modules):
            some = next((module for module in modules if "." in module), next(iter(modules), ""))
            warnings.warn(
                f"{function}: skip={name!r} matches no module; pass the whole name of one, or its end after a dot: "
                f"{some!r} or {some.rpartition('.')[2]!r}",
                UserWarning,
                stacklevel=2,
            )


def raise_nothing_quantized(path: Path, layout: Layout, as_it_is: bool, unfit: Sequence[str]) -> NoReturn:
    """Raise ValueError for a conversion that would write no quantized tensor. ``as_it_is``: it was to quantize none.

    ``unfit``: matrices that the layout does not hold.
    """
    if as_it_is:
        raise ValueError(
            f"convert: {path} has no quantized tensor, and the layout {layout.name} is one of quantized tensors; pass "
            "format=, or the layout plain"
        )
    if unfit:
        holds = " and ".join(SHAPES[dims] for dims in layout.dims)
        raise ValueError(
            f"convert: nothing was quantized: the layout {layout.name} holds {holds} only, and {path} has {len(unfit)} "
            f"others, such as {unfit[0]}; choose another layout, such as native"
        )
    raise ValueError(
        f"convert: nothing was quantized: {path} has no matrix of a layer, except for embeddings, heads and routers "
        "(include_head=True quantizes the head)"
    )


class Recipes:
    """The recipes of ``format``: one for all tensors, or, for an ``FqnToConfig``, one for each name.

    ``usually``: modules that one recipe for all leaves out; ``always``: those that a table leaves out too. Raises what
    ``recipe_of`` raises, and ValueError for a recipe that trains.
    """

    def __init__(self, format: Config | None, usually: Sequence[str], always: Sequence[str]) -> None:
        self._usually, self._always, self._table = usually, always, by_name(format)
        self.heads: Collection[str] = ()
        """Modules that are quantized although they are heads or embeddings."""
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
        if module in self.heads and not is_skipped(module, self._always):
            return self._recipes.get(DEFAULT), False
        return self._recipes.get(DEFAULT), stays(module, self._usually)

    def skips(self, names: Iterable[str]) -> bool:
        """Whether a tensor stays as it is because the caller has named its module."""
        return any(is_skipped(name.removesuffix(".weight"), self._always) for name in names)

    def warn_of_unmatched(self, names: Collection[str], model: nn.Module | None) -> None:
        """Warn of names that match no tensor, of a table or to be skipped: they may be those of another checkpoint.

        ``model``: if it is known; the checkpoint does not store weights that it shares. Raises ValueError if no name of
        a table matches, and nothing else is to be quantized.
        """
        modules = [name.removesuffix(".weight") for name in names]
        warn_of_unmatched_skip("convert", self._always, [*modules, *with_parameters(model)])
        if self._table is None:
            return
        every = {*names, *(name.removesuffix(".weight") for name in names)}
        unmatched = [k for k in self._recipes if k != DEFAULT and not any(self._table.matches(k, n) for n in every)]
        if unmatched and not self._recipes.keys() - {*unmatched}:
            raise ValueError(
                f"convert: no tensor of the checkpoint has a name of the plan, such as {unmatched[0]!r}; its names are "
                f"such as {next(iter(names), '')!r}: pass a plan that was made for this checkpoint"
            )
        if unmatched:
            more = f" and {len(unmatched) - 3} more" if len(unmatched) > 3 else ""
            warnings.warn(
                f"convert: no tensor of the checkpoint has the name {', '.join(map(repr, unmatched[:3]))}{more} of the "
                "FqnToConfig",
                UserWarning,
                stacklevel=3,
            )

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
from ..core.names import has_part
from ..recipe.linear_recipe import LinearRecipe
from .known import Known
from .layout import Layout

EMBEDDINGS = ("_embedding", "_embeddings")
"""Endings of module names of embeddings."""
SHAPES = {2: "matrices", 3: "stacked experts"}
"""Dimensions of a tensor -> what it is."""


def ends_in(module: str, names: Iterable[str]) -> bool:
    """Whether the name of a module ends in one of ``names``, as whole components."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def is_skipped(name: str, skip: Iterable[str]) -> bool:
    """Whether one of ``skip`` names a parameter, its module or a module around it, by the end of its name or all of it.

    So ``modules_to_not_convert`` of transformers names modules, too.
    """
    return any(has_part(name, part) for part in skip)


def stays(module: str, usually: Iterable[str]) -> bool:
    """Whether a module stays in high precision by its name alone, as ``quantize_`` decides or by the end of it."""
    return is_left_out(module) or ends_in(module, usually) or module.endswith(EMBEDDINGS)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _holder(name: str) -> str:
    """The module that has a parameter, whatever the parameter is called."""
    return name.rpartition(".")[0]


def with_parameters(model: nn.Module | None) -> list[str]:
    """The names of modules that have parameters of their own."""
    return [] if model is None else [name for name, module in model.named_modules() if module._parameters]


def warn_of_unmatched_skip(
    function: str, skip: Iterable[str], modules: Collection[str], parameters: Collection[str] = ()
) -> None:
    """Warn of names in ``skip`` that match nothing, except for those of heads and routers, which stay anyway."""
    for name in skip:
        if not is_left_out(name) and not any(has_part(other, name) for other in (*modules, *parameters)):
            some = next((module for module in modules if "." in module), next(iter(modules), ""))
            warnings.warn(
                f"{function}: skip={name!r} matches no module; pass the whole name of one, or its end after a dot: "
                f"{some!r} or {some.rpartition('.')[2]!r}",
                UserWarning,
                stacklevel=2,
            )


def raise_nothing_quantized(
    path: Path, layout: Layout, as_it_is: bool, unfit: Sequence[str], left: Sequence[str]
) -> NoReturn:  # fmt: skip
    """Raise ValueError for a conversion that would write no quantized tensor. ``as_it_is``: it was to quantize none.

    ``unfit``: tensors that the layout does not hold. ``left``: those whose codes its readers would not take.
    """
    if as_it_is:
        raise ValueError(
            f"convert: {path} has no quantized tensor, and the layout {layout.name} requires them; pass format=, or "
            "the layout plain"
        )
    if left:
        raise ValueError(
            f"convert: nothing was quantized: readers of the layout {layout.name} split, join, transpose or share the "
            f"{len(left)} matrices of {path}, such as {left[0]}, before they look for codes; choose another layout, "
            "such as native"
        )
    if unfit:
        holds = " and ".join(SHAPES[dims] for dims in layout.dims)
        raise ValueError(
            f"convert: nothing was quantized: the layout {layout.name} holds {holds} only, and {path} has {len(unfit)} "
            f"other tensors, such as {unfit[0]}; choose another layout, such as native"
        )
    raise ValueError(
        f"convert: nothing was quantized: {path} has no matrix of a layer, except for embeddings, heads and routers "
        "(include_head=True quantizes the head)"
    )


class Recipes:
    """The recipes of ``format``: one for all tensors, or, for an ``FqnToConfig``, one for each name.

    ``usually``: modules that one recipe for all leaves out if ``known`` does not decide; ``always``: those that are
    left out in any case. Names are those in the files, or those of transformers' modules. Raises what ``recipe_of``
    raises, and ValueError for a recipe that trains.
    """

    def __init__(self, format: Config | None, usually: Sequence[str], always: Sequence[str], known: Known) -> None:
        self._usually, self._always, self._table, self._known = usually, always, by_name(format), known
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
        names, key, default = self._every(name), None, self._recipes.get(DEFAULT)
        skipped = self.skips((name,))
        if self._table is not None and not skipped:
            keys = (self._table.key_of(_holder(other), other) for other in names)
            key = next((found for found in keys if found is not None), None)
        if key is not None:
            return self._recipes[key], self._recipes[key] is None
        if skipped or _module(name) in self.heads:
            return default, skipped
        taken = self._known.quantizes(name)
        return default, stays(_module(name), self._usually) if taken is None else not taken

    def skips(self, names: Iterable[str]) -> bool:
        """Whether a tensor stays as it is because the caller has named its module."""
        every = (other for name in names for other in self._every(name))
        return any(is_skipped(other, self._always) for other in every)

    def _every(self, name: str) -> tuple[str, ...]:
        """The names of a tensor: in the files, and of the parameters that transformers makes of it."""
        return name, *self._known.loaded(name).parameters

    def warn_of_unmatched(self, names: Collection[str]) -> None:
        """Warn of names that match no tensor, of a table or to be skipped: they may be those of another checkpoint.

        The checkpoint does not store weights that its model shares. Raises ValueError if no name of a table matches,
        and nothing else is to be quantized.
        """
        parameters = dict.fromkeys(other for name in names for other in self._every(name))
        modules = list(dict.fromkeys(module for name in parameters for module in (_module(name), _holder(name))))
        warn_of_unmatched_skip("convert", self._always, [*modules, *with_parameters(self._known.model)], parameters)
        if self._table is None:
            return
        every = {*parameters, *modules}
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

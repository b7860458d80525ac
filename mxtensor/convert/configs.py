"""What ``quantize_`` takes for a config, and the recipe that it gives to each weight.

mx.quantize_(model, {"re:.*experts": "mxfp4", "lm_head": None, "_default": "mxfp8"})
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ..core import names as spelling
from ..core.arguments import described, warn
from ..core.names import OF_PEERS, find, operands_of, suggestion
from ..core.peer_names import instead_of
from ..numerics.formats import FORMATS, Format
from ..recipe import RECIPES
from ..recipe.linear_recipe import LinearRecipe
from .weights import (
    FilterFn,
    Sharded,
    Weight,
    default_filter,
    names_of_weights,
    weights_to_quantize,
    without_heads,
)


class HasRecipe(Protocol):
    """A config object: a recipe class of ``mx.recipe``, or any other object that makes a LinearRecipe."""

    def linear_recipe(self) -> LinearRecipe:
        """The casts of the tensors of a linear layer."""


class HasConfig(Protocol):
    """An object that stands for another config, such as a plan for the formats in it."""

    def config_and_step(self) -> tuple[Any, str | None]:
        """What to pass to ``quantize_`` as ``config`` and as ``step``."""


Config = str | torch.dtype | Format | LinearRecipe | HasRecipe | HasConfig | Mapping[str, Any]
"""What ``quantize_`` accepts; the values of a dict are configs, or None."""
DEFAULT = "_default"
"""The key of a dict of configs for all weights that no other key names."""
CLASSES = {kind.__name__: f"mx.recipe.{kind.__name__}" for kind in RECIPES}
"""Name of a class of configs -> where it is."""


def config_and_step(config: Any) -> tuple[Any, str | None]:
    """What a config stands for, and the step of ``quantize_`` that it names; another config itself, without one."""
    stands_for = None if isinstance(config, type) else getattr(config, "config_and_step", None)
    return (config, None) if stands_for is None else stands_for()


def _without_step(config: Any) -> Any:
    if hasattr(config, "linear_recipe"):  # which says so itself
        return config
    given, step = config_and_step(config)
    if step is not None:
        raise ValueError(f"{type(config).__name__}: step={step!r} is for quantize_ alone; leave it out")
    return given


def recipe_of(config: Any) -> LinearRecipe:
    """The LinearRecipe of a config: a LinearRecipe itself, an object with ``linear_recipe()``, or the name of a format.

    A name (``"mxfp8"``, ``"mxfp8-weight-only"``, ``"mxfp4-weight-mxint8-activation"``), a dtype or a Format gives an
    inference recipe. Raises ValueError for an unknown format name, TypeError for any other object.
    """
    if isinstance(config, type):
        raise TypeError(f"cannot quantize with the class {config.__name__}; pass an instance: {config.__name__}()")
    config = _without_step(config)
    if isinstance(config, LinearRecipe):
        return config
    if hasattr(config, "linear_recipe"):
        return config.linear_recipe()  # type: ignore[no-any-return]
    if isinstance(config, str):
        return _recipe_called(config)
    if isinstance(config, (torch.dtype, Format)):
        return LinearRecipe.inference(config, config)
    instead = instead_of(type(config).__name__)
    if instead:
        raise TypeError(f"cannot quantize with {described(config)}{instead}")
    if hasattr(config, "quant_method"):
        raise TypeError(
            f"cannot quantize with {described(config)}: a quantization_config is for from_pretrained of transformers; "
            "pass quantize_ the name of a format, such as 'mxfp8-weight-only'"
        )
    if isinstance(config, Mapping):
        raise TypeError(
            f"{described(config)} has a config for each name; pass one config, such as the name of a format"
        )
    raise TypeError(
        f"cannot quantize with {described(config)}; pass a format name like 'mxfp8' or 'mxfp8-weight-only', a "
        "LinearRecipe, a dict of names of layers to these, or to train a recipe such as mx.recipe.MXFP8BlockScaling()"
    )


def _recipe_called(text: str) -> LinearRecipe:
    """The inference recipe of a name: a format's, or one that ``operands_of`` takes apart."""
    weight, activation = operands_of(text)
    try:
        return LinearRecipe.inference(weight, activation)
    except ValueError:
        if spelling.key(text) in OF_PEERS:
            raise
        named = find(text, CLASSES)
        if named is not None:
            raise ValueError(f"{text!r} names a class; pass an instance, {CLASSES[named]}()") from None
        if instead_of(text) and weight == text:
            raise ValueError(f"unknown format or config {text!r}{instead_of(text)}") from None
        short = [f"{format}-weight-only" for format in (*FORMATS, *FORMATS.aliases)]
        hint = suggestion(text, [*CLASSES, *short]) if len(text) > 5 else ""
        if hint and activation == text and not suggestion(text, FORMATS):
            raise ValueError(f"unknown format or config {text!r}; {hint}") from None
        raise


# ---------------------------------------------------------------------------------------------- a config for each name


class ByName:
    """A dict of configs for modules or parameters, by their fully qualified names.

    Keys are names of modules or parameters, ``re:`` with a regular expression that matches whole names, or
    ``_default``. Values are what ``quantize_`` takes; None leaves the weights unquantized. A weight takes the first of
    these keys that exists: the name of the parameter, the name of its module, the first expression that matches the
    parameter, the first that matches the module, ``_default``. ``_default`` applies to the layers that ``quantize_``
    would convert without a filter; the other keys apply to embeddings, heads and routers too. The name of a module is
    not a key of the modules inside it: ``"re:layers\\.0\\..*"`` is. Raises TypeError for keys that are not strings,
    ValueError for an invalid regular expression, and what ``recipe_of`` raises for a value.
    """

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._patterns: dict[str, re.Pattern[str]] = {}
        self.recipes: dict[str, LinearRecipe | None] = {}
        """Key -> recipe."""
        for name, config in table.items():
            if not isinstance(name, str):
                raise TypeError(f"a dict of configs has names of layers as keys, not {described(name)}")
            try:
                self.recipes[name] = None if config is None else recipe_of(config)
                if name.startswith("re:"):
                    self._patterns[name] = re.compile(name[3:])
            except re.error as error:
                raise ValueError(f"{name!r} is not a valid regular expression: {error}") from None
            except (ValueError, TypeError) as error:
                raise type(error)(f"config of {name!r}: {error}") from error

    def key_of(self, module_name: str, parameter_name: str) -> str | None:
        """The key for a parameter, by the full names of its module and its own; None if only ``_default`` matches."""
        names = (parameter_name, module_name)
        exact = [name for name in names if name in self.recipes and name != DEFAULT]
        matching = (name for whole in names for name, p in self._patterns.items() if p.fullmatch(whole))
        return exact[0] if exact else next(matching, None)

    def unmatched(self, names: Iterable[str], others: Iterable[str] = ()) -> list[str]:
        """The keys that match no name; one with None, which leaves weights alone, may also match one of ``others``."""
        names, every, found = set(names), {*names, *others}, []
        for name, recipe in self.recipes.items():
            fits = self._patterns[name].fullmatch if name in self._patterns else name.__eq__
            if name != DEFAULT and not any(map(fits, every if recipe is None else names)):
                found.append(name)
        return found


def by_name(config: Any) -> ByName | None:
    """The recipes of a dict of configs, or of a plan; None for another config."""
    config = _without_step(config)
    return ByName(config) if isinstance(config, Mapping) else None


def choose(
    model: nn.Module,
    config: Any,
    filter_fn: FilterFn | None,
    include_head: bool = False,
    sharded: Sharded | None = None,
) -> tuple[list[tuple[Weight, LinearRecipe]], LinearRecipe | None]:
    """Every weight to quantize, with its recipe, and the recipe of weights that no key names (None: left as they are).

    Raises what ``recipe_of`` and ``weights_to_quantize`` raise, ValueError for a filter beside a dict.
    """
    table = by_name(config)
    if table is None:
        recipe = recipe_of(config)
        return [(weight, recipe) for weight in weights_to_quantize(model, filter_fn, include_head, sharded)], recipe
    if filter_fn is not None or include_head:
        name = "filter_fn" if filter_fn is not None else "include_head"
        raise ValueError(f"quantize_: a dict of configs chooses the layers itself; leave {name} out")
    _warn_of_unmatched(model, table)
    general, usual = table.recipes.get(DEFAULT), default_filter(model)

    def wanted(module: nn.Module, fqn: str) -> bool:
        keys = [table.key_of(fqn, f"{fqn}.{name}" if fqn else name) for name in module._parameters]
        by_default = general is not None and None in keys and usual(module, fqn)
        return by_default or any(key is not None and table.recipes[key] is not None for key in keys)

    found = [
        (weight, table.key_of(weight.module_name, weight.fqn))
        for weight in weights_to_quantize(model, wanted, sharded=sharded)
    ]
    rest = [weight for weight, key in found if key is None and usual(weight.module, weight.module_name)]
    default = {(id(weight.module), weight.name) for weight in without_heads(model, rest)}
    chosen: list[tuple[Weight, LinearRecipe]] = []
    for weight, key in found:
        of_default = general if (id(weight.module), weight.name) in default else None
        recipe_for = of_default if key is None else table.recipes[key]
        if recipe_for is not None:
            chosen.append((weight, recipe_for))
    return chosen, general


def _warn_of_unmatched(model: nn.Module, table: ByName) -> None:
    """Warn of keys that match nothing: a misspelt name would leave a layer as it is, or quantize it, without a word."""
    names: list[str] = []
    others: list[str] = []
    for fqn, module in model.named_modules(remove_duplicate=False):
        if module._parameters or next(module.parameters(), None) is None:  # not one that only holds others
            others.append(fqn)
        known = names_of_weights(module)
        for name in module._parameters:
            others.append(f"{fqn}.{name}" if fqn else name)
            if name in known:
                names += [fqn, others[-1]]
    unmatched = table.unmatched(names, others)
    if unmatched:
        modules = {fqn for fqn, _ in model.named_modules(remove_duplicate=False)}
        holder = next((key for key in unmatched if key in modules), None)
        more = "" if holder is None else f"; for all that is inside {holder}, pass 're:{re.escape(holder)}\\..*'"
        warn(
            f"quantize_: no weight that can be quantized has the name {', '.join(map(repr, unmatched))} of the dict of "
            f"configs; names are those of model.named_modules() and model.named_parameters(){more}"
        )

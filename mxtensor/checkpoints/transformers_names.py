"""Names of tensors in the files of a checkpoint, and of the parameters that transformers makes of them.

transformers 5 renames tensors while it loads them, splits a fused projection, and stacks experts. Its own lists of
layers have the names of modules, those of other readers the names in the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn

from ..convert.heads import is_lookup


def model_of(config: Mapping[str, Any]) -> nn.Module | None:
    """The model of a ``config.json``, without values; None if transformers is not there or does not know it."""
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture is None or "model_type" not in config or find_spec("transformers") is None:
        return None
    transformers = import_module("transformers")
    kind = getattr(transformers, architecture, None)
    if kind is None:
        return None
    try:
        rest = {name: _floats(value) for name, value in config.items() if name != "quantization_config"}
        with torch.device("meta"):
            model: nn.Module = kind(kind.config_class.from_dict(rest))
    except Exception:  # a configuration of another version of transformers
        return None
    return model


def _floats(value: Any) -> Any:
    """``value`` with the floats that JSON does not have: transformers writes ``{"__float__": "Infinity"}``."""
    if isinstance(value, Mapping):
        return float(value["__float__"]) if [*value] == ["__float__"] else {k: _floats(v) for k, v in value.items()}
    return [_floats(item) for item in value] if isinstance(value, list) else value


def tied_keys(model: nn.Module) -> Mapping[str, str]:
    """Weight that is not stored -> the weight that it shares, as transformers' models know it."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def tied_to_embeddings(model: nn.Module) -> tuple[set[str], set[str]]:
    """The weights of embeddings, and all weights that share one with an embedding."""
    lookups = {f"{name}.weight" for name, module in model.named_modules() if is_lookup(module)}
    return lookups, {name for pair in tied_keys(model).items() if lookups & set(pair) for name in pair}


def tied_groups(model: nn.Module) -> list[set[str]]:
    """The names of each weight that is shared, as transformers' models know it."""
    groups: dict[str, set[str]] = {}
    for name, source in tied_keys(model).items():
        groups.setdefault(source, {source}).add(name)
    return list(groups.values())


class Loaded(NamedTuple):
    """What transformers makes of one tensor of a file."""

    parameters: tuple[str, ...] = ()
    """Names in the model: several for a tensor that is split, none for one that the model does not have."""
    operations: tuple[str, ...] = ()
    """Classes of transformers' operations that change the tensor on the way, such as ``Chunk``."""
    source: str | None = None
    """The pattern of transformers by which they take the tensor."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that have the parameters."""
        return tuple(dict.fromkeys(name.rpartition(".")[0] for name in self.parameters))

    def is_itself(self, name: str) -> bool:
        """Whether the tensor called ``name`` is the parameter of the same name, as it is stored."""
        return self.parameters == (name,) and not self.operations


def loaded_by(model: nn.Module, stored: Iterable[str], transforms: Iterable[Any] | None = None) -> dict[str, Loaded]:
    """Name in the files -> what transformers' ``model`` makes of the tensor.

    ``transforms``: those of one call of ``from_pretrained``; None: transformers' own for this class of models.
    """
    there = model.state_dict()
    try:
        loading = import_module("transformers.core_model_loading")
        known = import_module("transformers.conversion_mapping").get_model_conversion_mapping
    except ImportError:  # transformers 4, which renames next to nothing
        return {name: Loaded((name,) if name in there else ()) for name in stored}
    every = list(known(model) if transforms is None else deepcopy(list(transforms)))  # they note that they were used
    renamings = [one for one in every if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in every if isinstance(one, loading.WeightConverter)]
    by_source = {source: one for one in converters for source in one.source_patterns}
    prefix = getattr(model, "base_model_prefix", None)

    def of(name: str) -> Loaded:
        new, source = loading.rename_source_key(name, renamings, converters, prefix, there)
        if new not in there and name in there:  # as transformers' own loop
            new, source = loading.rename_source_key(name, [], [], prefix, there)
        if source is None:
            return Loaded((new,) if new in there else ())
        first, *others = by_source[source].target_patterns
        targets = dict.fromkeys((new, *(new.replace(first, other) for other in others)))
        operations = tuple(type(operation).__name__ for operation in by_source[source].operations)
        return Loaded(tuple(target for target in targets if target in there), operations, source)

    return {name: of(name) for name in sorted(stored, key=loading.dot_natural_key)}


def names_in_files(config: Mapping[str, Any], wanted: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Parameter -> its name in the files, for those of ``wanted`` that transformers finds under another name."""
    wanted, model = set(wanted), model_of(config)
    if model is None:
        return {}
    return {
        loaded.parameters[0]: name
        for name, loaded in loaded_by(model, stored).items()
        if len(loaded.parameters) == 1 and loaded.parameters[0] in wanted
    }

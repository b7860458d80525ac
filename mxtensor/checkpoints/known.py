"""What ``quantize_`` would do with each tensor of a checkpoint: decided by the model that transformers builds of its
configuration, and by names for what no such model has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from torch import nn

from ..convert.weights import (
    FilterFn,
    Kind,
    default_filter,
    names_of_weights,
    unknown_experts,
    weights_to_quantize,
    without_heads,
)
from ..numerics.formats import Orientation
from .transformers_names import Loaded, loaded_by, model_of, tied_keys, tied_to_embeddings


def _filter(model: nn.Module) -> FilterFn:
    """As ``quantize_`` without a filter, but for weights that are computed from others, which it refuses."""
    usual = default_filter(model)

    def accepts(module: nn.Module, fqn: str) -> bool:
        weights = (getattr(module, name, None) for name in names_of_weights(module))
        return usual(module, fqn) and all(isinstance(weight, nn.Parameter | None) for weight in weights)

    return accepts


class Known:
    """The model of a checkpoint, without values. ``stored``: the names of tensors in its files.

    ``Known(None)`` knows nothing, and ``Known(model)`` no names in files.
    """

    def __init__(self, model: nn.Module | None, stored: Iterable[str] = ()) -> None:
        self.model = model
        self._loaded = {} if model is None else loaded_by(model, stored)
        self._lookups, self._tied = (set[str](), set[str]()) if model is None else tied_to_embeddings(model)

    @cached_property
    def _shared(self) -> set[str]:
        pairs = {} if self.model is None else tied_keys(self.model)
        return {name for pair in pairs.items() for name in pair} - self._tied

    @cached_property
    def _kinds(self) -> dict[str, Kind]:
        """Parameter -> its kind, of those that ``quantize_`` converts."""
        if self.model is None:
            return {}
        found = without_heads(self.model, weights_to_quantize(self.model, _filter(self.model)))
        return {weight.fqn: weight.kind for weight in found if weight.fqn not in self._tied}

    @cached_property
    def _experts(self) -> set[str]:
        return set() if self.model is None else {weight.fqn for weight in unknown_experts(self.model)}

    @cached_property
    def _is_complete(self) -> bool:
        """Whether the files have all weights of the model that ``quantize_`` converts."""
        there = {parameter for loaded in self._loaded.values() for parameter in loaded.parameters}
        tied = {} if self.model is None else tied_keys(self.model)
        return bool(self._kinds) and all(name in there or tied.get(name) in there for name in self._kinds)

    @classmethod
    def of(cls, config: Mapping[str, Any], stored: Iterable[str]) -> Known:
        """What is known from the ``config.json`` of a checkpoint."""
        return cls(model_of(config), stored)

    def loaded(self, name: str) -> Loaded:
        """What transformers makes of a tensor; nothing for one that the model does not have."""
        return self._loaded.get(name, Loaded())

    def modules(self, name: str) -> tuple[str, ...]:
        """The modules of the model that have a tensor of the files, or parts of it."""
        return self.loaded(name).modules

    def is_lookup(self, name: str) -> bool:
        """Whether a tensor is the weight of an embedding."""
        return not self._lookups.isdisjoint((name, *self.loaded(name).parameters))

    def is_shared(self, name: str) -> bool:
        """Whether a tensor is the weight of two or more modules, embeddings not counted."""
        return not self._shared.isdisjoint((name, *self.loaded(name).parameters))

    def quantizes(self, name: str) -> bool | None:
        """Whether ``quantize_`` converts the module of a tensor; None if that is unknown.

        It does not convert what the model leaves out, such as layers for multi-token prediction. If the model lacks
        other tensors, the one that it leaves out may be one of them, with the name of another library.
        """
        parameters = self.loaded(name).parameters
        if not (parameters or self._is_complete) or not self._experts.isdisjoint(parameters):
            return None
        return any(parameter in self._kinds for parameter in parameters)

    def orientation(self, name: str) -> Orientation | None:
        """Which dimension products contract, of a tensor that is a weight as it is stored; None if it is not known."""
        loaded = self.loaded(name)
        kind = self._kinds.get(loaded.parameters[0]) if len(loaded.parameters) == 1 and not loaded.operations else None
        return None if kind is None else kind.orientation

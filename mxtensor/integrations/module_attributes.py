"""What the code of a model reads beside modules and values: kinds of tensors, adapters in use, hooks, the config."""

from __future__ import annotations

from collections.abc import Collection
from types import MethodType
from typing import Any

import torch

from ..compile.cpu_graphs import kind_of

_LEFT_OUT = "_modules", "_previous_max_cache_length"
"""The attribute of a module with its modules, which are listed by themselves, and one that ``generate`` writes for its
next call: it changes with each larger cache, and no step reads it."""
_CONSTANTS = int, float, str, bytes, type(None), torch.dtype, torch.device


def attributes_of(model: torch.nn.Module) -> list[Any]:
    """The attributes of all modules, to be compared by ``==`` with those of another time.

    Numbers and names are compared by value, also in containers and in configs of transformers; tensors by what a
    compiled graph takes to be the same; other objects by identity.
    """
    frozen = _Frozen()
    found: list[Any] = []
    for module in model.modules():
        found.append(type(module))
        found += [(name, frozen.of(value)) for name, value in vars(module).items() if name not in _LEFT_OUT]
    return found


class _Same:
    """Compares an object by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


class _Frozen:
    """Makes copies of values, which do not change when the values do."""

    def __init__(self) -> None:
        from transformers import PreTrainedConfig

        self._config: type = PreTrainedConfig
        self._seen: set[int] = set()  # ids of containers: a config belongs to many modules, and a list may have itself

    def of(self, value: Any) -> Any:
        if isinstance(value, _CONSTANTS):
            return value
        if isinstance(value, torch.Tensor):
            return kind_of(value)
        if isinstance(value, self._config):
            return self._all(value, vars(value).items())
        if isinstance(value, dict):
            return self._all(value, value.items())
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._all(value, list(enumerate(value)))
        if isinstance(value, MethodType):  # a new object each time
            return _Same(value.__func__), _Same(value.__self__)
        return _Same(value)

    def _all(self, owner: Any, items: Collection[tuple[Any, Any]]) -> Any:
        if not items or id(owner) in self._seen:
            return type(owner)
        self._seen.add(id(owner))
        return type(owner), [(name, self.of(value)) for name, value in items]

"""What is computed from a tensor, such as swizzled scales: cached until the tensor is written to or ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ..core.tracing import is_captured, is_traced

Made = TypeVar("Made")


class _Entry(NamedTuple):
    tensor: weakref.ref[Tensor]
    version: int
    made: dict[Hashable, Any]
    """layout -> the result"""


_cache: dict[int, _Entry] = {}
"""By the id of the tensor; an entry ends with its tensor."""


def _entry_of(t: Tensor) -> _Entry | None:
    """The entry of a tensor that has not been written to since it was made."""
    entry = _cache.get(id(t))
    return entry if entry is not None and entry.tensor() is t and entry.version == t._version else None


def _new_entry(t: Tensor) -> _Entry:
    key = id(t)

    def end(ref: weakref.ref[Tensor]) -> None:
        entry = _cache.get(key)
        if entry is not None and entry.tensor is ref:  # not of a later tensor that got the same id
            del _cache[key]

    entry = _cache[key] = _Entry(weakref.ref(t, end), t._version, {})
    return entry


def known_value(t: Tensor, layout: Hashable) -> Any:
    """What ``cached_value`` would find for a tensor that is known to be no traced one and no inference tensor, or
    None."""
    entry = _entry_of(t)
    return None if entry is None or is_captured(t) else entry.made.get(layout)


def cached_value(
    t: Tensor, layout: Hashable, make: Callable[[Tensor], Made], may_add: Callable[[Made], bool] | None = None
) -> Made:
    """``make(t)``, or the cached result for the same ``layout`` if ``t`` has not been written to since.

    ``may_add``: asked whether a new result may be cached. Nothing is while tracing, where there is no value yet, for
    inference tensors, which have no version, and in a CUDA graph: a replay must read the tensor as it is then, and the
    graph's memory has no content before a replay.
    """
    if is_traced(t) or t.is_inference() or is_captured(t):
        return make(t)
    entry = _entry_of(t)
    if entry is not None and layout in entry.made:
        return entry.made[layout]  # type: ignore[no-any-return]
    result = make(t)
    if isinstance(result, Tensor) and result.untyped_storage().data_ptr() == t.untyped_storage().data_ptr():
        return result  # a cached view would keep its key alive
    if may_add is None or may_add(result):
        (_entry_of(t) or _new_entry(t)).made[layout] = result
    return result


def forget(t: Tensor) -> None:
    """Drop what was computed from the memory of ``t``: a rule has written to it, and torch counts no such write."""
    memory = t.untyped_storage().data_ptr() if _cache else 0
    for key, entry in [*_cache.items()]:
        tensor = entry.tensor()
        if tensor is not None and tensor.untyped_storage().data_ptr() == memory:
            _cache.pop(key, None)

"""What is computed from a tensor, such as swizzled scales: cached until the tensor is written to or ends.

A captured CUDA graph reads memory, whatever the cache says later. So a result that a graph reads (``captured_value``)
stays, and a write to the tensor makes it again in the same memory.
"""

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
    remake: dict[Hashable, Callable[[], None]]
    """layout of a result that a graph reads -> makes it again in its memory"""


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

    before = _cache.get(key)
    entry = _cache[key] = _Entry(weakref.ref(t, end), t._version, {}, {})
    if before is not None and before.tensor() is t:
        _remake(before, entry)
    return entry


def _remake(before: _Entry, after: _Entry) -> None:
    """Make what graphs read again, and let ``after`` have it."""
    for layout, remake in before.remake.items():
        remake()
        after.remake[layout] = remake
        after.made[layout] = before.made[layout]


def known_value(t: Tensor, layout: Hashable) -> Any:
    """What ``cached_value`` would find for a tensor that is known to be neither traced nor an inference tensor, or
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
    if entry is None and (before := _cache.get(id(t))) is not None and before.remake:
        entry = _new_entry(t)  # with what graphs read, as ``t`` is now
    if entry is not None and layout in entry.made:
        return entry.made[layout]  # type: ignore[no-any-return]
    result = make(t)
    if isinstance(result, Tensor) and result.untyped_storage().data_ptr() == t.untyped_storage().data_ptr():
        return result  # a cached view would keep its key alive
    if may_add is None or may_add(result):
        (_entry_of(t) or _new_entry(t)).made[layout] = result
    return result


def captured_value(t: Tensor, layout: Hashable, remake: Callable[[], None] | None) -> Any:
    """What is cached for ``layout``, for a CUDA graph that is captured; None if nothing is.

    With ``remake`` the graph may read it in each replay: ``remake`` makes it again in the same memory. It is called
    after each write of a rule to ``t``, and after a write that torch itself makes at the next look-up outside a graph.
    It must not hold ``t``.
    """
    entry = _entry_of(t)
    if entry is None or layout not in entry.made:
        return None
    if remake is not None:
        entry.remake[layout] = remake
    return entry.made[layout]


def forget(t: Tensor) -> None:
    """Drop what was computed from the memory of ``t``, and make again what graphs read: a rule has written to it, and
    torch counts no such write."""
    memory = t.untyped_storage().data_ptr() if _cache else 0
    for key, entry in [*_cache.items()]:
        tensor = entry.tensor()
        if tensor is not None and tensor.untyped_storage().data_ptr() == memory:
            _cache.pop(key, None)
            if entry.remake:
                _remake(entry, _new_entry(tensor))

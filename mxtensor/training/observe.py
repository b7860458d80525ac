"""Observers of the operands of linear layers while they train, such as ``mx.monitor``.

``linear`` passes each call whose result needs a gradient to every observer. Calls of compiled graphs and of CUDA graphs
are not observed. Without an observer this costs one look at an empty list.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from ..core.tracing import is_captured, is_traced
from ..recipe.linear_recipe import LinearRecipe
from .operands import Scales


class LayerCall(NamedTuple):
    """The arguments of ``linear``."""

    x: Tensor
    weight: Tensor
    recipe: LinearRecipe
    scales: Scales | None
    ends: Tensor | None


class Observer(Protocol):
    def of_call(self, call: LayerCall) -> Callable[[Tensor], None] | None:
        """See a call. Returns what sees the gradient of its result, or None."""


SHARDS = "_mx_shards"
"""The attribute of a weight whose rows are several parameters: these, in order."""
OBSERVERS: list[weakref.ref[Observer]] = []


def add(observer: Observer) -> weakref.ref[Observer]:
    """Register ``observer``, until ``remove`` is called or nothing else references it."""
    reference = weakref.ref(observer, remove)
    OBSERVERS.append(reference)
    return reference


def remove(reference: weakref.ref[Observer]) -> None:
    """Remove an observer, if it is still registered."""
    OBSERVERS[:] = [other for other in OBSERVERS if other is not reference]


def notify(y: Tensor, call: LayerCall) -> None:
    """Call all observers with a call whose result is ``y``."""
    if not y.requires_grad or is_traced(call.x) or is_captured(call.x):
        return
    for reference in tuple(OBSERVERS):
        observer = reference()
        sees = None if observer is None else observer.of_call(call)
        if sees is not None:
            y.register_hook(sees)

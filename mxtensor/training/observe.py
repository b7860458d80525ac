"""Who sees the operands of linear layers while they train: ``mx.monitor`` does.

``linear`` tells every observer of each call whose result needs a gradient. Calls of compiled graphs and of CUDA graphs
are not seen. Without an observer this costs one look at an empty list.
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


OBSERVERS: list[weakref.ref[Observer]] = []


def add(observer: Observer) -> weakref.ref[Observer]:
    """Tell ``observer`` of calls until ``remove``, or until nobody else references it."""
    reference = weakref.ref(observer, remove)
    OBSERVERS.append(reference)
    return reference


def remove(reference: weakref.ref[Observer]) -> None:
    """End that; a second time changes nothing."""
    OBSERVERS[:] = [other for other in OBSERVERS if other is not reference]


def tell(y: Tensor, call: LayerCall) -> None:
    """Tell all observers of a call with the result ``y``."""
    if not y.requires_grad or is_traced(call.x) or is_captured(call.x):
        return
    for reference in tuple(OBSERVERS):
        observer = reference()
        sees = None if observer is None else observer.of_call(call)
        if sees is not None:
            y.register_hook(sees)

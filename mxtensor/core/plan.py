"""Plan: the one decision about a call, made once for all calls of its kind.

The first call of a kind asks the kernels and caches what they said. The second one finds the plan: it costs the host
one look-up, and if the plan has a launch, an allocation and that launch. Inference, forward and backward passes share
one cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .kernel import Kernel, Spec

MAX_PLANS = 4096
"""Plans that the cache holds; the least recently used one is dropped first."""


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """The kernel that a call runs, and why the faster kernels before it refuse.

    ``mx.Plan``, a format for each weight of a model, is another class (``convert/format_plan.py``).
    """

    spec: Spec
    kernel: Kernel | None
    """None: every kernel refuses."""
    refusals: dict[str, str]
    """Name of a kernel -> its reason, in the order in which they were asked."""
    launch: Callable[..., Any] | None = None
    """Runs the call for other values of its first operand; holds no tensor. None: the kernel runs as in the first
    call."""
    pinned: tuple[object, ...] = ()
    """Objects whose ids stand in the key: while the plan is cached, no other object can get such an id."""


class PlanCache:
    """Key -> Plan, least recently used first. Keys are made of numbers, names and dtypes, and a plan pins no tensor.

    Threads may use it at once: each step is one atomic call of OrderedDict, and a plan that another thread has dropped
    in between is still right.
    """

    def __init__(self) -> None:
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable) -> Plan | None:
        """The plan of ``key``, which becomes the most recently used one."""
        plan = self._plans.get(key)
        if plan is not None:
            try:  # noqa: SIM105  (contextlib.suppress takes longer than all of this)
                self._plans.move_to_end(key)
            except KeyError:  # another thread has dropped it
                pass
        return plan

    def put(self, key: Hashable, plan: Plan) -> None:
        """Cache ``plan``; drop the least recently used ones beyond MAX_PLANS."""
        self._plans[key] = plan
        with suppress(KeyError):  # another thread may have dropped it
            self._plans.move_to_end(key)  # a key that is cached stays where it is
        while len(self._plans) > MAX_PLANS:
            with suppress(KeyError):  # another thread may have emptied it
                self._plans.popitem(last=False)

    def clear(self) -> None:
        """Drop every plan."""
        self._plans.clear()


PLANS = PlanCache()
"""The plans of this process."""

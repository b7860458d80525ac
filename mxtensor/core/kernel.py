"""Kernel, Spec and Plan: a kernel accepts a call or refuses it with a reason, a sentence; a Plan is what was decided.

Knows no tensor and no kernel. ``kernels/`` holds tuples of Kernel; ``select`` asks them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from . import devices


class Spec(NamedTuple):
    """The properties of a call by which kernels decide. Shapes are logical. Text is made on demand, for speed."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    formats: tuple[object, ...]
    """Of each operand its format, the dtype of a plain one, a name, or a pair of these (from, to)."""
    dtype: torch.dtype
    device: torch.device
    traced: bool = False
    """Under torch.compile, FakeTensorMode or make_fx, where loops and out= buffers would be baked into the graph."""

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability; (0, 0) elsewhere."""
        return devices.device_capability(self.device)


@dataclass(frozen=True, eq=False)
class Kernel:
    """``refuses(spec, *operands)`` returns the reason for a refusal or None; ``run(*operands)`` does the work.

    Both answers are about this kernel alone: ``select.decide`` compares kernels.
    """

    name: str
    refuses: Callable[..., str | None]
    run: Callable[..., Any]
    device: str | None = None
    """The type of the only device it runs on. Other devices are refused without a call of ``refuses``."""
    run_traced: Callable[..., Any] | None = None
    """Replaces ``run`` when the spec is traced: the same work as ops that a graph can hold."""
    expected_us: Callable[..., float | None] | None = None
    """``expected_us(spec, *operands)``: microseconds of a call that it accepts and whose sizes are known; None if no
    model knows them."""


def describe_operand(format: object, shape: object) -> str:
    """``mxfp8_e4m3 4096x4096``."""

    def name(part: object) -> str:
        return "->".join(map(name, part)) if isinstance(part, tuple) else str(part).removeprefix("torch.")

    return f"{name(format)} {shape if isinstance(shape, str) else 'x'.join(map(str, shape))}"  # type: ignore[call-overload]


def describe(spec: Spec) -> str:
    """Operands as text: ``bfloat16 512x4096, mxfp8_e4m3 4096x4096``."""
    return ", ".join(map(describe_operand, spec.formats, spec.shapes))


_ELSEWHERE: dict[tuple[str, str], str] = {}


def elsewhere(wanted: str, device: str) -> str:
    """Why a kernel for one type of device refuses another. The sentences are cached: every call needs a few."""
    if torch.compiler.is_dynamo_compiling():  # a guard on the cache would fail as soon as the trace adds to it
        return f"runs on {wanted}, this tensor is on {device}"
    sentence = _ELSEWHERE.get((wanted, device))
    if sentence is None:
        sentence = _ELSEWHERE[wanted, device] = f"runs on {wanted}, this tensor is on {device}"
    return sentence


# -------------------------------------------------------------- plans, and the bounded cache of what a kind of call has

# The first call of a kind asks the kernels and caches what they said. Inference, forward and backward passes share one
# cache of plans. ``repeated.py`` keeps what later calls of a kind run in another cache of the same class.

MAX_PLANS = 4096
"""Entries that a cache holds; when there are more, the older half is dropped, and made again where it is needed."""


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """The kernel that a call runs, and why other kernels do not.

    ``mx.Plan``, a format for each weight of a model, is another class (``convert/format_plan.py``).
    """

    spec: Spec
    kernel: Kernel | None
    """None: every kernel refuses."""
    refusals: dict[str, str]
    """Name of a kernel -> why it refuses or, if it accepts, the times that are expected of it and of the one that runs.
    """


Entry = TypeVar("Entry")
_caches: list[Cache[Any]] = []


class Cache(Generic[Entry]):
    """Key -> entry. Keys are made of numbers, names and dtypes; no entry holds a tensor.

    Threads may use it at once: each step is one atomic call of a dict, and an entry that another thread has dropped in
    between is still right.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, Entry] = {}
        self.get = self._entries.get
        """The entry of a key; None if there is none."""
        _caches.append(self)

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: Hashable, entry: Entry) -> None:
        """Cache ``entry``."""
        self._entries[key] = entry
        if len(self._entries) > MAX_PLANS:
            for old in list(self._entries)[: MAX_PLANS // 2]:
                self._entries.pop(old, None)

    def values(self) -> list[Entry]:
        """All entries."""
        return list(self._entries.values())

    def clear(self) -> None:
        """Drop every entry."""
        self._entries.clear()


PLANS: Cache[Plan] = Cache()
"""The plans of this process."""


def forget_decisions() -> None:
    """Empty all caches, after a change of something that refusals depend on, such as a table of launch configs."""
    for cache in _caches:
        cache.clear()

"""A kind of call that repeats: the second call of the kind is recorded, and later calls run its program.

The first call decides, checks and casts in general; recording takes some milliseconds, which a kind that comes once
is spared. There is no second definition of what a call does: one that cannot be recorded takes the general way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import recording
from .program import Program
from .tracing import is_captured

Result = TypeVar("Result")
DEVICES = {"cuda"}
"""Types of devices on which all that writes memory is an op or says what it does, so that a call can be recorded."""


def kind_of(t: Tensor | None) -> Hashable:
    """All of a tensor that kernels and ops decide on."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15)


def recorded(
    work: Callable[[], Result], inputs: Sequence[Tensor | None], tensors_of: Callable[[Result], Sequence[Tensor | None]]
) -> tuple[Result, Program | None]:
    """``recording.record``, unless memory does not suffice: all of a call that is recorded lives until its end."""
    try:
        return recording.record(work, inputs, tensors_of)
    except torch.OutOfMemoryError:
        return work(), None


def run(program: Program, work: Callable[[], Any], inputs: Sequence[Tensor | None]) -> Any:
    """The results of a program; an error comes from ``work``, the general way, which names kernel and operands."""
    try:
        return program(*inputs)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return work()


class Repeated:
    """Calls of one kind, whose results are some tensors. Holds no tensor."""

    __slots__ = ("after", "calls", "program")

    def __init__(self, after: int = 2) -> None:
        self.after = after
        """The call that is recorded."""
        self.calls = 1
        """So many have run; the first one before this was made."""
        self.program: Program | None = None
        """None: not recorded, or not to be recorded."""

    def __call__(self, work: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """The tensors that ``work`` returns. It computes them from ``inputs`` and from what all calls share."""
        if self.program is not None:
            return run(self.program, work, inputs)  # type: ignore[no-any-return]
        first = next(t for t in inputs if t is not None)
        if is_captured(first):
            return work()
        self.calls += 1
        if self.calls != self.after:
            return work()
        out, self.program = recorded(work, inputs, lambda tensors: tensors)
        return out

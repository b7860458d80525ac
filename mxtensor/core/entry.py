"""Entry: one decision in the log of ``explain()``, and the time that its work took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from .kernel import Spec


class Timer:
    """The time of one entry: of CUDA events on a GPU, read when it is asked for, and wall time on a CPU.

    What runs inside another timed entry counts once, for the inner entry. On a GPU the time between two launches, for
    which the GPU waits for the host, is part of the entry.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start: Any = self._now()
        self.stop: Any = None
        self.inside: list[Timer] = []

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def end(self) -> None:
        """The work has been done, or launched."""
        self.stop = self._now()

    def elapsed(self) -> float:
        """Milliseconds, with all that ran inside."""
        if self.device.type != "cuda":
            return float(self.stop - self.start) * 1e3
        self.stop.synchronize()
        return float(self.start.elapsed_time(self.stop))

    def ms(self) -> float:
        """Milliseconds, without the entries inside."""
        return max(self.elapsed() - sum(timer.elapsed() for timer in self.inside), 0.0)


def can_time(spec: Spec) -> bool:
    """Whether the work of an entry happens now: not while it is traced or recorded into a CUDA graph."""
    if spec.traced or spec.device.type not in ("cpu", "cuda"):
        return False
    return spec.device.type == "cpu" or not torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class Entry:
    """One decision: the call, the kernel that ran, and why each faster kernel refused."""

    spec: Spec
    kernel: str
    refusals: dict[str, str]
    timers: list[Timer] = field(default_factory=list, compare=False, repr=False)
    """The timer of its work; none without ``time=True``, and for a traced call."""

    @property
    def ms(self) -> float | None:
        """Milliseconds, without the entries inside; None if it was not timed. Synchronizes with a GPU."""
        return self.timers[0].ms() if self.timers else None

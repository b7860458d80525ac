"""Shared by the GPU benchmarks: clocks, and inputs that are rotated past the L2 cache."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import mxtensor as mx
from mxtensor.report.tune import Graph, cold_copies

from .harness import Clock, Prepare, Row, Work, wall_clock

SLEEP_CYCLES_PER_MS = 2_000_000
"""Cycles of a GPU clock of 2 GHz. A slower clock sleeps longer, which takes time but changes no figure."""


# ---------------------------------------------------------------------------------------------- clocks


def event_clock(batch_ms: float, max_calls: int = 20) -> Clock:
    """A clock of GPU time: CUDA events around as many calls as take about ``batch_ms``, at most ``max_calls``.

    The GPU sleeps before the first event until the host has queued the calls. Otherwise the time of a short kernel
    would be the host's time to launch it. If the work synchronizes with the GPU itself, this wait is part of its time.
    """

    def clock(run: Work) -> Callable[[], float]:
        if not torch.cuda.is_available():  # a toy size
            return wall_clock(run)

        def sample(calls: int, sleep_ms: float) -> tuple[float, float]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(int(sleep_ms * SLEEP_CYCLES_PER_MS))
            begin = time.perf_counter()
            start.record()
            for _ in range(calls):
                run()
            end.record()
            host_ms = (time.perf_counter() - begin) * 1e3
            end.synchronize()
            return start.elapsed_time(end) / calls, host_ms / calls

        first, host_ms = min(sample(2, 0.0) for _ in range(2))
        calls = min(max(1, round(batch_ms / max(first, 1e-3))), max_calls)
        sleep_ms = min(1.5 * host_ms * calls, 10.0)
        return lambda: sample(calls, sleep_ms)[0]

    return clock


def graph_clock(run: Work) -> Callable[[], float]:
    """The clock of a ``Graph``: the GPU time of one of its calls. On a CPU, where there are none, wall time."""
    return run.milliseconds if isinstance(run, Graph) else wall_clock(run)


def step_clock(run: Work) -> Callable[[], float]:
    """The wall time of the work until the GPU has finished."""

    def finished() -> None:
        run()
        synchronize()

    return wall_clock(finished)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def host_clock(calls: int) -> Clock:
    """A clock of host time: the time to queue ``calls`` calls, divided by their number, without waiting for the GPU."""

    def clock(run: Work) -> Callable[[], float]:
        def sample() -> float:
            synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            return (time.perf_counter() - start) * 1e3 / calls

        return sample

    return clock


# ---------------------------------------------------------------------------------------------- work


def copies(nbytes: int) -> int:
    """How many inputs of ``nbytes`` to use in turn, so that each has left the L2 cache when it is used again."""
    return cold_copies(nbytes) if torch.cuda.is_available() else 2


def layer_of(weight: torch.Tensor) -> nn.Linear:
    """A linear layer with this weight (N, K), without bias and without gradient."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def rotate_inputs(inputs: Sequence[Any], fn: Callable[[Any], Any]) -> Prepare:
    """The work that calls ``fn`` on the next input each time, and starts again after the last.

    With ``copies`` inputs, each has left the L2 cache before it is read again.
    """

    def prepare() -> Work:
        if len(inputs) == 1:
            return lambda: fn(inputs[0])
        rotation = itertools.cycle(inputs)
        return lambda: fn(next(rotation))

    return prepare


def alternating(calls: Sequence[Work]) -> Work:
    """The calls one after the other: one CUDA graph, on a CPU a loop."""
    return Graph(calls) if torch.cuda.is_available() else lambda: [call() for call in calls]


def kernels_of(call: Work) -> str:
    """The kernels of a call, the outermost first."""
    with mx.explain() as log:
        call()
    return ", ".join(dict.fromkeys(entry.kernel for entry in log.entries))


def log_kernels(row: Row, name: str, inputs: Sequence[Any], fn: Callable[[Any], Any]) -> Prepare:
    """``rotate_inputs`` for our own contender ``name``. The kernels of its first call go to ``row.kernels``."""

    def prepare() -> Work:
        row.kernels[name] = kernels_of(lambda: fn(inputs[0]))
        return rotate_inputs(inputs, fn)()

    return prepare


class Deadline:
    """A time limit for a run: peers, which take long to compile, are skipped after it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = time.monotonic() + seconds

    def guard(self, prepare: Prepare) -> Prepare:
        """``prepare``, but it raises TimeoutError after the deadline."""

        def guarded() -> Work:
            if time.monotonic() > self.end:
                raise TimeoutError(f"not timed: the {self.seconds:g} seconds of this run have passed (--seconds)")
            return prepare()

        return guarded

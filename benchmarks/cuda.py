"""Shared by the GPU benchmarks: clocks, inputs that are rotated past the L2 cache, and targets for the figures."""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

import mxtensor as mx
from mxtensor.report.tune import Graph as Graph
from mxtensor.report.tune import cold_copies as cold_copies

from .harness import Clock, Prepare, Row, Work, command, machine, parser, print_table

SLEEP_CYCLES_PER_MS = 2_000_000
"""Cycles of a GPU clock of 2 GHz. A slower clock sleeps longer, which takes time but changes no figure."""


@dataclass
class GpuRow(Row):
    """A row that also names the kernels that ran."""

    kernels: dict[str, str] = field(default_factory=dict)
    """Contender -> the kernels that ``mx.explain`` logged, the outermost first."""

    def speedup(self, contender: str) -> float:
        """The base's time over this contender's."""
        return 1 / self.relative[contender] if contender in self.relative else float("nan")

    def tbps(self, contender: str) -> float:
        """Effective bandwidth in TB/s; NaN if the contender did not run."""
        return self.gbps(contender) / 1e3


# ---------------------------------------------------------------------------------------------- clocks


def event_clock(batch_ms: float, max_calls: int = 20) -> Clock:
    """A clock of GPU time: CUDA events around as many calls as take about ``batch_ms``, at most ``max_calls``.

    The GPU sleeps before the first event until the host has queued the calls. Otherwise the time of a short kernel
    would be the host's time to launch it. If the work synchronizes with the GPU itself, this wait is part of its time.
    """

    def clock(run: Work) -> Callable[[], float]:
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
    """The clock of a ``Graph``: the GPU time of one of its calls."""
    assert isinstance(run, Graph)
    return run.milliseconds


def host_clock(calls: int) -> Clock:
    """A clock of host time: the time to queue ``calls`` calls, divided by their number, without waiting for the GPU."""

    def clock(run: Work) -> Callable[[], float]:
        def sample() -> float:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            return (time.perf_counter() - start) * 1e3 / calls

        return sample

    return clock


# ---------------------------------------------------------------------------------------------- work


def layer_of(weight: torch.Tensor) -> nn.Linear:
    """A linear layer with this weight (N, K), without bias and without gradient."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def rotate_inputs(inputs: Sequence[Any], fn: Callable[[Any], Any]) -> Prepare:
    """The work that calls ``fn`` on the next input each time, and starts again after the last.

    With ``cold_copies`` inputs, each has left the L2 cache before it is read again.
    """

    def prepare() -> Work:
        if len(inputs) == 1:
            return lambda: fn(inputs[0])
        rotation = itertools.cycle(inputs)
        return lambda: fn(next(rotation))

    return prepare


def log_kernels(row: GpuRow, name: str, inputs: Sequence[Any], fn: Callable[[Any], Any]) -> Prepare:
    """``rotate_inputs`` for our own contender ``name``. The kernels of its first call go to ``row.kernels``."""

    def prepare() -> Work:
        with mx.explain() as log:
            fn(inputs[0])
        row.kernels[name] = ", ".join(dict.fromkeys(entry.kernel for entry in log.entries))
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


# ---------------------------------------------------------------------------------------------- targets


class Target(NamedTuple):
    """A limit for the worst of some figures."""

    what: str
    sign: str
    """``>=`` or ``<=``"""
    limit: float
    figures: Callable[[Sequence[Any]], Iterable[tuple[str, float]]]
    """rows -> (where, figure) for every figure that has this limit. A NaN was not measured."""

    def worst(self, rows: Sequence[Any]) -> tuple[float, str] | None:
        """The worst figure and where it was measured; None if nothing was."""
        measured = [(figure, where) for where, figure in self.figures(rows) if not math.isnan(figure)]
        return (min if self.sign == ">=" else max)(measured, key=lambda pair: pair[0], default=None)

    def margin(self, rows: Sequence[Any]) -> float:
        """The worst figure relative to the limit: below 1 the target is missed; infinite if nothing was measured."""
        found = self.worst(rows)
        if found is None:
            return math.inf
        return found[0] / self.limit if self.sign == ">=" else self.limit / max(found[0], 1e-12)

    def verdict(self, rows: Sequence[Any]) -> list[str]:
        """A line under VERDICT_HEADER: what, the limit, the worst figure, where it was measured, whether it holds."""
        found = self.worst(rows)
        limit = f"{self.sign} {self.limit:g}" if self.limit >= 10 else f"{self.sign} {self.limit:.2f}"
        if found is None:
            return [self.what, limit, "", "", "not measured"]
        figure, where = found
        holds = figure >= self.limit if self.sign == ">=" else figure <= self.limit
        return [self.what, limit, f"{figure:.3g}", where, "yes" if holds else "no"]


VERDICT_HEADER = ["target", "limit", "worst", "where", "holds"]


# ---------------------------------------------------------------------------------------------- the command


def exit_without_cuda(options: argparse.ArgumentParser) -> None:
    """Exit with status 1 and a message if there is no CUDA device."""
    if not torch.cuda.is_available():
        options.exit(1, "This benchmark times CUDA kernels, but torch finds no CUDA device here; nothing was timed.\n")


def gpu_arguments(description: str, seconds: int, **flags: str) -> argparse.Namespace:
    """Parse the options that all GPU benchmarks share. Exits if there is no CUDA device.

    ``seconds`` is the default of ``--seconds``. ``flags`` adds switches of one benchmark: name -> help text.
    """
    options = parser(description)
    options.add_argument("--quick", action="store_true", help="run one small size for few rounds and compile nothing")
    options.add_argument(
        "--seconds", type=float, default=seconds, help=f"skip peers after this many seconds (default: {seconds})"
    )
    for name, text in flags.items():
        options.add_argument(f"--{name}", action="store_true", help=text)
    args = options.parse_args()
    exit_without_cuda(options)
    args.device = "cuda"
    if args.quick:
        args.repeats = min(args.repeats, 7)
    return args


def machine_line() -> str:
    """The GPU and the versions in one line, which is printed above the tables."""
    info = machine()
    versions = ", ".join(f"{name} {number}" for name, number in info["versions"].items())
    return f"{info['gpu']}, CUDA {info['cuda']}, {versions}"


def print_header() -> None:
    """Print the command, the machine and the versions, between two empty lines."""
    print(f"\n{command()}\n{machine_line()}\n", flush=True)


def print_failures(rows: Iterable[Row]) -> None:
    """Print every contender that failed, with its error."""
    for row in rows:
        for name, error in row.failed.items():
            print(f"{row.work}, {name}: {error}")


def print_verdicts(targets: Sequence[Target], rows: Sequence[Any]) -> None:
    """Print every target with its worst figure. The targets that are missed by most come first."""
    print()
    print_table(VERDICT_HEADER, [t.verdict(rows) for t in sorted(targets, key=lambda t: t.margin(rows))])

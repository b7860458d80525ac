"""Shared by the GPU benchmarks: clocks of queued work, inputs that are not in the cache, targets beside figures."""

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

from .harness import Prepare, Row, Work, machine, parser, print_table

SLEEP_CYCLES_PER_MS = 2_000_000
"""Of a GPU clock of 2 GHz; a slower clock sleeps longer, which costs time and changes no figure."""


@dataclass
class GpuRow(Row):
    """A row with the kernels that ran."""

    kernels: dict[str, str] = field(default_factory=dict)
    """Contender -> what ``mx.explain`` logged, the outermost choice first."""

    def tbps(self, contender: str) -> float:
        """Effective terabytes a second."""
        return self.gbps(contender) / 1e3


# ---------------------------------------------------------------------------------------------- clocks


def events(batch_ms: float, most: int = 20) -> Callable[[Work], Callable[[], float]]:
    """A clock of GPU time: CUDA events around as many calls as take about ``batch_ms``.

    Before the first event the GPU sleeps for as long as the host needs to queue the calls, so that a short kernel is
    not timed by the host; work that waits for the GPU itself is timed with its waiting.
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
        calls = min(max(1, round(batch_ms / max(first, 1e-3))), most)
        sleep_ms = min(1.5 * host_ms * calls, 10.0)
        return lambda: sample(calls, sleep_ms)[0]

    return clock


def graph_clock(run: Work) -> Callable[[], float]:
    """The clock of a ``Graph``: GPU time of one of its calls."""
    assert isinstance(run, Graph)
    return run.milliseconds


def queued(calls: int) -> Callable[[Work], Callable[[], float]]:
    """A clock of host time: ``calls`` of them queued, the GPU not waited for."""

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
    """A frozen linear layer without bias that holds this weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def in_turn(works: Sequence[Work]) -> Work:
    """One work after the other, from the first again after the last."""
    if len(works) == 1:
        return works[0]
    following = itertools.cycle(works)
    return lambda: next(following)()


def over(inputs: Sequence[Any], fn: Callable[[Any], Any]) -> Prepare:
    """The work of ``fn`` on these inputs in turn."""
    return lambda: in_turn([lambda x=x: fn(x) for x in inputs])  # type: ignore[misc]


def explained(row: GpuRow, name: str, inputs: Sequence[Any], fn: Callable[[Any], Any]) -> Prepare:
    """``over`` for our own contender ``name``: the kernels of its first call are noted in ``row``."""

    def prepare() -> Work:
        with mx.explain() as log:
            fn(inputs[0])
        row.kernels[name] = ", ".join(dict.fromkeys(entry.kernel for entry in log.entries))
        return over(inputs, fn)()

    return prepare


class Deadline:
    """The seconds that a run has: peers, which have to be compiled, are left out when they are over."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = time.monotonic() + seconds

    def guard(self, prepare: Prepare) -> Prepare:
        """``prepare``, which raises TimeoutError once time is up."""

        def guarded() -> Work:
            if time.monotonic() > self.end:
                raise TimeoutError(f"not timed: the {self.seconds:g} seconds of this run were over (--seconds)")
            return prepare()

        return guarded


# ---------------------------------------------------------------------------------------------- targets


class Target(NamedTuple):
    """A limit, and the figures it is for."""

    what: str
    sign: str
    """``>=`` or ``<=``"""
    limit: float
    figures: Callable[[Sequence[Any]], Iterable[tuple[str, float]]]
    """rows -> (where, figure) of each that the limit is for"""

    def verdict(self, rows: Sequence[Any]) -> list[str]:
        """A line of the table: what, the limit, the worst figure and where it stands, and whether it holds."""
        found = [(figure, where) for where, figure in self.figures(rows) if not math.isnan(figure)]
        limit = f"{self.sign} {self.limit:g}" if self.limit >= 10 else f"{self.sign} {self.limit:.2f}"
        if not found:
            return [self.what, limit, "", "", "not measured"]
        worst, where = (min if self.sign == ">=" else max)(found, key=lambda pair: pair[0])
        holds = worst >= self.limit if self.sign == ">=" else worst <= self.limit
        return [self.what, limit, f"{worst:.3g}", where, "yes" if holds else "no"]


VERDICT_HEADER = ["target", "limit", "worst", "where", "holds"]


# ---------------------------------------------------------------------------------------------- the command


def leave_without_cuda(options: argparse.ArgumentParser) -> None:
    """With a sentence, where there is no CUDA device."""
    if not torch.cuda.is_available():
        options.exit(1, "This benchmark times CUDA kernels, and torch finds no CUDA device here; nothing was timed.\n")


def gpu_arguments(description: str, seconds: int, **flags: str) -> argparse.Namespace:
    """The options of the GPU benchmarks, and ``flags`` of one: name and help. Leaves where there is no CUDA device."""
    options = parser(description)
    options.add_argument("--quick", action="store_true", help="one small size, few rounds, nothing compiled")
    options.add_argument("--seconds", type=float, default=seconds, help="after so many, peers are left out")
    for name, text in flags.items():
        options.add_argument(f"--{name}", action="store_true", help=text)
    args = options.parse_args()
    leave_without_cuda(options)
    args.device = "cuda"
    if args.quick:
        args.repeats = min(args.repeats, 7)
    return args


def here() -> str:
    """The line above printed tables."""
    info = machine()
    versions = ", ".join(f"{name} {number}" for name, number in info["versions"].items())
    return f"{info['gpu']}, CUDA {info['cuda']}, {versions}"


def print_failures(rows: Iterable[Row]) -> None:
    """What was not timed, and why."""
    for row in rows:
        for name, why in row.failed.items():
            print(f"{row.work}, {name}: {why}")


def print_verdicts(targets: Sequence[Target], rows: Sequence[Any]) -> None:
    """The targets beside the worst figure of each."""
    print()
    print_table(VERDICT_HEADER, [target.verdict(rows) for target in targets])

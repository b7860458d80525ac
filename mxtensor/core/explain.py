"""``explain()``: a log of every decision inside a block, how long each took, and its table."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from .kernel import Spec, describe_operand

WIDTH = 100
"""Columns of a terminal that a table fills at most."""
MOST_LISTED = 3
"""Different numbers of rows that a line of the table lists; more are shown as a range."""

# ---------------------------------------------------------------------------------------------- time


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


def _can_time(spec: Spec) -> bool:
    """Whether the work of an entry happens now: not while it is traced or recorded into a CUDA graph."""
    if spec.traced or spec.device.type not in ("cpu", "cuda"):
        return False
    return spec.device.type == "cpu" or not torch.cuda.is_current_stream_capturing()


# ---------------------------------------------------------------------------------------------- entries


@dataclass(frozen=True)
class Entry:
    """One decision: what was asked, what ran, and why each faster kernel did not."""

    spec: Spec
    kernel: str
    refusals: dict[str, str]
    timers: list[Timer] = field(default_factory=list, compare=False, repr=False)
    """The timer of its work; none without ``time=True``, and for a traced call."""

    @property
    def ms(self) -> float | None:
        """Milliseconds, without the entries inside; None if it has no time. Waits for a GPU."""
        return self.timers[0].ms() if self.timers else None


@dataclass
class Log:
    """What ``explain()`` yields: the decisions taken inside its block, in order."""

    entries: list[Entry] = field(default_factory=list)
    time: bool = False
    """Whether each entry is timed."""

    def __str__(self) -> str:
        return self.table()

    def table(self, refused: bool = False) -> str:
        """Decisions of one kind on one line: how often, milliseconds if timed, op, operands and kernel.

        Calls of one kind differ in the number of rows only, {rows} of the first operand. Lines are at most 100
        characters long and, if timed, sorted by time. ``refused``: below each line, why the faster kernels refused.
        """
        if not self.entries:
            return "no MXTensor operation ran"
        kinds: dict[Any, list[Entry]] = {}
        for entry in self.entries:
            kinds.setdefault(_kind(entry), []).append(entry)
        lines = [_Line(entries) for entries in kinds.values()]
        if self.time:
            lines.sort(key=lambda line: -1.0 if line.ms is None else line.ms, reverse=True)
        return _printed(lines, self.time, refused)


_log: ContextVar[Log | None] = ContextVar("mxtensor_log", default=None)
_running: ContextVar[Timer | None] = ContextVar("mxtensor_running", default=None)


@contextmanager
def explain(time: bool = False) -> Iterator[Log]:
    """Log every decision inside the block: ``with mx.explain() as log: model(x)``, then ``print(log.table())``.

    ``time=True`` also measures each decision: by CUDA events on a GPU, by wall time on a CPU. A compiled function
    decides while it is traced, so that only its first call is logged, without a time. Other threads are not logged.
    """
    with use_log(Log(time=time)) as log:
        yield log


@contextmanager
def use_log(log: Log) -> Iterator[Log]:
    """Decisions inside the block are logged in ``log``."""
    token = _log.set(log)
    try:
        yield log
    finally:
        _log.reset(token)


current_log = _log.get
"""The log of the innermost ``explain()``; None without one."""


def record(spec: Spec, kernel: str, refusals: dict[str, str]) -> Entry | None:
    """Append a decision to the innermost ``explain()`` and return the entry; None without one."""
    if torch.compiler.is_dynamo_compiling():
        return None  # Dynamo reads this Python itself; rules that run below it are logged
    log = _log.get()
    if log is None:
        return None
    entry = Entry(spec, kernel, refusals)
    log.entries.append(entry)
    return entry


@contextmanager
def measure(entry: Entry | None) -> Iterator[None]:
    """The work of an entry happens inside the block, which is timed if its log is."""
    log = None if entry is None else _log.get()
    if entry is None or log is None or not log.time or not _can_time(entry.spec):
        yield
        return
    outer, timer = _running.get(), Timer(entry.spec.device)
    token = _running.set(timer)
    try:
        yield
    finally:
        _running.reset(token)
        timer.end()
        entry.timers.append(timer)
        if outer is not None:
            outer.inside.append(timer)


# ---------------------------------------------------------------------------------------------- the table


def by_reason(refusals: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Reason -> the kernels that gave it, in order."""
    found: dict[str, list[str]] = {}
    for name, reason in refusals:
        found.setdefault(reason, []).append(name)
    return found


def _kind(entry: Entry) -> tuple[Any, ...]:
    """All of an entry but the number of rows of its first operand."""
    spec = entry.spec
    first = spec.shapes[0][-1:] if spec.shapes and len(spec.shapes[0]) > 1 else spec.shapes[:1]
    return spec.op, spec.formats, first, spec.shapes[1:], entry.kernel


class _Line:
    """Entries of one kind."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries, self.spec, self.kernel = entries, entries[0].spec, entries[0].kernel
        times = [ms for ms in (entry.ms for entry in entries) if ms is not None]
        self.ms = sum(times) if times else None
        """Of all entries that have a time."""

    def operands(self) -> str:
        shapes: list[Any] = list(self.spec.shapes)
        firsts = {entry.spec.shapes[:1] for entry in self.entries}
        if len(firsts) > 1:
            rows = sorted({math.prod(first[0][:-1]) for first in firsts})
            listed = ",".join(map(str, rows)) if len(rows) <= MOST_LISTED else f"{rows[0]}..{rows[-1]}"
            shapes[0] = f"{{{listed}}}x{shapes[0][-1]}"
        return ", ".join(map(describe_operand, self.spec.formats, shapes))

    def reasons(self) -> list[str]:
        pairs = dict.fromkeys(pair for entry in self.entries for pair in entry.refusals.items())
        return [f"{', '.join(names)}: {reason}" for reason, names in by_reason(list(pairs)).items()]


SHORT = (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"), ("float64", "fp64"))
"""Names of dtypes in a table that would be too wide."""


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 3, 0)]}..."


def _fitted(rows: list[list[str]], spare: int) -> None:
    """Shorten the op and the operands, the last two cells of each row, to ``spare`` characters together."""

    def widths() -> list[int]:
        return [max(len(row[i]) for row in rows) for i in (-2, -1)]

    if sum(widths()) > spare:
        for row in rows[1:]:
            row[-2] = row[-2].removeprefix("aten.").removesuffix(".default")
            for name, short in SHORT:
                row[-1] = row[-1].replace(name, short)
    op, operands = widths()
    if op + operands > spare:
        op = min(op, max(spare - operands, spare // 3))
        for row in rows:
            row[-2], row[-1] = _cut(row[-2], op), _cut(row[-1], spare - op)


def _printed(lines: list[_Line], timed: bool, refused: bool) -> str:
    """The table as text."""
    rows = [["op", "operands"], *([line.spec.op, line.operands()] for line in lines)]
    counts = ["calls", *(str(len(line.entries)) for line in lines)]
    times = ["ms", *("-" if line.ms is None else f"{line.ms:.3f}" for line in lines)]
    kernels = ["kernel", *(line.kernel for line in lines)]
    columns = [counts, times] if timed else [counts]
    fixed = sum(max(map(len, column)) + 2 for column in (*columns, kernels)) + 2
    _fitted(rows, WIDTH - fixed)
    columns += [[row[0] for row in rows], [row[1] for row in rows], kernels]
    widths = [max(map(len, column)) for column in columns]
    table = zip(*columns, strict=True)
    text = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
    out = [text[0], "  ".join("-" * w for w in widths)]
    for row, line in zip(text[1:], lines, strict=True):
        out.append(row)
        for reason in line.reasons() if refused else ():
            out += textwrap.wrap(reason, WIDTH, initial_indent="    ", subsequent_indent="      ")
    return "\n".join(out)

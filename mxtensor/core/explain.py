"""``explain()``: a log of every decision inside a block, with the time that its work took, and its table."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .arguments import FLAG, check
from .compat_compile import size_hint
from .kernel import Spec, describe_operand
from .scopes import Scopes


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,), rule: bool = True
) -> str:
    """Columns of one width each, those with the numbers ``left`` aligned to the left and the others to the right.

    ``rule``: a line of dashes stands below the header.
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        return "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in pairs).rstrip()

    dashes = ["  ".join("-" * width for width in widths)] if rule else []
    return "\n".join([line(header), *dashes, *map(line, rows)])


# ---------------------------------------------------------------- the table of a log: decisions of one kind on one line

WIDTH = 100
"""Columns of a terminal that a table fills at most."""
MOST_LISTED = 3
"""Different numbers of rows that a line of the table lists; more are shown as a range."""
MAX_PENDING = 128
"""Entries of a line whose times are not added up yet: adding the time of a GPU waits for it."""
MAX_REASONS = 100
"""Refusals that a line lists."""


def _by_reason(refusals: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Reason -> the kernels that gave it, in order."""
    found: dict[str, list[str]] = {}
    for name, reason in refusals:
        found.setdefault(reason, []).append(name)
    return found


def kind_of(entry: Entry) -> tuple[Any, ...]:
    """All of an entry but the number of rows of its first operand."""
    spec = entry.spec
    first = spec.shapes[0][-1:] if spec.shapes and len(spec.shapes[0]) > 1 else spec.shapes[:1]
    return spec.op, spec.formats, first, spec.shapes[1:], entry.kernel


class Line:
    """Entries of one kind: how many, and what a table shows of them."""

    def __init__(self, first: Entry) -> None:
        self.first, self.spec, self.kernel = first, first.spec, first.kernel
        self.calls = 0
        self.rows: list[int] = []
        """The numbers of rows of the first operand, sorted: all if they are few, else the least and the largest."""
        self.refusals: dict[tuple[str, str], None] = {}
        self._ms: float | None = None
        self._timers: list[list[Timer]] = []
        """Of entries whose time has not been added: a GPU is not waited for while it works."""

    def count(self, entry: Entry, timed: bool) -> None:
        """Add an entry."""
        self.calls += 1
        if entry.spec.shapes:
            self._add_rows([math.prod(entry.spec.shapes[0][:-1])])
        if len(self.refusals) < MAX_REASONS:
            self.refusals.update(dict.fromkeys(entry.refusals.items()))
        if timed:
            self._timers.append(entry.timers)  # the work is still to come
            if len(self._timers) > MAX_PENDING:
                self._add_times(MAX_PENDING // 2)

    def join(self, other: Line) -> None:
        """Add all entries of a line of the same kind."""
        self.calls += other.calls
        self._add_rows(other.rows)
        self.refusals.update(other.refusals)
        self._timers += other._timers
        self._add_ms(other._ms)

    def _add_rows(self, rows: list[int]) -> None:
        if rows != self.rows:
            both = sorted({*self.rows, *rows})
            self.rows = both if len(both) <= MOST_LISTED + 1 else [*both[:MOST_LISTED], both[-1]]

    def _add_ms(self, ms: float | None) -> None:
        if ms is not None:
            self._ms = ms + (self._ms or 0.0)

    def _add_times(self, number: int) -> None:
        for timers in self._timers[:number]:
            self._add_ms(timers[0].ms() if timers else None)
        del self._timers[:number]

    @property
    def ms(self) -> float | None:
        """Of all entries that have a time."""
        self._add_times(len(self._timers))
        return self._ms

    def operands(self) -> str:
        shapes: list[Any] = list(self.spec.shapes)
        if len(self.rows) > 1:
            few = len(self.rows) <= MOST_LISTED
            listed = ",".join(map(str, self.rows)) if few else f"{self.rows[0]}..{self.rows[-1]}"
            shapes[0] = f"{{{listed}}}x{shapes[0][-1]}"
        return ", ".join(map(describe_operand, self.spec.formats, shapes))

    def reasons(self) -> list[str]:
        return [f"{', '.join(names)}: {reason}" for reason, names in _by_reason(list(self.refusals)).items()]


SHORT = (("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32"), ("float64", "fp64"))
"""Names of dtypes in a table that would be too wide."""


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 3, 0)]}..."


def _shorten(rows: list[list[str]], spare: int) -> None:
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


def table_of(lines: list[Line], timed: bool, refused: bool) -> str:
    """The lines under a header. ``refused``: below each, why other kernels did not run."""
    rows = [["op", "operands"], *([line.spec.op, line.operands()] for line in lines)]
    counts = ["calls", *(str(line.calls) for line in lines)]
    times = ["ms", *("-" if line.ms is None else f"{line.ms:.3f}" for line in lines)]
    kernels = ["kernel", *(line.kernel for line in lines)]
    columns = [counts, times] if timed else [counts]
    fixed = sum(max(map(len, column)) + 2 for column in (*columns, kernels)) + 2
    _shorten(rows, WIDTH - fixed)
    header, *cells = zip(*columns, *zip(*rows, strict=True), kernels, strict=True)
    head, dashes, *texts = text_table(header, cells, left=range(len(header))).split("\n")
    out = [head, dashes]
    for text, line in zip(texts, lines, strict=True):
        out.append(text)
        for reason in line.reasons() if refused else ():
            out += textwrap.wrap(reason, WIDTH, initial_indent="    ", subsequent_indent="      ")
    return "\n".join(out)


# ------------------------------------------------------------------------------------------- one decision, and its time


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


# ---------------------------------------------------------------------------------------------- the log

MAX_ENTRIES = 4_096
"""Entries that a log holds; later decisions are only counted, so that an ``explain()`` left open stays small."""
MAX_LINES = 256
"""Kinds of decisions that are counted after that."""


@dataclass
class Log:
    """The decisions inside an ``explain()`` block, in order."""

    entries: list[Entry] = field(default_factory=list)
    """The first MAX_ENTRIES decisions; the table counts the later ones too."""
    time: bool = False
    """Whether each entry is timed."""
    later: dict[Any, Line] = field(default_factory=dict, repr=False)
    """The decisions after MAX_ENTRIES, by kind."""
    unlisted: int = 0
    """The decisions after these of further kinds."""

    def add(self, entry: Entry) -> None:
        """Log a decision, or count it if there are MAX_ENTRIES already."""
        if len(self.entries) < MAX_ENTRIES:
            self.entries.append(entry)
            return
        kind = kind_of(entry)
        line = self.later.get(kind)
        if line is None:
            if len(self.later) >= MAX_LINES:
                self.unlisted += 1
                return
            line = self.later[kind] = Line(entry)
        line.count(entry, self.time)

    def __len__(self) -> int:
        """The number of decisions."""
        return len(self.entries) + sum(line.calls for line in list(self.later.values())) + self.unlisted

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        return self.table()

    def table(self, refused: bool = False) -> str:
        """Decisions of one kind on one line: how often, milliseconds if timed, op, operands and kernel.

        Calls of one kind differ in the number of rows only, {rows} of the first operand. Lines are at most 100
        characters long and, if timed, sorted by time. ``refused``: below each line, why other kernels did not run.
        """
        check("table", "refused", refused, FLAG)
        if not self.entries:
            return "no MXTensor operation ran"
        kinds: dict[Any, Line] = {}
        for entry in self.entries:
            kind = kind_of(entry)
            if kind not in kinds:
                kinds[kind] = Line(entry)
            kinds[kind].count(entry, self.time)
        for kind, later in list(self.later.items()):
            kinds.setdefault(kind, Line(later.first)).join(later)
        lines = list(kinds.values())
        if self.time:
            lines.sort(key=lambda line: -1.0 if line.ms is None else line.ms, reverse=True)
        return table_of(lines, self.time, refused) + self._left_out()

    def _left_out(self) -> str:
        """A sentence below the table if decisions were counted only."""
        if not self.later and not self.unlisted:
            return ""
        sentence = f"log.entries holds the first {len(self.entries)} of {len(self)} decisions; the table counts "
        sentence += "all of them" if not self.unlisted else f"all but {self.unlisted} of further kinds"
        return "\n" + "\n".join(textwrap.wrap(sentence, WIDTH))


LOGS: Scopes[Log | None] = Scopes("log", None)
"""The logs of open ``explain()`` blocks."""
_RUNNING: Scopes[Timer | None] = Scopes("running", None)


@contextmanager
def explain(time: bool = False) -> Iterator[Log]:
    """Log every decision inside the block: ``with mx.explain() as log: model(x)``, then ``print(log.table())``.

    ``time=True`` also measures each decision: by CUDA events on a GPU, by wall time on a CPU. A compiled function
    decides while it is traced, so that only its first call is logged, without a time. Other threads are not logged.
    """
    check("explain", "time", time, FLAG)
    with use_log(Log(time=time)) as log:
        yield log


def use_log(log: Log) -> AbstractContextManager[Log]:
    """Decisions inside the block are logged in ``log``."""
    return LOGS.block(log)  # type: ignore[return-value]


def record(spec: Spec, kernel: str, refusals: dict[str, str]) -> Entry | None:
    """Add a decision to the innermost ``explain()`` and return the entry; None without one."""
    if torch.compiler.is_dynamo_compiling():
        return None  # Dynamo reads this Python itself; rules that run below it are logged
    return record_traced(spec, kernel, refusals)


def record_traced(spec: Spec, kernel: str, refusals: dict[str, str]) -> Entry | None:
    """``record`` for a function that Dynamo calls while it traces."""
    log = LOGS.get()
    if log is None:
        return None
    if spec.traced:  # the sizes that symbols had then, which can be compared without guards
        spec = spec._replace(shapes=tuple(tuple(map(size_hint, shape)) for shape in spec.shapes))
    entry = Entry(spec, kernel, refusals)
    log.add(entry)
    return entry


@contextmanager
def measure(entry: Entry | None) -> Iterator[None]:
    """The work of an entry happens inside the block, which is timed if its log is."""
    log = None if entry is None else LOGS.get()
    if entry is None or log is None or not log.time or not can_time(entry.spec):
        yield
        return
    outer, timer = _RUNNING.get(), Timer(entry.spec.device)
    try:
        with _RUNNING.block(timer):
            yield
    finally:
        timer.end()
        entry.timers.append(timer)
        if outer is not None:
            outer.inside.append(timer)

"""The table of an ``explain()`` log: decisions of one kind on one line, which fits a terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from .entry import Entry, Timer
from .kernel import describe_operand
from .text_table import text_table

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
    """The lines under a header. ``refused``: below each, why faster kernels refused."""
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

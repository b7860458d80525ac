"""``explain()``: a log of every decision inside a block. ``entry.py`` has a decision and its time, ``log_table.py`` the
table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .arguments import FLAG, check
from .entry import Entry, Timer, can_time
from .kernel import Spec
from .log_table import WIDTH, Line, kind_of, table_of
from .scopes import Scopes

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
        characters long and, if timed, sorted by time. ``refused``: below each line, why the faster kernels refused.
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

"""Shared by all benchmarks: side-by-side timing, the description of the machine, tables and records.

A record is the JSON file that ``--json`` writes: the command, the machine and the raw figures.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch

from mxtensor.kernels.runtime.native_build import instruction_sets

Work = Callable[[], Any]
Prepare = Callable[[], Work]
"""A function that does the untimed preparation and returns the work to time."""
Clock = Callable[[Work], Callable[[], float]]
"""A function of the work. It returns a function that times one sample of this work, in milliseconds."""


@dataclass
class Row:
    """The contenders that were timed side by side at one piece of work."""

    work: str
    times: dict[str, float]
    """Contender -> median time in milliseconds. A contender that failed is in ``failed`` instead."""
    nbytes: int = 0
    """Bytes that every implementation has to read and write."""
    failed: dict[str, str] = field(default_factory=dict)
    """Contender -> the error that it raised, in one line."""
    relative: dict[str, float] = field(default_factory=dict)
    """Contender -> its time divided by that of the first contender in the same round; the median of all rounds."""

    def ratio(self, contender: str, base: str) -> float:
        """The time of ``base`` divided by the time of ``contender``: the speedup. NaN if either did not run."""
        if contender not in self.times or base not in self.times:
            return float("nan")
        return self.times[base] / self.times[contender]

    def gbps(self, contender: str) -> float:
        """Effective bandwidth in GB/s; NaN if the contender did not run."""
        return self.nbytes / self.times[contender] / 1e6 if contender in self.times else float("nan")


RowT = TypeVar("RowT", bound=Row)


def _clock(run: Work, seconds: Callable[[], float]) -> Callable[[], float]:
    def sample() -> float:
        start = seconds()
        run()
        return (seconds() - start) * 1e3

    return sample


def cpu_clock(run: Work) -> Callable[[], float]:
    """The clock of the CPU time of this process: for work on one thread, on a machine that does other work too."""
    return _clock(run, time.process_time)


def wall_clock(run: Work) -> Callable[[], float]:
    """The clock of wall time, for work that is finished when its call returns."""
    return _clock(run, time.perf_counter)


def side_by_side(work: str, contenders: dict[str, Prepare], nbytes: int = 0, repeats: int = 15, warmup: int = 3) -> Row:
    """A new Row, filled by ``timed`` with the wall clock."""
    return timed(Row(work, {}, nbytes), contenders, repeats, warmup)


FEWEST_ROUNDS = 5
"""``timed`` runs at least this many rounds."""


def timed(
    row: RowT,
    contenders: dict[str, Prepare],
    repeats: int = 15,
    warmup: int = 3,
    clock: Clock = wall_clock,
    seconds: float = float("inf"),
    summary: Callable[[list[float]], float] = statistics.median,
) -> RowT:
    """Time the contenders side by side, fill ``row`` with the medians, and return it.

    ``summary`` makes one figure of the times of a contender; ``min`` shows what other work on the machine hides.

    Every round times each contender once, so that a drift of the machine affects all of them. ``contenders`` maps a
    name to the function that prepares the work. A contender that raises in preparation or warm-up is recorded in
    ``row.failed``. There are ``repeats`` rounds, or fewer, but at least FEWEST_ROUNDS, once ``seconds`` have passed.
    """
    ready = _ready(row, contenders, warmup, clock)
    samples: dict[str, list[float]] = {name: [] for name in ready}
    begin = time.perf_counter()
    names = list(ready)
    for index in range(repeats):
        if index >= FEWEST_ROUNDS and time.perf_counter() - begin > seconds:
            break
        first = index % max(len(names), 1)  # rotate the order: the work before changes the temperature of the chip
        for name in names[first:] + names[:first]:
            samples[name].append(ready[name]())
    row.times = {name: summary(values) for name, values in samples.items()}
    base = samples.get(next(iter(contenders), ""))
    if base:
        row.relative = {
            name: statistics.median(t / b for t, b in zip(values, base, strict=True))
            for name, values in samples.items()
        }
    return row


def _ready(row: Row, contenders: dict[str, Prepare], warmup: int, clock: Clock) -> dict[str, Callable[[], float]]:
    """Contender -> a function that times one sample of its warm work; without those that fail."""
    ready = {}
    for name, prepare in contenders.items():
        try:
            run = prepare()
            for _ in range(warmup):
                run()
            ready[name] = clock(run)
        except Exception as error:
            row.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return ready


def machine() -> dict[str, Any]:
    """The date, the hardware and the software versions of a measurement."""
    names = ("mxtensor", "torch", "torchao", "gemlite", "triton", "numpy", "transformers", "peft")
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    return {
        "date": date.today().isoformat(),
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "instructions": instructions(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": versions,
    }


def instructions() -> list[str]:
    """The instruction sets of this processor that kernels may use, by the names that Linux gives them."""
    names = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimddp", "bf16", "i8mm")
    return [name for name in names if name in instruction_sets()]


WIDTH, MIN_WRAP = 100, 24
"""Of printed tables, in characters: the wanted width of a line, and the least width of a wrapped column."""


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Print aligned columns: the first to the left, the others to the right.

    If a line is wider than WIDTH, the headers are wrapped, and the last column too, to at least MIN_WRAP characters.
    """
    words = [max(map(len, name.split()), default=0) for name in header]
    cells = [max((len(row[i]) for row in rows), default=0) for i in range(len(header))]
    widths = [max(len(name), cell) for name, cell in zip(header, cells, strict=True)]
    if _line_width(widths) > WIDTH:
        widths = [max(pair) for pair in zip(words, cells, strict=True)]
        widths[-1] = min(widths[-1], max(widths[-1] - max(_line_width(widths) - WIDTH, 0), MIN_WRAP, words[-1]))
    for row in [header, ["-" * width for width in widths], *rows]:
        for line in _wrapped(row, widths):
            aligned = (c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            print("  ".join(aligned).rstrip())


def _line_width(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _wrapped(row: list[str], widths: Sequence[int]) -> list[tuple[str, ...]]:
    """The lines of a row, with its cells wrapped to these widths; a longer word is not split."""
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    cells = [textwrap.wrap(c, w, **options) if len(c) > w else [c] for c, w in zip(row, widths, strict=True)]
    return list(zip_longest(*cells, fillvalue=""))


def command() -> str:
    """The command line, as another machine can repeat it: an absolute path is shortened to its last component."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    arguments = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return " ".join([f"python -m {spec.name}" if spec is not None else Path(sys.argv[0]).name, *arguments])


def arguments(description: str) -> argparse.Namespace:
    """Parse the options that all benchmarks share."""
    return parser(description).parse_args()


def parser(description: str) -> argparse.ArgumentParser:
    """A parser of the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser, repeats: int = 15) -> None:
    """Add the options that all benchmarks share; ``repeats`` is the default of ``--repeats``."""
    parser.add_argument("--json", type=Path, help="write the raw figures to this file")
    text = f"rounds per row; the median is reported (default: {repeats})"
    parser.add_argument("--repeats", type=int, default=repeats, help=text)


class Progress:
    """The progress of a long run on stderr: tqdm's bar if it is installed, else a line for each tenth of the work."""

    def __init__(self, total: int, unit: str) -> None:
        self.total, self.unit, self.done = total, unit, 0
        try:
            from tqdm import tqdm

            self.bar: Any = tqdm(total=total, unit=unit, mininterval=1.0)
        except ImportError:
            self.bar = None

    def step(self, what: str) -> None:
        """One more unit of work is done; ``what`` names it."""
        self.done += 1
        if self.bar is not None:
            self.bar.set_postfix_str(what, refresh=False)
            self.bar.update()
        elif self.done * 10 // self.total > (self.done - 1) * 10 // self.total:
            print(f"{self.done} of {self.total} {self.unit}: {what}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the bar as it is, and go to the next line."""
        if self.bar is not None:
            self.bar.close()


def read_json(path: Path, kind: type[RowT]) -> tuple[dict[str, Any], list[RowT]]:
    """Read a record of ``write_json`` whose rows are of class ``kind``: the machine, and the rows."""
    record = json.loads(path.read_text())
    return record["machine"], [kind(**row) for row in record["rows"]]


def write_json(path: Path | None, rows: Sequence[Any], **more: Any) -> None:
    """Write a record: these rows (dataclasses), the machine, and the entries of ``more``. None writes nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"command": command(), "machine": machine(), "rows": [asdict(r) for r in rows]} | more
        path.write_text(json.dumps(record, indent=1) + "\n")

"""Shared by all benchmarks: contenders that take turns, the description of the machine, tables, records, the command.

A script has sections: each answers one question, and can be measured alone. A record is the JSON file that ``--json``
writes. It has for each section the command, the machine and the raw figures; a section that is measured again is
replaced.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import statistics
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from mxtensor.kernels.runtime.native_build import instruction_sets

RESULTS = Path(__file__).resolve().parent / "results"
"""Records of the repository."""
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
    kernels: dict[str, Any] = field(default_factory=dict)
    """Contender -> the kernels that ``mx.explain`` logged, the outermost first."""

    def speedup(self, contender: str) -> float:
        """The time of the first contender over this one's, in the same round; NaN if it did not run."""
        return 1 / self.relative[contender] if contender in self.relative else math.nan

    def over_base(self, contender: str) -> float:
        """This contender's time over that of the first one, in the same round; NaN if it did not run."""
        return self.relative.get(contender, math.nan)

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


# ---------------------------------------------------------------------------------------------- bandwidth

READING, MEGABYTES = ("sum", "amax"), 256
"""Reductions by torch over more than a cache holds. On some machines ``sum`` is faster, on others ``amax``."""


def readers(megabytes: int = MEGABYTES) -> dict[str, Prepare]:
    """Contenders that read so much memory, to be timed in turn with others."""
    return {name: lambda name=name: getattr(torch.ones(megabytes * 250_000), name) for name in READING}  # type: ignore[misc]


def take_bandwidth(row: Row, megabytes: int = MEGABYTES) -> float:
    """GB/s that the faster of the ``readers`` of a row has read; they are taken out of it."""
    row.relative = {name: ratio for name, ratio in row.relative.items() if name not in READING}
    return megabytes / min(row.times.pop(name) for name in READING)


# ---------------------------------------------------------------------------------------------- targets


class Target(NamedTuple):
    """A limit for the worst of some figures."""

    what: str
    sign: str
    """``>=`` or ``<=``"""
    limit: float
    figures: Callable[[Sequence[Any]], Iterable[tuple[str, float]]]
    """rows -> (where, figure) for every figure that has this limit. A NaN was not measured."""

    def verdict(self, rows: Sequence[Any]) -> list[str]:
        """A line under VERDICT_HEADER: what, the limit, the worst figure, where it was measured, whether it holds."""
        measured = [(figure, where) for where, figure in self.figures(rows) if not math.isnan(figure)]
        limit = f"{self.sign} {self.limit:g}" if self.limit >= 10 else f"{self.sign} {self.limit:.2f}"
        if not measured:
            return [self.what, limit, "", "", "not measured"]
        figure, where = (min if self.sign == ">=" else max)(measured, key=lambda pair: pair[0])
        holds = figure >= self.limit if self.sign == ">=" else figure <= self.limit
        return [self.what, limit, f"{figure:.3g}", where, "yes" if holds else "no"]


VERDICT_HEADER = ["target", "limit", "worst", "where", "holds"]


# ---------------------------------------------------------------------------------------------- the machine


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


# ---------------------------------------------------------------------------------------------- tables


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


# ---------------------------------------------------------------------------------------------- the command


def command() -> str:
    """The command line, as another machine can repeat it: an absolute path is shortened to its last component."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    arguments = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return " ".join([f"python -m {spec.name}" if spec is not None else Path(sys.argv[0]).name, *arguments])


def print_header() -> None:
    """Print the command, the machine and the versions, between two empty lines."""
    info = machine()
    device = f"{info['gpu']}, CUDA {info['cuda']}" if info["gpu"] else f"{info['cpu']}, {info['threads']} threads"
    versions = ", ".join(f"{name} {number}" for name, number in info["versions"].items())
    print(f"\n{command()}\n{device}, {versions}\n", flush=True)


def print_failures(rows: Iterable[Row]) -> None:
    """Print every contender that failed, with its error."""
    for row in rows:
        for name, error in row.failed.items():
            print(f"{row.work}, {name}: {error}")


class Section(NamedTuple):
    """One question of a script."""

    question: str
    measure: Callable[[argparse.Namespace], Sequence[Any] | None]
    """Takes the options; prints what it finds, and returns the rows of the record (dataclasses). None: it has written
    the record itself."""
    gpu: bool = False
    """Whether it needs a CUDA device."""


Sections = dict[str, Section]


def parser(doc: str, sections: Sections, repeats: int = 15) -> argparse.ArgumentParser:
    """The options that all scripts share: which sections, ``--json``, ``--repeats``, ``--tiny``."""
    options = argparse.ArgumentParser(description=doc.partition("\n")[0])
    listed = "; ".join(f"{name}: {section.question}" for name, section in sections.items())
    options.add_argument("sections", nargs="*", metavar="SECTION", help=f"(all) {listed}")
    options.add_argument("--json", type=Path, help="write the raw figures to this file, beside those of other sections")
    options.add_argument("--repeats", type=int, default=repeats, help="rounds of a row (%(default)s)")
    options.add_argument("--tiny", action="store_true", help="a toy size, on a CPU too: whether it runs, not how fast")
    return options


def run(options: argparse.ArgumentParser, sections: Sections, argv: Sequence[str] | None = None) -> None:
    """Measure the sections that the command line names, and write the record after each.

    Exits with status 1 if one needs a CUDA device and there is none, with 2 if there is no section of a name.
    """
    args = options.parse_args(argv)
    wanted = args.sections or list(sections)
    if unknown := [name for name in wanted if name not in sections]:
        options.error(f"there is no section {', '.join(unknown)}; the sections are {', '.join(sections)}")
    args.device = "cuda" if torch.cuda.is_available() and any(sections[name].gpu for name in wanted) else "cpu"
    if args.device == "cpu" and not args.tiny and any(sections[name].gpu for name in wanted):
        options.exit(1, "This benchmark times CUDA kernels, but torch finds no CUDA device here; nothing was timed.\n")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        level = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            for name in wanted:
                print_header()
                rows = sections[name].measure(args)
                if rows is not None:
                    print_failures(row for row in rows if isinstance(row, Row))
                    write_json(args.json, rows, name)
        finally:
            logging.disable(level)


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


# ---------------------------------------------------------------------------------------------- records


def read_json(path: Path, kind: type[Any], section: str = "") -> tuple[dict[str, Any], list[Any]]:
    """Read a section of a record, whose rows are of class ``kind``: the machine, and the rows."""
    record = json.loads(path.read_text())
    record = record[section] if section else record
    return record["machine"], [kind(**row) for row in record["rows"]]


def write_json(path: Path | None, rows: Sequence[Any], section: str = "", **more: Any) -> None:
    """Write these rows (dataclasses), the machine, and the entries of ``more``; None writes nothing.

    With a ``section``, other sections of the file stay as they are.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"command": command(), "machine": machine(), "rows": [asdict(r) for r in rows]} | more
    if section:
        record = (json.loads(path.read_text()) if path.exists() else {}) | {section: record}
    path.write_text(text_of(record))


def text_of(record: Mapping[str, Any]) -> str:
    """A record as JSON, with a line for each row."""
    entries = []
    for key, value in record.items():
        if key == "rows":
            text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        else:
            text = text_of(value) if isinstance(value, dict) and "rows" in value else json.dumps(value)
        entries.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"

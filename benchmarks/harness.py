"""Shared by every benchmark: timing side by side, the machine's description, tables and raw results."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

Work = Callable[[], Any]
Prepare = Callable[[], Work]
"""Does what is not to be timed, and returns what is."""
Clock = Callable[[Work], Callable[[], float]]
"""Looks at some work, and returns what takes one sample of it in milliseconds."""


@dataclass
class Row:
    """One question: what was timed beside what, medians in milliseconds."""

    work: str
    times: dict[str, float]
    """Contender -> median milliseconds; a contender that failed is missing here and named in ``failed``."""
    nbytes: int = 0
    """Bytes that any implementation has to read and write."""
    failed: dict[str, str] = field(default_factory=dict)
    relative: dict[str, float] = field(default_factory=dict)
    """Contender -> median over the rounds of its time over that of the first contender in the same round."""

    def ratio(self, contender: str, base: str) -> float:
        """How many times faster ``contender`` is than ``base``; NaN where either did not run."""
        if contender not in self.times or base not in self.times:
            return float("nan")
        return self.times[base] / self.times[contender]

    def gbps(self, contender: str) -> float:
        """Effective gigabytes a second."""
        return self.nbytes / self.times[contender] / 1e6 if contender in self.times else float("nan")


RowT = TypeVar("RowT", bound=Row)


def wall(run: Work) -> Callable[[], float]:
    """The clock of work that ends when its call returns."""

    def sample() -> float:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3

    return sample


def side_by_side(work: str, contenders: dict[str, Prepare], nbytes: int = 0, repeats: int = 15, warmup: int = 3) -> Row:
    """``timed`` by the wall clock, in a new Row."""
    return timed(Row(work, {}, nbytes), contenders, repeats, warmup)


FEWEST_ROUNDS = 5


def timed(
    row: RowT,
    contenders: dict[str, Prepare],
    repeats: int = 15,
    warmup: int = 3,
    clock: Clock = wall,
    seconds: float = float("inf"),
) -> RowT:
    """Time every contender in turn, round after round, so that drift of the machine hits all alike; fills ``row``.

    ``contenders``: name -> a function that prepares and returns the work. One that raises is recorded as failed.
    ``repeats`` rounds, fewer (but at least FEWEST_ROUNDS) when ``seconds`` have passed.
    """
    ready: dict[str, Callable[[], float]] = {}
    for name, prepare in contenders.items():
        try:
            run = prepare()
            for _ in range(warmup):
                run()
            ready[name] = clock(run)
        except Exception as error:
            row.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    samples: dict[str, list[float]] = {name: [] for name in ready}
    begin = time.perf_counter()
    for done in range(repeats):
        if done >= FEWEST_ROUNDS and time.perf_counter() - begin > seconds:
            break
        names = list(ready)
        first = done % max(len(names), 1)  # each comes first in turn: what ran before leaves a chip warm or cool
        for name in names[first:] + names[:first]:
            samples[name].append(ready[name]())
    row.times = {name: statistics.median(values) for name, values in samples.items()}
    base = samples.get(next(iter(contenders), ""))
    if base:
        row.relative = {
            name: statistics.median(t / b for t, b in zip(values, base, strict=True))
            for name, values in samples.items()
        }
    return row


def machine() -> dict[str, Any]:
    """What a figure means nothing without."""
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
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": versions,
    }


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Columns aligned, numbers to the right."""
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
    for r in [header, ["-" * w for w in widths], *rows]:
        print("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))))


def command() -> str:
    """What was typed, as another machine may repeat it: of absolute paths the last part."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return " ".join([f"python -m {spec.name}" if spec is not None else Path(sys.argv[0]).name, *words])


def arguments(description: str) -> argparse.Namespace:
    """The options all benchmarks share."""
    return parser(description).parse_args()


def parser(description: str) -> argparse.ArgumentParser:
    """A parser of the options all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write raw results to this file")
    parser.add_argument("--repeats", type=int, default=15, help="rounds per row (the median counts)")
    return parser


def read_json(path: Path, kind: type[RowT]) -> tuple[dict[str, Any], list[RowT]]:
    """What ``write_json`` wrote of rows of this kind: the machine, and the rows."""
    record = json.loads(path.read_text())
    return record["machine"], [kind(**row) for row in record["rows"]]


def write_json(path: Path | None, rows: Sequence[Any], **more: Any) -> None:
    """Raw results, dataclasses and ``more``, with the machine they were measured on."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"command": command(), "machine": machine(), "rows": [asdict(r) for r in rows]} | more
        path.write_text(json.dumps(record, indent=1) + "\n")

"""Shared by every benchmark: timing side by side, the machine's description, tables and raw results."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

Work = Callable[[], Any]


@dataclass
class Row:
    """One question: what was timed beside what, medians in milliseconds."""

    work: str
    times: dict[str, float]
    """Contender -> median milliseconds; a contender that failed is missing here and named in ``failed``."""
    nbytes: int = 0
    """Bytes that any implementation has to read and write."""
    failed: dict[str, str] = field(default_factory=dict)

    def ratio(self, contender: str, base: str) -> float:
        """How many times faster ``contender`` is than ``base``; NaN where either did not run."""
        if contender not in self.times or base not in self.times:
            return float("nan")
        return self.times[base] / self.times[contender]

    def gbps(self, contender: str) -> float:
        """Effective gigabytes a second."""
        return self.nbytes / self.times[contender] / 1e6 if contender in self.times else float("nan")


def side_by_side(
    work: str, contenders: dict[str, Callable[[], Work]], nbytes: int = 0, repeats: int = 15, warmup: int = 3
) -> Row:
    """Time every contender in turn, round after round, so that drift of the machine hits all alike.

    ``contenders``: name -> a function that prepares and returns the work. One that raises is recorded as failed.
    """
    ready: dict[str, Work] = {}
    row = Row(work, {}, nbytes)
    for name, prepare in contenders.items():
        try:
            ready[name] = prepare()
            for _ in range(warmup):
                ready[name]()
        except Exception as error:
            ready.pop(name, None)
            row.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    samples: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(repeats):
        for name, run in ready.items():
            start = time.perf_counter()
            run()
            samples[name].append((time.perf_counter() - start) * 1e3)
    row.times = {name: statistics.median(values) for name, values in samples.items()}
    return row


def machine() -> dict[str, Any]:
    """What a figure means nothing without."""
    names = ("mxtensor", "torch", "torchao", "triton", "numpy", "transformers", "peft")
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
        "python": platform.python_version(),
        "versions": versions,
    }


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Columns aligned, numbers to the right."""
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
    for r in [header, ["-" * w for w in widths], *rows]:
        print("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))))


def arguments(description: str) -> argparse.Namespace:
    """The options all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write raw results to this file")
    parser.add_argument("--repeats", type=int, default=15, help="rounds per row (the median counts)")
    return parser.parse_args()


def read_json(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """What ``write_json`` wrote of Rows: the machine, and the rows."""
    record = json.loads(path.read_text())
    return record["machine"], [Row(**row) for row in record["rows"]]


def write_json(path: Path | None, rows: Sequence[Any]) -> None:
    """Raw results, dataclasses, with the machine they were measured on."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), "rows": [asdict(r) for r in rows]}, indent=1) + "\n")

"""Compare the records of two folders: ``python -m benchmarks.compare BEFORE_DIR AFTER_DIR [--limit 1.03]``.

A figure is the median time of one contender at one work, in both records. Its ratio is the time after divided by the
time before. If the row has a control, which runs no code of ours (bfloat16, the copy, plain torch), this ratio is
divided by that of the control, so that a faster or slower machine changes no ratio. Peers are not compared.

The exit status is 1 if, in any record, the median ratio exceeds the limit, or a figure of before is missing after. A
single figure over the limit may be noise: it is counted and listed, and the status becomes 1 with ``--strict``. The
status is 2 if there is nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .harness import print_table

RECORDS = ("cast", "linear", "train_linear", "decode", "decode_model", "host_gpu")
CONTROLS = ("bfloat16", "copy", "plain torch")
"""Contenders that run no code of ours. The first of them in a row is its control."""
PEERS = ("torchao", "gemlite", "plain torch again")
"""Contenders whose names begin so are neither ours nor a control."""
TOP = 10
"""Figures that are listed for each record."""

Key = tuple[str, str]
"""(work, contender)"""


@dataclass(frozen=True)
class Figure:
    """The times of one contender at one work, in milliseconds."""

    work: str
    contender: str
    before: float
    after: float
    control: float = math.nan
    """The control's time after divided by its time before; NaN if there is no control."""

    @property
    def ratio(self) -> float:
        """Time after over time before, divided by the drift of the control if there is one."""
        raw = self.after / self.before
        return raw if math.isnan(self.control) else raw / self.control


def read_times(path: Path) -> tuple[dict[Key, float], dict[Key, float]]:
    """Read a record: the times of our contenders, and the times of the control beside each of them.

    ``decode_model`` has a row for each config with the times of a token and of a prefill. There the contender is the
    time's name, and the control is the same time of the row ``bfloat16``.
    """
    rows: Sequence[Mapping[str, Any]] = json.loads(path.read_text())["rows"]
    times: dict[Key, float] = {}
    controls: dict[Key, float] = {}
    if path.stem == "decode_model":
        base: Mapping[str, float] = next((row["times"] for row in rows if row["work"] in CONTROLS), {})
        for row in rows:
            if row["work"] not in CONTROLS:
                times |= {(row["work"], name): ms for name, ms in row["times"].items()}
                controls |= {(row["work"], name): base[name] for name in row["times"] if name in base}
        return times, controls
    for row in rows:
        if str(row.get("contender", "")).startswith(PEERS):  # linear and train_linear have one contender for each row
            continue
        control = next((row["times"][name] for name in CONTROLS if name in row["times"]), None)
        for name, ms in row["times"].items():
            if name not in CONTROLS and not name.startswith(PEERS):
                times[row["work"], name] = ms
                if control is not None:
                    controls[row["work"], name] = control
    return times, controls


def compare(before: Path, after: Path) -> tuple[list[Figure], list[Key]]:
    """The figures of two records, the highest ratio first, and the keys of ``before`` that ``after`` lacks."""
    (old, old_controls), (new, new_controls) = read_times(before), read_times(after)
    figures = []
    for key in old.keys() & new.keys():
        has_control = key in old_controls and key in new_controls
        drift = new_controls[key] / old_controls[key] if has_control else math.nan
        figures.append(Figure(*key, old[key], new[key], drift))
    return sorted(figures, key=lambda f: (-f.ratio, f.work, f.contender)), sorted(old.keys() - new.keys())


HEADER = ["work", "contender", "before ms", "after ms", "control", "ratio"]


def lines(figures: Sequence[Figure]) -> list[list[str]]:
    """The lines of the table; ``control`` is the drift of the control, by which the ratio is already divided."""
    return [
        [
            f.work, f.contender, f"{f.before:.4f}", f"{f.after:.4f}",
            "" if math.isnan(f.control) else f"{f.control:.3f}", f"{f.ratio:.3f}",
        ]
        for f in figures
    ]  # fmt: skip


def report(name: str, figures: Sequence[Figure], missing: Sequence[Key], limit: float) -> None:
    """Print the summary of one record and its TOP worst figures."""
    ratios = [figure.ratio for figure in figures]
    exceeding = sum(ratio > limit for ratio in ratios)
    if figures:
        mean, median = statistics.geometric_mean(ratios), statistics.median(ratios)
        print(f"\n{name}: {len(figures)} figures, geometric mean {mean:.3f}, median {median:.3f}, ", end="")
        print(f"{exceeding} over {limit:g}")
        print_table(HEADER, lines(figures[:TOP]))
    else:
        print(f"\n{name}: no common figures")
    for work, contender in missing:
        print(f"missing after: {work}, {contender}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print every record of both folders, the highest median first, and return the exit status."""
    description = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=description)
    parser.add_argument("before", type=Path, metavar="BEFORE_DIR")
    parser.add_argument("after", type=Path, metavar="AFTER_DIR")
    parser.add_argument("--limit", type=float, default=1.03, help="highest accepted ratio (default: 1.03)")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if any single figure exceeds the limit")
    args = parser.parse_args(argv)
    paths = {name: (args.before / f"{name}.json", args.after / f"{name}.json") for name in RECORDS}
    for name, (before, after) in paths.items():
        if before.exists() != after.exists():
            print(f"{name}: not compared, since only {before if before.exists() else after} exists")
    found = {name: compare(*pair) for name, pair in paths.items() if all(path.exists() for path in pair)}
    if not any(figures for figures, _ in found.values()):
        print(f"nothing to compare: {args.before} and {args.after} have no figures in common")
        return 2

    def median(figures: Sequence[Figure]) -> float:
        return statistics.median(figure.ratio for figure in figures) if figures else math.inf

    for name, (figures, missing) in sorted(found.items(), key=lambda item: -median(item[1][0])):
        report(name, figures, missing, args.limit)
    over = [f for figures, _ in found.values() for f in figures if f.ratio > args.limit]
    total = sum(len(figures) for figures, _ in found.values())
    print(f"\n{total} figures in {len(found)} records, {len(over)} over {args.limit:g}")
    failed = any(missing or median(figures) > args.limit for figures, missing in found.values())
    return int(failed or (args.strict and bool(over)))


if __name__ == "__main__":
    sys.exit(main())

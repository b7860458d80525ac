"""The pictures of ``benchmarks.parity``: the held-out loss over tokens, and its distance from bfloat16's.

Drawn by ``python -m benchmarks.plots``, one for each size: docs/assets/parity_SIZE.png.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mxtensor.report.model_report import COLORS

from .parity_arms import BASE
from .parity_record import Result, by_arm, read_all, spread

SIZES = ("large", "medium")
FAMILIES = ("bf16", "mxfp8", "float8", "mxfp6", "nvfp4", "mxfp4")
"""A family has one color; its arms differ in dashes."""
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (2, 1)), (0, (6, 2, 1, 2, 1, 2)))
MANY = 8
"""With more arms the right panel has the distance at the end only, a line for each arm."""
TICKS = (-0.5, 0, 0.5, 1, 2, 3, 5, 10, 20, 50)
LINEAR = 1.0
"""Percent up to which that axis is linear; it is logarithmic from there on."""
FIRST = 0.1
"""The distance is drawn from this share of the tokens on: losses that fall fast differ much."""


def checksum(results: Path, size: str) -> str:
    """The SHA-256 of all records of a size, which the picture has as metadata."""
    files = sorted((results / size).glob("*.jsonl"))
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def styles(arms: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Arm -> color and dashes."""
    count: dict[str, int] = {}
    out = {}
    for arm in arms:
        family = next(name for name in FAMILIES if arm.startswith(name))
        place = count[family] = count.get(family, -1) + 1
        color = "#000000" if family == BASE else COLORS[FAMILIES.index(family) - 1]
        out[arm] = {"color": color, "linestyle": DASHES[place % len(DASHES)], "linewidth": 1.5}
    return out


def differences(run: Result, base: Sequence[Result]) -> list[tuple[float, float]]:
    """(million tokens, percent over the mean of bf16's runs of the same seed) at the points that all have, from FIRST
    on."""
    same = [other for other in base if other.header.seed == run.header.seed]
    points = zip(*(other.points for other in same), strict=True)
    losses = {every[0].step: statistics.fmean(point.held_out for point in every) for every in points}
    least = FIRST * run.header.steps
    return [
        (point.tokens / 1e6, 100 * (point.held_out / losses[point.step] - 1))
        for point in run.points
        if point.step >= least and point.step in losses
    ]


def draw_differences(axes: Any, arms: Mapping[str, Sequence[Result]], looks: Mapping[str, dict[str, Any]]) -> None:
    """The distance over tokens, a line for each run."""
    for name, runs in arms.items():
        for apart in filter(None, (differences(run, arms.get(BASE, [])) for run in runs)):
            axes.plot(*zip(*apart, strict=True), **looks[name])
    axes.set_ylabel("over bf16 of the same seed [%]")
    axes.set_xlabel("million tokens (bytes)")


def draw_ends(axes: Any, arms: Mapping[str, Sequence[Result]], looks: Mapping[str, dict[str, Any]]) -> None:
    """The distance at the end, a dot for each run and a bar for the mean of all."""
    found = {
        name: [apart[-1][1] for apart in (differences(run, arms.get(BASE, [])) for run in runs) if apart]
        for name, runs in arms.items()
        if name != BASE
    }
    found = {name: ends for name, ends in found.items() if ends}
    for row, (name, ends) in enumerate(found.items()):
        axes.plot(ends, [row] * len(ends), "o", markersize=6, color=looks[name]["color"], alpha=0.6)
        axes.plot(statistics.fmean(ends), row, "|", markersize=15, markeredgewidth=2, color="#000000")
    axes.axvline(0, color="#000000", linewidth=1.2)
    axes.set_yticks(range(len(found)), list(found), fontsize=9)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xscale("symlog", linthresh=LINEAR)
    ticks = [tick for tick in TICKS if tick <= 1.1 * max(map(max, found.values()), default=0)]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel("over bf16 of the same seed, at the end [%]")


def figure_of(results: Sequence[Result]) -> Any:
    """Both panels; each run is a line, or a dot if there are MANY arms."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display
    from matplotlib.lines import Line2D

    arms = by_arm(results)
    looks, base = styles(list(arms)), arms.get(BASE, [])
    figure = Figure(figsize=(11.5, 4.6 + 0.22 * (len(arms) // 4)), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, runs in arms.items():
        for run in runs:
            points = [(p.tokens / 1e6, p.held_out) for p in run.points if p.step]
            left.plot(*zip(*points, strict=True), **looks[name])
    many = len(arms) > MANY
    (draw_ends if many else draw_differences)(right, arms, looks)
    if len(base) > 1:
        percent = 100 * spread(base) / base[0].loss
        (right.axvspan if many else right.axhspan)(-percent, percent, color="#e4e4e4", zorder=0)
        place, where = ((0, 1), ("data", "axes fraction")) if many else ((0.99, -percent), ("axes fraction", "data"))
        right.annotate(
            "spread of bf16's seeds", place, xycoords=where, ha="center" if many else "right", va="bottom", fontsize=8,
            color="#777777",
        )  # fmt: skip
    left.set_yscale("log")
    left.yaxis.set_major_formatter("{x:.2f}")
    left.yaxis.set_minor_formatter("{x:.2f}")
    left.set_ylabel("held-out loss [nats a byte]")
    left.set_xlabel("million tokens (bytes)")
    for axes in (left, right):
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [Line2D([], [], label=name, **looks[name]) for name in arms]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    parameters = results[0].header.parameters / 1e6
    figure.suptitle(f"A GPT of {parameters:.0f} million parameters, one {'dot' if many else 'line'} for each run")
    return figure


def draw(size: str, results: Path, pictures: Path) -> Path | None:
    """Draw the picture of one size and return its path, or None if there is no record. Needs matplotlib."""
    found = read_all(results, size)
    if not found:
        return None
    path = pictures / f"parity_{size}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure_of(found).savefig(path, dpi=130, metadata={"Source": checksum(results, size)})
    return path

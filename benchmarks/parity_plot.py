"""The pictures of ``benchmarks.parity``: the held-out loss over tokens, and its distance from bfloat16's.

Drawn by ``python -m benchmarks.plots``, one for each size: docs/assets/parity_SIZE.png.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mxtensor.report.model_report import COLORS

from .parity_arms import BASE
from .parity_record import Result, by_arm, read_all, spread

SIZES = ("large", "medium")
FAMILIES = ("bf16", "mxfp8", "float8", "mxfp6", "nvfp4", "mxfp4")
"""A family has one color; its arms differ in dashes."""
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (2, 1)), (0, (6, 2, 1, 2, 1, 2)))
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
    """(million tokens, percent over bf16 of the same seed) at the points that both have, from FIRST on."""
    same = next((other for other in base if other.header.seed == run.header.seed), None)
    losses = {} if same is None else {point.step: point.held_out for point in same.points}
    least = FIRST * run.header.steps
    return [
        (point.tokens / 1e6, 100 * (point.held_out / losses[point.step] - 1))
        for point in run.points
        if point.step >= least and point.step in losses
    ]


def figure_of(results: Sequence[Result]) -> Any:
    """Both panels; each seed is a line."""
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
            apart = differences(run, base)
            if apart:
                right.plot(*zip(*apart, strict=True), **looks[name])
    if len(base) > 1:
        percent = 100 * spread(base) / base[0].loss
        right.axhspan(-percent, percent, color="#eeeeee", zorder=0)
        right.annotate(
            "spread of bf16's seeds", (0.99, percent), xycoords=("axes fraction", "data"), ha="right", va="bottom",
            fontsize=8, color="#777777",
        )  # fmt: skip
    left.set_yscale("log")
    left.yaxis.set_major_formatter("{x:.2f}")
    left.yaxis.set_minor_formatter("{x:.2f}")
    left.set_ylabel("held-out loss [nats a byte]")
    right.set_ylabel("over bf16 of the same seed [%]")
    for axes in (left, right):
        axes.set_xlabel("million tokens (bytes)")
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    handles = [Line2D([], [], label=name, **looks[name]) for name in arms]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    parameters = results[0].header.parameters / 1e6
    figure.suptitle(f"A GPT of {parameters:.0f} million parameters, one line for each seed")
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

"""The picture of ``benchmarks.quality``: KL over bits per value. Drawn by ``python -m benchmarks.plots``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mxtensor.report.model_report import COLORS

from .quality import BOTH, CALIBRATED, NEAREST, OURS, PLANNED, TEXTS, Row

STYLES = {
    (OURS, NEAREST): ("o", COLORS[0], "none"), (OURS, CALIBRATED): ("o", COLORS[0], COLORS[0]),
    (OURS, PLANNED): ("D", COLORS[2], "none"), (OURS, BOTH): ("D", COLORS[2], COLORS[2]),
    ("llama.cpp", NEAREST): ("s", COLORS[1], COLORS[1]), ("torchao", NEAREST): ("^", COLORS[3], COLORS[3]),
}  # fmt: skip
"""(library, method) -> marker, color, color of its inside."""

PLACES = {
    "llama.cpp": (6, 6, "left"), "torchao": (-6, 0, "right"), NEAREST: (6, -4, "left"), CALIBRATED: (-6, 0, "right"),
    PLANNED: (-7, 0, "right"), BOTH: (-5, -13, "right"),
}  # fmt: skip
"""Library, or method of ours -> where a name is: points to the right, points up, alignment."""


def fill(figure: Any, rows: Sequence[Row]) -> None:
    """A panel for each text, a marker for each row, with its format beside it."""
    panels = figure.subplots(1, len(TEXTS), sharey=True)
    for axes, text in zip(panels, TEXTS, strict=True):
        for row in rows:
            marker, color, inside = STYLES[row.library, row.method]
            kl = row.quality[text].kl
            axes.plot(row.bits, kl, marker, color=color, markerfacecolor=inside, markersize=6.5, markeredgewidth=1.4)
            x, y, to = PLACES.get(row.library, PLACES[row.method])
            axes.annotate(
                row.format, (row.bits, kl), xytext=(x, y), textcoords="offset points", fontsize=7.5, color=color, ha=to,
                va="center",
            )  # fmt: skip
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.margins(x=0.16, y=0.08)
        axes.set_title(text, fontsize=10.5)
        axes.set_xlabel("bits per value, over the whole model", fontsize=9.5)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("KL, nats per token (logarithmic)", fontsize=9.5)


def keys(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """The legend: the markers that are drawn."""
    drawn = {(row.library, row.method) for row in rows}
    return {
        f"{library}, {method}": {"linestyle": "", "marker": marker, "color": color, "markerfacecolor": inside}
        for (library, method), (marker, color, inside) in STYLES.items()
        if (library, method) in drawn
    }

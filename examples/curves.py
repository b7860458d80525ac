"""The losses of training runs as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mxtensor.report.model_report import COLORS

MARKERS = "osD^vPX*"
DASHES = ("-", (0, (3, 2)), (0, (1, 1.5)))
"""A curve on top of another leaves it visible."""


@dataclass(frozen=True)
class Curve:
    """What one run gave."""

    name: str
    losses: Sequence[float]
    """Of each step."""
    held_out: Sequence[tuple[int, float]]
    """(step, loss) on text that was not learned from."""


def smooth(losses: Sequence[float], keep: float = 0.95) -> list[float]:
    """At each step the mean of the losses so far, each step back counting ``keep`` times as much as the next."""
    total = weight = 0.0
    out = []
    for loss in losses:
        total, weight = keep * total + loss, keep * weight + 1
        out.append(total / weight)
    return out


def plot(curves: Sequence[Curve], path: Path, title: str, unit: str) -> Path:
    """Draw each curve in one color: training loss pale and, smoothed, in full; held-out loss as marks.

    ``unit``: what one step learns from. The suffix of ``path`` chooses the kind of file; its folder is made.
    """
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for i, (curve, color, marker) in enumerate(zip(curves, COLORS, MARKERS, strict=False)):
        steps = range(1, len(curve.losses) + 1)
        axes.plot(steps, curve.losses, color=color, alpha=0.2, linewidth=0.8)
        dashes, label = DASHES[i % len(DASHES)], f"{curve.name}, training (smoothed)"
        axes.plot(steps, smooth(curve.losses), color=color, linewidth=1.8, linestyle=dashes, label=label)
        at, operands = zip(*curve.held_out, strict=True)
        label = f"{curve.name}, held out: {operands[-1]:.3f} at the end"
        axes.plot(at, operands, color=color, linestyle="", marker=marker, markerfacecolor="none", label=label)
    axes.set_xlabel(f"step of {unit}")
    axes.set_ylabel("loss [nats a byte]")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path

"""Plots the losses of training runs in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mxtensor.report.model_report import COLORS

MARKERS = "osD^vPX*"
DASHES = ("-", (0, (3, 2)), (0, (1, 1.5)))
"""With dashes, a curve on top of another leaves it visible."""


@dataclass(frozen=True)
class Curve:
    """The losses of one run."""

    name: str
    losses: Sequence[float]
    """One training loss per step."""
    held_out: Sequence[tuple[int, float]]
    """(step, loss) on held-out text."""


def smooth(losses: Sequence[float], keep: float = 0.95) -> list[float]:
    """Exponential moving average of the losses: each step weighs ``keep`` times as much as the step after it."""
    total = weight = 0.0
    out = []
    for loss in losses:
        total, weight = keep * total + loss, keep * weight + 1
        out.append(total / weight)
    return out


def plot(curves: Sequence[Curve], path: Path, title: str, unit: str) -> Path:
    """Draw each curve in one color: the training loss pale, the smoothed one solid, the held-out loss as marks.

    ``unit``: what one step trains on, for the axis. The suffix of ``path`` chooses the file type. Creates the folder.
    """
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for i, (curve, color, marker) in enumerate(zip(curves, COLORS, MARKERS, strict=False)):
        steps = range(1, len(curve.losses) + 1)
        axes.plot(steps, curve.losses, color=color, alpha=0.2, linewidth=0.8)
        dashes, label = DASHES[i % len(DASHES)], f"{curve.name}, training (smoothed)"
        axes.plot(steps, smooth(curve.losses), color=color, linewidth=1.8, linestyle=dashes, label=label)
        at, held_out = zip(*curve.held_out, strict=True)
        label = f"{curve.name}, held out: {held_out[-1]:.3f} at the end"
        axes.plot(at, held_out, color=color, linestyle="", marker=marker, markerfacecolor="none", label=label)
    axes.set_xlabel(f"step of {unit}")
    axes.set_ylabel("loss [nats per byte]")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path

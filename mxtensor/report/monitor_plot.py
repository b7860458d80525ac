"""The rows of ``mx.monitor``, and their heat map: layers over steps, one panel for each copy of an operand."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.arguments import TEXT, check, optional
from .cast_stats import SIDES
from .model_report import FILE, file_of_plot, short_names

OPERANDS = ("input", "weight", "grad")
FIGURES = {
    "sqnr_db": ("SQNR [dB]", 1.0, "viridis"),
    "saturated": ("saturated [%]", 100.0, "magma_r"),
    "underflowed": ("became zero [%]", 100.0, "magma_r"),
}
"""Field of MonitorRow -> label, unit, colors."""
MOST_INCHES = 40.0
"""Of the height of a picture."""


@dataclass(frozen=True)
class MonitorRow:
    """What the cast of one copy of an operand did to its values in one step."""

    step: int
    """Counted by ``Monitor.step``, from 0."""
    fqn: str
    """The name of the weight in ``named_parameters()``; names of the parameters of one weight are joined by ``+``, and
    a slice of a stack has its number in brackets."""
    operand: str
    """``input``, ``weight`` or ``grad``."""
    side: str
    """``rowwise`` or ``columnwise``: the copy for the first or the second product that the operand enters."""
    format: str
    saturated: float
    """Fraction of the values above the largest one that their block represents."""
    underflowed: float
    """Fraction of the values that became zero and were not."""
    sqnr_db: float
    """SQNR in dB; see ``sqnr_db``."""


def grid_of(rows: Sequence[MonitorRow], figure: str, fqns: Sequence[str], steps: Sequence[int]) -> list[list[float]]:
    """The figure of each layer (rows) in each step (columns), in the unit of the picture; nan where there is none."""
    layers, places = ({name: i for i, name in enumerate(names)} for names in (fqns, steps))
    grid = [[math.nan] * len(steps) for _ in fqns]
    for row in rows:
        value = getattr(row, figure) * FIGURES[figure][1]
        if math.isfinite(value):
            grid[layers[row.fqn]][places[row.step]] = value
    return grid


def plot_history(rows: Sequence[MonitorRow], path: str | os.PathLike[str], figure: str, title: str | None) -> Path:
    """``Monitor.plot`` of these rows."""
    check("plot", "path", path, FILE)
    check("plot", "figure", figure, TEXT)
    check("plot", "title", title, optional(TEXT))
    if figure not in FIGURES:
        raise ValueError(f"plot: figure is {figure!r}; choose one of {', '.join(FIGURES)}")
    try:
        from matplotlib.figure import Figure  # not pyplot: no global state, no display
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install 'mxtensor[plot]'") from error
    if not rows:
        raise ValueError("plot: nothing was measured; train a layer with a recipe in eager code, then call step()")

    label, _, colors = FIGURES[figure]
    fqns, steps = list(dict.fromkeys(row.fqn for row in rows)), sorted({row.step for row in rows})
    panels = [(o, s, [r for r in rows if (r.operand, r.side) == (o, s)]) for o in OPERANDS for s in SIDES]
    panels = [panel for panel in panels if panel[2]]
    grids = [grid_of(chosen, figure, fqns, steps) for _, _, chosen in panels]
    finite = [value for grid in grids for line in grid for value in line if math.isfinite(value)] or [0.0]
    height = min(1.9 + 0.19 * len(fqns), MOST_INCHES)
    picture = Figure(figsize=(2.6 + 1.75 * len(panels), max(height, 3.0)), layout="constrained")
    image: Any = None
    grid_axes = picture.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (operand, side, _), grid in zip(grid_axes, panels, grids, strict=True):
        image = axes.imshow(
            grid, aspect="auto", interpolation="nearest", cmap=colors, vmin=min(finite), vmax=max(finite)
        )  # fmt: skip
        axes.set_title(f"{operand}\n{side}", fontsize=9)
        shown = sorted({0, len(steps) // 2, len(steps) - 1})
        axes.set_xticks(shown, [str(steps[i]) for i in shown], fontsize=8)
        axes.tick_params(length=0)
    grid_axes[0].set_yticks(range(len(fqns)), short_names(fqns), fontsize=7 if len(fqns) > 40 else 8)
    picture.supxlabel("step", fontsize=9)
    picture.colorbar(image, ax=list(grid_axes), label=label, fraction=0.04, pad=0.01)
    if title is not None:
        picture.suptitle(title, fontsize=12)
    path = file_of_plot(path)
    picture.savefig(path, dpi=150)
    return path

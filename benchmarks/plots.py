"""Draw the pictures of records for the documentation: ``python -m benchmarks.plots`` (extra ``plot``).

The picture docs/assets/NAME.png shows the record benchmarks/results/NAME.json. Its metadata contains the checksum of
the record, so that a test can tell whether it is current.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mxtensor.report.model_report import COLORS

from . import cast, decode, linear, parity_plot, quality, quality_plot, scale, train_linear
from .cuda import Target
from .harness import read_json

ROOT = Path(__file__).resolve().parent.parent
GRAY, INK = "#8a8a8a", "#333333"
PEER_COLOR = COLORS[1]
TARGET_KEY = {"linestyle": "", "marker": "|", "color": COLORS[2], "markersize": 11, "markeredgewidth": 1.8}


def checksum(record: Path) -> str:
    """The SHA-256 of a record, which its picture contains as metadata."""
    return hashlib.sha256(record.read_bytes()).hexdigest()


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure  # pyplot would need a display and has global state
    except ImportError as error:
        raise ImportError("benchmarks.plots needs matplotlib: pip install 'mxtensor[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def _rows_of_names(axes: Any, names: Sequence[str]) -> None:
    """One row of the picture for each name, the first on top, with bands of alternating color."""
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.5, -0.5)
    for i in range(0, len(names), 2):
        axes.axhspan(i - 0.5, i + 0.5, color="#f4f4f4", linewidth=0, zorder=0)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _target_line(axes: Any, row: int, limit: float) -> None:
    """A short line at the target of one row."""
    axes.plot([limit, limit], [row - 0.42, row + 0.42], color=COLORS[2], linewidth=1.8, zorder=2)


def _limits(probe: Any, targets: Sequence[Target]) -> list[float]:
    """The limits of the targets that judge ``probe``, a row of one contender."""
    return [target.limit for target in targets if list(target.figures([probe]))]


def _times_over_bfloat16(axes: Any, low: float, high: float, ticks: Sequence[float], label: str) -> None:
    """A logarithmic axis from ``low`` to ``high``, with those ticks that are on it."""
    ticks = [t for t in ticks if low <= t <= high]
    axes.set_xscale("log")
    axes.set_xticks(ticks, ["bf16" if t == 1 else f"{t:g}x" for t in ticks], fontsize=9)
    axes.minorticks_off()
    axes.set_xlim(low, high)
    axes.set_xlabel(label, fontsize=9.5, color=INK)


def _title(figure: Any, title: str, machine: dict[str, Any]) -> None:
    """The title, and below it the machine, the versions and the date."""
    versions = machine["versions"]
    packages = [f"{name} {versions[name]}" for name in ("torch", "torchao") if name in versions]
    figure.suptitle(f"{title}\n", fontsize=13, color=INK)
    below = 1 - 0.34 / figure.get_figheight()
    source = ", ".join([machine["gpu"] or machine["cpu"], *packages, machine["date"]])
    figure.text(0.5, below, source, ha="center", va="top", fontsize=9, color=GRAY)


def _legend(figure: Any, keys: dict[str, dict[str, Any]], columns: int) -> None:
    """A legend below the axes, filled column by column. ``keys`` maps a label to the properties of its line."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label, **style) for label, style in keys.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


# ---------------------------------------------------------------------------------------------- casts

RULES = {cast.OURS: "", cast.FLOOR: ", floor"}
"""Our contender -> the suffix of its name in the picture."""
OFFSETS = (-0.17, 0.17)
CROSS: dict[str, Any] = {"linestyle": "", "marker": "x", "markersize": 6, "markeredgewidth": 1.6}


def _cast_targets(kind: str) -> dict[str, float]:
    """Format -> the target for its fraction of the copy bandwidth at one work; the lowest if there are several."""
    lowest: dict[str, float] = {}
    for name in cast.FORMATS:
        probe = cast.CastRow("", {cast.OURS: 1.0}, 1, relative={cast.OURS: 1.0}, format=name, kind=kind)
        probe.twice_nbytes = probe.copy_nbytes = 1
        limits = [target.limit for target in cast.TARGETS if target.sign == ">=" and list(target.figures([probe]))]
        if limits:
            lowest[name] = min(limits)
    return lowest


def draw_cast(machine: dict[str, Any], rows: Sequence[cast.CastRow]) -> Any:
    """Fraction of the copy bandwidth: one panel for each work, one row for each format, one marker for each size."""
    rows = [row for row in rows if row.kind in cast.WORKS]
    sizes = list(dict.fromkeys(row.size for row in rows))[:2]
    names = [
        row_name
        for name in dict.fromkeys(row.format for row in rows)
        for row_name in (name, *((name + ", floor",) if name in cast.WITH_FLOOR else ()))
    ]
    fractions = [row.fraction(cast.OURS, twice) for row in rows for twice in (False, True)]
    most = max([1.03, *(fraction for fraction in fractions if not math.isnan(fraction))])
    figure = _figure(13, 1.9 + 0.36 * len(names))
    panels = figure.subplots(1, len(cast.WORKS), sharey=True)
    for axes, kind in zip(panels, cast.WORKS, strict=True):
        _rows_of_names(axes, names)
        axes.set_title(kind, fontsize=11, color=INK)
        axes.set_xlim(0, most + 0.05)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "copy"], fontsize=8.5)
        axes.axvline(1, color=INK, linewidth=0.9)
        _draw_casts(axes, kind, [row for row in rows if row.kind == kind], names, sizes)
    dot = {"linestyle": "", "color": COLORS[0], "markersize": 6.5, "marker": "o"}
    keys: dict[str, dict[str, Any]] = {
        size: dot | ({} if position else {"markerfacecolor": "white"}) for position, size in enumerate(sizes)
    }
    keys["input counted twice"] = {"color": COLORS[5], "linewidth": 2.2}
    keys["torchao compiled"] = {"color": PEER_COLOR} | CROSS
    keys["target"] = TARGET_KEY
    _title(figure, "Casts of bfloat16: fraction of the copy bandwidth (higher is better)", machine)
    _legend(figure, keys, len(keys))
    return figure


def _draw_casts(axes: Any, kind: str, rows: Sequence[cast.CastRow], names: Sequence[str], sizes: Sequence[str]) -> None:
    """The figures and the targets of one work."""
    drawn = {row.format + suffix for row in rows for name, suffix in RULES.items() if name in row.relative}
    for name, limit in _cast_targets(kind).items():
        for i in (names.index(n) for n in (name, name + ", floor") if n in drawn):
            _target_line(axes, i, limit)
    for row in (row for row in rows if row.size in sizes):
        position = sizes.index(row.size)
        for contender, suffix in RULES.items():
            if contender in row.relative and row.format + suffix in names:
                y = names.index(row.format + suffix) + OFFSETS[position]
                _draw_fraction(axes, row, contender, y, filled=position == 1)
        for contender, suffix in (("torchao compiled", ""), ("torchao compiled, floor", ", floor")):
            if contender in row.relative and row.format + suffix in names:
                y = names.index(row.format + suffix)
                axes.plot(row.fraction(contender), y, color=PEER_COLOR, zorder=3, **CROSS)


def _draw_fraction(axes: Any, row: cast.CastRow, contender: str, y: float, filled: bool) -> None:
    """A dot at the fraction, and a line to the fraction with the input counted twice, if it is read twice."""
    once, twice = row.fraction(contender), row.fraction(contender, twice=True)
    if not math.isnan(twice):
        axes.plot([once, twice], [y, y], color=COLORS[5], linewidth=2.2, solid_capstyle="butt", zorder=2)
        axes.plot([twice, twice], [y - 0.11, y + 0.11], color=COLORS[5], linewidth=2.2, zorder=2)
    face = COLORS[0] if filled else "white"
    axes.plot(once, y, marker="o", markersize=6, color=COLORS[0], markerfacecolor=face, zorder=4)


# ---------------------------------------------------------------------------------------------- linear layers

SHAPE_MARKERS = "osD"


def draw_linear(machine: dict[str, Any], rows: Sequence[linear.LinearRow]) -> Any:
    """Time over bfloat16: one row for each contender, one marker for each shape, on a logarithmic axis."""
    names = list(dict.fromkeys(row.contender for row in rows))
    weights = list(dict.fromkeys(row.shape.partition("x")[2] for row in rows))
    tokens = list(dict.fromkeys(row.shape.partition("x")[0] for row in rows))
    figure = _figure(10.5, 2.0 + 0.4 * len(names))
    axes = figure.add_subplot()
    _rows_of_names(axes, names)
    axes.axvline(1, color=INK, linewidth=0.9)
    for i, name in enumerate(names):
        probe = linear.LinearRow("", {}, contender=name, relative={name: 1.0})
        for limit in _limits(probe, linear.TARGETS)[-1:]:
            _target_line(axes, i, limit)
    spread = 0.6 / max(len(weights) * len(tokens) - 1, 1)

    def style(position: int, token: int) -> dict[str, Any]:
        color = COLORS[(0, 1, 3)[position % 3]]
        face = color if token else "white"
        return {"marker": SHAPE_MARKERS[position % 3], "color": color, "markerfacecolor": face, "markersize": 6}

    for row in (row for row in rows if row.contender in row.relative):
        m, _, weight = row.shape.partition("x")
        position, token = weights.index(weight), tokens.index(m)
        y = names.index(row.contender) - 0.3 + spread * (position * len(tokens) + token)
        axes.plot(row.over_base, y, zorder=3, **style(position, token))
    found = [row.over_base for row in rows if row.contender in row.relative]
    low, high = min([*found, 0.6]) / 1.08, max([*found, 1.25]) * 1.08
    ticks = (0.25, 0.35, 0.5, 0.65, 0.8, 1, 1.25, 1.6, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    _times_over_bfloat16(axes, low, high, ticks, "time over bfloat16 F.linear in the same round (logarithmic)")
    keys = {
        f"M {m}, N x K {weight.replace('x', ' x ')}": {"linestyle": ""} | style(position, token)
        for position, weight in enumerate(weights)
        for token, m in enumerate(tokens)
    }
    _title(figure, "Linear layers: time over bfloat16 (lower is better)", machine)
    _legend(figure, keys | {"target": TARGET_KEY}, len(weights) + 1)
    return figure


# ---------------------------------------------------------------------------------------------- decoding


def draw_decode(machine: dict[str, Any], rows: Sequence[decode.DecodeRow]) -> Any:
    """Time over the number of rows at one shape: bfloat16, two formats, and the most rows of kernel ``small_m``."""
    n, k = decode.CURVE_SHAPE
    same = sorted((row for row in rows if (row.n, row.k) == (n, k)), key=lambda row: row.m)
    figure = _figure(9.5, 5.2)
    axes = figure.add_subplot()
    names = (decode.BASE, *decode.CURVES)
    ends_of: dict[str, tuple[int, float, str]] = {}
    for name, color in zip(names, (INK, COLORS[0], COLORS[1]), strict=True):
        points = {row.m: row.times[name] * 1e3 for row in same if name in row.times}
        axes.plot(list(points), list(points.values()), color=color, marker="o", markersize=4, linewidth=1.6)
        ends_of[name] = max(points), points[max(points)], color
    spacing, below = 0.045 * max(us for _, us, _ in ends_of.values()), float("-inf")  # so that labels do not overlap
    for name, (m, us, color) in sorted(ends_of.items(), key=lambda item: item[1][1]):
        below = max(us, below + spacing)
        axes.annotate(name, (m, below), (6, -3), textcoords="offset points", fontsize=9, color=color)
    kernels = {row.m: row.kernels.get(decode.CURVES[0], "") for row in same if decode.CURVES[0] in row.times}
    ends = [m for m, kernel in kernels.items() if kernel.startswith("small_m")]
    if ends:
        axes.axvline(max(ends), color=GRAY, linewidth=0.9, linestyle=":")
        axes.annotate("small_m up to here", (max(ends), axes.get_ylim()[1]), (-4, -12), textcoords="offset points",
                      ha="right", fontsize=8.5, color=GRAY)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(decode.CURVE), [str(m) for m in decode.CURVE], fontsize=9)
    axes.minorticks_off()
    axes.set_xlim(0.9, 1100)
    axes.set_ylim(0)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("rows of activations (logarithmic)", fontsize=9.5, color=INK)
    axes.set_ylabel("microseconds", fontsize=9.5, color=INK)
    _title(figure, f"A linear layer of {n} x {k} at few rows (lower is better)", machine)
    return figure


# ---------------------------------------------------------------------------------------------- training


def draw_train_linear(machine: dict[str, Any], rows: Sequence[train_linear.TrainRow]) -> Any:
    """Time of a step over bfloat16: one row for each contender, one marker for each shape, filled if compiled."""
    names = list(dict.fromkeys(row.contender for row in rows if row.relative.keys() - {train_linear.BASE}))
    shapes = list(dict.fromkeys(row.shape for row in rows))
    figure = _figure(10.5, 2.0 + 0.42 * len(names))
    axes = figure.add_subplot()
    _rows_of_names(axes, names)
    axes.axvline(1, color=INK, linewidth=0.9)
    for i, name in enumerate(names):
        probe = train_linear.TrainRow("", {}, contender=name, relative={train_linear.EAGER: 1.0})
        for limit in _limits(probe, train_linear.TARGETS):
            _target_line(axes, i, limit)

    def style(shape: str, how: str) -> dict[str, Any]:
        position = shapes.index(shape)
        color = COLORS[(0, 1, 3)[position % 3]]
        face = color if how == train_linear.COMPILED else "white"
        return {"marker": SHAPE_MARKERS[position % 3], "color": color, "markerfacecolor": face, "markersize": 6.5}

    modes = (train_linear.EAGER, train_linear.COMPILED)
    found = [1.0]
    for row in (row for row in rows if row.contender in names):
        for how in (how for how in modes if how in row.relative):
            y = names.index(row.contender) + (-0.2, 0.2)[shapes.index(row.shape) % 2]
            axes.plot(row.over_base(how), y, zorder=3, **style(row.shape, how))
            found.append(row.over_base(how))
    low, high = min(found) / 1.1, max(found) * 1.1
    label = "time of forward and backward over bfloat16 in the same round (logarithmic)"
    _times_over_bfloat16(axes, low, high, (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 4), label)
    keys = {
        f"{shape.replace('x', ' x ')}, {how}": {"linestyle": ""} | style(shape, how)
        for shape in shapes
        for how in modes
    }
    _title(figure, "Training a linear layer: time over bfloat16 (lower is better)", machine)
    _legend(figure, keys | {"target": TARGET_KEY}, 3)
    return figure


# ---------------------------------------------------------------------------------------------- quality


def draw_quality(machine: dict[str, Any], rows: Sequence[quality.Row]) -> Any:
    """KL over bits per value."""
    figure = _figure(11.0, 5.6)
    quality_plot.fill(figure, rows)
    _title(figure, "Bits against KL divergence (lower left is better)", machine)
    _legend(figure, quality_plot.keys(rows), 3)
    return figure


# ---------------------------------------------------------------------------------------------- the command

DRAWN: dict[str, tuple[type[Any], Callable[[dict[str, Any], Any], Any]]] = {
    "cast": (cast.CastRow, draw_cast),
    "linear": (linear.LinearRow, draw_linear),
    "decode": (decode.DecodeRow, draw_decode),
    "train_linear": (train_linear.TrainRow, draw_train_linear),
    "quality": (quality.Row, draw_quality),
}
"""Name of the record -> (class of its rows, drawing function)."""


def draw(name: str, results: Path, pictures: Path) -> Path | None:
    """Draw the picture of one record and return its path, or None if there is no record. Needs matplotlib."""
    record = results / f"{name}.json"
    if not record.exists():
        return None
    kind, drawing = DRAWN[name]
    machine, rows = read_json(record, kind)
    figure = drawing(machine, quality.read(record) if name == "quality" else rows)
    path = pictures / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Source": checksum(record)})
    return path


def main() -> None:
    """Draw the pictures of all records in a folder."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options.add_argument("--pictures", type=Path, default=ROOT / "docs" / "assets")
    args = options.parse_args()
    for name in DRAWN:
        path = draw(name, args.results, args.pictures)
        print(path or f"{name}: no record in {args.results}; python -m benchmarks.{name} --json writes one")
    print(scale.draw(args.pictures / "scale.png"))
    for size in parity_plot.SIZES:
        path = parity_plot.draw(size, args.results / "parity", args.pictures)
        print(path or f"parity of size {size}: no record in {args.results}; python -m benchmarks.parity writes them")


if __name__ == "__main__":
    main()

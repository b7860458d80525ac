"""Draw the pictures of the documentation from the records: ``python -m benchmarks.plots`` (extra ``plot``).

The metadata of a picture has the checksum of what it shows, so that a test can tell whether it is current.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mxtensor.report.model_report import COLORS

from . import cast, generate, layers, llm_cpu, parity_record, quality, scale, training
from .harness import RESULTS, read_json
from .parity_record import Result, by_arm, read_all, spread

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "assets"
GRAY, INK = "#8a8a8a", "#333333"
PEER_COLOR = COLORS[1]
FORMAT_COLORS = {
    "mxfp8-weight-only": COLORS[0], "mxint8": COLORS[4], "mxfp4-weight-only": COLORS[1],
    "mxfp4-weight-mxint8-activation": COLORS[2],
}  # fmt: skip


def checksum(records: Sequence[Path]) -> str:
    """The SHA-256 of records, which their picture contains as metadata."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in records)).hexdigest()


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure  # not pyplot: no global state, no display
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


def _times_over_bfloat16(axes: Any, low: float, high: float, ticks: Sequence[float], label: str) -> None:
    """A logarithmic axis from ``low`` to ``high``, with those ticks that are on it."""
    ticks = [t for t in ticks if low <= t <= high]
    axes.set_xscale("log")
    axes.set_xticks(ticks, ["bf16" if t == 1 else f"{t:g}x" for t in ticks], fontsize=9)
    axes.minorticks_off()
    axes.set_xlim(low, high)
    axes.set_xlabel(label, fontsize=9.5, color=INK)


def _title(figure: Any, title: str, machines: Sequence[dict[str, Any]]) -> None:
    """The title, and below it the machines and the dates."""
    figure.suptitle(f"{title}\n", fontsize=13, color=INK)
    below = 1 - 0.34 / figure.get_figheight()
    source = "; ".join(
        dict.fromkeys(f"{m['gpu'] or m['cpu']}, torch {m['versions']['torch']}, {m['date']}" for m in machines)
    )
    figure.text(0.5, below, source, ha="center", va="top", fontsize=9, color=GRAY)


def _legend(figure: Any, keys: dict[str, dict[str, Any]], columns: int) -> None:
    """A legend below the axes, filled column by column. ``keys`` maps a label to the properties of its line."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=label, **style) for label, style in keys.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _plain_axes(axes: Any) -> None:
    """A light grid behind the lines, and no frame above and on the right."""
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


Machine = dict[str, Any]

# ---------------------------------------------------------------------------------------------- layers by rows


def draw_layers(*found: tuple[Machine, Sequence[layers.LayerRow]]) -> Any:
    """Speed over bfloat16 by the number of rows: for each GPU and format the mean of all layers, and their range.

    ``found``: the layers of public models on each GPU, then those of thousands of rows, which are dots.
    """
    *gpus, (_, large) = found
    formats = layers.FORMATS
    figure = _figure(13, 4.6)
    panels = figure.subplots(1, len(formats), sharey=True)
    for axes, config in zip(panels, formats, strict=True):
        for (machine, rows), color in zip(gpus, (COLORS[0], COLORS[1]), strict=False):
            by_m: dict[int, list[float]] = {}
            for row in rows:
                if config in row.relative:
                    by_m.setdefault(row.m, []).append(row.speedup(config))
            ms = sorted(by_m)
            worst, best = [min(by_m[m]) for m in ms], [max(by_m[m]) for m in ms]
            axes.fill_between(ms, worst, best, color=color, alpha=0.15, linewidth=0)
            means = [statistics.geometric_mean(by_m[m]) for m in ms]
            label = machine["gpu"].removeprefix("NVIDIA ").split()[0]
            axes.plot(
                ms, means, color=color, marker="o", markersize=4, linewidth=1.8, label=f"{label}: mean, worst to best"
            )
        dots = [(row.m, row.speedup(config)) for row in large if config in row.relative]
        if dots:
            axes.plot(
                *zip(*dots, strict=True), "D", color=COLORS[0], markersize=4.5, alpha=0.7, label="H200, each layer"
            )
        axes.axhline(1, color=INK, linewidth=0.9)
        axes.set_title(config, fontsize=11, color=INK)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks([1, 8, 64, 512, 4096], ["1", "8", "64", "512", "4096"], fontsize=9)
        axes.set_yticks([0.5, 0.7, 1, 1.5, 2, 3, 4], ["0.5x", "0.7x", "bf16", "1.5x", "2x", "3x", "4x"], fontsize=9)
        axes.minorticks_off()
        axes.set_xlim(0.8, 12_000)
        axes.set_xlabel("rows of activations", fontsize=9.5, color=INK)
        _plain_axes(axes)
    panels[0].legend(frameon=False, fontsize=9)
    _title(
        figure, "Linear layers of eight public models: speed over bfloat16 (higher is better)", [m for m, _ in found]
    )
    return figure


# ---------------------------------------------------------------------------------------------- models that decode


def draw_generate(
    graphs: tuple[Machine, Sequence[generate.ModelRow]], calls: tuple[Machine, Sequence[generate.GenerateRow]]
) -> Any:
    """Speed over bfloat16 of a model that decodes: a bar for each format."""
    base = next(row for row in graphs[1] if row.work == generate.BASE)
    bars: dict[str, dict[str, float]] = {
        "CUDA graph\nbatch 1": {r.work: r.tokens_a_second / base.tokens_a_second for r in graphs[1]}
    }
    for row in calls[1]:
        bars.setdefault(f"generate\nbatch {row.batch}", {})[row.config] = row.speedup("token")
    figure = _figure(9.5, 4.2)
    axes = figure.add_subplot()
    names = ("mxfp8-weight-only", "mxfp4-weight-only")
    for place, speeds in enumerate(bars.values()):
        for offset, name in zip((-0.19, 0.19), names, strict=True):
            axes.bar(place + offset, speeds[name], 0.34, color=FORMAT_COLORS[name], label=name if not place else None)
            axes.text(place + offset, speeds[name] + 0.03, f"{speeds[name]:.2f}x", ha="center", fontsize=9, color=INK)
    axes.axhline(1, color=INK, linewidth=0.9)
    axes.set_xticks(range(len(bars)), list(bars), fontsize=9.5)
    axes.set_ylabel("tokens per second over bfloat16", fontsize=9.5, color=INK)
    axes.set_ylim(0, 2.75)
    _plain_axes(axes)
    axes.legend(frameon=False, fontsize=9, loc="upper right", ncols=2)
    _title(figure, "Decoding with the shape of Llama 3 8B (higher is better)", [graphs[0], calls[0]])
    return figure


# ---------------------------------------------------------------------------------------------- language models on CPU


def draw_llm_cpu(*found: tuple[Machine, Sequence[llm_cpu.LlmRow]]) -> Any:
    """Speed over llama.cpp's at equal bits: a line for each model and mode, a dot for each batch and threads."""
    rows = [row for _, of_machine in found for row in of_machine]
    kinds: dict[str, list[llm_cpu.LlmRow]] = {}
    for row in sorted(rows, key=lambda row: (row.threads == 16, row.model == "llama-1b")):
        if any(name.startswith("llama.cpp") for name in row.times):
            kinds.setdefault(kind_of(row), []).append(row)
    figure = _figure(10.5, 1.7 + 0.36 * len(kinds))
    axes = figure.add_subplot()
    _rows_of_names(axes, list(kinds))
    axes.axvline(1, color=INK, linewidth=0.9)
    for place, of_kind in enumerate(kinds.values()):
        for row in of_kind:
            for shift, (name, peer) in zip((-0.24, -0.08, 0.08, 0.24), llm_cpu.EQUAL_BITS.items(), strict=True):
                speed = row.ratio(name, peer)
                if not math.isnan(speed):
                    filled = {} if row.batch == 1 else {"markerfacecolor": "white"}
                    axes.plot(speed, place + shift, "o", color=FORMAT_COLORS[name], markersize=5.5, **filled)
    axes.set_xscale("log")
    ticks = (0.15, 0.25, 0.4, 0.6, 0.8, 1, 1.3, 1.6, 2)
    axes.set_xticks(ticks, ["llama.cpp" if t == 1 else f"{t:g}x" for t in ticks], fontsize=9)
    axes.minorticks_off()
    axes.set_xlabel("speed over llama.cpp's at equal bits (logarithmic)", fontsize=9.5, color=INK)
    keys: dict[str, dict[str, Any]] = {
        name: {"linestyle": "", "marker": "o", "color": FORMAT_COLORS[name]} for name in llm_cpu.EQUAL_BITS
    }
    keys["batch 1"] = {"linestyle": "", "marker": "o", "color": GRAY}
    keys["batch 4, 16"] = keys["batch 1"] | {"markerfacecolor": "white"}
    _title(figure, "Language models on a CPU (right is better)", [machine | {"gpu": None} for machine, _ in found])
    _legend(figure, keys, 3)
    return figure


def kind_of(row: llm_cpu.LlmRow) -> str:
    """Model, way to run it and processor of a row."""
    mode = row.mode
    if mode == llm_cpu.READING:
        mode = f"prompt of {row.prompt} tokens"
    elif row.prompt != llm_cpu.PROMPT:
        mode += f", after {row.prompt:,} tokens"
    return f"{row.model}, {mode}" + (f", {row.threads} threads" if row.threads > 2 else "")


# ---------------------------------------------------------------------------------------------- training


def draw_training(*found: tuple[Machine, Sequence[training.TrainRow]]) -> Any:
    """Time of a step over bfloat16: one line for each recipe, one marker for each shape of layers, then of experts."""
    rows = [row for _, of_part in found for row in of_part]
    names = [name for name in training.RECIPES if any(row.contender == name for row in rows)]
    shapes = list(dict.fromkeys(row.shape for row in rows))
    figure = _figure(10.5, 2.1 + 0.42 * len(names))
    axes = figure.add_subplot()
    _rows_of_names(axes, names)
    axes.axvline(1, color=INK, linewidth=0.9)
    styles = {
        shape: {"marker": "osD^v"[place % 5], "color": COLORS[place % len(COLORS)], "markersize": 6.5}
        for place, shape in enumerate(shapes)
    }
    for row in (row for row in rows if training.EAGER in row.relative and row.contender in names):
        y = names.index(row.contender) - 0.28 + 0.14 * shapes.index(row.shape)
        axes.plot(row.over_base(training.EAGER), y, zorder=3, **styles[row.shape])
    ticks = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 4, 5)
    label = "time of forward and backward, eager, over bfloat16 in the same round (logarithmic)"
    ratios = [row.over_base(training.EAGER) for row in rows if row.contender in names]
    _times_over_bfloat16(axes, min(ratios) / 1.1, max(ratios) * 1.1, ticks, label)
    keys = {
        ("experts: " if "rows" in shape else "layer: ") + shape: {"linestyle": ""} | style
        for shape, style in styles.items()
    }
    _title(figure, "Training: time over bfloat16 (lower is better)", [machine for machine, _ in found])
    _legend(figure, keys, 3)
    return figure


# ---------------------------------------------------------------------------------------------- casts

RULES = {cast.OURS: "", cast.FLOOR: ", floor"}
"""Our contender -> the suffix of its name in the picture."""
OFFSETS = (-0.17, 0.17)
CROSS: dict[str, Any] = {"linestyle": "", "marker": "x", "markersize": 6, "markeredgewidth": 1.6}


def draw_cast(found: tuple[Machine, Sequence[cast.CastRow]]) -> Any:
    """Fraction of the copy bandwidth: one panel for each work, one row for each format, one marker for each size."""
    machine, rows = found
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
        _draw_casts(axes, [row for row in rows if row.kind == kind], names, sizes)
    dot = {"linestyle": "", "color": COLORS[0], "markersize": 6.5, "marker": "o"}
    keys: dict[str, dict[str, Any]] = {
        size: dot | ({} if position else {"markerfacecolor": "white"}) for position, size in enumerate(sizes)
    }
    keys["input counted twice"] = {"color": COLORS[5], "linewidth": 2.2}
    keys["torchao compiled"] = {"color": PEER_COLOR} | CROSS
    _title(figure, "Casts of bfloat16: share of the copy bandwidth (higher is better)", [machine])
    _legend(figure, keys, len(keys))
    return figure


def _draw_casts(axes: Any, rows: Sequence[cast.CastRow], names: Sequence[str], sizes: Sequence[str]) -> None:
    """The figures of one work."""
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


# ---------------------------------------------------------------------------------------------- quality

STYLES = {
    (quality.OURS, quality.NEAREST): ("o", COLORS[0], "none"),
    (quality.OURS, quality.CALIBRATED): ("o", COLORS[0], COLORS[0]),
    (quality.OURS, quality.PLANNED): ("D", COLORS[2], "none"),
    (quality.OURS, quality.BOTH): ("D", COLORS[2], COLORS[2]),
    ("llama.cpp", quality.NEAREST): ("s", COLORS[1], COLORS[1]),
    ("torchao", quality.NEAREST): ("^", COLORS[3], COLORS[3]),
}
"""(library, method) -> marker, color, color of its inside."""

PLACES = {
    "llama.cpp": (6, 6, "left"),
    "torchao": (-6, 0, "right"),
    quality.NEAREST: (6, -4, "left"),
    quality.CALIBRATED: (-6, 0, "right"),
    quality.PLANNED: (-7, 0, "right"),
    quality.BOTH: (-5, -13, "right"),
}
"""Library, or method of ours -> where a name is: points to the right, points up, alignment."""


def _fill_quality(figure: Any, rows: Sequence[quality.WeightsRow]) -> None:
    """A panel for each text, a marker for each row, with its format beside it."""
    panels = figure.subplots(1, len(quality.TEXTS), sharey=True)
    for axes, text in zip(panels, quality.TEXTS, strict=True):
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


def quality_keys(rows: Sequence[quality.WeightsRow]) -> dict[str, dict[str, Any]]:
    """The legend: the markers that are drawn."""
    drawn = {(row.library, row.method) for row in rows}
    return {
        f"{library}, {method}": {"linestyle": "", "marker": marker, "color": color, "markerfacecolor": inside}
        for (library, method), (marker, color, inside) in STYLES.items()
        if (library, method) in drawn
    }


def draw_quality(found: tuple[Machine, Sequence[quality.WeightsRow]]) -> Any:
    """KL over bits per value."""
    figure = _figure(11.0, 5.6)
    _fill_quality(figure, found[1])
    _title(figure, "Bits against KL divergence (lower left is better)", [found[0]])
    _legend(figure, quality_keys(found[1]), 3)
    return figure


# ---------------------------------------------------------------------------------------------- parity of training

PARITY_SIZES = ("large", "medium")
FAMILIES = ("bf16", "mxfp8", "float8", "mxfp6", "nvfp4", "mxfp4")
"""A family has one color; its arms differ in dashes."""
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (2, 1)), (0, (6, 2, 1, 2, 1, 2)))
MANY = 8
"""With more arms the right panel has the distance at the end only, a line for each arm."""
TICKS = (-0.5, 0, 0.5, 1, 2, 3, 5, 10, 20, 50)
LINEAR = 1.0
"""Percent up to which that axis is linear; it is logarithmic from there on."""
FROM = 0.1
"""The distance is drawn from this share of the tokens on: losses that fall fast differ much."""


def parity_checksum(results: Path, size: str) -> str:
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
        color = "#000000" if family == parity_record.BASE else COLORS[FAMILIES.index(family) - 1]
        out[arm] = {"color": color, "linestyle": DASHES[place % len(DASHES)], "linewidth": 1.5}
    return out


def differences(run: Result, base: Sequence[Result]) -> list[tuple[float, float]]:
    """(million tokens, percent over the mean of bf16's runs of the same seed) at the points that all have, from FROM
    on."""
    same = [other for other in base if other.header.seed == run.header.seed]
    points = zip(*(other.points for other in same), strict=True)
    losses = {every[0].step: statistics.fmean(point.held_out for point in every) for every in points}
    least = FROM * run.header.steps
    return [
        (point.tokens / 1e6, 100 * (point.held_out / losses[point.step] - 1))
        for point in run.points
        if point.step >= least and point.step in losses
    ]


def draw_differences(axes: Any, arms: Mapping[str, Sequence[Result]], looks: Mapping[str, dict[str, Any]]) -> None:
    """The distance over tokens, a line for each run."""
    for name, runs in arms.items():
        for apart in filter(None, (differences(run, arms.get(parity_record.BASE, [])) for run in runs)):
            axes.plot(*zip(*apart, strict=True), **looks[name])
    axes.set_ylabel("over bf16 of the same seed [%]")
    axes.set_xlabel("million tokens (bytes)")


def draw_ends(axes: Any, arms: Mapping[str, Sequence[Result]], looks: Mapping[str, dict[str, Any]]) -> None:
    """The distance at the end, a dot for each run and a bar for the mean of all."""
    found = {
        name: [apart[-1][1] for apart in (differences(run, arms.get(parity_record.BASE, [])) for run in runs) if apart]
        for name, runs in arms.items()
        if name != parity_record.BASE
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


def draw_parity(results: Sequence[Result]) -> Any:
    """Both panels; each run is a line, or a dot if there are MANY arms."""
    from matplotlib.lines import Line2D

    arms = by_arm(results)
    looks, base = styles(list(arms)), arms.get(parity_record.BASE, [])
    figure = _figure(11.5, 4.6 + 0.22 * (len(arms) // 4))
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


# ---------------------------------------------------------------------------------------------- many GPUs

SHOWN = 2 * scale.CAPACITY / 1e9
"""The largest scale.memory that the picture shows, in GB."""


def scale_checksum() -> str:
    """The SHA-256 of the table, which the picture has as metadata."""
    return hashlib.sha256(repr(scale.lines()).encode()).hexdigest()


def draw_scale() -> Any:
    """Above, what a GPU receives in a microbatch; below, its scale.memory: bf16 and mxfp8 side by side."""
    picture = _figure(13, 7.4)
    grid = picture.subplots(2, len(scale.STUDIES), sharex="col", squeeze=False)
    for study, received, stored in zip(scale.STUDIES, *grid, strict=True):
        for place, layout in enumerate(study.layouts):
            for offset, wire, edge in ((-0.2, scale.BF16, "#ffffff"), (0.2, scale.MXFP8, "#000000")):
                sent = scale.wire_bytes(study.model, wire, layout, study.tokens, study.recompute)
                _bar(received, place + offset, edge, scale.KINDS, {k: v / layout.microbatches for k, v in sent.items()})
                whole = scale.memory(study.model, wire, layout, study.tokens, study.recompute)
                _bar(stored, place + offset, edge, scale.MEMORY, whole)
                total = sum(whole.values()) / 1e9
                if total > SHOWN:
                    stored.text(place + offset, SHOWN, f"{total:.0f}", ha="center", va="bottom", fontsize=7.5)
        received.set_title(f"{study.model.name}\n{study.tokens} tokens a GPU and microbatch", fontsize=10)
        received.set_ylim(0, 1.04 * received.get_ylim()[1])  # an empty bar at the top leaves no margin
        stored.axhline(scale.CAPACITY / 1e9, color="#777777", linewidth=0.9, linestyle="--")
        stored.set_ylim(0, min(SHOWN, stored.get_ylim()[1]))
        ticks = [f"{layout.gpus:,}\n{str(layout).replace(' ', chr(10))}" for layout in study.layouts]
        stored.set_xticks(range(len(ticks)), ticks, fontsize=7.5)
    for row, names, label in zip(grid, (scale.KINDS, scale.MEMORY), ("received", "memory"), strict=True):
        row[0].set_ylabel(f"{label} [GB]")
        handles = [_patch(color, name) for color, name in zip(COLORS, names, strict=False)]
        row[-1].legend(handles=handles, frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        for axes in row:
            axes.grid(axis="y", color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
    picture.suptitle("Calculated: bf16 (left bars) and MXFP8 (right bars, black edges); dashed: an H100's 80 GB")
    return picture


def _bar(axes: Any, place: float, edge: str, names: tuple[str, ...], figures: dict[str, float]) -> None:
    """One bar, with a color for each name."""
    bottom = 0.0
    for color, name in zip(COLORS, names, strict=False):
        height = figures[name] / 1e9
        axes.bar(place, height, 0.36, bottom, color=color, edgecolor=edge, linewidth=0.6)
        bottom += height


def _patch(color: str, name: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color, label=name)


# ---------------------------------------------------------------------------------------------- the command


class Source(NamedTuple):
    """A section of a record."""

    record: str
    section: str
    kind: type[Any]

    def read(self, results: Path) -> tuple[Machine, Sequence[Any]]:
        """The machine, and the rows."""
        path = results / f"{self.record}.json"
        if self.kind is quality.WeightsRow:
            return read_json(path, dict, self.section)[0], quality.read(path, self.kind, self.section)
        return read_json(path, self.kind, self.section)


DRAWN: dict[str, tuple[Callable[..., Any], tuple[Source, ...]]] = {
    "layers": (draw_layers, (
        Source("layers-h200", "models", layers.LayerRow), Source("layers-h100", "models", layers.LayerRow),
        Source("layers-h200", "large", layers.LayerRow),
    )),
    "generate": (draw_generate, (
        Source("generate-h200", "decode", generate.ModelRow),
        Source("generate-h100", "transformers", generate.GenerateRow),
    )),
    "llm_cpu": (draw_llm_cpu, (
        Source("llm_cpu-epyc", "decode", llm_cpu.LlmRow), Source("llm_cpu-xeon", "decode", llm_cpu.LlmRow),
    )),
    "training": (draw_training, (
        Source("training-h200", "layer", training.TrainRow), Source("training-h200", "experts", training.TrainRow),
    )),
    "cast": (draw_cast, (Source("cast-h100", "casts", cast.CastRow),)),
    "quality": (draw_quality, (Source("quality-epyc", "weights", quality.WeightsRow),)),
}  # fmt: skip
"""Name of the picture -> drawing function, and what it shows."""


def records_of(name: str, results: Path = RESULTS) -> list[Path]:
    """The files that a picture of DRAWN shows."""
    return [results / f"{record}.json" for record in dict.fromkeys(source.record for source in DRAWN[name][1])]


def figure_of(name: str, results: Path = RESULTS) -> Any:
    """A picture of DRAWN. Needs matplotlib."""
    drawing, sources = DRAWN[name]
    return drawing(*(source.read(results) for source in sources))


def save(figure: Any, path: Path, source: str) -> Path:
    """Write a picture, with the checksum of its source; the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Source": source})
    return path


def main(argv: Sequence[str] | None = None) -> None:
    """Draw all pictures, or those that the command line names."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [*DRAWN, "scale", *(f"parity_{size}" for size in PARITY_SIZES)]
    options.add_argument("names", nargs="*", metavar="NAME", help=f"(all) {', '.join(names)}")
    options.add_argument("--pictures", type=Path, default=PICTURES, metavar="FOLDER", help="(docs/assets)")
    args = options.parse_args(argv)
    for name in args.names or names:
        if name == "scale":
            figure, source = draw_scale(), scale_checksum()
        elif name in DRAWN:
            figure, source = figure_of(name), checksum(records_of(name))
        else:
            size = name.removeprefix("parity_")
            figure = draw_parity(read_all(RESULTS / "parity", size))
            source = parity_checksum(RESULTS / "parity", size)
        print(save(figure, args.pictures / f"{name}.png", source))


if __name__ == "__main__":
    main()

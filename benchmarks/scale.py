"""Training on 8 to 10,000 GPUs, calculated: bytes on the wire and in memory of a GPU. ``python -m benchmarks.scale``.

``scale_model`` has the formulas. They are compared with the record of ``benchmarks.fsdp`` (two GPUs): bytes of
all-gathers, which must be equal, and the peak of memory. Times follow from the links of ``estimate`` and from the
measured time of a linear layer (the record of ``train_linear``); nothing here ran on more than two GPUs.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxtensor.report.model_report import COLORS

from . import fsdp, train_linear
from .estimate import EFFICIENCY, HOP, NETWORK, NODE
from .harness import print_table, read_json
from .scale_model import (
    BF16,
    KINDS,
    MEASURED,
    MEMORY,
    MODELS,
    MXFP4,
    MXFP8,
    NVFP4,
    WIRES,
    Layout,
    Model,
    Wire,
    gathered,
    memory,
    wire_bytes,
)

RESULTS = Path(__file__).resolve().parent / "results"
NVLINK = 450e9
"""Bandwidth of NVLink on Hopper in one direction, in bytes/s."""
CAPACITY = 80e9
"""Bytes of memory of an H100."""


@dataclass(frozen=True)
class Study:
    """A model and its layouts."""

    model: Model
    tokens: int
    """Of a GPU in a microbatch."""
    recompute: bool
    layouts: tuple[Layout, ...]


STUDIES = (
    Study(MODELS[0], 4096, False, (
        Layout(shard=8), Layout(shard=64), Layout(shard=64, replicate=8), Layout(shard=64, replicate=64),
        Layout(shard=80, replicate=125),
    )),
    Study(MODELS[1], 8192, True, (
        Layout(shard=8), Layout(shard=64), Layout(tensor=8, shard=64),
        Layout(tensor=8, pipeline=4, shard=64, replicate=2), Layout(tensor=8, pipeline=5, shard=50, replicate=5),
    )),
    Study(MODELS[2], 8192, True, (
        Layout(shard=8, expert=8), Layout(shard=64, expert=8), Layout(shard=512, expert=32),
        Layout(pipeline=2, shard=256, replicate=8, expert=32), Layout(pipeline=2, shard=200, replicate=25, expert=8),
    )),
)  # fmt: skip

# ---------------------------------------------------------------------------------------------- rates

CONTENDERS = {MXFP8.name: "mxfp8, 32x32 weights", NVFP4.name: "nvfp4", MXFP4.name: "mxfp4"}
"""Format -> its name in the record of ``train_linear``; tiles, since FSDP2 gathers their codes."""
SHAPE = "8192x8192x8192"


def speeds() -> dict[str, float]:
    """Format -> floating-point operations per second of forward and backward of a linear layer, measured."""
    _, rows = read_json(RESULTS / "train_linear.json", train_linear.TrainRow)
    rows = [row for row in rows if row.shape == SHAPE]
    work = 6 * 8192**3 * 1e3
    found = {BF16.name: work / statistics.median(row.times[train_linear.BASE] for row in rows)}
    for name, contender in CONTENDERS.items():
        row = next(row for row in rows if row.contender == contender)
        found[name] = work / row.times[train_linear.EAGER]
    return found


def computation(study: Study, layout: Layout, speed: float) -> float:
    """Seconds of a GPU's products in a step: three for each layer, four if layers run again."""
    passes = 8 if study.recompute else 6
    tokens = study.tokens * layout.microbatches
    return passes * study.model.active * tokens / layout.pipeline / speed


def over_nodes(received: float, ranks: int, in_node: int) -> float:
    """Seconds of collectives over ``ranks`` GPUs, ``in_node`` of them in each node, of which each receives so much.

    The bytes of other nodes enter a node through the network ports of these GPUs, each through one of them, and are
    passed on over NVLink. Both overlap, so that the slower one counts.
    """
    nodes = max(ranks / in_node, 1)
    if ranks <= 1:
        return 0.0
    between = received / (1 - 1 / ranks) * (1 - 1 / nodes) / (in_node * NETWORK)
    return max(received / NVLINK, between) / EFFICIENCY


def communication(study: Study, wire: Wire, layout: Layout) -> dict[str, float]:
    """Seconds of each kind in a step, as if nothing ran beside it."""
    sent = wire_bytes(study.model, wire, layout, study.tokens, study.recompute)
    in_node = NODE // layout.tensor
    stage = study.model.layers / layout.pipeline
    hops = HOP * (max(layout.shard / in_node, 1) - 1) * stage
    gathers = 1 if layout.pipeline > 1 else 2
    out = {
        "FSDP gather": over_nodes(sent["FSDP gather"], layout.shard, min(in_node, layout.shard)) + gathers * hops,
        "FSDP reduce": over_nodes(sent["FSDP reduce"], layout.shard, min(in_node, layout.shard)) + hops,
        "DP reduce": sent["DP reduce"] / (NETWORK * EFFICIENCY),
        "TP": sent["TP"] / (NVLINK * EFFICIENCY),
        "PP": sent["PP"] / (NETWORK * EFFICIENCY),
    }
    away = 1 - NODE / layout.expert if layout.expert > NODE else 0.0  # tokens for experts of other nodes
    out["EP"] = sent["EP"] * max(away / NETWORK, (1 - away) / NVLINK) / EFFICIENCY
    return {kind: out[kind] for kind in KINDS}


# ---------------------------------------------------------------------------------------------- tables

CHECK_HEADER = ["config", "gathered bytes", "measured", "peak GB", "measured GB"]
HEADER = [
    "model", "GPUs", "layout", "tokens a GPU", "format", *(f"{kind} GB" for kind in KINDS), "received GB", "memory GB",
    "fits", "communication ms", "products ms",
]  # fmt: skip
FORMAT_HEADER = ["model", "GPUs", "format", "received GB", "over bf16", "memory GB", "products over bf16"]


def check_lines() -> list[list[str]]:
    """The formulas beside the record of two GPUs."""
    _, rows = read_json(RESULTS / "fsdp.json", fsdp.FsdpRow)
    found = []
    for row in rows:
        gather = MXFP8 if row.work == fsdp.CODES else BF16
        saved = BF16 if row.work == fsdp.BASE else MXFP8
        layout, tokens = Layout(shard=row.ranks), fsdp.BATCH * fsdp.LENGTH
        whole = sum(memory(MEASURED, saved, layout, tokens, recompute=False).values())
        received = sum(gathered(MEASURED, gather, layout))
        found.append([
            row.work, f"{received:,.0f}", f"{row.gathered_bytes:,}", f"{whole / 1e9:.2f}", f"{row.peak_bytes / 1e9:.2f}"
        ])  # fmt: skip
    return found


def line(study: Study, layout: Layout, wire: Wire, speed: float) -> list[str]:
    """One line of the table."""
    sent = wire_bytes(study.model, wire, layout, study.tokens, study.recompute)
    whole = sum(memory(study.model, wire, layout, study.tokens, study.recompute).values())
    cells = [f"{sent[kind] / 1e9:.2f}" if sent[kind] else "" for kind in KINDS]
    return [
        study.model.name, str(layout.gpus), str(layout), str(study.tokens * layout.microbatches), wire.name, *cells,
        f"{sum(sent.values()) / 1e9:.1f}", f"{whole / 1e9:.0f}", "yes" if whole < CAPACITY else "no",
        f"{sum(communication(study, wire, layout).values()) * 1e3:,.0f}",
        f"{computation(study, layout, speed) * 1e3:,.0f}",
    ]  # fmt: skip


def lines() -> list[list[str]]:
    """A line for each model, number of GPUs, and of bf16 and mxfp8."""
    rate = speeds()
    return [
        line(study, layout, wire, rate[wire.name])
        for study in STUDIES
        for layout in study.layouts
        for wire in (BF16, MXFP8)
    ]


def format_lines(index: int = 2) -> list[list[str]]:
    """Every format, for one of the layouts of each model."""
    rate, found = speeds(), []
    for study in STUDIES:
        layout = study.layouts[index]
        base = sum(wire_bytes(study.model, BF16, layout, study.tokens, study.recompute).values())
        for wire in WIRES:
            sent = sum(wire_bytes(study.model, wire, layout, study.tokens, study.recompute).values())
            whole = sum(memory(study.model, wire, layout, study.tokens, study.recompute).values())
            found.append([
                study.model.name, str(layout.gpus), wire.name, f"{sent / 1e9:.1f}", f"{sent / base:.2f}",
                f"{whole / 1e9:.1f}", f"{rate[BF16.name] / rate[wire.name]:.2f}",
            ])  # fmt: skip
    return found


# ---------------------------------------------------------------------------------------------- the picture


SHOWN = 2 * CAPACITY / 1e9
"""The largest memory that the picture shows, in GB."""


def checksum() -> str:
    """The SHA-256 of the table, which the picture has as metadata."""
    return hashlib.sha256(repr(lines()).encode()).hexdigest()


def draw(path: Path) -> Path:
    """Write the picture. Needs matplotlib."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure().savefig(path, dpi=110, metadata={"Source": checksum()})
    return path


def figure() -> Any:
    """Above, what a GPU receives in a microbatch; below, its memory: bf16 and mxfp8 side by side."""
    from matplotlib.figure import Figure  # not pyplot: no global state, no display

    picture = Figure(figsize=(13, 7.4), layout="constrained")
    grid = picture.subplots(2, len(STUDIES), sharex="col", squeeze=False)
    for study, received, stored in zip(STUDIES, *grid, strict=True):
        for place, layout in enumerate(study.layouts):
            for offset, wire, edge in ((-0.2, BF16, "#ffffff"), (0.2, MXFP8, "#000000")):
                sent = wire_bytes(study.model, wire, layout, study.tokens, study.recompute)
                _bar(received, place + offset, edge, KINDS, {k: v / layout.microbatches for k, v in sent.items()})
                whole = memory(study.model, wire, layout, study.tokens, study.recompute)
                _bar(stored, place + offset, edge, MEMORY, whole)
                total = sum(whole.values()) / 1e9
                if total > SHOWN:
                    stored.text(place + offset, SHOWN, f"{total:.0f}", ha="center", va="bottom", fontsize=7.5)
        received.set_title(f"{study.model.name}\n{study.tokens} tokens a GPU and microbatch", fontsize=10)
        received.set_ylim(0, 1.04 * received.get_ylim()[1])  # an empty bar at the top leaves no margin
        stored.axhline(CAPACITY / 1e9, color="#777777", linewidth=0.9, linestyle="--")
        stored.set_ylim(0, min(SHOWN, stored.get_ylim()[1]))
        ticks = [f"{layout.gpus:,}\n{str(layout).replace(' ', chr(10))}" for layout in study.layouts]
        stored.set_xticks(range(len(ticks)), ticks, fontsize=7.5)
    for row, names, label in zip(grid, (KINDS, MEMORY), ("received", "memory"), strict=True):
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


def main() -> None:
    """Print the tables, or draw the picture."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--plot", type=Path, metavar="FILE", help="also draw the picture")
    args = options.parse_args()
    print_table(CHECK_HEADER, check_lines())
    print()
    print_table(HEADER, lines())
    print()
    print_table(FORMAT_HEADER, format_lines())
    if args.plot is not None:
        print(draw(args.plot))


if __name__ == "__main__":
    main()

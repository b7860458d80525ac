"""Linear layers at few rows beside bfloat16 cuBLAS, gemlite and torchao: ``python -m benchmarks.decode --json F``.

Every contender is a CUDA graph of calls over several weights in turn, so that no weight is in the cache when it is
read. ``--peers`` times gemlite and torchao instead, and two of our configs.
"""

from __future__ import annotations

import logging
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mxtensor as mx

from . import peers
from .cuda import (
    Deadline,
    GpuRow,
    Graph,
    Target,
    cold_copies,
    gpu_arguments,
    graph_clock,
    layer_of,
    machine_line,
    print_failures,
    print_verdicts,
)
from .harness import Prepare, print_table, timed, write_json

BASE = "bfloat16"
ROWS = (1, 4, 16, 64)
CURVE = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192))
"""(N, K)"""
CURVE_SHAPE = (14336, 4096)
FORMATS = ("mxfp8", "mxfp4", "nvfp4", "mxfp6")
WEIGHT_ONLY = "-weight-only"
CURVES = ("mxfp8-weight-only", "mxfp4-weight-only")
PEER_SHAPE = (14336, 4096)
"""The shape at which peers are timed: gemlite tunes itself for seconds at each."""


@dataclass
class DecodeRow(GpuRow):
    """Contenders and bfloat16 ``F.linear`` in turn, at one number of rows of one shape."""

    m: int = 0
    n: int = 0
    k: int = 0


def dense(n: int, k: int) -> list[Tensor]:
    """bfloat16 weights, as many as keep each other out of the cache."""
    return [
        torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(max(2, cold_copies(2 * n * k)))
    ]


def ours(row: DecodeRow, config: str, operands: Sequence[nn.Module], x: Tensor) -> Prepare:
    """Layers that ``mx.quantize_`` has converted, in turn."""

    def prepare() -> Graph:
        with mx.explain() as log:
            operands[0](x)
        row.kernels[config] = ", ".join(dict.fromkeys(entry.kernel for entry in log.entries))
        return Graph([lambda module=module: module(x) for module in operands])  # type: ignore[misc]

    return prepare


def quantized(config: str, n: int, k: int) -> list[nn.Module]:
    """As many layers as keep each other out of the cache."""
    bits = mx.get_format(config.removesuffix(WEIGHT_ONLY)).bits_per_value
    weight = torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * 0.02
    return [mx.quantize_(layer_of(weight), config) for _ in range(max(2, cold_copies(int(n * k * bits / 8))))]


def rows_of(n: int, k: int, rows: Sequence[int], configs: Sequence[str], args: Any) -> list[DecodeRow]:
    """Every config at every number of rows of one shape, in turn with bfloat16."""
    operands = {config: quantized(config, n, k) for config in configs}

    def contenders(row: DecodeRow, x: Tensor, plain: list[Tensor]) -> dict[str, Prepare]:
        return {config: ours(row, config, layers, x) for config, layers in operands.items()}

    return beside_base(n, k, rows, "", contenders, args)


def peer_rows(rows: Sequence[int], args: Any, deadline: Deadline) -> list[DecodeRow]:
    """gemlite and torchao at one shape, while there is time."""

    def contenders(row: DecodeRow, x: Tensor, plain: list[Tensor]) -> dict[str, Prepare]:
        return {
            name: deadline.guard(lambda make=make: Graph(make(plain, x)))  # type: ignore[misc]
            for name, make in peers.DECODE.items()
        }

    return beside_base(*PEER_SHAPE, rows, ", peers", contenders, args)


Contenders = Callable[[DecodeRow, Tensor, list[Tensor]], dict[str, Prepare]]
"""(the row, activations, bfloat16 weights) -> what is timed beside bfloat16."""


def beside_base(n: int, k: int, rows: Sequence[int], what: str, make: Contenders, args: Any) -> list[DecodeRow]:
    """The contenders of ``make`` at every number of rows of one shape, in turn with bfloat16; ``what``: of the rows."""
    plain = dense(n, k)
    found = []
    for m in rows:
        x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
        row = DecodeRow(f"{m}x{n}x{k}{what}", {}, n * k, m=m, n=n, k=k)
        contenders: dict[str, Prepare] = {BASE: lambda x=x: Graph([lambda w=w: F.linear(x, w) for w in plain])}  # type: ignore[misc]
        timed(row, contenders | (others := make(row, x, plain)), args.repeats, clock=graph_clock)
        figures = ", ".join(f"{name} {row.speedup(name):.2f}x" for name in others)
        print(f"{row.work}: {row.times.get(BASE, float('nan')) * 1e3:.1f} us, {figures}", flush=True)
        found.append(row)
    return found


# ---------------------------------------------------------------------------------------------- targets

LIMITS: dict[str, dict[int, tuple[float, float]]] = {
    "mxfp8": {1: (1.85, 1.6), 4: (1.8, 0), 16: (1.6, 1.4), 64: (1.3, 1.1)},
    "mxfp4": {1: (3.0, 2.4), 4: (2.8, 0), 16: (2.2, 1.8), 64: (1.5, 1.2)},
    "nvfp4": {1: (3.0, 2.4), 4: (2.8, 0), 16: (2.2, 1.8), 64: (1.5, 1.2)},
    "mxfp6": {1: (2.2, 0), 4: (2.1, 0), 16: (1.7, 0), 64: (1.2, 0)},
}
"""Format -> rows -> times bfloat16, as the geometric mean of the shapes and at the worst of them."""


def mean_speedup(rows: Sequence[DecodeRow], config: str, m: int) -> float:
    """The geometric mean over the shapes of the table."""
    figures = [
        row.speedup(config) for row in rows if row.m == m and config in row.relative and (row.n, row.k) in SHAPES
    ]
    return statistics.geometric_mean(figures) if figures else float("nan")


def means(config: str, m: int) -> Callable[[Sequence[DecodeRow]], Iterable[tuple[str, float]]]:
    """By the mean of the shapes."""
    return lambda rows: [("", mean_speedup(rows, config, m))]


def worst(config: str, m: int) -> Callable[[Sequence[DecodeRow]], Iterable[tuple[str, float]]]:
    """By shape."""
    return lambda rows: [(row.work, row.speedup(config)) for row in rows if row.m == m]


def large(rows: Sequence[DecodeRow]) -> Iterable[tuple[str, float]]:
    """Time over bfloat16's where the rows are many."""
    for row in rows:
        for config in CURVES:
            if row.m >= 128 and config in row.relative:
                yield f"{config} {row.work}", row.relative[config]


def of(format: str) -> Iterable[Target]:
    """The targets of both configs of a format."""
    for m, (mean, least) in LIMITS[format].items():
        for config in (format + WEIGHT_ONLY, format):
            name = f"{config}, {m} row{'' if m == 1 else 's'}"
            yield Target(f"{name}, mean", ">=", mean, means(config, m))
            if least:
                yield Target(f"{name}, every shape", ">=", least, worst(config, m))


TARGETS = (
    *(target for format in LIMITS for target in of(format)),
    Target("128 to 512 rows, time over bfloat16", "<=", 1.10, large),
)


HEADER = ["rows", "config", *(f"{n}x{k}" for n, k in SHAPES), "mean", "kernels"]


def lines(rows: Sequence[DecodeRow]) -> list[list[str]]:
    """A line for each number of rows and config: times bfloat16 (and microseconds) by shape."""
    found = []
    for m in ROWS:
        for config in [f + end for f in FORMATS for end in (WEIGHT_ONLY, "")]:
            by_shape = {(row.n, row.k): row for row in rows if row.m == m and config in row.relative}
            cells = []
            for shape in SHAPES:
                row = by_shape.get(shape)
                cells.append(f"{row.speedup(config):.2f} ({row.times[config] * 1e3:.1f} us)" if row else "")
            if any(cells):
                kernels = "; ".join(dict.fromkeys(row.kernels.get(config, "") for row in by_shape.values()))
                mean = mean_speedup(rows, config, m)
                found.append([str(m), config, *cells, "" if math.isnan(mean) else f"{mean:.2f}", kernels])
    return found


def peer_names() -> list[str]:
    """Ours, then the peers."""
    return [*CURVES, *peers.DECODE]


def peer_lines(rows: Sequence[DecodeRow]) -> list[list[str]]:
    """A line for each number of rows at which a peer was timed."""
    found = []
    for m in ROWS:
        same = [row for row in rows if row.m == m and (row.n, row.k) == PEER_SHAPE]
        figures = {name: row.speedup(name) for row in same for name in row.relative}
        if figures.keys() & peers.DECODE.keys():
            found.append([str(m), *(f"{figures[name]:.2f}" if name in figures else "" for name in peer_names())])
    return found


def main() -> None:
    """Time every config on every shape and the curve; or two configs and the peers, while there is time."""
    args = gpu_arguments(__doc__ or "", seconds=240, peers="time gemlite and torchao, at one shape")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    deadline = Deadline(args.seconds)
    configs = [f + end for f in FORMATS for end in (WEIGHT_ONLY, "")]
    rows: list[DecodeRow] = []
    with torch.no_grad():
        if args.peers:
            rows += rows_of(*PEER_SHAPE, ROWS, CURVES, args) + peer_rows(ROWS, args, deadline)
        else:
            for n, k in SHAPES[:1] if args.quick else SHAPES:
                rows += rows_of(n, k, ROWS, configs, args)
            if not args.quick:
                rows += rows_of(*CURVE_SHAPE, [m for m in CURVE if m not in ROWS], CURVES, args)
    print(f"\n{machine_line()}\n")
    if args.peers:
        print_table(["rows", *peer_names()], peer_lines(rows))
    else:
        print_table(HEADER, lines(rows))
        print_verdicts(TARGETS, rows)
    print_failures(rows)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()

"""Linear layers on a GPU beside bfloat16 cuBLAS and torchao: ``python -m benchmarks.linear --json F`` (``--quick``)."""

from __future__ import annotations

import logging
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
    Target,
    cold_copies,
    event_clock,
    gpu_arguments,
    layer_of,
    log_kernels,
    machine_line,
    print_failures,
    print_verdicts,
    rotate_inputs,
)
from .harness import Prepare, print_table, timed, write_json

CONFIGS = ("mxfp8", "mxfp4", "nvfp4", "mxfp6_e2m3", "mxint8", "mxfp8-weight-only", "float8_tensor", "float8_row")
"""What ``mx.quantize_`` is given; without ``-weight-only`` activations are cast on the fly."""
TOKENS = (4096, 8192)
WEIGHTS = ((4096, 4096), (14336, 4096), (8192, 8192))
"""(N, K)"""
PEER_TOKENS = 4096
"""The M at which torchao stands beside us: it compiles anew for each."""
BASE = "bfloat16"
Pairs = list[tuple[Tensor, Tensor]]


@dataclass
class LinearRow(GpuRow):
    """One contender and bfloat16 ``F.linear`` in turn, on one shape."""

    contender: str = ""
    shape: str = ""
    """MxNxK: rows of activations, rows of the weight, columns of both."""

    @property
    def over_base(self) -> float:
        """Median of time over bfloat16's of the same round."""
        return self.relative.get(self.contender, float("nan"))

    def tflops(self, contender: str) -> float:
        """Useful floating-point operations, in 10^12 a second."""
        m, n, k = map(int, self.shape.split("x"))
        return 2 * m * n * k / self.times[contender] / 1e9 if contender in self.times else float("nan")


def linear_row(name: str, pairs: Pairs, prepare: Callable[[LinearRow], Prepare], args: Any) -> LinearRow:
    """Contender ``name`` in turn with bfloat16, which has the two nearest in time in every round."""
    (m, k), n = pairs[0][0].shape, pairs[0][1].shape[0]
    shape = f"{m}x{n}x{k}"
    row = LinearRow(f"{name} {shape}", {}, contender=name, shape=shape)
    both = {BASE: rotate_inputs(pairs, lambda pair: F.linear(*pair)), name: prepare(row)}
    timed(row, both, args.repeats, clock=event_clock(6.0, max_calls=12), seconds=1.5)
    print(f"{row.work}: {row.over_base:.3f} of {row.times.get(BASE, float('nan')):.4f} ms", flush=True)
    return row


def ours(config: str, pairs: Pairs) -> Callable[[LinearRow], Prepare]:
    """nn.Linear layers under ``mx.quantize_``."""

    def layers() -> list[tuple[Tensor, nn.Module]]:
        operands: list[tuple[Tensor, nn.Module]] = []
        for x, weight in pairs:
            operands.append((x, mx.quantize_(layer_of(weight), config)))
        return operands

    def contender(row: LinearRow) -> Prepare:
        return lambda: log_kernels(row, config, layers(), lambda pair: pair[1](pair[0]))()

    return contender


def cold_pairs(m: int, n: int, k: int, device: str) -> Pairs:
    """Activations and weights, as many as keep each other out of the cache, even in four bits per weight."""
    return [
        (
            torch.randn(m, k, dtype=torch.bfloat16, device=device),
            torch.randn(n, k, dtype=torch.bfloat16, device=device) * 0.02,
        )
        for _ in range(cold_copies(2 * m * k + n * k // 2))
    ]


# ---------------------------------------------------------------------------------------------- targets


def ratios(*names: str) -> Callable[[Sequence[LinearRow]], Iterable[tuple[str, float]]]:
    """Time over bfloat16 of these contenders."""
    return lambda rows: [(row.work, row.over_base) for row in rows if row.contender in names]


TARGETS = (
    Target("MXFP8 over bfloat16", "<=", 1.06, ratios("mxfp8")),
    Target("MXFP4 and NVFP4 over bfloat16", "<=", 1.10, ratios("mxfp4", "nvfp4")),
    Target("float8 per tensor and row over bfloat16", "<=", 0.65, ratios("float8_tensor", "float8_row")),
)


# ---------------------------------------------------------------------------------------------- tables

HEADER = ["shape", "contender", "ms", "TFLOP/s", "bf16 ms", "over bf16", "kernels"]


def cells(row: LinearRow) -> list[str]:
    """The line of the printed table."""
    name, base = row.contender, row.times.get(BASE, float("nan"))
    if name not in row.times:
        return [row.shape, name, "fails", "", f"{base:.4f}", "", ""]
    figures = [f"{row.times[name]:.4f}", f"{row.tflops(name):.0f}", f"{base:.4f}", f"{row.over_base:.3f}"]
    return [row.shape, name, *figures, row.kernels.get(name, "")]


def summary(rows: Sequence[LinearRow]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: contenders down, shapes across; time over bfloat16, and bfloat16's own milliseconds."""
    shapes = list(dict.fromkeys(row.shape for row in rows))
    found = {(row.contender, row.shape): row for row in rows}

    def own(shape: str) -> str:
        times = sorted(row.times[BASE] for row in rows if row.shape == shape and BASE in row.times)
        return f"{times[len(times) // 2]:.3f} ms" if times else ""

    def cell(row: LinearRow | None) -> str:
        if row is None:
            return ""
        return f"{row.over_base:.2f}" if row.contender in row.times else "fails"

    lines = [[f"{BASE} `F.linear`", *map(own, shapes), "cuBLAS"]]
    for name in dict.fromkeys(row.contender for row in rows):
        mine = [found.get((name, shape)) for shape in shapes]
        kernels = dict.fromkeys(row.kernels[name] for row in mine if row is not None and name in row.kernels)
        lines.append([name, *map(cell, mine), "; ".join(kernels)])
    return ["contender", *shapes, "kernels"], lines


def main() -> None:
    """Time every contender on every shape: ours first, then torchao's while there is time."""
    args = gpu_arguments(__doc__ or "", seconds=170)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    deadline = Deadline(args.seconds)
    shapes = [(m, n, k) for m in TOKENS for n, k in WEIGHTS]
    if args.quick:
        shapes = shapes[:1]
    rows: list[LinearRow] = []

    def peer(name: str, convert: Callable[[nn.Module], Any], pairs: Pairs, compile: bool) -> LinearRow:
        prepare = deadline.guard(peers.linear(convert, pairs, compile))
        return linear_row(name, pairs, lambda row: prepare, args)

    with torch.no_grad():
        for shape in shapes:
            pairs = cold_pairs(*shape, args.device)
            rows += [linear_row(config, pairs, ours(config, pairs), args) for config in CONFIGS]
        for compile in (False,) if args.quick else (False, True):
            for shape in (shape for shape in shapes if shape[0] == PEER_TOKENS):
                pairs = cold_pairs(*shape, args.device)
                for label, (convert, compiles) in peers.LINEARS.items():
                    if compiles or not compile:
                        rows.append(peer(label + " compiled" * compile, convert, pairs, compile))
    print(f"\n{machine_line()}\n")
    order = {f"{m}x{n}x{k}": place for place, (m, n, k) in enumerate(shapes)}
    print_table(HEADER, [cells(row) for row in sorted(rows, key=lambda row: order[row.shape])])
    print_failures(rows)
    print_verdicts(TARGETS, rows)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()

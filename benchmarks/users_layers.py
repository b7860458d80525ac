"""The command ``layers`` of ``benchmarks.users``: every linear shape of public models, at 1 to 512 rows.

Every contender is a CUDA graph of calls over several weights in turn, so that no weight is in the L2 cache when it is
read. A figure is a speed over that of bfloat16: higher is better.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mxtensor as mx

from .cuda import Graph, cold_copies, graph_clock, layer_of, print_failures, print_header
from .decode import BASE, WEIGHT_ONLY, DecodeRow
from .harness import Prepare, Progress, Work, print_table, timed, wall_clock, write_json

Shape = tuple[int, int]
"""(N, K) of a weight."""


class Model(NamedTuple):
    """The sizes of a public model."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int = 128
    fused_qkv: bool = False
    fused_gate: bool = False
    """Gate and up are one weight, as in layers of experts."""

    def shapes(self) -> dict[Shape, str]:
        """(N, K) -> the name of the layer."""
        q, kv = self.heads * self.head, self.kv_heads * self.head
        inputs = {"qkv": q + 2 * kv} if self.fused_qkv else {"kv": kv, "q": q}
        gate = {"gate_up": 2 * self.inner} if self.fused_gate else {"gate": self.inner}
        return {
            **{(n, self.hidden): name for name, n in (inputs | gate).items()},
            (self.hidden, q): "q, o" if q == self.hidden and not self.fused_qkv else "o",
            (self.hidden, self.inner): "down",
        }


MODELS = {
    "Llama 3 8B": Model(4096, 14336, 32, 8),
    "Llama 3 70B": Model(8192, 28672, 64, 8),
    "Qwen 3 8B": Model(4096, 12288, 32, 8),
    "Qwen 3 30B-A3B": Model(2048, 768, 32, 4, fused_gate=True),
    "gpt-oss-20b": Model(2880, 2880, 64, 8, head=64, fused_gate=True),
    "Mistral Small 24B": Model(5120, 32768, 32, 8),
    "Gemma 3 12B": Model(3840, 15360, 16, 8, head=256),
    "Phi 4": Model(5120, 17920, 40, 10, fused_qkv=True, fused_gate=True),
}
"""From the ``config.json`` of each model."""
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 256, 384, 512)
QUICK_ROWS, QUICK_SHAPES = (1, 8, 32, 64, 160, 512), 10
FORMATS = ("mxfp8-weight-only", "mxfp8", "mxfp4-weight-only")
BANDS = ((1, 64), (65, 512))
"""Least and largest number of rows of a summary."""
TOP = 20
"""Worst figures that are listed."""
STEP, SIZES, DRAWN = 32, (512, 18432), 10
"""Shapes that are drawn: N and K are multiples of STEP between SIZES."""


def model_shapes() -> dict[Shape, str]:
    """Every distinct (N, K) of MODELS -> the models and layers that have it."""
    found: dict[Shape, list[str]] = {}
    for name, model in MODELS.items():
        for shape, layer in model.shapes().items():
            found.setdefault(shape, []).append(f"{name} {layer}")
    return {shape: "; ".join(names) for shape, names in found.items()}


def random_shapes(seed: int, count: int = DRAWN) -> dict[Shape, str]:
    """As many other shapes: nobody has measured launch configs for them."""
    draw, found = random.Random(seed), dict[Shape, str]()
    while len(found) < count:
        n, k = (STEP * draw.randint(SIZES[0] // STEP, SIZES[1] // STEP) for _ in range(2))
        if (n, k) not in model_shapes():
            found[n, k] = "drawn"
    return found


# ---------------------------------------------------------------------------------------------- measuring


def plain(n: int, k: int, device: str) -> Tensor:
    """A random bfloat16 weight."""
    return torch.randn(n, k, dtype=torch.bfloat16, device=device) * 0.02


def bits_of(config: str) -> float:
    """Bits of a stored value, with its fraction of the scales."""
    return 16 if config == BASE else mx.get_format(config.removesuffix(WEIGHT_ONLY)).bits_per_value


def layers_of(config: str, n: int, k: int, device: str) -> list[nn.Module]:
    """As many layers of this shape as evict each other from the L2 cache."""
    count = max(2, cold_copies(int(n * k * bits_of(config) / 8))) if device == "cuda" else 2
    weights = [plain(n, k, device) for _ in range(count)] if config == BASE else [plain(n, k, device)] * count
    layers: list[nn.Module] = [layer_of(weight) for weight in weights]
    return layers if config == BASE else [mx.quantize_(layer, config) for layer in layers]


def calls_of(row: DecodeRow, config: str, layers: Sequence[nn.Module], x: Tensor) -> Prepare:
    """The calls of these layers in turn: one CUDA graph, or on a CPU one after the other."""

    def prepare() -> Work:
        if config != BASE:
            with mx.explain() as log:
                layers[0](x)
            row.kernels[config] = ", ".join(dict.fromkeys(entry.kernel for entry in log.entries))
        calls = [lambda layer=layer: layer(x) for layer in layers]
        return Graph(calls) if x.is_cuda else lambda: [call() for call in calls]

    return prepare


def compile_kernels(shapes: Sequence[Shape], rows: Sequence[int], formats: Sequence[str], device: str) -> float:
    """Call each shape once at each number of rows, in a thread per processor; return the seconds that this took.

    The first shape runs in one thread and compiles the Triton kernels, which all shapes share. The others compile CUDA
    sources: their compiler releases the lock of the interpreter.
    """
    begin = time.perf_counter()

    def one(shape: Shape) -> None:
        with torch.no_grad(), suppress(Exception):  # it will be raised again, and recorded, where the shape is timed
            weight = plain(*shape, device)
            for config in formats:
                layer = mx.quantize_(layer_of(weight), config)
                for m in rows:
                    layer(torch.zeros(m, shape[1], dtype=torch.bfloat16, device=device))

    one(shapes[0])
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        list(pool.map(one, shapes[1:]))
    return time.perf_counter() - begin


def shape_rows(shape: Shape, rows: Sequence[int], formats: Sequence[str], args: Any) -> list[DecodeRow]:
    """Every format at every number of rows of one shape, in turn with bfloat16."""
    n, k = shape
    operands = {config: layers_of(config, n, k, args.device) for config in (BASE, *formats)}
    found = []
    for m in rows:
        x = torch.randn(m, k, dtype=torch.bfloat16, device=args.device)
        row = DecodeRow(f"{m}x{n}x{k}", {}, n * k, m=m, n=n, k=k)
        contenders = {config: calls_of(row, config, layers, x) for config, layers in operands.items()}
        clock = graph_clock if args.device == "cuda" else wall_clock
        found.append(timed(row, contenders, args.repeats, warmup=2, clock=clock))
    return found


# ---------------------------------------------------------------------------------------------- figures


class Figure(NamedTuple):
    """The speed of a format over that of bfloat16, at one number of rows of one shape."""

    speed: float
    config: str
    row: DecodeRow


def figures(rows: Sequence[DecodeRow]) -> list[Figure]:
    """Every figure, the worst first."""
    found = [Figure(row.speedup(config), config, row) for row in rows for config in row.relative if config != BASE]
    return sorted(found, key=lambda figure: figure.speed)


WORST_HEADER = ["M x N x K", "format", "over bf16", "us", "bf16 us", "kernels", "layers"]


def worst_lines(found: Sequence[Figure], names: Mapping[Shape, str], top: int = TOP) -> list[list[str]]:
    """The worst figures, with the kernels that ran and the layers of this shape."""
    return [
        [
            row.work, config, f"{speed:.2f}", f"{row.times[config] * 1e3:.1f}", f"{row.times[BASE] * 1e3:.1f}",
            row.kernels.get(config, ""), names.get((row.n, row.k), ""),
        ]
        for speed, config, row in found[:top]
    ]  # fmt: skip


SUMMARY_HEADER = ["rows", "format", "geometric mean", "worst", "where", "slower than bf16"]


def summary_line(rows: str, config: str, found: Sequence[Figure]) -> list[str]:
    """The geometric mean and the worst of these figures, and how many of them are below 1."""
    mean = statistics.geometric_mean(figure.speed for figure in found)
    worst, slower = found[0], sum(figure.speed < 1 for figure in found)
    return [rows, config, f"{mean:.2f}", f"{worst.speed:.2f}", worst.row.work, f"{slower} of {len(found)}"]


def summary(found: Sequence[Figure], by: Callable[[int], str]) -> list[list[str]]:
    """A line for each format and each ``by(rows)`` that is not empty. ``found`` begins with the worst figure."""
    groups: dict[tuple[str, str], list[Figure]] = {}
    for figure in found:
        groups.setdefault((figure.config, by(figure.row.m)), []).append(figure)
    configs = list(dict.fromkeys(config for row in found for config in row.row.relative if config != BASE))
    names = list(dict.fromkeys(by(m) for m in sorted({figure.row.m for figure in found})))
    return [
        summary_line(name, config, groups[config, name])
        for config in configs
        for name in names
        if name and (config, name) in groups
    ]


def band_of(m: int) -> str:
    """The name of the band that has ``m`` rows."""
    return next((f"{low} to {high}" for low, high in BANDS if low <= m <= high), "")


# ---------------------------------------------------------------------------------------------- the command


def add_options(options: argparse.ArgumentParser) -> None:
    """The options of this command."""
    options.add_argument("--quick", action="store_true", help=f"{QUICK_SHAPES} of the shapes, {len(QUICK_ROWS)} rows")
    text = f"instead of the models' shapes, {DRAWN} random ones that this number seeds"
    options.add_argument("--seed-shapes", type=int, metavar="SEED", help=text)
    options.add_argument("--formats", nargs="+", default=FORMATS, help=f"default: {' '.join(FORMATS)}")
    options.add_argument("--rows", nargs="+", type=int, help="rows of activations")
    options.add_argument("--seconds", type=float, default=240, help="begin no shape after this time (default: 240)")


def chosen_shapes(args: argparse.Namespace) -> dict[Shape, str]:
    """The shapes that these options ask for."""
    if args.seed_shapes is not None:
        return random_shapes(args.seed_shapes)
    shapes = model_shapes()
    if not args.quick:
        return shapes
    every = len(shapes) // QUICK_SHAPES
    return dict(list(shapes.items())[: every * QUICK_SHAPES : every])


def run(args: argparse.Namespace) -> None:
    """GPU time of the linear layers of eight public models."""
    shapes, rows = chosen_shapes(args), args.rows or (QUICK_ROWS if args.quick else ROWS)
    if args.tiny:
        shapes, rows = {(64, 96): "toy", (96, 64): "toy"}, (1, 80)
    end = time.monotonic() + args.seconds
    found: list[DecodeRow] = []
    with torch.no_grad():
        x, w = plain(512, 4096, args.device), plain(4096, 4096, args.device)
        for _ in range(2 if args.tiny else 500):  # to the clock of a busy GPU
            F.linear(x, w)
        seconds = compile_kernels(list(shapes), rows, args.formats, args.device)
        progress = Progress(len(shapes), "shapes")
        for shape in shapes:
            if time.monotonic() > end:
                break
            found += shape_rows(shape, rows, args.formats, args)
            worst = figures(found)[0] if figures(found) else None
            progress.step(f"worst {worst.speed:.2f}, {worst.config} {worst.row.work}" if worst else "")
        progress.close()
    print_header()
    print(f"the first call of each kernel: {seconds:.1f} s; {progress.done} of {len(shapes)} shapes timed; ", end="")
    print("figures are speeds over that of bfloat16\n")
    sorted_figures = figures(found)
    print_table(WORST_HEADER, worst_lines(sorted_figures, shapes))
    print()
    print_table(SUMMARY_HEADER, summary(sorted_figures, band_of))
    print()
    print_table(SUMMARY_HEADER, summary(sorted_figures, str))
    print_failures(found)
    write_json(args.json, found, layers={f"{n}x{k}": name for (n, k), name in shapes.items()})

"""Linear layers and experts in inference on a GPU beside bfloat16: ``python -m benchmarks.layers --json FILE``.

A figure is a speed over that of bfloat16 in the same rounds: higher is better. Up to 512 rows every contender is a CUDA
graph of calls over several weights in turn, so that none is in the L2 cache when it is read.

    python -m benchmarks.layers models --seed-shapes 1                   ten random shapes instead of the models'
    python -m benchmarks.layers --one mxfp4-weight-only 1 14336 4096     one product, for a profiler such as ncu
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mxtensor as mx

from . import peers
from .cuda import (
    Deadline,
    alternating,
    copies,
    event_clock,
    graph_clock,
    kernels_of,
    layer_of,
    log_kernels,
    rotate_inputs,
)
from .harness import Prepare, Progress, Row, Section, Work, parser, print_table, timed
from .harness import run as run_sections

BASE, WEIGHT_ONLY = "bfloat16", "-weight-only"
Shape = tuple[int, int]
"""(N, K) of a weight."""


@dataclass
class LayerRow(Row):
    """The formats and bfloat16 in turn: ``m`` rows of activations, a weight (n, k)."""

    m: int = 0
    n: int = 0
    k: int = 0


# ---------------------------------------------------------------------------------------------- shapes


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
ROWS = (1, 8, 32, 64, 96, 160, 256, 512)
FORMATS = ("mxfp8-weight-only", "mxfp8", "mxfp4-weight-only")
EVERY_FORMAT = tuple(name + end for name in ("mxfp8", "mxfp4", "nvfp4", "mxfp6") for end in (WEIGHT_ONLY, ""))
FEW = (1, 4, 16, 64)
FIVE: tuple[Shape, ...] = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192))
PEER_SHAPE = (14336, 4096)
"""The shape at which peers are timed: gemlite tunes itself for seconds at each."""
PEER_FORMATS = ("mxfp8-weight-only", "mxfp4-weight-only")
TOY: dict[Shape, str] = {(64, 96): "toy", (96, 64): "toy"}
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


# ---------------------------------------------------------------------------------------------- few rows


def plain(n: int, k: int, device: str) -> Tensor:
    """A random bfloat16 weight."""
    return torch.randn(n, k, dtype=torch.bfloat16, device=device) * 0.02


def layers_of(config: str, n: int, k: int, device: str) -> list[nn.Module]:
    """As many layers of this shape as evict each other from the L2 cache."""
    bits = 16 if config == BASE else mx.get_format(config.removesuffix(WEIGHT_ONLY)).bits_per_value
    count = max(2, copies(int(n * k * bits / 8)))
    weights = [plain(n, k, device) for _ in range(count)] if config == BASE else [plain(n, k, device)] * count
    layers: list[nn.Module] = [layer_of(weight) for weight in weights]
    return layers if config == BASE else [mx.quantize_(layer, config) for layer in layers]


def calls_of(row: LayerRow, config: str, layers: Sequence[nn.Module], x: Tensor) -> Prepare:
    """The calls of these layers in turn."""

    def prepare() -> Work:
        if config != BASE:
            row.kernels[config] = kernels_of(lambda: layers[0](x))
        return alternating([partial(layer, x) for layer in layers])

    return prepare


Beside = Callable[[Sequence[nn.Module], Tensor], dict[str, Prepare]]
"""(bfloat16 layers, activations) -> other contenders."""


def shape_rows(
    shape: Shape, rows: Sequence[int], formats: Sequence[str], args: argparse.Namespace, beside: Beside | None = None
) -> list[LayerRow]:
    """Every format at every number of rows of one shape, in turn with bfloat16."""
    n, k = shape
    operands = {config: layers_of(config, n, k, args.device) for config in (BASE, *formats)}
    found = []
    for m in rows:
        x = torch.randn(m, k, dtype=torch.bfloat16, device=args.device)
        row = LayerRow(f"{m}x{n}x{k}", {}, n * k, m=m, n=n, k=k)
        contenders = {config: calls_of(row, config, layers, x) for config, layers in operands.items()}
        if beside is not None:
            contenders |= beside(operands[BASE], x)
        found.append(timed(row, contenders, args.repeats, warmup=2, clock=graph_clock))
    return found


def compile_kernels(shapes: Sequence[Shape], rows: Sequence[int], formats: Sequence[str], device: str) -> None:
    """Call each shape once at each number of rows, in a thread per processor.

    The first shape runs in one thread and compiles the Triton kernels, which all shapes share. The others compile CUDA
    sources: their compiler releases the lock of the interpreter.
    """

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


def swept(
    shapes: Mapping[Shape, str], rows: Sequence[int], formats: Sequence[str], args: argparse.Namespace
) -> list[LayerRow]:
    """The rows of these shapes, of those that begin before ``--seconds``; prints the worst figures and the means."""
    end, found = time.monotonic() + args.seconds, list[LayerRow]()
    with torch.no_grad():
        x, w = plain(512, 4096, args.device), plain(4096, 4096, args.device)
        for _ in range(2 if args.tiny else 500):  # to the clock of a busy GPU
            F.linear(x, w)
        compile_kernels(list(shapes), rows, formats, args.device)
        progress = Progress(len(shapes), "shapes")
        for shape in shapes:
            if time.monotonic() > end:
                break
            found += shape_rows(shape, rows, formats, args)
            progress.step(f"{shape[0]}x{shape[1]}")
        progress.close()
    sorted_figures = figures(found)
    print_table(WORST_HEADER, worst_lines(sorted_figures, shapes))
    print()
    print_table(SUMMARY_HEADER, summary(sorted_figures, str))
    return found


def models(args: argparse.Namespace) -> list[LayerRow]:
    """GPU time of the linear layers of eight public models."""
    shapes = model_shapes() if args.seed_shapes is None else random_shapes(args.seed_shapes)
    rows = args.rows or ((1, 80) if args.tiny else ROWS)
    return swept(TOY if args.tiny else shapes, rows, args.formats or FORMATS, args)


def formats(args: argparse.Namespace) -> list[LayerRow]:
    """Every format with casts of activations and without, at few rows of five shapes."""
    shapes = TOY if args.tiny else dict.fromkeys(FIVE, "")
    return swept(shapes, args.rows or ((1,) if args.tiny else FEW), args.formats or EVERY_FORMAT, args)


def beside_peers(args: argparse.Namespace) -> list[LayerRow]:
    """Two of our formats, gemlite and torchao, at one shape."""
    deadline = Deadline(args.seconds)

    def beside(layers: Sequence[nn.Module], x: Tensor) -> dict[str, Prepare]:
        weights = [layer.weight for layer in layers]
        return {
            name: deadline.guard(lambda make=make: alternating(make(weights, x)))  # type: ignore[misc]
            for name, make in peers.DECODE.items()
        }

    shape, rows = (next(iter(TOY)), (1,)) if args.tiny else (PEER_SHAPE, FEW)
    with torch.no_grad():
        found = shape_rows(shape, args.rows or rows, PEER_FORMATS, args, beside)
    names = [*PEER_FORMATS, *peers.DECODE]
    print_table(["rows", *names], [[str(row.m), *(f"{row.speedup(name):.2f}" for name in names)] for row in found])
    return found


# ---------------------------------------------------------------------------------------------- figures


class Figure(NamedTuple):
    """The speed of a format over that of bfloat16, at one number of rows of one shape."""

    speed: float
    config: str
    row: LayerRow


def figures(rows: Sequence[LayerRow]) -> list[Figure]:
    """Every figure, the worst first."""
    found = [Figure(row.speedup(config), config, row) for row in rows for config in row.relative if config != BASE]
    return sorted(found, key=lambda figure: figure.speed)


WORST_HEADER = ["M x N x K", "format", "over bf16", "us", "bf16 us", "kernels", "layers"]
SUMMARY_HEADER = ["rows", "format", "geometric mean", "worst", "where", "slower than bf16"]


def worst_lines(found: Sequence[Figure], names: Mapping[Shape, str], top: int = 20) -> list[list[str]]:
    """The worst figures, with the kernels that ran and the layers of this shape."""
    return [
        [
            row.work, config, f"{speed:.2f}", f"{row.times[config] * 1e3:.1f}", f"{row.times[BASE] * 1e3:.1f}",
            row.kernels.get(config, ""), names.get((row.n, row.k), ""),
        ]
        for speed, config, row in found[:top]
    ]  # fmt: skip


def summary(found: Sequence[Figure], by: Callable[[int], str]) -> list[list[str]]:
    """A line for each format and each ``by(rows)`` that is not empty. ``found`` begins with the worst figure."""
    groups: dict[tuple[str, str], list[Figure]] = {}
    for figure in found:
        groups.setdefault((figure.config, by(figure.row.m)), []).append(figure)
    configs = list(dict.fromkeys(config for row in found for config in row.row.relative if config != BASE))
    names = list(dict.fromkeys(by(m) for m in sorted({figure.row.m for figure in found})))
    lines = []
    for config in configs:
        for name in names:
            if name and (each := groups.get((config, name))):
                mean = statistics.geometric_mean(figure.speed for figure in each)
                slower = f"{sum(figure.speed < 1 for figure in each)} of {len(each)}"
                lines.append([name, config, f"{mean:.2f}", f"{each[0].speed:.2f}", each[0].row.work, slower])
    return lines


# ---------------------------------------------------------------------------------------------- thousands of rows

LARGE_FORMATS = ("mxfp8", "mxfp4", "nvfp4", "mxfp6_e2m3", "mxint8", "mxfp8-weight-only", "float8_tensor", "float8_row")
"""Without ``-weight-only`` activations are cast on the fly."""
TOKENS, WEIGHTS = (4096, 8192), ((4096, 4096), (14336, 4096), (8192, 8192))
PEER_TOKENS = 4096
"""The M at which torchao stands beside us: it compiles anew for each."""
Pairs = list[tuple[Tensor, Tensor]]
"""(activations, weight)"""


def cold_pairs(m: int, n: int, k: int, device: str) -> Pairs:
    """Activations and weights, as many as keep each other out of the cache, even in four bits per weight."""
    count = copies(2 * m * k + n * k // 2)
    return [(torch.randn(m, k, dtype=torch.bfloat16, device=device), plain(n, k, device)) for _ in range(count)]


def large_row(name: str, pairs: Pairs, prepare: Callable[[LayerRow], Prepare], args: argparse.Namespace) -> LayerRow:
    """Contender ``name`` in turn with bfloat16 alone: the GPU lowers its clocks under load."""
    (m, k), n = pairs[0][0].shape, pairs[0][1].shape[0]
    row = LayerRow(f"{name} {m}x{n}x{k}", {}, m=m, n=n, k=k)
    both = {BASE: rotate_inputs(pairs, lambda pair: F.linear(*pair)), name: prepare(row)}
    return timed(row, both, args.repeats, clock=event_clock(6.0, max_calls=12), seconds=1.5)


def ours(config: str, pairs: Pairs) -> Callable[[LayerRow], Prepare]:
    """nn.Linear layers under ``mx.quantize_``."""

    def contender(row: LayerRow) -> Prepare:
        def prepare() -> Work:
            layers = [(x, mx.quantize_(layer_of(weight), config)) for x, weight in pairs]
            return log_kernels(row, config, layers, lambda pair: pair[1](pair[0]))()

        return prepare

    return contender


def large(args: argparse.Namespace) -> list[LayerRow]:
    """Layers of thousands of rows: ours first, then torchao's while there is time."""
    deadline, rows = Deadline(args.seconds), list[LayerRow]()
    shapes = [(16, 64, 96)] if args.tiny else [(m, n, k) for m in TOKENS for n, k in WEIGHTS]
    with torch.no_grad():
        progress = Progress(len(shapes), "shapes")
        for shape in shapes:
            pairs = cold_pairs(*shape, args.device)
            rows += [large_row(config, pairs, ours(config, pairs), args) for config in args.formats or LARGE_FORMATS]
            progress.step("x".join(map(str, shape)))
        progress.close()
        for compile in (False, True):
            for shape in (shape for shape in shapes if shape[0] == PEER_TOKENS):
                pairs = cold_pairs(*shape, args.device)
                for label, (convert, compiles) in peers.LINEARS.items():
                    if compiles or not compile:
                        theirs = deadline.guard(peers.linear(convert, pairs, compile))
                        rows.append(large_row(label + " compiled" * compile, pairs, lambda _, p=theirs: p, args))  # type: ignore[misc]
    lines = [
        [row.work, name, f"{ms:.4f}", f"{row.over_base(name):.3f}", row.kernels.get(name, "")]
        for row in rows
        for name, ms in row.times.items()
    ]
    print_table(["layer", "contender", "ms", "time over bf16", "kernels"], lines)
    return rows


# ---------------------------------------------------------------------------------------------- experts


class Stack(NamedTuple):
    """The experts of a layer; each token goes to ``chosen`` of them."""

    experts: int
    chosen: int
    width: int
    """N"""
    cols: int
    """K"""

    def __str__(self) -> str:
        return f"{self.experts}x{self.width}x{self.cols}"


STACKS = {
    "Mixtral 8x7B gate_up": Stack(8, 2, 28672, 4096),
    "Mixtral 8x7B down": Stack(8, 2, 4096, 14336),
    "OLMoE gate_up": Stack(64, 8, 2048, 2048),
    "OLMoE down": Stack(64, 8, 2048, 1024),
    "Qwen 3 30B-A3B gate_up": Stack(128, 8, 1536, 2048),
    "Qwen 3 30B-A3B down": Stack(128, 8, 2048, 768),
    "gpt-oss-20b gate_up": Stack(32, 4, 5760, 2880),
    "gpt-oss-20b down": Stack(32, 4, 2880, 2880),
}
"""From the ``config.json`` of each model."""
BATCHES = (1, 4, 16, 64)
EXPERT_FORMATS = ("mxfp8-weight-only", "mxfp4-weight-only")
"""``mx.quantize`` makes weights whose activations stay in high precision."""
CHOICES = 16
"""Calls of a graph, each with another random choice of experts: together they read more than the L2 cache holds."""


@dataclass
class ExpertsRow(Row):
    """The formats and bfloat16 in turn, at one number of tokens of one stack."""

    stack: str = ""
    batch: int = 0


def choices_of(stack: Stack, batch: int, device: str, picked: bool) -> list[Tensor]:
    """CHOICES random choices: the ends of each expert's rows, int32 (experts,), or the expert of each row."""
    draw, found = torch.Generator().manual_seed(0), []
    for _ in range(CHOICES):
        chosen = torch.stack([torch.randperm(stack.experts, generator=draw)[: stack.chosen] for _ in range(batch)])
        counts = torch.bincount(chosen.flatten(), minlength=stack.experts)
        found.append(chosen.flatten().to(device) if picked else counts.cumsum(0).to(device, torch.int32))
    return found


def product(x: Tensor, weight: Tensor, choice: Tensor, picked: bool) -> Tensor:
    """The results of the rows x (M, K), in the order of tokens or of experts."""
    if picked:
        return torch.bmm(weight[choice], x.unsqueeze(-1)).squeeze(-1)
    return F.grouped_mm(x, weight.mT, offs=choice)


def stack_rows(name: str, stack: Stack, picked: bool, args: argparse.Namespace) -> list[ExpertsRow]:
    """Every format at every number of tokens of one stack, in turn with bfloat16."""
    size = stack.experts, stack.width, stack.cols
    dense = torch.randn(*size, dtype=torch.bfloat16, device=args.device) * 0.02
    configs = args.formats or EXPERT_FORMATS
    weights = {BASE: dense} | {c: mx.quantize(dense, c.removesuffix(WEIGHT_ONLY)) for c in configs}
    found = []
    for batch in args.rows or BATCHES:
        x = torch.randn(batch * stack.chosen, stack.cols, dtype=torch.bfloat16, device=args.device)
        row = ExpertsRow(f"{name}, {batch} tokens", {}, math.prod(size), stack=str(stack), batch=batch)
        choices = choices_of(stack, batch, args.device, picked)

        def prepare(config: str, row: ExpertsRow = row, x: Tensor = x, choices: list[Tensor] = choices) -> Work:
            calls = [lambda choice=choice: product(x, weights[config], choice, picked) for choice in choices]
            row.kernels[config] = kernels_of(calls[0])
            return alternating(calls)

        contenders: dict[str, Prepare] = {c: lambda c=c, prepare=prepare: prepare(c) for c in weights}  # type: ignore[misc]
        found.append(timed(row, contenders, args.repeats, warmup=2, clock=graph_clock))
    return found


def experts(args: argparse.Namespace, picked: bool = False) -> list[ExpertsRow]:
    """The experts of public models while they decode: ``F.grouped_mm``; ``picked``: bmm of a matrix for each row."""
    stacks = {"toy": Stack(4, 2, 64, 96)} if args.tiny else STACKS
    end, found = time.monotonic() + args.seconds, list[ExpertsRow]()
    with torch.no_grad():
        progress = Progress(len(stacks), "stacks")
        for name, stack in stacks.items():
            if time.monotonic() > end:
                break
            found += stack_rows(name, stack, picked, args)
            progress.step(name)
        progress.close()
    lines = [
        (row.speedup(name), [row.work, row.stack, name, f"{row.speedup(name):.2f}", row.kernels.get(name, "")])
        for row in found
        for name in row.relative
        if name != BASE
    ]
    print_table(["layer", "experts x N x K", "format", "over bf16", "kernels"], [line for _, line in sorted(lines)])
    return found


# ---------------------------------------------------------------------------------------------- the command

SECTIONS = {
    "models": Section("how fast is every linear layer of eight public models, at 1 to 512 rows?", models, gpu=True),
    "formats": Section("the same of every format, at 1 to 64 rows of five shapes", formats, gpu=True),
    "peers": Section("the same beside gemlite and torchao, at one shape", beside_peers, gpu=True),
    "large": Section("how fast is a layer of thousands of rows?", large, gpu=True),
    "experts": Section("how fast are the experts of public models while they decode?", experts, gpu=True),
    "picked": Section("the same by bmm, as generate calls it", lambda args: experts(args, picked=True), gpu=True),
}


def one_product(config: str, m: int, n: int, k: int) -> None:
    """Run the kernel ``small_m`` once, with the config of the table, for a profiler.

    No other kernel in the process matches the names of its kernels: ``persistent``, ``pipelined``, ``wgmma``,
    ``activations`` and ``maxima``.
    """
    layer = mx.quantize_(nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16), config)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), mx.kernels("small_m"):
        layer(x)
    torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> None:
    """Time layers, or run one product."""
    options = parser(__doc__ or "", SECTIONS, repeats=7)
    add: Any = options.add_argument
    add("--formats", nargs="+", metavar="NAME", help="what quantize_ takes (those of the section)")
    add("--rows", nargs="+", type=int, help="rows of activations, tokens of experts (those of the section)")
    add("--seconds", type=float, default=240, help="begin no shape, and no peer, after this time (%(default)s)")
    add("--seed-shapes", type=int, metavar="SEED", help=f"models: {DRAWN} random shapes that this number seeds instead")
    add("--one", nargs=4, metavar=("FORMAT", "M", "N", "K"), help="run one product of few rows, and measure nothing")
    args = options.parse_args(argv)
    if args.one:
        if not torch.cuda.is_available():
            options.exit(1, "This command runs a CUDA kernel, and torch finds no CUDA device here; nothing was run.\n")
        one_product(args.one[0], *map(int, args.one[1:]))
        return
    run_sections(options, SECTIONS, argv)


if __name__ == "__main__":
    main()

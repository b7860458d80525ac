"""The command ``experts`` of ``benchmarks.users``: the experts of mixture-of-experts models while they decode.

A call is ``F.grouped_mm`` of the tokens' rows and one stack of weights, as transformers' ``grouped_mm`` experts make it
twice a layer. ``--batched``: it picks a matrix for each row out of the stack and multiplies them by ``bmm``, as the
``batched_mm`` experts do, which ``generate`` takes on a GPU.

Tokens choose their experts at random. A contender is a CUDA graph of calls with choices of their own in turn, which
together read more than the L2 cache holds. A figure is a speed over that of bfloat16: higher is better.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import mxtensor as mx

from .cuda import GpuRow, Graph, graph_clock, print_failures, print_header
from .decode import BASE, WEIGHT_ONLY
from .harness import Prepare, Progress, Work, print_table, timed, wall_clock, write_json


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
TOY = {"toy": Stack(4, 2, 64, 96)}
BATCHES = (1, 4, 16, 64)
FORMATS = ("mxfp8-weight-only", "mxfp4-weight-only")
"""``mx.quantize`` makes weights whose activations stay in high precision."""
CHOICES = 16
"""Calls of a graph."""


@dataclass
class ExpertsRow(GpuRow):
    """The formats and bfloat16 in turn, at one number of tokens of one stack."""

    stack: str = ""
    batch: int = 0


def choices_of(stack: Stack, batch: int, device: str, batched: bool) -> list[Tensor]:
    """CHOICES random choices: the ends of each expert's rows, int32 (experts,), or the expert of each row."""
    draw, found = torch.Generator().manual_seed(0), []
    for _ in range(CHOICES):
        chosen = torch.stack([torch.randperm(stack.experts, generator=draw)[: stack.chosen] for _ in range(batch)])
        counts = torch.bincount(chosen.flatten(), minlength=stack.experts)
        found.append(chosen.flatten().to(device) if batched else counts.cumsum(0).to(device, torch.int32))
    return found


def product(x: Tensor, weight: Tensor, choice: Tensor, batched: bool) -> Tensor:
    """The results of the rows x (M, K), in the order of tokens or of experts."""
    if batched:
        return torch.bmm(weight[choice], x.unsqueeze(-1)).squeeze(-1)
    return F.grouped_mm(x, weight.mT, offs=choice)


def calls_of(
    row: ExpertsRow, config: str, weight: Tensor, choices: Sequence[Tensor], x: Tensor, batched: bool
) -> Prepare:
    """The calls with these choices in turn: one CUDA graph, or on a CPU one after the other."""

    def prepare() -> Work:
        with mx.explain() as log:
            product(x, weight, choices[0], batched)
        row.kernels[config] = ", ".join(dict.fromkeys(entry.kernel for entry in log.entries))
        calls = [lambda choice=choice: product(x, weight, choice, batched) for choice in choices]
        return Graph(calls) if x.is_cuda else lambda: [call() for call in calls]

    return prepare


def stack_rows(name: str, stack: Stack, args: Any) -> list[ExpertsRow]:
    """Every format at every number of tokens of one stack, in turn with bfloat16."""
    size = stack.experts, stack.width, stack.cols
    plain = torch.randn(*size, dtype=torch.bfloat16, device=args.device) * 0.02
    weights = {BASE: plain} | {c: mx.quantize(plain, c.removesuffix(WEIGHT_ONLY)) for c in args.formats}
    found = []
    for batch in args.batches:
        x = torch.randn(batch * stack.chosen, stack.cols, dtype=torch.bfloat16, device=args.device)
        row = ExpertsRow(f"{name}, {batch} tokens", {}, math.prod(size), stack=str(stack), batch=batch)
        choices = choices_of(stack, batch, args.device, args.batched)
        contenders = {c: calls_of(row, c, weight, choices, x, args.batched) for c, weight in weights.items()}
        clock = graph_clock if args.device == "cuda" else wall_clock
        found.append(timed(row, contenders, args.repeats, warmup=2, clock=clock))
    return found


def table(rows: Sequence[ExpertsRow], formats: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Header and lines, the stack with the worst figure first."""
    batches = sorted({row.batch for row in rows})
    by_stack: dict[str, dict[int, ExpertsRow]] = {}
    for row in rows:
        by_stack.setdefault(row.work.rpartition(", ")[0], {})[row.batch] = row
    lines = []
    for name, found in by_stack.items():
        for config in formats:
            cells = [f"{found[b].speedup(config):.2f}" if b in found else "" for b in batches]
            lines.append([name, next(iter(found.values())).stack, config, *cells])
    lines.sort(key=lambda line: min((float(cell) for cell in line[3:] if cell), default=math.inf))
    return ["layer", "experts x N x K", "format", *(f"{b} tokens" for b in batches)], lines


def means(rows: Sequence[ExpertsRow], formats: Sequence[str]) -> list[list[str]]:
    """The geometric mean over stacks and the worst of each format and number of tokens."""
    lines = []
    for config in formats:
        for batch in sorted({row.batch for row in rows}):
            speeds = {row.work: row.speedup(config) for row in rows if row.batch == batch and config in row.relative}
            if speeds:
                worst = min(speeds, key=speeds.__getitem__)
                mean = statistics.geometric_mean(speeds.values())
                lines.append([str(batch), config, f"{mean:.2f}", f"{speeds[worst]:.2f}", worst.rpartition(", ")[0]])
    return lines


MEANS_HEADER = ["tokens", "format", "geometric mean", "worst", "where"]


def add_options(options: argparse.ArgumentParser) -> None:
    """The options of this command."""
    options.add_argument("--formats", nargs="+", default=FORMATS, help=f"default: {' '.join(FORMATS)}")
    options.add_argument("--batches", nargs="+", type=int, default=BATCHES, help="tokens of a step")
    options.add_argument("--batched", action="store_true", help="pick a matrix for each row, and call bmm")
    options.add_argument("--seconds", type=float, default=240, help="begin no stack after this time (default: 240)")


def run(args: argparse.Namespace) -> None:
    """GPU time of the experts of public models while they decode."""
    stacks, end = TOY if args.tiny else STACKS, time.monotonic() + args.seconds
    found: list[ExpertsRow] = []
    with torch.no_grad():
        progress = Progress(len(stacks), "stacks")
        for name, stack in stacks.items():
            if time.monotonic() > end:
                break
            found += stack_rows(name, stack, args)
            progress.step(name)
        progress.close()
    print_header()
    print("figures are speeds over that of bfloat16\n")
    print_table(*table(found, args.formats))
    print()
    print_table(MEANS_HEADER, means(found, args.formats))
    print_failures(found)
    write_json(args.json, found)

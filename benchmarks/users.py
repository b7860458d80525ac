"""What users run, each row beside bfloat16 in the same run: ``python -m benchmarks.users COMMAND --json F``.

    host         host time of one eager F.linear, and of forward and backward of one layer
    layers       GPU time of every linear shape of eight public models, at 1 to 512 rows
    experts      GPU time of the experts of four public models while they decode
    generate     tokens per second of transformers' ``generate``, eager and with a static cache
    train        a whole training step of a GPT, eager and compiled
    first-token  the time until the first token, with an empty cache of compiled kernels and with a full one

Each command has ``--help``. All need a GPU; ``experts`` has ``--device cpu`` too.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx

from . import users_experts, users_first, users_generate, users_layers, users_train
from .cuda import exit_without_cuda, host_clock, print_failures, print_header
from .harness import Prepare, Progress, Row, Work, add_options, print_table, timed, write_json
from .train_linear import RECIPES

BASE = "bfloat16"
ROWS = (1, 4, 8, 16, 64, 128, 256, 512)
FORMATS = (
    "mxfp8", "mxfp8-weight-only", "mxfp4", "mxfp4-weight-only", "mxfp6-weight-only", "nvfp4", "nvfp4-weight-only",
    "float8_e4m3_row", "float8_e4m3_tensor",
)  # fmt: skip
TRAINED = ("mxfp8", "float8 current", "float8 delayed", "float8 block", "nvfp4")
"""Keys of train_linear.RECIPES."""
TRAIN_ROWS = (128, 2048)
CALLS, STEPS = 50, 10
"""Calls and training steps that are queued at a time: at most 200 launches, so that the host does not wait."""


@dataclass
class HostRow(Row):
    """``times`` are milliseconds of host time of one call."""

    kind: str = ""
    m: int = 0


def host_row(m: int, size: int, args: Any) -> HostRow:
    """``F.linear`` without gradients at ``m`` rows of one weight, in each format; ``--compiled``: a compiled layer."""
    x = torch.randn(m, size, dtype=torch.bfloat16, device=args.device)

    def prepare(config: str) -> Work:
        layer = nn.Linear(size, size, bias=False, dtype=torch.bfloat16, device=args.device).requires_grad_(False)
        if config != BASE:
            mx.quantize_(layer, config)
        if args.compiled:
            compiled = torch.compile(layer)
            return lambda: compiled(x)
        weight = layer.weight
        return lambda: F.linear(x, weight)

    contenders: dict[str, Prepare] = {name: lambda name=name: prepare(name) for name in (BASE, *args.formats)}  # type: ignore[misc]
    row = HostRow(f"F.linear {m}x{size}x{size}", {}, kind="F.linear", m=m)
    with torch.no_grad():
        return timed(row, contenders, args.repeats, clock=host_clock(CALLS))


def train_row(m: int, size: int, args: Any) -> HostRow:
    """Forward and backward of one layer at ``m`` rows, with each training recipe."""
    x = torch.randn(m, size, dtype=torch.bfloat16, device=args.device, requires_grad=True)
    grad = torch.randn(m, size, dtype=torch.bfloat16, device=args.device)

    def prepare(recipe: str) -> Work:
        layer = nn.Linear(size, size, bias=False, dtype=torch.bfloat16, device=args.device)
        if recipe != BASE:
            mx.quantize_(layer, RECIPES[recipe]())

        def work() -> None:
            x.grad = layer.weight.grad = None
            layer(x).backward(grad)

        return work

    contenders: dict[str, Prepare] = {name: lambda name=name: prepare(name) for name in (BASE, *args.recipes)}  # type: ignore[misc]
    row = HostRow(f"forward and backward {m}x{size}x{size}", {}, kind="forward and backward", m=m)
    return timed(row, contenders, args.repeats, clock=host_clock(STEPS))


def host_table(rows: Sequence[HostRow]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the rows of one kind: microseconds of one call, and those above bfloat16 in brackets."""
    lines = []
    for name in rows[0].times | rows[0].failed:
        cells = []
        for row in rows:
            us, base = (row.times.get(contender, float("nan")) * 1e3 for contender in (name, BASE))
            cells.append(f"{us:.1f}" if name == BASE else f"{us:.1f} ({us - base:+.1f})")
        lines.append([name, *cells])
    return [f"{rows[0].kind}, us", *(f"{row.m} rows" for row in rows)], lines


def run_host(args: argparse.Namespace) -> None:
    """Time every format and recipe, and print a table of each kind."""
    work = [(make, numbers) for make, numbers in ((host_row, args.rows), (train_row, args.train_rows)) if numbers]
    size, progress = 64 if args.tiny else 4096, Progress(len(args.rows) + len(args.train_rows), "rows")
    tables = []
    for make, numbers in work:
        table = []
        for m in numbers:
            table.append(make(m, size, args))
            progress.step(table[-1].work)
        tables.append(table)
    progress.close()
    print_header()
    for table in tables:
        print_table(*host_table(table))
        print()
    rows = [row for table in tables for row in table]
    print_failures(rows)
    write_json(args.json, rows)


def add_host_options(options: argparse.ArgumentParser) -> None:
    """The options of ``host``."""
    options.add_argument("--rows", nargs="*", type=int, default=ROWS, help="rows of activations of F.linear")
    options.add_argument("--formats", nargs="*", default=FORMATS, help=f"default: {' '.join(FORMATS)}")
    options.add_argument("--train-rows", nargs="*", type=int, default=TRAIN_ROWS, help="the same of a training layer")
    options.add_argument(
        "--recipes", nargs="*", choices=RECIPES, default=TRAINED, help=f"default: {', '.join(TRAINED)}"
    )
    options.add_argument("--compiled", action="store_true", help="call the layer through torch.compile")


Command = tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None], int]
"""A function that adds options, one that measures and prints, and the default of ``--repeats``."""
COMMANDS: dict[str, Command] = {
    "host": (add_host_options, run_host, 25),
    "layers": (users_layers.add_options, users_layers.run, 7),
    "experts": (users_experts.add_options, users_experts.run, 7),
    "generate": (users_generate.add_options, users_generate.run, 3),
    "train": (users_train.add_options, users_train.run, 7),
    "first-token": (users_first.add_options, users_first.run, 1),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command. Exits if there is no CUDA device."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.users", description=(__doc__ or "").partition("\n")[0])
    commands = options.add_subparsers(dest="command", required=True)
    for name, (add, run, repeats) in COMMANDS.items():
        one = commands.add_parser(name, help=(run.__doc__ or "").partition("\n")[0])
        add_options(one, repeats)
        devices = "cuda (the default) or cpu" if name == "experts" else argparse.SUPPRESS
        one.add_argument("--device", default="cuda", help=devices)
        one.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # a toy size, for tests on a CPU
        add(one)
    args = options.parse_args(argv)
    if args.device == "cuda":
        exit_without_cuda(options)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    COMMANDS[args.command][1](args)


if __name__ == "__main__":
    main()

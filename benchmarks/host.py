"""What an eager call costs the host over plain torch: ``python -m benchmarks.host --json FILE``.

Models without an MXTensor pay nothing: no torch function is replaced. On a GPU calls are queued, and their kernels are
not waited for; the first call of a size makes the Plan, the next ones only launch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

import mxtensor as mx

from .cuda import host_clock
from .harness import Prepare, Row, Section, Work, parser, print_table, run, timed
from .training import RECIPES

PLAIN, SECOND = "plain torch", "plain torch again"
CALLS, STEPS = 500, 10
"""Timed at a time: fewer than the launches that CUDA queues before it makes the host wait."""
ON_CPU = {"weight-only": "mxfp8-weight-only", "activations": "mxfp8"}
ON_GPU = {
    name: name
    for name in ("mxfp8", "mxfp8-weight-only", "mxfp4", "mxfp4-weight-only", "nvfp4", "mxfp6", "float8_e4m3_row")
}
TRAINED = ("mxfp8", "float8 current", "float8 delayed", "float8 block", "nvfp4")
"""Keys of training.RECIPES."""


def call_row(dtype: torch.dtype, size: int, configs: dict[str, str], device: str, args: argparse.Namespace) -> Row:
    """Milliseconds of CALLS calls of ``F.linear`` at one row, without gradients."""
    x, dense = (torch.randn(rows, size, dtype=dtype, device=device) for rows in (1, size))

    def calls(weight: torch.Tensor) -> Work:
        def work() -> None:
            for _ in range(2 if args.tiny else CALLS):
                F.linear(x, weight)

        return work

    contenders = {PLAIN: lambda: calls(dense), SECOND: lambda: calls(dense.clone())}
    for name, config in configs.items():
        layer = torch.nn.Linear(size, size, bias=False, dtype=dtype, device=device)
        weight = mx.quantize_(layer, config).weight
        contenders[name] = lambda weight=weight: calls(weight)  # type: ignore[misc]
    row = Row(f"F.linear 1x{size}x{size} {str(dtype).removeprefix('torch.')}", {})
    with torch.no_grad():
        return timed(row, contenders, args.repeats, clock=host_clock(1))


def step_row(size: int, m: int, device: str, args: argparse.Namespace) -> Row:
    """Milliseconds of forward and backward of one layer at ``m`` rows, with each training recipe."""
    x = torch.randn(m, size, dtype=torch.bfloat16, device=device, requires_grad=True)
    grad = torch.randn(m, size, dtype=torch.bfloat16, device=device)

    def prepare(recipe: str) -> Work:
        layer = torch.nn.Linear(size, size, bias=False, dtype=torch.bfloat16, device=device)
        if recipe != PLAIN:
            mx.quantize_(layer, RECIPES[recipe]())

        def work() -> None:
            x.grad = layer.weight.grad = None
            layer(x).backward(grad)

        return work

    contenders: dict[str, Prepare] = {name: partial(prepare, name) for name in (PLAIN, *TRAINED)}
    return timed(Row(f"forward and backward {m}x{size}x{size}", {}), contenders, args.repeats, clock=host_clock(STEPS))


def shown(rows: list[Row], calls: int) -> list[Row]:
    """Print microseconds of one call, and those above plain torch; the rows."""
    lines = [
        [row.work, name, f"{ms / calls * 1e3:.1f}", f"{(ms - row.times[PLAIN]) / calls * 1e3:+.1f}"]
        for row in rows
        for name, ms in row.times.items()
    ]
    print_table(["work", "contender", "us per call", "over plain"], lines)
    return rows


def on_cpu(args: argparse.Namespace) -> list[Row]:
    """A call on a small weight, on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [call_row(dtype, 64, ON_CPU, "cpu", args) for dtype in (torch.float32, torch.bfloat16)]
    finally:
        torch.set_num_threads(before)
    return shown(rows, 2 if args.tiny else CALLS)


def on_gpu(args: argparse.Namespace) -> list[Row]:
    """A call of a layer that decodes without a CUDA graph."""
    size = 64 if args.tiny else 4096
    return shown([call_row(torch.bfloat16, size, ON_GPU, args.device, args)], 2 if args.tiny else CALLS)


def steps(args: argparse.Namespace) -> list[Row]:
    """A training step of one layer."""
    return shown([step_row(64 if args.tiny else 4096, m, args.device, args) for m in (128, 2048)], 1)


SECTIONS = {
    "cpu": Section("what does a call on a CPU cost the host?", on_cpu),
    "gpu": Section("what does a call of a decoding layer on a GPU cost the host?", on_gpu, gpu=True),
    "training": Section("what do forward and backward of one layer on a GPU cost the host?", steps, gpu=True),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Time the host."""
    run(parser(__doc__ or "", SECTIONS, repeats=25), SECTIONS, argv)


if __name__ == "__main__":
    main()

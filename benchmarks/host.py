"""What an eager F.linear on a small MXTensor weight costs over plain torch: ``python -m benchmarks.host --json F``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import mxtensor as mx

from .harness import Row, Work, arguments, machine, print_table, side_by_side, write_json

CALLS = 500
SIZE = 64
HEADER = ["work", "contender", "us a call", "over plain"]
CONTENDERS = {"weight-only": "mxfp8-weight-only", "activations": "mxfp8"}


def _calls(weight: torch.Tensor, x: torch.Tensor) -> Work:
    def work() -> None:
        for _ in range(CALLS):
            F.linear(x, weight)

    return work


def row(dtype: torch.dtype, repeats: int) -> Row:
    """Milliseconds of CALLS calls at one row of activations and a 64x64 weight: nothing but host time."""
    x, dense = torch.randn(1, SIZE, dtype=dtype), torch.randn(SIZE, SIZE, dtype=dtype)
    contenders = {"plain torch": lambda: _calls(dense, x), "plain torch again": lambda: _calls(dense.clone(), x)}
    for name, config in CONTENDERS.items():
        layer = torch.nn.Linear(SIZE, SIZE, bias=False, dtype=dtype)
        weight = mx.quantize_(layer, config).weight
        contenders[name] = lambda weight=weight: _calls(weight, x)  # type: ignore[misc]
    return side_by_side(f"F.linear 1x{SIZE}x{SIZE} {str(dtype).removeprefix('torch.')}", contenders, repeats=repeats)


def cells(row: Row) -> list[list[str]]:
    """A line of the table for every contender."""
    base = row.times["plain torch"]
    return [
        [row.work, name, f"{ms / CALLS * 1e3:.1f}", f"{(ms - base) / CALLS * 1e3:+.1f}"]
        for name, ms in row.times.items()
    ]


def main() -> None:
    """Print microseconds a call, and those above plain torch."""
    args = arguments(__doc__ or "")
    torch.set_num_threads(1)
    with torch.no_grad():
        rows = [row(dtype, args.repeats) for dtype in (torch.float32, torch.bfloat16)]
    here = machine()
    versions = ", ".join(f"{name} {number}" for name, number in here["versions"].items())
    print(f"{here['cpu']}, {here['threads']} thread, {versions}\n")
    print_table(HEADER, [line for r in rows for line in cells(r)])
    write_json(args.json, rows)


if __name__ == "__main__":
    main()

"""What an eager F.linear on a small MXTensor weight costs over plain torch: ``python -m benchmarks.host --json F``.

With ``--cuda``, of a decoding layer on a GPU: calls are queued and their kernels not waited for.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import mxtensor as mx

from .cuda import exit_without_cuda, host_clock
from .harness import Row, Work, machine, parser, print_table, timed, wall_clock, write_json

CALLS = 500
"""Timed at a time: fewer than the launches that CUDA queues before it makes the host wait."""
SIZE, DECODING = 64, 4096
"""Rows and columns of the weight, on CPU and with ``--cuda``."""
HEADER = ["work", "contender", "us per call", "over plain"]
CONTENDERS = {"weight-only": "mxfp8-weight-only", "activations": "mxfp8"}
FORMATS = {name: name for name in ("mxfp8", "mxfp8-weight-only", "mxfp4", "mxfp4-weight-only", "nvfp4", "mxfp6")}


def _calls(weight: torch.Tensor, x: torch.Tensor) -> Work:
    def work() -> None:
        for _ in range(CALLS):
            F.linear(x, weight)

    return work


def row(dtype: torch.dtype, repeats: int, device: str = "cpu") -> Row:
    """Milliseconds of CALLS calls at one row of activations: nothing but host time."""
    size, configs = (SIZE, CONTENDERS) if device == "cpu" else (DECODING, FORMATS)
    x, dense = (torch.randn(rows, size, dtype=dtype, device=device) for rows in (1, size))
    contenders = {"plain torch": lambda: _calls(dense, x), "plain torch again": lambda: _calls(dense.clone(), x)}
    for name, config in configs.items():
        layer = torch.nn.Linear(size, size, bias=False, dtype=dtype, device=device)
        weight = mx.quantize_(layer, config).weight
        contenders[name] = lambda weight=weight: _calls(weight, x)  # type: ignore[misc]
    work = Row(f"F.linear 1x{size}x{size} {str(dtype).removeprefix('torch.')}", {})
    return timed(work, contenders, repeats, clock=wall_clock if device == "cpu" else host_clock(1))


def cells(row: Row) -> list[list[str]]:
    """A line of the table for every contender."""
    base = row.times["plain torch"]
    return [
        [row.work, name, f"{ms / CALLS * 1e3:.1f}", f"{(ms - base) / CALLS * 1e3:+.1f}"]
        for name, ms in row.times.items()
    ]


def main() -> None:
    """Print microseconds per call, and those above plain torch."""
    options = parser(__doc__ or "")
    options.add_argument("--cuda", action="store_true", help="a decoding layer on a GPU")
    args = options.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        if args.cuda:
            exit_without_cuda(options)
            rows = [row(torch.bfloat16, args.repeats, "cuda")]
        else:
            rows = [row(dtype, args.repeats) for dtype in (torch.float32, torch.bfloat16)]
    here = machine()
    versions = ", ".join(f"{name} {number}" for name, number in here["versions"].items())
    print(f"{here['cpu']}, {here['threads']} thread, {versions}\n")
    print_table(HEADER, [line for r in rows for line in cells(r)])
    write_json(args.json, rows)


if __name__ == "__main__":
    main()

"""Linear layers of few rows on CPU beside float32, bfloat16 and torchao's int8: ``python -m benchmarks.cpu_linear``.

The weights of a layer are rotated: there are so many copies that none is in the cache when it is used, as in a
model that generates text. Contenders take turns, and a row is the median of the rounds. The bandwidth of memory is
measured on the same threads (``benchmarks/bandwidth.py``). Prints the worst row first.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

import mxtensor as mx

from .bandwidth import bandwidth
from .harness import Prepare, Row, Work, machine, parser, print_table, timed, write_json

SHAPES = {
    "SmolLM2-135M": ((576, 576), (192, 576), (1536, 576), (576, 1536)),
    "Llama 1B": ((2048, 2048), (512, 2048), (8192, 2048), (2048, 8192)),
}
"""Model -> the shapes (N, K) of its linear layers."""
CONFIGS = (
    "mxfp8-weight-only", "mxfp6-weight-only", "mxint8-weight-only", "nvfp4-weight-only", "mxfp4-weight-only", "mxfp8",
    "mxint8", "mxfp4",
)  # fmt: skip
ROWS = (1, 4, 16, 64)
CACHE = 1 << 26
"""Bytes of weights between two uses of the same one."""
PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HEADER = ["layer", "rows", "contender", "us", "speedup", "GB/s", "of bandwidth"]


@dataclass
class LayerRow(Row):
    """One layer (K,) -> (N,) with ``rows`` rows of activations."""

    model: str = ""
    n: int = 0
    k: int = 0
    rows: int = 0


def layer(n: int, k: int, dtype: torch.dtype, config: str | None) -> torch.nn.Linear:
    """A linear layer with random weights, quantized by ``config``."""
    made = torch.nn.Linear(k, n, bias=False, dtype=dtype).requires_grad_(False)
    if config is not None:
        mx.quantize_(made, config)
    return made


def nbytes(module: torch.nn.Linear) -> int:
    """Bytes that a product reads of the weight."""
    operand: Any = getattr(module.weight, "rowwise", None)
    return module.weight.nbytes if operand is None else int(sum([t.nbytes for t in operand.tensors]))


def rotated(n: int, k: int, rows: int, dtype: torch.dtype, config: str | None) -> Prepare:
    """The work of one product with the next of many copies of a layer."""

    def prepare() -> Work:
        first = layer(n, k, dtype, config)
        copies = [first, *(layer(n, k, dtype, config) for _ in range(CACHE // nbytes(first)))]
        x, following = torch.randn(rows, k, dtype=dtype), cycle(copies)
        for module in copies:
            module(x)
        return lambda: next(following)(x)

    return prepare


def torchao_int8(n: int, k: int, rows: int) -> Prepare:
    """torchao's int8 weight-only layer with bfloat16 activations."""

    def prepare() -> Work:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        copies = [layer(n, k, torch.bfloat16, None) for _ in range(CACHE // (n * k) + 1)]
        for module in copies:
            quantize_(module, Int8WeightOnlyConfig())
        x, following = torch.randn(rows, k, dtype=torch.bfloat16), cycle(copies)
        return lambda: next(following)(x)

    return prepare


def measured(model: str, n: int, k: int, rows: int, configs: list[str], repeats: int) -> LayerRow:
    """One layer with one number of rows, all contenders."""
    contenders: dict[str, Prepare] = {name: rotated(n, k, rows, dtype, None) for name, dtype in PLAIN.items()}
    contenders["torchao int8"] = torchao_int8(n, k, rows)
    for config in configs:
        contenders[config] = rotated(n, k, rows, torch.bfloat16, config)
    row = LayerRow(f"{model} {n}x{k}, {rows} rows", {}, model=model, n=n, k=k, rows=rows)
    return timed(row, contenders, repeats)


def speedup(row: Row, contender: str) -> float:
    """How many times as fast as the faster of float32 and bfloat16."""
    return min(row.times[name] for name in PLAIN) / row.times[contender]


def lines(rows: list[LayerRow], peak: float) -> list[list[str]]:
    """The table, the contender with the least speedup first; ``peak``: the bandwidth of memory in GB/s."""
    found: list[tuple[float, list[str]]] = []
    for row in rows:
        for name, ms in row.times.items():
            if name not in CONFIGS:
                continue
            rate = nbytes(layer(row.n, row.k, torch.bfloat16, name)) / ms / 1e6
            where = f"{row.model} {row.n}x{row.k}"
            cells = [where, str(row.rows), name, f"{ms * 1e3:.0f}", f"{speedup(row, name):.2f}"]
            found.append((speedup(row, name), [*cells, f"{rate:.1f}", f"{rate / peak:.2f}"]))
    return [cells for _, cells in sorted(found, key=lambda pair: pair[0])]


def options() -> argparse.Namespace:
    """The options of this benchmark."""
    found = parser(__doc__ or "")
    found.add_argument("--rows", type=int, nargs="+", default=ROWS)
    found.add_argument("--configs", nargs="+", default=CONFIGS, choices=CONFIGS)
    found.add_argument("--model", choices=SHAPES, default=None)
    return found.parse_args()


def main() -> None:
    """Time every layer and print times, speedups and the share of the memory bandwidth."""
    args = options()
    warnings.filterwarnings("ignore")
    rows = []
    with torch.no_grad():
        peak = bandwidth(args.repeats)
        for model, shapes in SHAPES.items():
            for (n, k), m in ((shape, m) for shape in shapes for m in args.rows if args.model in (None, model)):
                row = measured(model, n, k, m, args.configs, args.repeats)
                rows.append(row)
                print(f"{row.work}: " + ", ".join(f"{n} {t * 1e3:.0f}" for n, t in row.times.items()), flush=True)
    here = machine()
    print(f"\n{here['cpu']}, {here['threads']} threads, {peak:.1f} GB/s\n")
    print_table(HEADER, lines(rows, peak))
    write_json(args.json, rows)


if __name__ == "__main__":
    main()

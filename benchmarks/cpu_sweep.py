"""Are products with codes on CPU ever slower than decoding the whole weight? ``python -m benchmarks.cpu_sweep``.

Every shape, format, number of rows and dtype runs the kernel that the package chooses and, in turn with it, the path
without it: decode the weight to float32, call ``F.linear``. The fastest call of each counts, so that other work on the
machine shows less. Prints the worst rows first; the target allows 5 % for noise.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import product

import torch

import mxtensor as mx

from .cuda import Target, print_verdicts
from .harness import Prepare, Progress, Row, Work, add_options, machine, print_table, timed, write_json

SHAPES = ((32, 32), (192, 576), (576, 576), (1000, 100), (576, 1536), (2048, 2048))
FORMATS = (
    "mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxint8", "mxfp4", "nvfp4", "float8_e4m3_row",
    "float8_e4m3_128x128",
)  # fmt: skip
ROWS = (1, 2, 3, 4, 5, 8, 16, 24, 32, 33, 48, 64, 128)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
CHOSEN, WHOLE = "chosen", "whole weight"
HEADER = ["product", "chosen, us", "whole weight, us", "time ratio"]


def contender(layer: torch.nn.Linear, x: torch.Tensor, kernel: str | None) -> Prepare:
    """The work of one call with the kernel that is chosen, or with a named one."""

    def with_kernel() -> torch.Tensor:
        with mx.kernels(kernel or ""):
            return layer(x)  # type: ignore[no-any-return]

    def prepare() -> Work:
        return (lambda: layer(x)) if kernel is None else with_kernel

    return prepare


def measured(n: int, k: int, format: str, rows: int, dtype: str, repeats: int) -> Row:
    """One product (rows, k) x (n, k)."""
    layer = torch.nn.Linear(k, n, bias=False, dtype=DTYPES[dtype]).requires_grad_(False)
    mx.quantize_(layer, f"{format}-weight-only")
    x = torch.randn(rows, k, dtype=DTYPES[dtype])
    row = Row(f"{n}x{k} {format}, {rows} rows of {dtype}", {})
    work = {CHOSEN: contender(layer, x, None), WHOLE: contender(layer, x, "emulated")}
    return timed(row, work, repeats, seconds=0.3, summary=min)


def ratios(rows: Sequence[Row]) -> Iterable[tuple[str, float]]:
    """The time of the chosen kernel over that of the whole weight."""
    return [(row.work, row.times[CHOSEN] / row.times[WHOLE]) for row in rows]


TARGETS = (Target("time over that of decoding the whole weight", "<=", 1.05, ratios),)


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """The table, the worst row first."""
    worst = sorted(rows, key=lambda row: -row.times[CHOSEN] / row.times[WHOLE])
    return [
        [row.work, *(f"{row.times[name] * 1e3:.0f}" for name in (CHOSEN, WHOLE)), f"{1 / row.ratio(CHOSEN, WHOLE):.2f}"]
        for row in worst
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Time all products and print the worst ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser, repeats=40)
    add = parser.add_argument
    add("--formats", nargs="+", default=FORMATS, metavar="NAME", help="names of formats")
    add("--dtypes", nargs="+", default=tuple(DTYPES), choices=DTYPES, help="of activations")
    add("--rows", nargs="+", type=int, default=ROWS, help="numbers of rows")
    add("--shapes", nargs="+", default=[f"{n}x{k}" for n, k in SHAPES], metavar="NxK", help="of weights")
    add("--show", type=int, default=20, help="rows to print (%(default)s)")
    args = parser.parse_args(argv)
    shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    work = list(product(shapes, args.formats, args.rows, args.dtypes))
    rows, progress = [], Progress(len(work), "product")
    with torch.no_grad():
        for (n, k), format, count, dtype in work:
            rows.append(measured(n, k, format, count, dtype, args.repeats))
            progress.step(rows[-1].work)
    progress.close()
    here = machine()
    print(f"\n{here['cpu']}, {here['threads']} threads; {len(rows)} products\n")
    print_table(HEADER, lines(rows)[: args.show])
    print_verdicts(TARGETS, rows)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()

"""Are products with codes on CPU ever slower than decoding the whole weight? ``python -m benchmarks.cpu_sweep``.

Every shape, format, number of rows and dtype runs the kernel that the package chooses and, in turn with it, the path
without it: decode the weight to float32, call ``F.linear``. The fastest call of each counts, so that other work on the
machine shows less. Prints the worst rows first; the target allows 5 % for noise.

    python -m benchmarks.cpu_sweep --instructions amx avx512 --tile-rows 1 4096 --dtypes bfloat16 --shapes 4096x4096

times instruction sets beside each other instead. ``--tile-rows`` says for which rows AMX uses its tiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import product
from statistics import geometric_mean

import torch

import mxtensor as mx
from mxtensor.kernels.gemm import cpu_library

from .cuda import Target, print_failures, print_verdicts
from .harness import (
    Prepare,
    Progress,
    Row,
    Work,
    add_options,
    machine,
    print_table,
    timed,
    wall_clock,
    write_json,
)

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


@lru_cache(maxsize=1)
def layer_of(n: int, k: int, config: str, dtype: str) -> torch.nn.Linear:
    """A quantized layer; the last one is cached."""
    layer = torch.nn.Linear(k, n, bias=False, dtype=DTYPES[dtype]).requires_grad_(False)
    mx.quantize_(layer, config)
    return layer


def measured(
    n: int, k: int, format: str, rows: int, dtype: str, repeats: int, sets: Sequence[str] = (), casts: bool = False
) -> Row:
    """One product (rows, k) x (n, k); by each of the instruction sets, if there are any."""
    layer, x = (
        layer_of(n, k, format if casts else f"{format}-weight-only", dtype),
        torch.randn(rows, k, dtype=DTYPES[dtype]),
    )
    row = Row(f"{n}x{k} {format}, {rows} rows of {dtype}", {})
    work = {CHOSEN: contender(layer, x, None), WHOLE: contender(layer, x, "emulated")}
    if sets:
        work = {name: by_instructions(name, layer, x) for name in sets}
    return timed(row, work, repeats, clock=switching_clock, seconds=0.3, summary=min)


class ByInstructions:
    """The work of one call with the products of an instruction set, which ``switch`` chooses for the whole process."""

    def __init__(self, name: str, layer: torch.nn.Linear, x: torch.Tensor) -> None:
        self.layer, self.x, self.kernels = layer, x, cpu_library.load_kernels(name)
        if isinstance(self.kernels, str):
            raise RuntimeError(self.kernels)

    def switch(self) -> None:
        library = cpu_library.library()
        assert not isinstance(library, str) and not isinstance(self.kernels, str)
        library.use(self.kernels)

    def __call__(self) -> torch.Tensor:
        return self.layer(self.x)  # type: ignore[no-any-return]


def by_instructions(name: str, layer: torch.nn.Linear, x: torch.Tensor) -> Prepare:
    """The work of one call by an instruction set. It is chosen at once, for the calls before the timed ones."""

    def prepare() -> Work:
        work = ByInstructions(name, layer, x)
        work.switch()
        return work

    return prepare


def switching_clock(run: Work) -> Callable[[], float]:
    """The clock of wall time; the instruction set is chosen before it starts."""
    sample = wall_clock(run)

    def switched() -> float:
        if isinstance(run, ByInstructions):
            run.switch()
        return sample()

    return switched


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


BY_ROWS = ["rows", "products", "geometric mean of time ratios", "worst"]


def by_rows(rows: Sequence[Row]) -> list[list[str]]:
    """For each number of rows of activations: how many products, and their ratios of times."""
    found: dict[int, list[float]] = {}
    for work, ratio in ratios(rows):
        found.setdefault(int(work.split(", ")[1].split()[0]), []).append(ratio)
    return [
        [str(m), str(len(each)), f"{geometric_mean(each):.2f}", f"{max(each):.2f}"] for m, each in sorted(found.items())
    ]


def lines_of_sets(rows: Sequence[Row], sets: Sequence[str]) -> list[list[str]]:
    """The table of instruction sets: microseconds, and the speed of the first over the last."""
    return [
        [row.work, *(f"{row.times[name] * 1e3:.0f}" for name in sets), f"{row.ratio(sets[0], sets[-1]):.2f}"]
        for row in rows
        if set(sets) <= row.times.keys()
    ]


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser, repeats=40)
    add, tile_rows = parser.add_argument, cpu_library.TILE_ROWS
    add("--formats", nargs="+", default=FORMATS, metavar="NAME", help="names of formats")
    add("--dtypes", nargs="+", default=tuple(DTYPES), choices=DTYPES, help="of activations")
    add("--rows", nargs="+", type=int, default=ROWS, help="numbers of rows")
    add("--shapes", nargs="+", default=[f"{n}x{k}" for n, k in SHAPES], metavar="NxK", help="of weights")
    add("--instructions", nargs="+", default=(), metavar="SET", help="timed beside each other: amx avx512 avx2 plain")
    add("--tile-rows", nargs=2, type=int, default=tile_rows, help="least and most rows in tiles %(default)s")
    add("--casts", action="store_true", help="activations are quantized too")
    add("--threads", type=int, default=torch.get_num_threads(), help="of torch (%(default)s)")
    add("--show", type=int, default=20, help="rows to print (%(default)s)")
    args = parser.parse_args(argv)
    args.shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes]
    lacking = [name for name in args.instructions if name not in cpu_library.usable_instructions()]
    if lacking:
        parser.error(f"this processor does not run {', '.join(lacking)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Time all products and print the worst ones."""
    args = parsed(argv)
    cpu_library.TILE_ROWS = tuple(args.tile_rows)
    torch.set_num_threads(args.threads)
    work = list(product(args.shapes, args.formats, args.rows, args.dtypes))
    rows, progress = [], Progress(len(work), "product")
    with torch.no_grad():
        for (n, k), format, count, dtype in work:
            rows.append(measured(n, k, format, count, dtype, args.repeats, args.instructions, args.casts))
            progress.step(rows[-1].work)
    progress.close()
    here = machine()
    print(f"\n{here['cpu']}, {here['threads']} threads; {len(rows)} products\n")
    if args.instructions:
        names = [f"{name}, us" for name in args.instructions]
        print_table(["product", *names, "speed"], lines_of_sets(rows, args.instructions))
        print_failures(rows)
    else:
        print_table(HEADER, lines(rows)[: args.show])
        print_verdicts(TARGETS, rows)
    write_json(args.json, rows)


if __name__ == "__main__":
    main()

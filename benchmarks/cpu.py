"""Casts and linear layers on a CPU: ``python -m benchmarks.cpu --json FILE``.

``casts``: casts and layers of 512 rows beside plain torch and torchao. ``sweep``: is a product with codes ever slower
than decoding the whole weight? Every shape, format, number of rows and dtype runs the kernel that the package chooses
and, in turn with it, the path without it; the fastest call of each counts.

    python -m benchmarks.cpu sweep --instructions amx avx512 --tile-rows 1 4096 --dtypes bfloat16 --shapes 4096x4096

times instruction sets beside each other instead. ``--tile-rows`` says for which rows AMX uses its tiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import product
from statistics import geometric_mean
from typing import Any

import torch
import torch.nn.functional as F

import mxtensor as mx
from mxtensor.kernels.gemm import cpu_codes

from .harness import Prepare, Progress, Row, Section, Work, parser, print_table, run, timed, wall_clock
from .peers import torchao_cast, torchao_linear

# ---------------------------------------------------------------------------------------------- casts and layers

CASTS = {"mxfp8": torch.float8_e4m3fn, "mxfp6_e2m3": "fp6_e2m3", "mxfp4": torch.float4_e2m1fn_x2, "nvfp4": "nvfp4"}
"""Our format -> torchao's element dtype (NVFP4 is a class of its own there)."""


def values(*shape: int) -> torch.Tensor:
    """Fresh Gaussian bfloat16 values."""
    return torch.randn(*shape, dtype=torch.bfloat16)


def eager(fn: Callable[..., Any], *args: Any) -> Prepare:
    """The work of ``fn`` on ``args``."""
    return lambda: lambda: fn(*args)


def compiled(fn: Callable[..., Any], *args: Any) -> Prepare:
    """The work of ``torch.compile(fn, fullgraph=True)`` on ``args``."""

    def prepare() -> Work:
        torch._dynamo.reset()
        graph = torch.compile(fn, fullgraph=True)
        graph(*args)
        return lambda: graph(*args)

    return prepare


def format_rows(format: str, args: argparse.Namespace) -> list[Row]:
    """The cast, its inverse and a linear layer in one format. torchao is imported by its contenders, which may fail."""
    size, rows = (64, 16) if args.tiny else (4096, 512)
    x, weight, elem = values(size, size), values(size, size) * 0.02, CASTS[format]
    quantized = mx.quantize(x, format)
    layer = torch.nn.Linear(size, size, bias=False, dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(weight.clone())
    mx.quantize_(layer, format)
    inputs = values(rows, size)

    def both(name: str, fn: Callable[..., Any], *of: Any) -> dict[str, Prepare]:
        """A contender eager, and compiled unless the size is a toy."""
        return {name: eager(fn, *of)} | ({} if args.tiny else {f"{name} compiled": compiled(fn, *of)})

    def torchao_dequantize() -> Work:
        other = torchao_cast(x, elem)
        return lambda: other.dequantize(torch.bfloat16)

    def torchao_layer() -> Work:
        run_layer = torchao_linear(weight, elem)
        return lambda: run_layer(inputs)

    def torchao_layer_compiled() -> Work:
        return compiled(torchao_linear(weight, elem), inputs)()

    peer: dict[str, Prepare] = {} if elem == "nvfp4" else {"torchao": torchao_layer}
    peer |= {} if elem == "nvfp4" or args.tiny else {"torchao compiled": torchao_layer_compiled}
    works: list[tuple[str, int, dict[str, Prepare]]] = [
        (f"cast {size}x{size} -> {format}", x.nbytes + quantized.nbytes,
         both("torchao", torchao_cast, x, elem) | both("mxtensor", lambda x: mx.quantize(x, format), x)),
        (f"dequantize {size}x{size} {format}", x.nbytes + quantized.nbytes,
         {"torchao": torchao_dequantize} | both("mxtensor", lambda w: w.dequantize(), quantized)),
        (f"linear {rows}x{size}x{size} {format}", inputs.nbytes + layer.weight.nbytes + rows * size * 2,
         both("bfloat16", F.linear, inputs, weight) | both("mxtensor", layer, inputs) | peer),
    ]  # fmt: skip
    return [timed(Row(work, {}, nbytes), contenders, args.repeats) for work, nbytes, contenders in works]


def casts(args: argparse.Namespace) -> list[Row]:
    """Casts and layers of four formats."""
    progress, rows = Progress(len(CASTS), "formats"), []
    with torch.no_grad():
        for format in CASTS:
            rows += format_rows(format, args)
            progress.step(format)
    progress.close()
    rows.sort(key=lambda row: [word in row.work for word in ("cast ", "dequantize ", "linear ")], reverse=True)
    lines = [
        [row.work, name, f"{ms:.1f}", f"{row.speedup(name):.2f}", f"{row.gbps(name):.1f}"]
        for row in rows
        for name, ms in row.times.items()
    ]
    print("speeds: of casts over torchao's eager cast, of layers over bfloat16\n")
    print_table(["work", "contender", "ms", "speed", "GB/s"], lines)
    return rows


# ---------------------------------------------------------------------------------------------- products of all sizes

SHAPES = ((32, 32), (192, 576), (576, 576), (1000, 100), (576, 1536), (2048, 2048))
FORMATS = (
    "mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxint8", "mxfp4", "nvfp4", "float8_e4m3_row",
    "float8_e4m3_128x128",
)  # fmt: skip
SWEPT = (1, 2, 3, 4, 5, 8, 16, 24, 32, 33, 48, 64, 128)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
CHOSEN, WHOLE = "chosen", "whole weight"


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


def product_row(
    n: int, k: int, format: str, rows: int, dtype: str, repeats: int, sets: Sequence[str] = (), casts: bool = False
) -> Row:
    """One product (rows, k) x (n, k); by each of the instruction sets, if there are any."""
    layer = layer_of(n, k, format if casts else f"{format}-weight-only", dtype)
    x = torch.randn(rows, k, dtype=DTYPES[dtype])
    row = Row(f"{n}x{k} {format}, {rows} rows of {dtype}", {})
    work = {CHOSEN: contender(layer, x, None), WHOLE: contender(layer, x, "emulated")}
    if sets:
        work = {name: by_instructions(name, layer, x) for name in sets}
    return timed(row, work, repeats, clock=switching_clock, seconds=0.3, summary=min)


class ByInstructions:
    """The work of one call with the products of an instruction set, which ``switch`` chooses for the whole process."""

    def __init__(self, name: str, layer: torch.nn.Linear, x: torch.Tensor) -> None:
        self.layer, self.x, self.kernels = layer, x, cpu_codes.load_kernels(name)
        if isinstance(self.kernels, str):
            raise RuntimeError(self.kernels)

    def switch(self) -> None:
        library = cpu_codes.library()
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


def sweep(args: argparse.Namespace) -> list[Row]:
    """Products of all sizes; of instruction sets beside each other with ``--instructions``."""
    before, threads = cpu_codes.TILE_ROWS, torch.get_num_threads()
    cpu_codes.TILE_ROWS = tuple(args.tile_rows)
    torch.set_num_threads(args.threads)
    wanted = list(product(args.shapes, args.formats, args.rows, args.dtypes))
    rows, progress = list[Row](), Progress(len(wanted), "products")
    try:
        with torch.no_grad():
            for shape, format, count, dtype in wanted:
                n, k = map(int, shape.split("x"))
                sets, repeats = args.instructions, args.repeats
                rows.append(product_row(n, k, format, count, dtype, repeats, sets, args.casts))
                progress.step(rows[-1].work)
    finally:
        cpu_codes.TILE_ROWS = before
        torch.set_num_threads(threads)
    progress.close()
    if args.instructions:
        header = ["product", *(f"{name}, us" for name in args.instructions), "speed"]
        print_table(header, lines_of_sets(rows, args.instructions))
    else:
        worst = sorted(rows, key=lambda row: -row.ratio(WHOLE, CHOSEN))
        cells = [
            [r.work, *(f"{r.times[n] * 1e3:.0f}" for n in (CHOSEN, WHOLE)), f"{r.ratio(WHOLE, CHOSEN):.2f}"]
            for r in worst
        ]
        print_table(["product", "chosen, us", "whole weight, us", "time ratio"], cells[: args.show])
        print_table(["rows", "products", "geometric mean of time ratios", "worst"], by_rows(rows))
    return rows


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


SECTIONS = {
    "casts": Section("how long do casts and layers of 512 rows take beside torchao?", casts),
    "sweep": Section("is a product with codes ever slower than decoding the whole weight?", sweep),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Time casts, layers and products on this CPU."""
    options = parser(__doc__ or "", SECTIONS)
    add, tile_rows = options.add_argument, cpu_codes.TILE_ROWS
    add("--formats", nargs="+", default=FORMATS, metavar="NAME", help="sweep: names of formats")
    add("--dtypes", nargs="+", default=tuple(DTYPES), choices=DTYPES, help="sweep: of activations")
    add("--rows", nargs="+", type=int, default=SWEPT, help="sweep: numbers of rows")
    add("--shapes", nargs="+", default=[f"{n}x{k}" for n, k in SHAPES], metavar="NxK", help="sweep: of weights")
    add("--instructions", nargs="+", default=(), metavar="SET", help="sweep: timed beside each other: amx avx512 avx2")
    add("--tile-rows", nargs=2, type=int, default=tile_rows, help="sweep: least and most rows in tiles %(default)s")
    add("--casts", action="store_true", help="sweep: activations are quantized too")
    add("--threads", type=int, default=torch.get_num_threads(), help="sweep: of torch (%(default)s)")
    add("--show", type=int, default=20, help="sweep: rows to print (%(default)s)")
    args = options.parse_args(argv)
    lacking = [name for name in args.instructions if name not in cpu_codes.usable_instructions()]
    if lacking:
        options.error(f"this processor does not run {', '.join(lacking)}")
    run(options, SECTIONS, argv)


if __name__ == "__main__":
    main()

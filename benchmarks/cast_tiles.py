"""Tiles of the CUDA cast of both copies, beside Triton and a copy: ``python -m benchmarks.cast_tiles``.

First every format is compared with the reference, bit for bit, then every tile with Triton's codes. The table has the
share of the copy's bandwidth. The tiles of ``mxtensor/kernels/quantize/cuda_tiles.py`` are set from it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mxtensor.kernels.quantize import cuda_both, triton_ops, two_casts
from mxtensor.kernels.quantize.cuda_tiles import Tile, tile_for
from mxtensor.kernels.quantize.triton_common import slow_in_one_pass
from mxtensor.kernels.runtime import nvrtc
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.formats import E8M0, Format
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import encode

from .cast import moved_bytes
from .cuda import exit_without_cuda, machine_line
from .harness import print_table

FORMATS = ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8", "nvfp4")
CHECKED = (*FORMATS, "mxfp8_e5m2", "mxfp6_e3m2", "nvfp4_single_level", "mxfp8_e4m3[1x16]", "mxfp4_e2m1[1x128]")
SIZES = ("8192x8192", "4096x4096", "8192x14336", "16384x16384")
TILES = (
    Tile(128, 128, 256, 4, 1, 8), Tile(128, 128, 256, 4, 1, 1), Tile(128, 128, 256, 5, 1, 8),
    Tile(128, 128, 256, 6, 1, 8), Tile(128, 128, 256, 3, 2, 8), Tile(128, 128, 128, 6, 1, 8),
    Tile(128, 64, 256, 6, 1, 16), Tile(128, 64, 256, 5, 2, 16), Tile(128, 64, 128, 8, 2, 16),
    Tile(256, 64, 256, 4, 1, 16), Tile(256, 64, 256, 3, 2, 16), Tile(128, 256, 256, 3, 1, 4),
    Tile(256, 128, 512, 2, 1, 8),
)  # fmt: skip
COPY_BYTES = 1 << 29
COLD_BYTES = 1 << 28
"""The calls of one graph read at least as many bytes, so that none finds its input in the L2 cache."""


def tiles_of(format: Format) -> Iterator[Tile]:
    """The tiles to time; a row of a strip has at most 32 bytes of scales."""
    for tile in TILES:
        yield tile._replace(strip=max(1, min(tile.strip, 32 * format.block[1] // tile.cols)))


# ---------------------------------------------------------------------------------------------- the same bits


def values(rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Rows of every magnitude, with zeros of both signs, the largest value, NaN and infinities."""
    x = torch.randn(rows, cols) * 2.0 ** torch.randint(-140, 120, (rows, 1)).float()
    x[rows // 2 :] = torch.randn(rows - rows // 2, cols) * 2.0 ** torch.randint(-4, 5, (1, cols)).float()
    top = torch.finfo(dtype).max
    x = x.clamp(-top, top)
    x[0, : cols // 2], x[1, ::40] = -0.0, -top
    x[4, cols // 3], x[5, cols // 2], x[6, -1] = float("nan"), float("inf"), float("-inf")
    return x.to(dtype)


def same(got: Operand, expected: Operand) -> bool:
    """Whether two operands have the same bytes."""
    return all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.to(a.device).reshape(-1).view(torch.uint8))
        for a, b in zip(got.tensors, expected.tensors, strict=True)
    )


Case = tuple[str, str, torch.dtype, int, int]
"""Format, scale rule, dtype, rows and columns."""


def cases() -> Iterator[Case]:
    """What is compared with the reference: whole tiles, tails of odd and of aligned rows, and the other scale rules."""
    for name in CHECKED:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield name, "rceil", dtype, 256, 512
            yield name, "rceil", dtype, 301, 419
        yield name, "rceil", torch.bfloat16, 136, 260
        if Cast.of(name).format.scale is E8M0:
            yield name, "floor", torch.bfloat16, 256, 512
            yield name, "even", torch.bfloat16, 256, 512


def differs(case: Case) -> bool:
    """Whether the kernel and the reference differ; with special values, and without."""
    name, scaling, dtype, rows, cols = case
    cast = Cast.of(name, scaling)
    for first in (0, 8):
        x = values(rows + first, cols, dtype)[first:]
        got = cuda_both.quantize_both(x.cuda(), cast)
        if not (same(got[0], encode(x, cast)) and same(got[1], encode(x.t().contiguous(), cast))):
            return True
    return False


def check_formats() -> int:
    """Print each case that differs from the reference; how many there are. Threads compile kernels at the same time."""
    every = list(cases())
    with ThreadPoolExecutor() as pool:
        wrong = [case for case, bad in zip(every, pool.map(differs, every), strict=True) if bad]
    for case in wrong:
        print("DIFFERS:", *case)
    print(f"bits: {len(wrong)} of {len(every)} cases differ from the reference", flush=True)
    return len(wrong)


# ---------------------------------------------------------------------------------------------- times


def milliseconds(call: Callable[[Tensor], Any], inputs: Sequence[Tensor], repeats: int) -> float:
    """Milliseconds of one call: the median of replays of a graph that calls it on every input."""
    call(inputs[0])
    torch.cuda.synchronize()
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for x in inputs:
            results.append(call(x))
    samples = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / len(inputs))
    return float(median(samples[2:]))


def old_way(x: Tensor, cast: Cast) -> Any:
    """Both copies as without the CUDA kernel."""
    return (two_casts if slow_in_one_pass(cast) else triton_ops).QUANTIZE_BOTH.run(x, cast)


def by(tile: Tile, cast: Cast) -> Callable[[Tensor], tuple[Operand, Operand]]:
    """The cast with this tile."""

    def call(x: Tensor) -> tuple[Operand, Operand]:
        return cuda_both.quantize_both(x, cast, tile)

    return call


def compile_all(formats: Sequence[str]) -> None:
    """Compile all kernels of the table, in one thread per processor."""
    capability = torch.cuda.get_device_capability()
    jobs = []
    for name in formats:
        cast = Cast.of(name)
        for tile in tiles_of(cast.format):
            pieces = (
                16, 16, min(16, tile.strip * tile.cols // cast.format.block[1]), 16,
                min(16, tile.rows // cast.format.block[1]),
            )  # fmt: skip
            jobs.append(cuda_both.constants(cast, torch.bfloat16, tile, True, pieces, capability >= (8, 9)))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda row: nvrtc.compiled(cuda_both.SOURCES, row, capability), jobs))


Lines = dict[tuple[str, str], list[str]]
"""(format, tile) -> its share of the copy bandwidth for each size."""


def time_format(name: str, inputs: Sequence[Tensor], copy: float, repeats: int, lines: Lines) -> int:
    """Add the shares of the format's tiles to ``lines``, and print the best; how many differ from the cast before.

    ``copy``: bytes a millisecond of a copy.
    """
    cast, (rows, cols), wrong = Cast.of(name), inputs[0].shape, 0
    nbytes = moved_bytes(cast.format, "both", rows, cols)
    nbytes += 2 * rows * cols if cast.format.global_scale else 0
    expected = old_way(inputs[0], cast)
    calls: dict[str, Callable[[Tensor], Any]] = {"before": partial(old_way, cast=cast)}
    calls |= {",".join(map(str, tile)): by(tile, cast) for tile in tiles_of(cast.format)}
    chosen = ",".join(map(str, tile_for(cast.format, 2, rows, cols)))
    for label, call in calls.items():
        note = ""
        if label != "before" and not all(map(same, call(inputs[0]), expected)):
            wrong, note = wrong + 1, " DIFFERS"
        share = nbytes / milliseconds(call, inputs, repeats) / copy
        line = lines.setdefault((name, label), [])
        line.append(f"{share:.2f}{'*' if label == chosen else ''}{note}")
    best = max((lines[name, label][-1], label) for label in calls if label != "before")
    print(f"{rows}x{cols} {name}: before {lines[name, 'before'][-1]}, best {' by '.join(best)}", flush=True)
    return wrong


def main() -> None:
    """Check bits, then print a line for each format and tile."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--formats", nargs="*", default=FORMATS)
    options.add_argument("--sizes", nargs="*", default=SIZES)
    options.add_argument("--repeats", type=int, default=10)
    options.add_argument("--no-check", action="store_true", help="do not compare with the reference first")
    args = options.parse_args()
    exit_without_cuda(options)
    print(machine_line())
    wrong = 0 if args.no_check else check_formats()
    compile_all(args.formats)
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    lines: Lines = {}
    for text in args.sizes:
        rows, cols = map(int, text.split("x"))
        count = max(1, COLD_BYTES // (2 * rows * cols))
        inputs = [torch.randn(rows, cols, device="cuda").bfloat16() for _ in range(count)]
        copy = 2 * COPY_BYTES / milliseconds(lambda _: target.copy_(source), inputs[:1], args.repeats)
        wrong += sum(time_format(name, inputs, copy, args.repeats, lines) for name in args.formats)
        del inputs
        torch.cuda.empty_cache()
    header = ["format", "rows,cols,threads,blocks,stages,strip", *args.sizes]
    print("\nshare of copy bandwidth (NVFP4: input counted twice); * is the tile of cuda_tiles.py")
    print_table(header, [[*key, *cells] for key, cells in lines.items()])
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

"""Times the configs of small products on the GPU that is here: ``python -m mxtensor.tune`` writes its table.

For each format, number of rows and shape, every config that fits is run under a CUDA graph over weights that are not in
the cache; the fastest goes to ``kernels/small_batch_sm90.json`` (of this GPU's compute capability), from which
``kernels/small_batch_table.py`` chooses. What is not measured this time stays in the table. Nothing is tuned while a
model runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.quantize.select import quantize_operand
from ..kernels.runtime import nvrtc
from ..kernels.small_m.config import KINDS, RESERVED, Facts, Gpu, LaunchConfig, facts_for, classes_of, constants, registers
from ..kernels.small_m.heuristics import ROWS, WGMMA, Measured, gpu_of, line, measured_of, path_of
from ..kernels.small_m.launch import Weight, launch, sources_of
from ..kernels.small_m.shared_memory import layout_of
from ..numerics.cast import Cast
from ..numerics.formats import Format, get_format
from ..numerics.operand import Operand

FORMATS = ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4_e2m1", "nvfp4")
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192), (1024, 4096))
"""(N, K)"""
JOINED = ((6144, 4096), (28672, 4096))
"""The same of layers of Llama 3 8B that are made together, at one row."""
FEW = 8
"""Rows of activations up to which warps may read and cast their own."""
COLD = 4
"""Inputs take turns until together they are so many times the L2 cache."""


def staged(bits: int, rows: int, n: int, k: int, gpu: Gpu) -> Iterator[LaunchConfig]:
    """Plans of warps that share the stages of a block."""
    nt = next(t for t in (1, 2, 4, 8) if 8 * t >= min(rows, 64))
    splits = (1, 2, 4) if gpu.capability >= nvrtc.CLUSTERS else (1,)
    cuts = itertools.product((1, 2), (1, 2, 4, 8), (1, 2, 4, 8), (4, 8), (2, 3, 4), (8, 16), splits, (False, True))
    for mt, wr, wk, slabs, stages, warps, split, whole in cuts:
        if wr * wk not in (4, 8) or (wr * wk == 4 and warps == 8):
            continue
        if mt * nt > 8 and warps > 8:
            continue
        if whole and (rows > 2 or slabs * wk < 8):
            continue
        if nt < 4 and (slabs, stages) in ((8, 4), (4, 2)):  # too much under way, too little
            continue
        if nt == 1 and warps == 8:
            continue
        config = LaunchConfig(mt, nt, wr, wk, slabs, stages, warps // (wr * wk), split, whole)
        blocks = -(-n // config.rows) * split
        if blocks >= 0.7 * gpu.multiprocessors and not (split > 1 and blocks > 2 * split * gpu.multiprocessors):
            yield config


def together(bits: int, rows: int, n: int, k: int, gpu: Gpu) -> Iterator[LaunchConfig]:
    """Plans in which four warps multiply together."""
    least = next((t for t in (1, 2, 4, 8, 16) if 8 * t >= rows), 16)
    # tiles and chunks under way; of 256 columns fewer
    under_way = ((8, 2), (8, 4), (12, 3), (12, 6), (16, 8), (24, 12), (4, 2), (6, 3))
    warps = tuple((wr, wk) for wr in (4, 8, 12, 16) for wk in (1, 2, 3, 4) if wr * wk <= 16 and (wk == 1 or rows <= 64))
    numbers = ((least, 32) if rows > 128 else (least,), warps, (1, 2, 3), under_way, (1, 2, 3, 4, 6, 8))
    meetings = (False, False), (True, False), (False, True)  # apart, sends
    for nt, (wr, wk), blocks, (stages, ahead), split, (apart, sends) in itertools.product(*numbers, meetings):
        config = LaunchConfig(1, nt, wr, wk, 4, stages, blocks, split, False, True, ahead, 0, apart, sends)
        held = 4 * nt + ahead * 2 * bits  # registers for sums and for what is under way
        if (nt == 32) != (stages < 8) or not 8 <= wr * wk * blocks <= 16 or (blocks == 3 and wr * wk != 4):
            continue
        if held + 60 > registers(config).multiplying or (ahead > 2 and held < 32):
            continue
        if (split == 1 and (apart or sends)) or (split in (3, 6) and not apart) or (sends and config.cols % split):
            continue
        count = -(-n // config.rows) * -(-rows // config.cols)  # of clusters, or blocks that take turns
        at_a_time = gpu.multiprocessors // split if apart or split == 1 else gpu.clusters[split]
        if count * split >= 0.6 * gpu.multiprocessors and (split == 1 or count <= blocks * at_a_time):
            yield config


def resident(bits: int, rows: int, n: int, k: int, gpu: Gpu) -> Iterator[LaunchConfig]:
    """Plans that keep the activations."""
    nt = next((t for t in (1, 2, 4) if 8 * t >= rows), None)
    if nt is None:
        return
    splits = (1, 2, 4) if gpu.capability >= nvrtc.CLUSTERS else (1,)
    shapes = ((1, 4), (1, 8), (1, 16), (2, 4), (2, 8), (4, 2), (4, 4))
    wholes = (True,) if rows == 1 else (False, True) if rows <= FEW else (False,)
    numbers = ((1, 2), shapes, (4, 8, 16), (2, 3, 4, 5), (1, 2, 4), splits)
    for mt, (wr, wk), slabs, stages, blocks, split in itertools.product(*numbers):
        warps = wr * wk * blocks
        if warps not in (8, 16) or mt * nt > 4 or (wr > 1 and (rows <= 4 or blocks > 1)):
            continue
        if not 2**15 <= bits * warps * (stages - 1) * mt * slabs * 64 <= 2**17:  # bytes under way
            continue
        if split > 1 and rows * k < 2**15 and n > 2048:  # where one block has room for them
            continue
        firsts = range(min(3, stages - 1))  # stages asked for before activations; 0: all but one
        for first, whole in itertools.product(firsts, wholes):
            yield LaunchConfig(mt, nt, wr, wk, slabs, stages, blocks, split, whole, ahead=first, persistent=blocks)


def candidates(format: Format, rows: int, n: int, k: int, kind: str) -> Iterator[LaunchConfig]:
    """Plans of a kind that fill this GPU and for which its shared memory has room."""
    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device()))
    for config in {"pipelined": staged, "wgmma": together, "persistent": resident}[kind](
        format.element.bits, rows, n, k, gpu
    ):
        room = layout_of(format, config, rows, n, k, gpu)
        if room and config.blocks * (room.bytes + RESERVED) <= gpu.memory + RESERVED:
            yield config


class Graph:
    """Some calls as one CUDA graph: what a decoding loop replays."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        self.calls, self.graph = calls, torch.cuda.CUDAGraph()  # kept, with all that they hold: the graph reads it
        with torch.cuda.graph(self.graph):
            for call in calls:
                call()

    def __call__(self) -> None:
        self.graph.replay()

    def milliseconds(self) -> float:
        """GPU time of one of its calls, by replaying all."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / len(self.calls)


def graph_time(calls: Sequence[Callable[[], Any]], repeats: int = 5) -> float:
    """Microseconds of one of these calls, which a CUDA graph runs one after the other."""
    graph = Graph(calls)
    graph()
    return 1e3 * statistics.median(graph.milliseconds() for _ in range(repeats))


def cold_copies(nbytes: int) -> int:
    """How many inputs of ``nbytes`` have to take turns so that each has left the L2 cache when it comes again."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(1, math.ceil(COLD * cache / max(nbytes, 1)))


def weights(format: Format, n: int, k: int) -> list[Operand]:
    """Random weights, as many as keep each other out of the cache."""
    count = max(2, cold_copies(int(n * k * format.bits_per_value / 8)))
    first = quantize_operand(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02, Cast(format))
    out = [first]
    for _ in range(count - 1):
        out.append(Operand(first.data.clone(), first.scale.clone(), first.global_scale, format, first.shape))
    return out


def call(x: Tensor, w: Operand, config: LaunchConfig | None, cast: Cast | None = None) -> Tensor:
    """The product with this config, weight-only or of activations that are cast."""
    weight = Weight(w.data, w.scale, w.global_scale, None)
    return launch(x, (weight,), w.format, w.shape[1], None, None, 1.0, 1.0, x.dtype, cast, config)[0]


def casts_of(format: Format, rows: int, kind: str) -> tuple[Cast | None, ...]:
    """What activations go through when configs are timed: a cast makes a difference to those that cast themselves."""
    return (None, Cast(format)) if rows <= FEW and kind == "persistent" else (None,)


def compile_all(format: Format, kernels: Iterable[tuple[LaunchConfig, int]]) -> None:
    """Compile the kernels of these configs and classes in as many threads as there are processors."""
    capability = torch.cuda.get_device_capability()

    def one(kernel: tuple[LaunchConfig, int]) -> None:
        (config, classes), half = kernel, torch.bfloat16
        for cast in casts_of(format, 1, config.kind) if config.whole_x else (None,):
            facts = Facts(format, half, half, half, 16, 16, 16, True, cast, classes)
            nvrtc.compiled(KERNEL_SOURCES[config.kind], constants(facts_for(facts, config), config), capability)

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, kernels))


def kinds(rows: int) -> tuple[str, ...]:
    """The kinds of configs worth timing at so many rows."""
    if torch.cuda.get_device_capability() != WGMMA:
        return ("pipelined", "persistent")
    few = {1: ("pipelined", "persistent"), 2: ("persistent",), FEW: ("wgmma", "persistent")}  # the rest is as of 4 rows
    return few.get(rows, KINDS if rows <= 64 else ("wgmma",))


def fastest(format: Format, m: int, n: int, k: int, kind: str, held: Sequence[Operand]) -> Iterator[Measured]:
    """The config that takes the least time, for each of its casts; a config that the device refuses is left out."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    for cast in casts_of(format, m, kind):
        timed, name = [], f"{format} {m}x{n}x{k}{' cast' if cast else ''}"
        for config in candidates(format, m, n, k, kind):
            try:
                timed.append((graph_time([partial(call, x, w, config, cast) for w in held], 3), config))
            except RuntimeError as error:
                print(f"{name} {tuple(config)}: {error}", flush=True)
        if timed:
            us, config = min(timed)
            print(f"{name}: {us:.2f} us by {tuple(map(int, config))}, of {len(timed)}", flush=True)
            yield Measured(format.name, cast is not None, m, n, k, us, config)


def _case(row: Sequence[Any]) -> tuple[Any, ...]:
    """What a line of a file is about: format, shape, rows, the kind of config, and whether activations were cast."""
    line = measured_of(row)
    return line.format, line.n, line.k, line.m, line.config.kind, line.casts


def merged(old: Iterable[Sequence[Any]], new: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
    """The lines of a file, each new one in the place of the old one of the same case; in the order of the cases."""
    by_case = {_case(row): row for row in (*old, *new)}
    return [by_case[case] for case in sorted(by_case)]


def write(path: Path, found: Iterable[Measured]) -> None:
    """Put what was measured into the table at ``path``; what else it holds stays."""
    old = json.loads(path.read_text()) if path.exists() else []
    lines = merged(old, map(line, found))
    path.write_text("[\n" + ",\n".join(" " + json.dumps(row) for row in lines) + "\n]\n")


def shape_of(text: str) -> tuple[int, int]:
    """(N, K) from ``NxK``."""
    n, k = text.split("x")
    return int(n), int(k)


def main() -> None:
    """Time, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--shapes", nargs="+", type=shape_of, help="of weights, as NxK (default: all)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of configs")
    parser.add_argument(
        "--json", type=Path, help="the table to write to; lines of other cases stay (default: that of this GPU)"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "This command times CUDA kernels, and torch finds no CUDA device here.\n")
    path = args.json or path_of(torch.cuda.get_device_capability())
    for format in map(get_format, args.formats):
        shapes = [(m, n, k) for m in args.rows for n, k in args.shapes or (SHAPES + JOINED if m == 1 else SHAPES)]
        cases = [(*shape, kind) for shape in shapes for kind in kinds(shape[0]) if kind in args.kinds]
        kernels = {(config, classes_of(format, config, case[0])) for case in cases for config in candidates(format, *case)}
        print(f"{format}: compiling {len(kernels)} kernels", flush=True)
        compile_all(format, kernels)
        for n, k in dict.fromkeys(shape[1:] for shape in shapes):
            held = weights(format, n, k)
            write(path, [line for case in cases if case[1:3] == (n, k) for line in fastest(format, *case, held)])
    print(f"wrote {path}")


if __name__ == "__main__":
    main()

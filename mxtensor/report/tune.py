"""Times the launch configs of small-M products on this GPU and writes their table: ``python -m mxtensor.report.tune``.

For each format, number of rows and shape, every config that fits is timed in a CUDA graph, over weights that are not in
the L2 cache. The fastest goes to ``kernels/small_m/sm90.json`` (or the file of this compute capability), from which
``kernels/small_m/heuristics.py`` chooses. Rows of the table that are not measured again stay. A model that runs never
tunes anything.

``mx.tune(model)`` times the products of a model's quantized layers, among the configs that the cost model of
``kernels/expected_time.py`` expects to be fastest. The result serves all later processes on this kind of GPU, in the
folder of compiled kernels.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.kernel import forget_decisions
from ..core.progress import with_progress
from ..kernels.expected_time import by_expected_time, costs_of, rows_key, tiles_at_a_time, tiles_of
from ..kernels.quantize.choose_cast import quantize_operand
from ..kernels.runtime import nvrtc
from ..kernels.runtime.nvrtc import RESERVED
from ..kernels.small_m.config import KINDS, Gpu, LaunchConfig, can_use_wgmma, layout_of, registers, registers_in_use
from ..kernels.small_m.heuristics import (
    FEW,
    ROWS,
    WGMMA_CAPABILITY,
    Measured,
    gpu_of,
    path_of,
    read,
    stand_in,
    store_tuned,
    write,
)
from ..kernels.small_m.launch import Weight, compile_all, launch, resolve
from ..numerics.cast import Cast
from ..numerics.formats import Format, get_format
from ..numerics.operand import Operand
from ..tensor.mxtensor import MXTensor

FORMATS = ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4_e2m1", "nvfp4")
SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192), (1024, 4096))
"""(N, K)"""
JOINED = ((6144, 4096), (28672, 4096))
"""(N, K) of Llama 3 8B layers with one input (q, k and v; gate and up), which run as one launch; timed at one row."""
NARROW_IN_FLIGHT = ((8, 2), (8, 4), (12, 6))
"""(stages, ahead) of tiles narrower than the rows need."""
OTHER_REGISTERS = 60
"""Registers of a thread that multiplies converted activations, beside its sums and the codes that it loads ahead."""
TUNED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTENDERS = 6
"""Configs that ``mx.tune`` times for one product: those that the cost model expects to be fastest."""
COLD = 4
"""Total size of the weights that are used in turn, in L2 cache sizes."""


def pipelined(bits: int, rows: int, n: int, k: int, gpu: Gpu) -> Iterator[LaunchConfig]:
    """Configs of the kernel whose warps share the stages of a block."""
    nt = next(t for t in (1, 2, 4, 8) if 8 * t >= min(rows, 64))
    splits = (1, 2, 4) if gpu.capability >= nvrtc.CLUSTERS else (1,)
    choices = itertools.product((1, 2), (1, 2, 4, 8), (1, 2, 4, 8), (4, 8), (2, 3, 4), (8, 16), splits, (False, True))
    for mt, wr, wk, slabs, stages, warps, split, whole in choices:
        if wr * wk not in (4, 8) or (wr * wk == 4 and warps == 8):
            continue
        if mt * nt > 8 and warps > 8:
            continue
        if whole and (rows > 2 or slabs * wk < 8):
            continue
        if nt < 4 and (slabs, stages) in ((8, 4), (4, 2)):  # too many bytes in flight, too few
            continue
        if nt == 1 and warps == 8:
            continue
        config = LaunchConfig(mt, nt, wr, wk, slabs, stages, warps // (wr * wk), split, whole)
        blocks = -(-n // config.rows) * split
        if blocks >= 0.7 * gpu.multiprocessors and not (split > 1 and blocks > 2 * split * gpu.multiprocessors):
            yield config


def columns(rows: int) -> tuple[int, ...]:
    """The widths of tiles (``nt``) that suit this number of activation rows: the least that has them all, up to 128
    rows, above that 256 too, and narrower ones for weights so small that one tile of rows leaves the GPU idle."""
    least = next((t for t in (1, 2, 4, 8, 16) if 8 * t >= rows), 16)
    narrow = tuple(t for t in (2, 4, 8) if least / 4 <= t < least)
    return (least, 24, 32, *narrow) if rows > 128 else (least, *narrow)


def is_narrow(config: LaunchConfig, rows: int) -> bool:
    """Whether a wgmma config has narrower tiles than this number of activation rows needs."""
    return config.wgmma and config.nt < columns(rows)[0]


def wgmma(bits: int, rows: int, n: int, k: int, gpu: Gpu) -> Iterator[LaunchConfig]:
    """Configs of the wgmma kernel."""
    # (stages, ahead): tiles and chunks in flight; fewer for 256 columns
    in_flight = ((8, 2), (8, 4), (12, 3), (12, 6), (16, 8), (24, 12), (4, 2), (6, 3))
    warps = tuple((wr, wk) for wr in (4, 8, 12, 16) for wk in (1, 2, 3, 4) if wr * wk <= 16 and (wk == 1 or rows <= 64))
    numbers = (columns(rows), warps, (1, 2, 3), in_flight, (1, 2, 3, 4, 6, 8))
    reductions = (False, False), (True, False), (False, True)  # reduce_global, reduce_dsmem
    for nt, (wr, wk), blocks, (stages, ahead), split, (reduce_global, reduce_dsmem) in itertools.product(
        *numbers, reductions
    ):
        config = LaunchConfig(
            1, nt, wr, wk, 4, stages, blocks, split, False, True, ahead, 0, reduce_global, reduce_dsmem
        )
        used = registers_in_use(config, bits)
        if (nt == 32) != (stages < 8) or not 8 <= wr * wk * blocks <= 16 or (blocks == 3 and wr * wk != 4):
            continue
        if used + OTHER_REGISTERS > registers(config).compute or (ahead > 2 and used < 32):
            continue
        if split == 1 and (reduce_global or reduce_dsmem):
            continue
        if (split in (3, 6) and not reduce_global) or (reduce_dsmem and config.cols % split):
            continue
        narrow = is_narrow(config, rows)
        if narrow and ((stages, ahead) not in NARROW_IN_FLIGHT or reduce_dsmem != (split > 1)):
            continue
        filled = tiles_of(config, rows, n) * split >= 0.6 * gpu.multiprocessors
        if filled and ((split == 1 and not narrow) or tiles_of(config, rows, n) <= tiles_at_a_time(config, gpu)):
            yield config


def persistent(bits: int, rows: int, n: int, k: int, gpu: Gpu) -> Iterator[LaunchConfig]:
    """Configs of the kernel that keeps the activations in shared memory."""
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
        if not 2**15 <= bits * warps * (stages - 1) * mt * slabs * 64 <= 2**17:  # bytes in flight
            continue
        if split > 1 and rows * k < 2**15 and n > 2048:  # one block can store these activations
            continue
        firsts = range(min(3, stages - 1))  # stages requested before the activations; 0: all but one
        for first, whole in itertools.product(firsts, wholes):
            yield LaunchConfig(mt, nt, wr, wk, slabs, stages, blocks, split, whole, ahead=first, persistent=blocks)


def candidates(format: Format, rows: int, n: int, k: int, kind: str) -> Iterator[LaunchConfig]:
    """Configs of a kind that fill this GPU and fit its shared memory."""
    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device()))
    configs = {"pipelined": pipelined, "wgmma": wgmma, "persistent": persistent}[kind]
    for config in configs(format.element.bits, rows, n, k, gpu):
        if all_blocks_fit(format, config, rows, n, k, gpu):
            yield config


def all_blocks_fit(format: Format, config: LaunchConfig, rows: int, n: int, k: int, gpu: Gpu) -> bool:
    """Whether as many blocks as the config asks for have their shared memory on one multiprocessor."""
    layout = layout_of(format, config, rows, n, k, gpu)
    return layout is not None and config.blocks * (layout.bytes + RESERVED) <= gpu.memory + RESERVED


class Graph:
    """Several calls as one CUDA graph, as a decoding loop replays them: each has run before, so that the graph finds
    the forms of weights that are cached."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        calls[0]()
        for call in calls:
            call()
        torch.cuda.synchronize()
        self.calls, self.graph = calls, torch.cuda.CUDAGraph()  # the graph reads the tensors of the calls
        with torch.cuda.graph(self.graph):
            for call in calls:
                call()

    def __call__(self) -> None:
        self.graph.replay()

    def milliseconds(self) -> float:
        """GPU time of one call, from one replay of all."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / len(self.calls)


def graph_time(calls: Sequence[Callable[[], Any]], repeats: int = 5) -> float:
    """Median microseconds of one of these calls in a CUDA graph of all."""
    graph = Graph(calls)
    graph()
    return 1e3 * statistics.median(graph.milliseconds() for _ in range(repeats))


def cold_copies(nbytes: int) -> int:
    """How many inputs of ``nbytes`` to use in turn, so that each has left the L2 cache when it is used again."""
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(1, math.ceil(COLD * cache / max(nbytes, 1)))


def weights(format: Format, n: int, k: int) -> list[Operand]:
    """Random weights, enough of them that none is in the cache when it is read."""
    count = max(2, cold_copies(int(n * k * format.bits_per_value / 8)))
    first = quantize_operand(torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02, Cast(format))
    out = [first]
    for _ in range(count - 1):
        out.append(first.map(torch.clone))
    return out


def call(x: Tensor, w: Operand, config: LaunchConfig | None, cast: Cast | None = None) -> Tensor:
    """The product with this config, weight-only or of activations that are cast."""
    weight = Weight(w.data, w.scale, w.global_scale, None)
    return launch(x, (weight,), w.format, w.shape[1], None, None, 1.0, 1.0, x.dtype, cast, config)[0]


def casts_of(format: Format, rows: int, kind: str) -> tuple[Cast | None, ...]:
    """The casts of activations to time: persistent configs are timed with and without one, others without."""
    return (None, Cast(format)) if rows <= FEW and kind == "persistent" else (None,)


def kinds(rows: int) -> tuple[str, ...]:
    """The kinds of kernels worth timing at this number of rows."""
    if torch.cuda.get_device_capability() != WGMMA_CAPABILITY:
        return ("pipelined", "persistent")
    few = {1: ("pipelined", "persistent"), 2: ("persistent",), FEW: ("wgmma", "persistent")}  # others as at 4 rows
    return few.get(rows, KINDS if rows <= 64 else ("wgmma",))


def fastest(format: Format, m: int, n: int, k: int, kind: str, copies: Sequence[Operand]) -> Iterator[Measured]:
    """The fastest config of a kind, for each cast. A config that the device refuses is printed and left out."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    for cast in casts_of(format, m, kind):
        timed, name = [], f"{format} {m}x{n}x{k}{' cast' if cast else ''}"
        for config in candidates(format, m, n, k, kind):
            try:
                timed.append((graph_time([partial(call, x, w, config, cast) for w in copies], 3), config))
            except RuntimeError as error:
                print(f"{name} {tuple(config)}: {error}", flush=True)
        if timed:
            us, config = min(timed)
            print(f"{name}: {us:.2f} us by {tuple(map(int, config))}, of {len(timed)}", flush=True)
            yield Measured(format.name, cast is not None, m, n, k, us, config)


def merged(old: Iterable[Measured], new: Iterable[Measured]) -> list[Measured]:
    """All measurements in the order of their cases; a new one replaces the old one of the same case.

    A case is a format, shape, number of rows, kind of kernel, and whether activations were cast.
    """
    by_case = {(line.format, line.n, line.k, line.m, line.config.kind, line.casts): line for line in (*old, *new)}
    return [by_case[case] for case in sorted(by_case)]


def update(path: Path, found: Iterable[Measured]) -> None:
    """Write measurements to the table at ``path``; its rows of other cases stay."""
    write(path, merged(read(path) if path.exists() else [], found))


# ---------------------------------------------------------------------------------------------- mx.tune


def _products(model: nn.Module) -> dict[tuple[str, bool, int, int], torch.device]:
    """(format, cast of activations, N, K) -> device, of the quantized layers on CUDA devices."""
    found = {}
    for layer in model.modules():
        w = getattr(layer, "weight", None)
        if isinstance(w, MXTensor) and w.dim() == 2 and w.device.type == "cuda":
            n, k = w.shape
            found[stand_in(w.format), w.recipe.activation is not None, n, k] = w.device
    return found


def _contenders(format: Format, casts: bool, m: int, n: int, k: int, gpu: Any) -> list[LaunchConfig]:
    """The configs to time for one product, the one that is expected to be fastest first; ``casts``: of activations that
    are cast, which no direct config reads."""
    model, rows = costs_of(gpu.capability), rows_key(m)
    costs = (casts and m <= FEW and model.get((format.name, True, rows))) or model.get((format.name, False, rows), ())
    wgmma = can_use_wgmma(format, k, 0, (0, 0))
    order = [config for _, config in by_expected_time(costs, m, n, k, format, gpu)]
    known = [c for c in order if (wgmma or not c.wgmma) and not (casts and c.direct)]
    return [c for c in known if layout_of(format, c, m, n, k, gpu)][:CONTENDERS]


def tune(model: nn.Module, rows: Sequence[int] = TUNED_ROWS, seconds: float = 60.0) -> dict[tuple[int, int, int], str]:
    """Measure the products of ``model``'s quantized layers with these numbers of activation rows.

    Ends after about ``seconds``; what was not measured by then stays with the cost model. Returns the kind of kernel of
    each (rows, N, K). Compiled graphs keep the kernels they were captured with. Raises ValueError if the model has no
    quantized layer on a CUDA device, or for a GPU without a cost model.
    """
    products = _products(model)
    if not products:
        raise ValueError(
            "tune needs a model with quantized layers on a CUDA device: mx.quantize_(model.cuda(), 'mxfp8')"
        )

    end, found = time.monotonic() + seconds, []
    for (name, casts, n, k), device in with_progress(products.items(), "tuning", "shape"):
        format, gpu, cast = get_format(name), gpu_of(device), Cast(get_format(name)) if casts else None
        if not costs_of(gpu.capability):
            raise ValueError(f"there is no cost model of {gpu.name}; write one with python -m mxtensor.report.costs")
        if time.monotonic() > end:
            continue
        cases = {m: _contenders(format, casts, m, n, k, gpu) for m in rows}
        with torch.cuda.device(device), torch.no_grad():
            compile_all(format, [(m, n, k, config, cast) for m in rows for config in cases[m]])
            copies = weights(format, n, k)
            for m, configs in cases.items():
                x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
                for config in configs if time.monotonic() <= end else ():
                    us = graph_time([partial(call, x, w, config, cast) for w in copies], 3)
                    found.append(Measured(name, casts, m, n, k, us, config))
    best: dict[tuple[Any, ...], Measured] = {}
    for line in sorted(found, key=lambda line: -line.us):
        best[line[:5]] = line
    names = {torch.cuda.get_device_name(device) for device in products.values()}
    for gpu_name in names:
        store_tuned(gpu_name, list(best.values()))
    resolve.cache_clear()
    forget_decisions()
    return {(line.m, line.n, line.k): line.config.kind for line in best.values()}


# ---------------------------------------------------------------------------------------------- the command


def shape_of(text: str) -> tuple[int, int]:
    """(N, K) from ``NxK``."""
    n, k = text.split("x")
    return int(n), int(k)


def format_name(text: str) -> str:
    """The name of the format called ``text``, in any spelling."""
    try:
        return get_format(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}") from error


def main() -> None:
    """Time the configs, print the fastest and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", type=format_name, default=FORMATS)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--shapes", nargs="+", type=shape_of, help="of weights, as NxK (default: all)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="of kernels (default: all)")
    parser.add_argument(
        "--json", type=Path, help="the table to update (default: that of this GPU); rows of other cases stay"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "This command times CUDA kernels, and torch finds no CUDA device here.\n")
    path = args.json or path_of(torch.cuda.get_device_capability())
    for format in map(get_format, args.formats):
        shapes = [(m, n, k) for m in args.rows for n, k in args.shapes or (SHAPES + JOINED if m == 1 else SHAPES)]
        cases = [(*shape, kind) for shape in shapes for kind in kinds(shape[0]) if kind in args.kinds]
        print(f"{format}: compiling", flush=True)
        products = [
            (*case[:3], config, cast)
            for case in cases
            for cast in casts_of(format, case[0], case[3])
            for config in candidates(format, *case)
        ]
        print(f"{format}: {compile_all(format, products)} kernels", flush=True)
        for n, k in dict.fromkeys(shape[1:] for shape in shapes):
            copies = weights(format, n, k)
            update(path, [line for case in cases if case[1:3] == (n, k) for line in fastest(format, *case, copies)])
    print(f"wrote {path}")


if __name__ == "__main__":
    main()

"""Fits the cost model of small-M products on this GPU and writes its file: ``python -m mxtensor.report.costs``.

The configs that were fastest for some shape (``sm90.json``) and those of ``even_tiles`` are timed over many shapes.
Their coefficients are fitted to ``FITTED``; the error is printed on ``HELD_OUT``, shapes that the fit does not see, as
the median and the 90th percentile of |predicted / measured - 1|, and as the time lost by taking the predicted config in
place of the fastest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ..kernels.expected_time import (
    ROWS,
    Cost,
    Key,
    by_expected_time,
    costs_of,
    features,
    path_of,
    predict,
    tiles_at_a_time,
    tiles_of,
    write,
)  # fmt: skip
from ..kernels.small_m.config import Gpu, LaunchConfig, config_of, has_registers, layout_of, registers, registers_in_use
from ..kernels.small_m.heuristics import FEW, STAND_INS, WGMMA_CAPABILITY, fitted, gpu_of, table
from ..kernels.small_m.launch import compile_all
from ..numerics.cast import Cast
from ..numerics.formats import Format, get_format
from .tune import FORMATS, OTHER_REGISTERS, all_blocks_fit, call, format_name, graph_time, is_narrow, weights

FITTED = (
    (4096, 4096), (14336, 4096), (4096, 14336), (6144, 5120), (5120, 5120), (2880, 4096), (5120, 2880), (1024, 4096),
    (2048, 2048), (3840, 15360), (768, 2048), (512, 2880), (17920, 5120), (28672, 8192), (1536, 6144), (1024, 1024),
    (2880, 2880), (2048, 768),
)  # fmt: skip
"""(N, K) of the weights that the coefficients are fitted to."""
HELD_OUT = (
    (12288, 4096), (13696, 4096), (7168, 5120), (5120, 32768), (4096, 2048), (5760, 2880), (3072, 1536), (8192, 8192),
    (1536, 2048), (1280, 1280),
)  # fmt: skip
"""(N, K) of the weights that only the printed error is about."""
SIZES = (512, 768, 1024, 1536, 2048, 2880, 4096, 5120, 6144, 8192, 12288, 16384, 28672)
"""N and K of shapes, all pairs; a config is written if it is among the fastest for one of them."""
PRODUCTS_PER_US = 2048 * 1980
"""Products of two 16-bit numbers of one multiprocessor."""
SAVED = 2
"""The fastest configs that a shape needs: of all, of those with converted activations, and of those without wgmma."""
LENDERS = {"nvfp4": "mxfp4_e2m1", "mxfp6_e2m3": "mxfp8_e4m3"}
"""A format -> the one that lends it the costs of configs that were not timed for it."""
MOST_TILES = 8
"""Tiles along the rows of activations."""
WIDEST = 256
"""Columns of a tile: those of one matrix instruction."""
LEAST_WIDE = 96
"""Rows from which converted activations are worth tiles of other widths than those of the table."""
FEW_STAGES = 176
"""Columns from which four tiles fill the shared memory."""
Case = tuple[str, bool, int, LaunchConfig]
Times = dict[Case, list[tuple[int, int, float]]]
"""(format, cast, rows, config) -> (N, K, microseconds) of each shape."""
Product = tuple[int, int, int, LaunchConfig, Cast | None]
"""(M, N, K, config, cast of the activations)"""


def candidates(format: Format, m: int, casts: bool, capability: tuple[int, int]) -> list[LaunchConfig]:
    """The configs of the table that can be fastest for m rows."""
    found: dict[LaunchConfig, None] = {}
    for line in table(capability):
        config = line.config
        name = STAND_INS[format.element.bits] if config.wgmma else format.name
        if line.format not in (name, format.name) or (config.whole_x and m > FEW) or (casts and not config.persistent):
            continue
        near = line.m / 2 <= m <= line.m or (config.wgmma and min(line.m, m) >= 64) or max(line.m, m) <= FEW
        narrow = is_narrow(config, line.m) and line.m >= m > config.cols
        if near or narrow:
            found[fitted(config, m) if config.wgmma and m > 64 else config] = None
    return list(found)


def widths(rows: int) -> list[int]:
    """The least columns that divide these rows into 1, 2, ... tiles, in multiples of 8, or of 16 above 32 columns."""
    found: dict[int, None] = {}
    for tiles in range(1, MOST_TILES + 1):
        least = -(-rows // tiles)
        step = 16 if least > 32 else 8
        found[-(-least // step) * step] = None
    return [cols for cols in found if 16 <= cols <= WIDEST]


def _divisions(rows: int, cols: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(wr, wk, blocks, stages, ahead) for tiles of these columns."""
    if cols >= FEW_STAGES:
        yield 8, 1, 1, 4, 2
    elif cols > 64:
        yield from ((8, 1, 1, 8, 2), (12, 1, 1, 8, 2))
    else:
        yield from ((4, 1, 2, 8, 4), (8, 1, 1, 8, 2), (8, 1, 1, 8, 4), (12, 1, 1, 8, 2))
        if cols <= 32:
            yield 4, 1, 2, 12, 6
        if rows <= 64:
            yield 4, 2, 1, 8, 4


def even_tiles(format: Format, rows: int) -> Iterator[LaunchConfig]:
    """Configs of the wgmma kernel whose tiles divide this number of rows evenly, and that have enough registers.

    512 rows in tiles of 256 leave 52 of 132 multiprocessors idle for a weight of 5120 rows, in tiles of 176 only 12: so
    there are tiles of many widths, of two or three warpgroups, with converted activations and direct.
    """
    for cols in widths(rows):
        for wr, wk, blocks, stages, ahead in _divisions(rows, cols):
            converted = rows >= LEAST_WIDE and (cols > 64 or rows > 160)
            for direct in [False] * converted + [True] * (rows >= 16):
                for split in (1, 2, 4, 8) if direct else (1, 2, 4):
                    sends = split > 1 and cols <= 64 and cols % split == 0
                    config = LaunchConfig(
                        1, cols // 8, wr, wk, 4, stages, blocks, split, False, True, ahead, 0, False, sends, direct
                    )
                    used = registers_in_use(config, format.element.bits) + OTHER_REGISTERS
                    if has_registers(format, config) if direct else used <= registers(config).compute + 8:
                        yield config


def pays_off(config: LaunchConfig, rows: int, n: int, gpu: Gpu) -> bool:
    """Whether to time it for n weight rows: it fills half of the GPU, columns are split only if all tiles run at a
    time, and narrow tiles are for small weights."""
    tiles, at_a_time = tiles_of(config, rows, n), tiles_at_a_time(config, gpu)
    if 2 * tiles * config.split < gpu.multiprocessors or (config.split > 1 and tiles > at_a_time):
        return False
    return config.cols >= min(rows, 128) or tiles <= 2 * at_a_time


def products(format: Format, shapes: Sequence[tuple[int, int]], gpu: Gpu) -> Iterator[Product]:
    """Every candidate on every shape. Tiles narrower than the rows need are for small weights: two waves at most."""
    for m, casts in itertools.product(ROWS, (False, True)):
        if casts and m > FEW:
            continue
        known = candidates(format, m, casts, gpu.capability)
        for config in known:
            most = 2 * tiles_at_a_time(config, gpu) if is_narrow(config, m) else math.inf
            for n, k in shapes:
                if tiles_of(config, m, n) <= most and layout_of(format, config, m, n, k, gpu):
                    yield m, n, k, config, Cast(format) if casts else None
        for config in () if casts or gpu.capability != WGMMA_CAPABILITY else even_tiles(format, m):
            for n, k in () if config in known else shapes:
                if pays_off(config, m, n, gpu) and all_blocks_fit(format, config, m, n, k, gpu):
                    yield m, n, k, config, None


def measure(
    format: Format, shapes: Sequence[tuple[int, int]], known: Times
) -> Iterator[tuple[Case, tuple[int, int, float]]]:
    """Time every candidate on every shape, but for the ``known`` times; progress is printed."""
    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device()))
    timed = {(*case, *shape) for case, times in known.items() for *shape, _ in times}
    every = [
        (m, n, k, config, cast)
        for m, n, k, config, cast in products(format, shapes, gpu)
        if (format.name, cast is not None, m, config, n, k) not in timed
    ]
    print(f"{format}: compiling the kernels of {len(every)} products", flush=True)
    print(f"{format}: {compile_all(format, every)} kernels", flush=True)
    for n, k in dict.fromkeys(case[1:3] for case in every):
        copies = weights(format, n, k)
        for m, _, _, config, cast in (case for case in every if case[1:3] == (n, k)):
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            try:
                us = graph_time([partial(call, x, w, config, cast) for w in copies], 3)
            except RuntimeError:
                continue
            yield (format.name, cast is not None, m, config), (n, k, us)
        print(f"{format}: {n}x{k}", flush=True)


def non_negative_fit(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The least-squares solution without negative coefficients; there are few, so every subset is tried."""
    best, error = np.zeros(rows.shape[1]), math.inf
    for size in range(1, rows.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(rows.shape[1]), size)):
            found = np.linalg.lstsq(rows[:, chosen], wanted, rcond=None)[0]
            off = float(((rows[:, chosen] @ found - wanted) ** 2).sum())
            if (found >= 0).all() and off < error - 1e-9:
                best, error = np.zeros(rows.shape[1]), off
                best[chosen] = found
    return best


def fit(times: Times, gpu: Gpu, keep: Callable[[int, int], bool]) -> dict[Case, Cost]:
    """The coefficients of each config, by relative error, from the shapes to keep; at least four are needed."""
    out = {}
    for case, measured in times.items():
        name, _, m, config = case
        used = [(n, k, us) for n, k, us in measured if keep(n, k)]
        if len(used) < 4:
            continue
        known = np.array([features(config, m, n, k, get_format(name), gpu) for n, k, _ in used])
        us = np.array([one for *_, one in used])
        # what the matrix instructions of a step take at least, on an H100 at its highest clock
        least_step = config.rows * config.cols * config.depth / PRODUCTS_PER_US if config.wgmma else 0.0
        least = np.array([0, least_step, 0, 0, 0, 0])
        found = least + non_negative_fit(known / us[:, None], 1 - known @ least / us)
        (least_n, most_n), (least_k, most_k) = ((min(sizes), max(sizes)) for sizes in list(zip(*used, strict=True))[:2])
        start, step, byte, wave, tail, columns = map(float, found)
        out[case] = Cost(config, start, step, byte, wave, tail, columns, least_n, most_n, least_k, most_k)
    return out


def lent(costs: Mapping[Case, Cost], gpu: Gpu) -> dict[Case, Cost]:
    """Costs of wgmma configs that were timed for another format only (``LENDERS``): its coefficients times the mean
    ratio of the expected times of the configs that both formats have at this number of rows."""
    out = {}
    for (name, lender), m in itertools.product(LENDERS.items(), ROWS):
        own, other = (
            {case[3]: cost for case, cost in costs.items() if case[:3] == (format, False, m) and case[3].wgmma}
            for format in (name, lender)
        )
        ratios = [
            math.log(
                predict(own[config], m, n, k, get_format(name), gpu)
                / predict(other[config], m, n, k, get_format(lender), gpu)
            )
            for config in own.keys() & other.keys()
            for n, k in FITTED
        ]
        for config in [config for config in other if ratios and config not in own]:
            ratio = math.exp(statistics.fmean(ratios))
            out[name, False, m, config] = other[config].times(ratio)
    return out


def needed(costs: Mapping[Key, Sequence[Cost]], gpu: Gpu) -> dict[Key, Sequence[Cost]]:
    """Only the configs that are among the fastest for some shape of ``SIZES``."""
    classes = (lambda c: True, lambda c: not c.direct, lambda c: not c.wgmma)
    out: dict[Key, Sequence[Cost]] = {}
    for (name, casts, m), known in costs.items():
        format, saved = get_format(name), set[LaunchConfig]()
        below = max((rows for rows in ROWS if rows < m), default=0)
        for n, k, rows in itertools.product(SIZES, SIZES, {below + 1, m}):
            fits = [c for c in known if layout_of(format, c.config, rows, n, k, gpu)]
            order = [config for _, config in by_expected_time(fits, rows, n, k, format, gpu)]
            for belongs in classes:
                saved.update(list(filter(belongs, order))[:SAVED])
        out[name, casts, m] = [cost for cost in known if cost.config in saved]
    return out


def check(times: Times, costs: dict[Case, Cost], gpu: Gpu, shapes: Sequence[tuple[int, int]]) -> str:
    """The error of the coefficients on these shapes, as a sentence."""
    by_product: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for case, measured in times.items():
        for n, k, us in measured if case in costs else ():
            if (n, k) in shapes and costs[case].knows(n, k):
                expected = predict(costs[case], case[2], n, k, get_format(case[0]), gpu)
                by_product[(*case[:3], n, k)].append((expected, us))
    errors = sorted(abs(expected / us - 1) for pairs in by_product.values() for expected, us in pairs)
    lost = [min(pairs)[1] / min(us for _, us in pairs) for pairs in by_product.values()]
    median, high = statistics.median(errors), errors[int(0.9 * len(errors))]
    mean = math.exp(statistics.fmean(map(math.log, lost)))
    return (
        f"{len(shapes)} shapes, {len(errors)} times: error {median:.1%} median, {high:.1%} at the 90th percentile; the "
        f"predicted config takes {mean:.3f} times as long as the fastest, at worst {max(lost):.2f}"
    )


def read_times(path: Path) -> tuple[str, Times]:
    """Where the times of a file were measured, and the times. Raises ValueError for another file."""
    try:
        content = json.loads(path.read_text())
        times = {
            (format, bool(casts), m, config_of(config)): [(n, k, us) for n, k, us in measured]
            for format, casts, m, config, measured in content["rows"]
        }
        return content["note"], times
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise ValueError(f"{path} is not a file of --times: {error}") from error


def write_times(path: Path, note: str, times: Times) -> None:
    """A line is what one config takes: format, cast, rows, the config, and N, K and microseconds of each shape."""
    rows = (
        [*case[:2], case[2], list(map(int, case[3])), [(n, k, round(us, 2)) for n, k, us in times[case]]]
        for case in times
    )
    lines = ",\n".join("  " + json.dumps(row, separators=(",", ":")) for row in rows)
    path.write_text(f'{{\n "note": {json.dumps(note)},\n "rows": [\n{lines}\n ]\n}}\n')


def updated(known: Mapping[Key, Sequence[Cost]], fitted: Mapping[Case, Cost]) -> dict[Key, Sequence[Cost]]:
    """The costs of a file, with those of the formats that were fitted replaced."""
    formats = {case[0] for case in fitted}
    found: dict[Key, list[Cost]] = {key: list(some) for key, some in known.items() if key[0] not in formats}
    for (name, casts, m, _), cost in fitted.items():
        found.setdefault((name, casts, m), []).append(cost)
    return dict(found)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure or read times, fit, print the errors and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", type=format_name, default=FORMATS)
    parser.add_argument("--json", type=Path, help="the file to write (default: that of this GPU)")
    parser.add_argument("--times", type=Path, help="add the measured times to this file; those it has are not measured")
    parser.add_argument("--read", type=Path, metavar="TIMES", help="fit to the times of this file, which needs no GPU")
    args = parser.parse_args(argv)
    if args.read is None and not torch.cuda.is_available():
        parser.exit(1, "This command times CUDA kernels, and torch finds no CUDA device here; pass --read TIMES.\n")
    try:
        file = args.read or (args.times if args.times and args.times.exists() else None)
        known = ("", Times()) if file is None else read_times(file)
    except ValueError as error:
        parser.error(f"{error}")
    if args.read is None:
        gpu = gpu_of(torch.device("cuda", torch.cuda.current_device()))
        times = Times(known[1])
        note = f"{gpu.name}, torch {torch.__version__}"
        for format in map(get_format, args.formats):
            for case, measured in measure(format, FITTED + HELD_OUT, times):
                times.setdefault(case, []).append(measured)
            if args.times:
                write_times(args.times, note, times)
    else:
        gpu, (note, times) = gpu_of(torch.device("cpu")), known
    seen = fit(times, gpu, lambda n, k: (n, k) in FITTED)
    print("fitted to:", check(times, seen, gpu, FITTED))
    print("held out:", check(times, seen, gpu, HELD_OUT))
    path = args.json or path_of(gpu.capability)
    every = fit(times, gpu, lambda n, k: True)  # what is written uses all measurements
    every |= lent(every, gpu)
    write(path, needed(updated(costs_of(gpu.capability), every), gpu), note)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()

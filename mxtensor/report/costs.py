"""Fits the cost model of small-M products on this GPU and writes its file: ``python -m mxtensor.report.costs``.

The configs that were fastest for some shape (``sm90.json``) are timed over many shapes. Their coefficients are fitted
to ``FITTED``; the error is printed on ``HELD_OUT``, shapes that the fit does not see, as the median and the 90th
percentile of |predicted / measured - 1|, and as the time lost by taking the predicted config in place of the fastest.
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

from ..kernels.small_m.compile_ahead import compile_all
from ..kernels.small_m.config import LaunchConfig, config_of
from ..kernels.small_m.costs import ROWS, Cost, Key, costs_of, features, path_of, predict, write
from ..kernels.small_m.heuristics import fitted, gpu_of, table
from ..kernels.small_m.shared_memory import Gpu, layout_of
from ..numerics.cast import Cast
from ..numerics.formats import Format, get_format
from .tune import FEW, FORMATS, call, format_name, graph_time, weights

FITTED = (
    (4096, 4096), (14336, 4096), (4096, 14336), (6144, 5120), (5120, 5120), (2880, 4096), (5120, 2880), (1024, 4096),
    (2048, 2048), (3840, 15360), (768, 2048), (512, 2880), (17920, 5120), (28672, 8192), (1536, 6144),
)  # fmt: skip
"""(N, K) of the weights that the coefficients are fitted to."""
HELD_OUT = (
    (12288, 4096), (13696, 4096), (7168, 5120), (5120, 32768), (4096, 2048), (5760, 2880), (3072, 1536), (8192, 8192),
)  # fmt: skip
"""(N, K) of the weights that only the printed error is about."""
Case = tuple[str, bool, int, LaunchConfig]
Times = dict[Case, list[tuple[int, int, float]]]
"""(format, cast, rows, config) -> (N, K, microseconds) of each shape."""


def candidates(format: Format, m: int, casts: bool) -> list[LaunchConfig]:
    """The configs of the table that can be fastest for m rows."""
    found: dict[LaunchConfig, None] = {}
    for line in table(torch.cuda.get_device_capability()):
        config = line.config
        if line.format != format.name or (config.whole_x and m > FEW) or (casts and not config.persistent):
            continue
        near = line.m / 2 <= m <= line.m or (config.wgmma and min(line.m, m) >= 64) or max(line.m, m) <= FEW
        if near:
            found[fitted(config, m) if config.wgmma and m > 64 else config] = None
    return list(found)


def measure(format: Format, shapes: Sequence[tuple[int, int]]) -> Iterator[tuple[Case, tuple[int, int, float]]]:
    """Time every candidate on every shape; progress is printed."""
    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device()))
    kinds = [(m, casts) for m in ROWS for casts in ((False, True) if m <= FEW else (False,))]
    every = [
        (m, n, k, config, Cast(format) if casts else None)
        for m, casts in kinds
        for n, k in shapes
        for config in candidates(format, m, casts)
        if layout_of(format, config, m, n, k, gpu)
    ]
    print(f"{format}: compiling the kernels of {len(every)} products", flush=True)
    print(f"{format}: {compile_all(format, every)} kernels", flush=True)
    for n, k in shapes:
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
        out[case] = Cost(config, *map(float, non_negative_fit(known / us[:, None], np.ones(len(us)))))
    return out


def check(times: Times, costs: dict[Case, Cost], gpu: Gpu, shapes: Sequence[tuple[int, int]]) -> str:
    """The error of the coefficients on these shapes, as a sentence."""
    by_product: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for case, measured in times.items():
        for n, k, us in measured if case in costs else ():
            if (n, k) in shapes:
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
    """Where the times of a file were measured, and the times."""
    content, times = json.loads(path.read_text()), Times()
    for name, casts, m, n, k, us, *config in content["rows"]:
        times.setdefault((name, bool(casts), m, config_of(config)), []).append((n, k, us))
    return content["note"], times


def write_times(path: Path, note: str, times: Times) -> None:
    """A time is a line: format, cast, rows, N, K, microseconds and the config."""
    lines = [json.dumps([*case[:3], *one, *map(int, case[3])]) for case in times for one in times[case]]
    rows = ",\n".join("  " + line for line in lines)
    path.write_text(f'{{\n "note": {json.dumps(note)},\n "rows": [\n{rows}\n ]\n}}\n')


def updated(known: Mapping[Key, Sequence[Cost]], fitted: Mapping[Case, Cost]) -> dict[Key, Sequence[Cost]]:
    """The costs of a file with those of the same configs replaced, and new ones added."""
    found = {key: {cost.config: cost for cost in some} for key, some in known.items()}
    for (name, casts, m, config), cost in fitted.items():
        found.setdefault((name, casts, m), {})[config] = cost
    return {key: list(some.values()) for key, some in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure or read times, fit, print the errors and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", type=format_name, default=FORMATS)
    parser.add_argument("--json", type=Path, help="the file to write (default: that of this GPU)")
    parser.add_argument("--times", type=Path, help="also write every measured time to this file")
    parser.add_argument("--read", type=Path, metavar="TIMES", help="fit to the times of this file, which needs no GPU")
    args = parser.parse_args(argv)
    if args.read is None and not torch.cuda.is_available():
        parser.exit(1, "This command times CUDA kernels, and torch finds no CUDA device here; pass --read TIMES.\n")
    if args.read is None:
        gpu, times = gpu_of(torch.device("cuda", torch.cuda.current_device())), Times()
        note = f"{gpu.name}, torch {torch.__version__}"
        for format in map(get_format, args.formats):
            for case, measured in measure(format, FITTED + HELD_OUT):
                times.setdefault(case, []).append(measured)
    else:
        gpu, (note, times) = gpu_of(torch.device("cpu")), read_times(args.read)
    if args.times:
        write_times(args.times, note, times)
    seen = fit(times, gpu, lambda n, k: (n, k) in FITTED)
    print("fitted to:", check(times, seen, gpu, FITTED))
    print("held out:", check(times, seen, gpu, HELD_OUT))
    path = args.json or path_of(gpu.capability)
    every = fit(times, gpu, lambda n, k: True)  # what is written uses all measurements
    write(path, updated(costs_of(gpu.capability), every), note)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()

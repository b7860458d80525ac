"""The cost model of small-M products: the time of a launch config on a shape that was not measured.

    microseconds = start + step * (steps of the slowest block) + byte * (MB of weight) + wave * (waves of blocks)
                   + tail * (steps of a row that is not whole chunks of 128 columns)
                   + columns * (thousands of columns of activations that each block of a persistent kernel brings)

The coefficients of each config are fitted to measurements over many shapes (``python -m mxtensor.report.costs``,
which also prints the error on shapes that it was not fitted to) and stand in ``costs_sm90.json``, one file per compute
capability: for each format, with and without a cast of the activations, and for each of ``ROWS`` the configs that were
fastest for some shape, with the sizes between which they were measured. Outside of these a config is taken only if no
other one can run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ...numerics.formats import Format
from .config import LaunchConfig, config_of
from .shared_memory import Gpu

FOLDER = Path(__file__).parent
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Activation rows M that are measured; other M take the coefficients of the next larger one."""


class Cost(NamedTuple):
    """The coefficients of one config, in microseconds, and the sizes of the weights that they were fitted to."""

    config: LaunchConfig
    start: float
    step: float
    byte: float
    wave: float
    tail: float = 0.0
    columns: float = 0.0
    least_n: int = 1
    most_n: int = 2**31
    least_k: int = 1
    most_k: int = 2**31

    @property
    def coefficients(self) -> tuple[float, ...]:
        """What ``features`` are multiplied by."""
        return self[1:7]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Between which N and K the coefficients were fitted: least and most of each."""
        return self[7:]

    def times(self, ratio: float) -> Cost:
        """The cost of a config that takes ``ratio`` times as long."""
        start, step, byte, wave, tail, columns = (ratio * value for value in self.coefficients)
        return self._replace(start=start, step=step, byte=byte, wave=wave, tail=tail, columns=columns)

    def knows(self, n: int, k: int) -> bool:
        """Whether the coefficients were fitted to weights about as large as (n, k)."""
        return (
            self.least_n <= BEYOND * n and n <= BEYOND * self.most_n
            and self.least_k <= BEYOND * k and k <= BEYOND * self.most_k
        )  # fmt: skip


VALUES = len(Cost._fields) - 1
BEYOND = 1.5
"""A size may be this many times as large as the largest measured one, and as small in comparison to the least one."""
Key = tuple[str, bool, int]
"""(format, whether the activations are cast, rows)."""


def tiles_at_a_time(config: LaunchConfig, gpu: Gpu) -> int:
    """Tiles of weight rows that run at a time. Those that a cluster shares are fewer than multiprocessors suggest: its
    blocks are close to each other, and some places between clusters stay empty."""
    split = config.split
    return config.blocks * (gpu.multiprocessors // split if config.reduce_global else gpu.clusters_of(split))


def tiles_of(config: LaunchConfig, m: int, n: int) -> int:
    """Tiles of n weight rows by m activation rows."""
    return -(-n // config.rows) * -(-m // config.cols)


def features(config: LaunchConfig, m: int, n: int, k: int, format: Format, gpu: Gpu) -> tuple[float, ...]:
    """What the coefficients are multiplied by, for a product (m, k) by (n, k)^T.

    A step is one stage of columns of one tile of weight rows; of a persistent kernel, for one of its warps.
    """
    tiles, steps = -(-n // config.rows), -(-k // (config.depth * config.split))
    megabytes = n * k * format.bits_per_value / 8e6
    if config.persistent:
        blocks = min(tiles, max(1, gpu.multiprocessors * config.persistent // config.split))
        most = -(-tiles // blocks)
        return 1.0, -(-most // config.wr) * -(-steps // config.wk), megabytes, 0.0, 0.0, k / 1024
    waves = -(-tiles_of(config, m, n) // max(1, tiles_at_a_time(config, gpu)))
    return 1.0, waves * steps, megabytes, waves, waves * steps if config.wgmma and k % 128 else 0.0, 0.0


def predict(cost: Cost, m: int, n: int, k: int, format: Format, gpu: Gpu) -> float:
    """Microseconds of a product by this config."""
    known = features(cost.config, m, n, k, format, gpu)
    return sum(coefficient * feature for coefficient, feature in zip(cost.coefficients, known, strict=True))


def by_expected_time(
    costs: Sequence[Cost], m: int, n: int, k: int, format: Format, gpu: Gpu
) -> list[tuple[float, LaunchConfig]]:
    """(microseconds, config) of each cost, the fastest first; those that do not know this size come after all others.

    Sizes beyond all that were measured count as the nearest measured ones.
    """
    if not costs:
        return []
    near_n = min(max(n, min(c.least_n for c in costs)), max(c.most_n for c in costs))
    near_k = min(max(k, min(c.least_k for c in costs)), max(c.most_k for c in costs))
    order = sorted((not c.knows(near_n, near_k), predict(c, m, n, k, format, gpu), c.config) for c in costs)
    return [(us, config) for _, us, config in order]


def rows_key(m: int) -> int:
    """The measured number of rows whose coefficients m takes."""
    return next((rows for rows in ROWS if rows >= m), ROWS[-1])


def path_of(capability: tuple[int, int]) -> Path:
    """The file of this compute capability."""
    return FOLDER / f"costs_sm{capability[0]}{capability[1]}.json"


@cache
def costs_of(capability: tuple[int, int]) -> dict[Key, tuple[Cost, ...]]:
    """The coefficients for GPUs of this compute capability; empty if they were not measured."""
    path = path_of(capability)
    found: dict[Key, list[Cost]] = {}
    for format, casts, m, *values in json.loads(path.read_text())["rows"] if path.exists() else ():
        cost = Cost(config_of(values[VALUES:]), *values[:VALUES])
        found.setdefault((format, bool(casts), m), []).append(cost)
    return {key: tuple(costs) for key, costs in found.items()}


def write(path: Path, costs: dict[Key, Sequence[Cost]], note: str) -> None:
    """Write a file of coefficients, one config a line; ``note`` says where they were measured."""
    rows: Iterable[list[Any]] = (
        [format, int(casts), m, *(float(f"{c:.4g}") for c in cost.coefficients), *cost.sizes, *map(int, cost.config)]
        for (format, casts, m), some in sorted(costs.items())
        for cost in some
    )
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    columns = ["format", "casts", "m", *Cost._fields[1:], *LaunchConfig._fields]
    path.write_text(
        f'{{\n "note": {json.dumps(note)},\n "columns": {json.dumps(columns)},\n "rows": [\n{lines}\n ]\n}}\n'
    )

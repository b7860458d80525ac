"""Expected microseconds of products on a GPU: the one fitted model, by which a kernel is chosen (``core/select.py``).

Each kernel asks for its own time in ``expected_us``; the smallest one wins. All figures are in the files beside this
one, one for each compute capability; without a file there are no times, and the order of the kernels decides.

- ``expected_time_sm90.json``: rates of ``fp8_rows``, ``dequant`` and grouped products. They were fitted to products of
  128, 512, 1024 and 4096 rows with weights of 4096x4096, 4096x14336 and 2880x2880 in MXFP8, MXFP4 and MXFP8 by MXFP4,
  and to products of 160, 256 and 512 rows with the weights of eight models in MXFP8 (``benchmarks.layers models``).
  ``tests/kernels/test_expected_time.py`` has the times and what the model says: within 35 % with a weight rescaled
  before, 19 % with one rescaled each time, 12 % for ``dequant``.
- ``expected_time_small_m_sm90.json``: for each launch config of ``small_m`` the coefficients of

    microseconds = start + step * (steps of the slowest block) + byte * (MB of weight) + wave * (waves of blocks)
                   + tail * (steps of a row that is not whole chunks of 128 columns)
                   + columns * (thousands of columns of activations that each block of a persistent kernel brings)

  fitted to measurements over many shapes (``python -m mxtensor.report.costs``, which also prints the error on shapes
  that it was not fitted to): for each format, with and without a cast of the activations, and for each of ``ROWS`` the
  configs that were fastest for some shape, with the sizes between which they were measured. Outside of these a config
  is taken only if no other one can run.

Sizes are numbers: a size that torch.compile does not know never comes here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..core.compat import called_while_traced
from ..numerics.formats import Format
from .small_m.config import Gpu, LaunchConfig, config_of

FOLDER = Path(__file__).parent


@called_while_traced
def figures_of(capability: tuple[int, int]) -> Mapping[str, Any] | None:
    """The rates of ``fp8_rows``, ``dequant`` and grouped products on GPUs of this compute capability; None if they were
    not measured."""
    return _figures(FOLDER / f"expected_time_sm{capability[0]}{capability[1]}.json")


@cache
def _figures(path: Path) -> Mapping[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


# ---------------------------------------------------------------------------------------------- fp8_rows and dequant


def _waves(figures: Mapping[str, Any], rows: int, width: int) -> float:
    """Tiles of the result for each multiprocessor: a wave is one."""
    tile = figures["tile"]
    return float(-(-rows // tile) * -(-width // tile) / figures["multiprocessors"])


def fp8_rows(
    figures: Mapping[str, Any], rows: int, width: int, cols: int, left: Format, right: Format, plain: bool, cached: bool
) -> float:
    """Microseconds of ``fp8_rows``: (rows, cols) by (width, cols). ``plain``: the activations are not codes yet;
    ``cached``: the rescaled weight is."""
    f, launch = figures["fp8_rows"], figures["launch"]

    def rescale(values: int, format: Format) -> float:
        """Stored codes to row-scaled codes."""
        least, rate = f["rescale"]["8_bits" if format.element.bits == 8 else "fewer_bits"]
        return float(max(least, values / rate))

    # cuBLAS takes a slower kernel for rows that are not whole tiles: 160 rows take longer than 256
    weight = f["weight"]["whole_tiles" if rows % figures["tile"] == 0 else "other_rows"]
    start, column = f["wave"]
    us = math.ceil(_waves(figures, rows, width)) * (start + column * cols) + launch
    us += weight * width * cols + f["result"] * rows * width
    if plain:  # bfloat16 values to row-scaled codes: 2 bytes read and 1 written
        us += launch + 3 * rows * cols / f["cast"].get(left.element.name, f["cast"]["other"])
    else:
        us += rescale(rows * cols, left)
    return float(us if cached else us + rescale(width * cols, right))


def dequant(figures: Mapping[str, Any], rows: int, width: int, cols: int, right: Format) -> float:
    """Microseconds of ``dequant``: the weight decoded, activations rounded, a product in bfloat16.

    Three kernels start one after the other, each after 2 us, as those of ``fp8_rows`` do: without that bound products
    far smaller than the measured ones would seem to be nearly free.
    """
    f = figures["dequant"]
    traffic = width * cols * (2 + right.bits_per_value / 8) + 2 * rows * cols
    start, column = f["wave"]
    halves = math.ceil(2 * _waves(figures, rows, width)) / 2
    us = f["start"] + traffic / f["traffic"] + max(2 * width * cols / f["weight"], halves * (start + column * cols))
    return float(max(us, f["least"]))


def in_training(figures: Mapping[str, Any], name: str, rows: int, width: int, cols: int) -> float:
    """Microseconds of a product of 8-bit elements whose operands are both cast in this step, each for two products, by
    the kernel ``name``: ``fp8_rows`` or ``dequant``.

    Both copies of a value from two reads take 6 bytes, or 3 for each product. ``dequant`` has values written for one
    product and codes for the other one, which decodes them. The rate of casts is not fitted.
    """
    f, waves, launch = figures[f"{name}_in_training"], _waves(figures, rows, width), figures["launch"]
    start, column = f["wave"]
    product = math.ceil(waves) * (start + column * cols) + launch
    if name == "dequant":
        product = math.ceil(2 * waves) / 2 * (start + column * cols)
    return float(product + 2 * launch + f["bytes"] * (rows + width) * cols / f["cast"])


# ---------------------------------------------------------------------------------------------- grouped products

SHORT, VERY_SHORT = 1024, 192
LARGE, FEW = 2048, 128


def grouped(figures: Mapping[str, Any], product: str, m: int, n: int, k: int) -> float:
    """Microseconds for an average group, (m, k) by (n, k), of row-scaled E4M3 by ``torch``, ``triton wide`` or
    ``triton narrow``.

    The rates are TFLOP/s for each of the ``kinds`` of groups: at least SHORT rows and columns of K; fewer rows; at most
    VERY_SHORT rows; fewer columns. ``torch._scaled_grouped_mm`` takes one of three tiles by the sizes of an average
    group (torch 2.11, ScaledGroupMM.cu). The one for groups of which fewer than two of M, N and K are LARGE or more
    keeps two accumulators of 128x256 values, which spill registers when sums go to float32. Each rate of torch's was
    measured where torch takes the tile.
    """
    if product == "torch":
        large = sum(size >= LARGE for size in (m, n, k)) >= 2
        product = f"torch {'64x128' if m <= FEW or n <= FEW else '128x128' if large else '128x256'}"
    kind = 2 if m <= VERY_SHORT else 3 if k < SHORT else 0 if m >= SHORT else 1
    return float(2e-6 * m * n * k / figures["grouped"][product][kind])


# ---------------------------------------------------------------------------------------------- small_m

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
    return FOLDER / f"expected_time_small_m_sm{capability[0]}{capability[1]}.json"


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

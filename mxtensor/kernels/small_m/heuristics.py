"""Which launch config a shape gets: a measured one, else the fastest one by ``kernels/expected_time.py``.

``mx.tune(model)`` measures the shapes of a model on this GPU and keeps the result (``tuned``).
``sm90.json`` (one file per compute capability) has one row per measurement; its ``columns`` name the values of a row.
A GPU without a table or costs takes the configs of the nearest shape of another compute capability that fit its shared
memory.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...core.compat import called_while_traced
from ...core.devices import device_capability, multiprocessors
from ...numerics.formats import Format, get_format
from ..expected_time import by_expected_time, costs_of, rows_key
from ..runtime.disk_cache import find, forget, store, warn_once
from ..runtime.nvrtc import CLUSTERS, function, library
from .config import KINDS, Gpu, LaunchConfig, config_of, layout_of

FOLDER = Path(__file__).parent
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Activation rows M that are measured; other M take the configs of the next larger one, if it has any."""
WGMMA_CAPABILITY = (9, 0)
"""The compute capability that has the wgmma instruction."""
STAND_INS = {8: "mxfp8_e4m3", 6: "mxfp6_e2m3", 4: "mxfp4_e2m1"}
"""Element bits -> the measured format whose configs other formats take; NVFP4 has its own for the kinds measured."""
SHARED_BYTES = {
    capability: kibibytes * 1024
    for kibibytes, capabilities in (
        (163, ((8, 0), (8, 7))),
        (227, ((9, 0), (10, 0), (10, 3), (11, 0))),
        (99, ((8, 9),)),
    )
    for capability in capabilities
}
"""Compute capability -> bytes of shared memory of a block (CUDA C++ Programming Guide, compute capabilities); other
capabilities count as the smallest."""
CLUSTERS_OF_AN_H100 = {2: 66, 4: 30, 8: 15}
"""Blocks of a cluster -> clusters that run at a time, of 132 multiprocessors; for devices that are not a GPU."""
TUNED = "tuned"
"""The kind of the files of ``mx.tune`` in the disk cache."""
BY_WARPS = 128
"""Rows up to which the kernels without wgmma pay off on a GPU that has wgmma."""
TRUSTED = 0.9
"""Up to ``FEW`` rows a config of the table is taken unless the expected time of another one is less than this share of
the measured one. For more rows the cost model knows many more configs than the table, and errs less."""
FEW = 8
"""Activation rows up to which the product kernel may load and cast all activations itself."""
FALLBACK = LaunchConfig(1, 1, 1, 4, 4, 2, 1, 1, False)
"""A config that fits any GPU."""


# ---------------------------------------------------------------------------------------------- tables


class Measured(NamedTuple):
    """One row of a table."""

    format: str
    casts: bool
    """whether the activations were cast on the way; up to 8 rows this changes which config is fastest"""
    m: int
    n: int
    k: int
    us: float
    """microseconds of one product in a CUDA graph"""
    config: LaunchConfig


COLUMNS = (*Measured._fields[:-1], *LaunchConfig._fields)
"""The columns of a table file."""
NAMED = ("format", "us")
"""Columns that are not whole numbers."""
REQUIRED = COLUMNS[: -len(LaunchConfig._field_defaults)]
"""Columns without a default."""


def path_of(capability: tuple[int, int]) -> Path:
    """The table file of this compute capability."""
    return FOLDER / f"sm{capability[0]}{capability[1]}.json"


def row_of(measured: Measured) -> list[Any]:
    """A measurement as a row of a table file, in the order of ``COLUMNS``."""
    return [measured.format, int(measured.casts), *measured[2:5], round(measured.us, 2), *map(int, measured.config)]


def measured_of(row: Mapping[str, Any]) -> Measured:
    """A row of a table file, by column names. Raises ValueError for missing or unknown columns and wrong values."""
    given = dict(row)
    if (
        not set(REQUIRED) <= given.keys() <= set(COLUMNS)
        or given["casts"] not in (0, 1)
        or type(given["format"]) is not str
        or type(given["us"]) not in (int, float)
        or not 0 < given["us"] < math.inf
        or not all(type(value) is int and 0 <= value < 1 << 31 for name, value in given.items() if name not in NAMED)
    ):
        raise ValueError(
            f"a row of a table of launch configs has the columns {', '.join(COLUMNS)}, not {given}; "
            "measure the table again with python -m mxtensor.report.tune"
        )
    config = config_of([given[name] for name in LaunchConfig._fields if name in given])
    return Measured(given["format"], bool(given["casts"]), given["m"], given["n"], given["k"], given["us"], config)


def read(path: Path) -> list[Measured]:
    """The measurements of a table file. Raises ValueError for rows that do not fit the columns, or another file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [measured_of(dict(zip(content["columns"], row, strict=True))) for row in content["rows"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is not a table of launch configs: {str(error) or repr(error):.300}") from error


def write(path: Path, lines: Sequence[Measured]) -> None:
    """Write a table file, one row a line."""
    rows = ",\n".join("  " + json.dumps(row_of(line)) for line in lines)
    path.write_text(f'{{\n "columns": {json.dumps(COLUMNS)},\n "rows": [\n{rows}\n ]\n}}\n')


@cache
def table(capability: tuple[int, int]) -> tuple[Measured, ...]:
    """The table of a compute capability, or of the nearest lower one that has a table, or else of the lowest."""
    known = sorted(int(path.stem.removeprefix("sm")) for path in FOLDER.glob("sm*.json"))
    if not known:
        return ()
    number = 10 * capability[0] + capability[1]
    best = max((n for n in known if n <= number), default=known[0])
    return tuple(read(FOLDER / f"sm{best}.json"))


@cache
def tuned(gpu: str) -> tuple[Measured, ...]:
    """What ``mx.tune`` measured on this kind of GPU, on this computer."""
    found = find(TUNED, gpu, "json") if gpu else None
    try:
        return () if found is None else tuple(read(found[0]))
    except ValueError as error:  # of another version
        warn_once(f"{error}; measure again with mx.tune")
        return ()


def store_tuned(gpu: str, lines: Sequence[Measured]) -> Path:
    """Keep measurements for all later processes, beside those of other shapes, and use them from now on."""
    by_case = {line[:5]: line for line in (*tuned(gpu), *lines)}
    old = find(TUNED, gpu, "json")
    path = store(TUNED, gpu, "json", lambda path: write(path, list(by_case.values())))
    if old is not None and old[0] != path:
        forget(old[0])
    tuned.cache_clear()
    return path


# ---------------------------------------------------------------------------------------------- the GPU


@cache
def gpu_of(device: torch.device) -> Gpu:
    """The limits of a CUDA device; for other devices, those of an H100."""
    capability = device_capability(device) if device.type == "cuda" else (9, 0)
    count = multiprocessors(device) if device.type == "cuda" else 132
    memory = SHARED_BYTES.get(capability, SHARED_BYTES[8, 9])
    clusters = {} if device.type == "cuda" else dict(CLUSTERS_OF_AN_H100)
    if device.type == "cuda" and capability >= CLUSTERS and not isinstance(library(), str):
        for size in (2, 4, 8):
            probe = function(device, ("machine.cuh", "probe.cu"), (), "probe", struct.Struct(""), 32, size)
            clusters[size] = probe.clusters(memory)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Gpu(capability, memory, count, clusters, name)


def most_rows(capability: tuple[int, int], wgmma: bool = True) -> int:
    """Rows up to which a small-M kernel is faster than to dequantize the weight and call cuBLAS.

    ``wgmma``: whether a wgmma kernel can run this product (``can_use_wgmma``).
    """
    if capability != WGMMA_CAPABILITY:
        return 64
    return 512 if wgmma else BY_WARPS


# ---------------------------------------------------------------------------------------------- the choice


def groups_with_rows(rows: int, groups: int) -> tuple[int, int]:
    """(groups that have some of the rows, rows to expect in a large one) if each row is in a random group.

    To a kernel of groups the stack is a matrix as high as its matrices that have rows.
    """
    busy = max(1, round(groups * (1 - (1 - 1 / groups) ** rows)))
    mean = rows / busy
    return busy, min(rows, math.ceil(mean + math.sqrt(mean - 1))) if mean > 1 else 1


def stand_in(format: Format) -> str:
    """The format that was measured in place of this one."""
    return format.name if format.global_scale else STAND_INS[format.element.bits]


def fitted(config: LaunchConfig, m: int) -> LaunchConfig:
    """A wgmma config for more than 64 rows with no more columns than m activation rows need, in multiples of 32."""
    if not config.wgmma or m <= 64:
        return config
    tiles = -(-m // config.cols)
    return config._replace(nt=min(config.nt, 4 * -(-m // (32 * tiles))))


def measured_for(format: Format, lines: Sequence[Measured]) -> list[Measured]:
    """Of each kind of kernel the rows of the format itself, else of the format with its bits, else of the 8-bit one."""
    names, found = (stand_in(format), STAND_INS[format.element.bits], STAND_INS[8]), []
    for kind in KINDS:
        of_a_kind = ([line for line in lines if (line.config.kind, line.format) == (kind, name)] for name in names)
        found += next(filter(None, of_a_kind), [])
    return found


def _preference(m: int, rows: int) -> tuple[int, int]:
    """Sort key: which measured number of rows to try first for m.

    First m or the next larger one; then fewer rows that fill as many columns of the matrix instruction; then more rows;
    then fewer rows.
    """
    enough = next((known for known in ROWS if known >= m), rows)
    rank = 0 if rows == enough else 1 if 1 < rows < m <= -(-rows // 8) * 8 else 2 if rows > m else 3
    return rank, abs(rows - m)


def choose_config(
    device: torch.device, format: Format, m: int, n: int, k: int, x_rows: int,
    allowed: Callable[[LaunchConfig], bool] = lambda config: True, casts: bool = False,
) -> LaunchConfig:  # fmt: skip
    """The fastest config for m rows (of one group; ``x_rows`` of all groups), n and k: what ``mx.tune`` measured, else
    for a shape of the table what that measured, unless the cost model expects another config to be clearly faster, else
    by the cost model, else of the nearest measured shape.

    It is ``allowed``, runs on ``device`` and fits its shared memory; ``FALLBACK`` if no measured one does. ``casts``:
    whether the kernel casts the activations.
    """
    gpu = gpu_of(device)

    def possible(config: LaunchConfig) -> bool:
        return allowed(config) and not (config.wgmma and gpu.capability != WGMMA_CAPABILITY)

    def runnable(config: LaunchConfig) -> LaunchConfig | None:
        if not possible(config):
            return None
        config = config if gpu.capability >= CLUSTERS else config._replace(split=1)
        return config if layout_of(format, config, x_rows, n, k, gpu) else None

    product, case = (gpu, format, m, n, k, casts), (stand_in(format), casts, m, n, k)
    here = (runnable(line.config) for line in tuned(gpu.name) if line[:5] == case)
    tuned_here = next((config for config in here if config is not None), None)
    if tuned_here is not None:
        return tuned_here
    found, measured = _by_costs(*product, runnable), _in_table(gpu, stand_in(format), m, n, k)
    if found is not None and (measured is None or m > FEW or found[0] < TRUSTED * measured):
        return found[1]
    return _nearest(*product, possible, runnable)


@called_while_traced
def expected_time(format_name: str, m: int, n: int, k: int) -> float | None:
    """Microseconds of a product of converted activations on an H100, by the config that ``choose_config`` takes; None
    if neither table nor cost model knows the format."""
    format = get_format(format_name)
    gpu, name = gpu_of(torch.device("cpu")), stand_in(format)
    measured = min((line.us for line in table(gpu.capability) if line[:5] == (name, False, m, n, k)), default=None)
    found = _by_costs(gpu, format, m, n, k, False, lambda config: None if config.direct else config)
    if found is None or (measured is not None and m <= FEW and found[0] >= TRUSTED * measured):
        return measured
    return found[0]


def _in_table(gpu: Gpu, name: str, m: int, n: int, k: int) -> float | None:
    """The least time of this shape in the table, at m rows or the next larger number that was measured; infinity where
    it has fewer rows only, None for other shapes."""
    known: dict[int, float] = {}
    for line in table(gpu.capability):
        if (line.format, line.casts, line.n, line.k) == (name, False, n, k):
            known[line.m] = min(line.us, known.get(line.m, math.inf))
    return known.get(min((rows for rows in known if rows >= m), default=0), math.inf) if known else None


Runnable = Callable[[LaunchConfig], LaunchConfig | None]
"""A config -> the config as this GPU can run it for this product; None if it cannot."""


def _by_costs(
    gpu: Gpu, format: Format, m: int, n: int, k: int, casts: bool, runnable: Runnable
) -> tuple[float, LaunchConfig] | None:
    """The config that the cost model expects to be fastest, and its microseconds; None without a model of this GPU."""
    model, rows = costs_of(gpu.capability), rows_key(min(m, most_rows(gpu.capability)))
    for name in dict.fromkeys((stand_in(format), STAND_INS[format.element.bits], STAND_INS[8])):
        for key in ((name, casts, rows), (name, False, rows)):
            for us, config in by_expected_time(model.get(key, ()), m, n, k, format, gpu):
                found = runnable(fitted(config, m))
                if found is not None:
                    return us, found
    return None


def _nearest(
    gpu: Gpu, format: Format, m: int, n: int, k: int, casts: bool, possible: Callable[[LaunchConfig], bool],
    runnable: Runnable,
) -> LaunchConfig:  # fmt: skip
    """The config of the nearest measured shape; ``FALLBACK`` if none can run."""
    capability = gpu.capability
    m = min(m, most_rows(capability))

    def distance(line: Measured) -> tuple[float, float]:
        return abs(math.log2(line.n / n)) + abs(math.log2(line.k / k)), line.us

    fit = measured_for(format, [line for line in table(capability) if possible(line.config)])
    with_cast = {(line.m, line.n, line.k, line.config.kind): line for line in fit if line.casts}
    for rows in sorted({line.m for line in fit}, key=partial(_preference, m)):
        # Rows without a cast exist for all kinds and say which kind is fastest; rows with one say which config of it.
        for line in sorted((line for line in fit if line.m == rows and not line.casts), key=distance):
            same_cast = with_cast.get((rows, line.n, line.k, line.config.kind)) if casts else None
            config = (same_cast or line).config
            found = runnable(fitted(config, m))
            if found is not None:
                return found
    return FALLBACK

"""Which plan goes with which shape: what ``python -m mxtensor.tune`` has measured on each kind of GPU.

``sm90.json`` and its like hold, for some formats, rows and shapes, the fastest plan. A shape that is not
there takes the plan of the nearest one; a GPU that has no table, the plans of another that it has room for.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...core.devices import device_capability
from ...numerics.formats import Format
from ..runtime.nvrtc import CLUSTERS, function, library
from .config import KINDS, Gpu, Plan, plan_of
from .shared_memory import room_of

FOLDER = Path(__file__).parent
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Rows of activations that are measured; others take the plans of the next more, if there are any for them."""
TOGETHER = (9, 0)
"""The compute capability whose matrix instructions four warps issue together."""
STAND_INS = {8: "mxfp8_e4m3", 6: "mxfp6_e2m3", 4: "mxfp4_e2m1"}
"""Bits of an element -> the format whose plans its formats take; nvfp4 has its own, of the kinds that were measured."""
SHARED = {
    capability: kibibytes * 1024
    for kibibytes, capabilities in (
        (163, ((8, 0), (8, 7))),
        (227, ((9, 0), (10, 0), (10, 3), (11, 0))),
        (99, ((8, 9),)),
    )
    for capability in capabilities
}
"""Compute capability -> bytes of shared memory of a block (CUDA C++ Programming Guide, compute capabilities); others
have what the least of them has."""
BY_WARPS = 128
"""Rows up to which plans are worth it whose warps multiply each for itself, where others might multiply together."""
LAST = Plan(1, 1, 1, 4, 4, 2, 1, 1, False)
"""A plan that any GPU has room for."""


class Measured(NamedTuple):
    """A line of a table."""

    format: str
    casts: bool
    """whether activations were cast on the way; up to 8 rows that makes a difference to which plan is best"""
    m: int
    n: int
    k: int
    us: float
    """microseconds, under a CUDA graph"""
    plan: Plan


def path_of(capability: tuple[int, int]) -> Path:
    """Where the table of GPUs with this compute capability lies."""
    return FOLDER / f"sm{capability[0]}{capability[1]}.json"


def line(measured: Measured) -> list[Any]:
    """As it stands in a file."""
    return [measured.format, int(measured.casts), *measured[2:5], round(measured.us, 2), *map(int, measured.plan)]


def measured_of(row: Sequence[Any]) -> Measured:
    """From a line of a file."""
    format, casts, m, n, k, us, *plan = row
    if casts not in (0, 1) or not all(isinstance(value, int) for value in (m, n, k)):
        raise ValueError(
            f"a line of a table of plans is [format, casts, m, n, k, us, *plan], not {list(row)}; "
            "python -m mxtensor.tune measures it anew"
        )
    return Measured(format, bool(casts), m, n, k, us, plan_of(plan))


@cache
def table(capability: tuple[int, int]) -> tuple[Measured, ...]:
    """The lines for a compute capability, or for the one nearest below that has a table, or above."""
    known = sorted(int(path.stem.removeprefix("sm")) for path in FOLDER.glob("sm*.json"))
    if not known:
        return ()
    number = 10 * capability[0] + capability[1]
    best = max((n for n in known if n <= number), default=known[0])
    return tuple(map(measured_of, json.loads((FOLDER / f"sm{best}.json").read_text())))


def stand_in(format: Format) -> str:
    """The format that was measured in place of this one."""
    return format.name if format.global_scale else STAND_INS[format.element.bits]


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Compute capability, shared memory and multiprocessors; elsewhere, those of an H100."""
    capability = device_capability(device) if device.type == "cuda" else (9, 0)
    count = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    memory, clusters = SHARED.get(capability, SHARED[8, 9]), {}
    if device.type == "cuda" and capability >= CLUSTERS and not isinstance(library(), str):
        for size in (2, 4, 8):
            probe = function(device, ("machine.cuh", "probe.cu"), (), "probe", struct.Struct(""), 32, size)
            clusters[size] = probe.clusters(memory)
    return Gpu(capability, memory, count, clusters)


def most_rows(capability: tuple[int, int], together: bool = True) -> int:
    """Up to where the product takes less time than decoding the weight once, for a product of the library's.

    ``together``: whether four warps may multiply together.
    """
    if capability != TOGETHER:
        return 64
    return 512 if together else BY_WARPS


def fitted(plan: Plan, m: int) -> Plan:
    """The plan with as many columns as m rows of activations need, in multiples of 32, where it has more."""
    tiles = -(-m // plan.cols)
    return plan._replace(nt=min(plan.nt, 4 * -(-m // (32 * tiles))))


def measured_for(format: Format, lines: Sequence[Measured]) -> list[Measured]:
    """Of each kind of plans those of the format itself, or where it has none, of the one that stands for as many bits,
    or for 8."""
    names, found = (stand_in(format), STAND_INS[format.element.bits], STAND_INS[8]), []
    for kind in KINDS:
        of_a_kind = ([line for line in lines if (line.plan.kind, line.format) == (kind, name)] for name in names)
        found += next(filter(None, of_a_kind), [])
    return found


def _preference(m: int, rows: int) -> tuple[int, int]:
    """Plans of which number of rows are looked at first for m: as many or the next more, fewer that fill as many
    columns of the matrix instruction, more, fewer."""
    enough = next((known for known in ROWS if known >= m), rows)
    rank = 0 if rows == enough else 1 if 1 < rows < m <= -(-rows // 8) * 8 else 2 if rows > m else 3
    return rank, abs(rows - m)


def choose_plan(
    device: torch.device, format: Format, m: int, n: int, k: int, x_rows: int,
    allowed: Callable[[Plan], bool] = lambda plan: True, casts: bool = False,
) -> Plan:  # fmt: skip
    """The plan for m rows (of a group; ``x_rows`` of all), n and k: ``allowed``, fast on ``device``, and with room.

    ``casts``: whether activations are cast on the way.
    """
    gpu = gpu_of(device)
    capability = gpu.capability
    m = min(m, most_rows(capability))

    def distance(line: Measured) -> tuple[float, float]:
        return abs(math.log2(line.n / n)) + abs(math.log2(line.k / k)), line.us

    fit = [
        line for line in table(capability) if allowed(line.plan) and not (line.plan.together and capability != TOGETHER)
    ]
    fit = measured_for(format, fit)
    of_casts = {(line.m, line.n, line.k, line.plan.kind): line for line in fit if line.casts}
    for rows in sorted({line.m for line in fit}, key=partial(_preference, m)):
        # all kinds are measured without a cast, which says which of them is best; with one, which plan of it
        for line in sorted((line for line in fit if line.m == rows and not line.casts), key=distance):
            of_cast = of_casts.get((rows, line.n, line.k, line.plan.kind)) if casts else None
            plan = (of_cast or line).plan
            plan = plan if capability >= CLUSTERS else plan._replace(split=1)
            if plan.together and m > 64:
                plan = fitted(plan, m)
            if room_of(format, plan, x_rows, n, k, gpu):
                return plan
    return LAST

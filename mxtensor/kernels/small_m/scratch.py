"""The scratch memory of a product: one allocation for the activations that another kernel converts and for split sums.

    float16 activations | float32 scale of each row | maxima of blocks | counters | partial sums

Each part starts at a multiple of ``ALIGNMENT`` bytes. A config with ``whole_x`` or ``direct``
needs none.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ...numerics.cast import Cast
from .config import LaunchConfig

ALIGNMENT = 256
ALONE = 16384
"""Activations up to which every block finds the largest magnitude of all of them by itself."""
MAXIMA = 128
"""Most blocks of the kernel ``maxima``."""
ACTIVATION_THREADS = {"maxima": 256, "activations": 512}
"""Kernels in ``cuda/activations.cu`` -> threads of a block."""


class Scratch(NamedTuple):
    """Offsets in bytes, and the sizes that the kernels need."""

    bytes: int
    scale: int
    counters: int
    partial_sums: int
    width: int
    """columns of a row of activations in memory: K rounded up to whole chunks"""
    maxima_blocks: int
    """blocks of the kernel ``maxima``, which runs before for an NVFP4 cast of many values; 0: it does not run"""
    counted: int
    """counters, which the kernel ``activations`` sets to zero"""


@lru_cache(maxsize=4096)
def scratch_of(config: LaunchConfig, rows: int, k: int, cast: Cast | None, blocks: tuple[int, int]) -> Scratch:
    """The scratch memory of a product of (rows, k) activations, cast to ``cast``, by ``blocks`` along N and M."""
    tile_rows = config.cols if config.wgmma else 0
    step = 128 if tile_rows else max(256, config.depth) if config.persistent else 256
    width = -(-k // step) * step
    stored_rows = -(-rows // tile_rows) * tile_rows if tile_rows else rows + config.cols
    maxima = 0
    if cast is not None and cast.format.global_scale and rows * k > ALONE:
        maxima = min(MAXIMA, -(-rows * k // (16 * ACTIVATION_THREADS["maxima"])))
    counted = blocks[0] * blocks[1] if config.reduce_global else 0
    sums = 4 * counted * config.split * config.rows * config.cols
    starts = [0]
    for size in (2 * stored_rows * width, 4 * (rows + maxima), 4 * counted, sums):
        starts.append(starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    _, scale, counters, partial_sums, end = starts
    return Scratch(end, scale, counters, partial_sums, width, maxima, counted)

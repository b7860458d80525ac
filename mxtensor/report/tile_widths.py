"""Configs of the wgmma kernel whose tiles divide the rows of activations evenly, for the cost model to be fitted to.

512 rows in tiles of 256 leave 52 of 132 multiprocessors idle for a weight of 5120 rows, in tiles of 176 only 12: so for
each number of rows there are tiles of many widths, of two or three warpgroups, with converted activations and direct.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..kernels.small_m.config import LaunchConfig, registers, registers_in_use
from ..kernels.small_m.costs import tiles_at_a_time, tiles_of
from ..kernels.small_m.direct import has_registers
from ..kernels.small_m.shared_memory import Gpu
from ..numerics.formats import Format
from .tune import OTHER_REGISTERS

MOST_TILES = 8
"""Tiles along the rows of activations."""
WIDEST = 256
"""Columns of a tile: those of one matrix instruction."""
LEAST_WIDE = 96
"""Rows from which converted activations are worth tiles of other widths than those of the table."""
FEW_STAGES = 176
"""Columns from which four tiles fill the shared memory."""


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
    """The configs for this number of rows that have enough registers."""
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

"""How the CUDA cast of both copies divides a matrix among blocks of threads."""

from __future__ import annotations

from typing import NamedTuple

from ...numerics.formats import Format
from ..runtime.cuda_macros import RESERVED

SHARED_BYTES = 233472
"""Shared memory of a multiprocessor of sm_90 for blocks."""


class Tile(NamedTuple):
    """Each field is a macro of ``cuda/cast_both.cu``: ``tile_rows`` and so on."""

    rows: int
    cols: int
    threads: int
    blocks: int
    """blocks that must fit on one multiprocessor; this limits the registers of a thread"""
    stages: int
    """tiles in shared memory"""
    strip: int
    """tiles that a block casts, one beside the other"""


TILE = Tile(128, 128, 256, 4, 1, 1)
"""The tile from 16-bit values: the fastest of 13 on an H100, with every format (``benchmarks.cast_tiles``)."""
BLOCKS_WANTED = 512
"""A matrix that has fewer blocks than this with whole strips gets shorter strips."""


def tile_for(format: Format, value_bytes: int, rows: int, cols: int) -> Tile:
    """The tile for a matrix; from float32 it has half the columns, so that it takes as much memory."""
    wide = max(TILE.cols * 2 // value_bytes, format.block[1])
    tile = TILE._replace(cols=wide, rows=max(TILE.rows, format.block[1]))
    strip, high = tile.strip, -(-rows // tile.rows)
    while strip > 1 and high * -(-cols // (wide * strip)) < BLOCKS_WANTED:
        strip //= 2
    tile = tile._replace(strip=strip)
    return tile._replace(blocks=min(tile.blocks, SHARED_BYTES // (shared_bytes(tile, format, value_bytes) + RESERVED)))


def shared_bytes(tile: Tile, format: Format, value_bytes: int) -> int:
    """Shared memory of a block: tiles, and the scales of its rows and of the columns of one tile."""
    values = tile.rows * tile.cols
    return tile.stages * values * value_bytes + (tile.strip + 1) * values // format.block[1]

"""Which rows a tile has: in a stack of matrices, or in groups of rows whose ends are on the device (a tile map).

Groups are padded with zeros to whole blocks of PAD rows, each to at least one (``numerics/groups.py``). What follows
the last group counts as one more: its rows belong to no group, and its padded rows are zeros.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Tile(NamedTuple):
    """The rows of a tile, all int32. They are columns of the transpose."""

    matrix: tl.tensor
    """the matrix of the stack, or the group"""
    rows_before: tl.tensor
    """rows of this matrix before the tile"""
    first_row: tl.tensor
    """of all rows"""
    rows_left: tl.tensor
    """rows of this matrix from there on; not positive if the tile has none"""
    to_col: tl.tensor
    """the column of the transpose (of groups: of the padded matrix) that is the first row"""
    cols_left: tl.tensor
    """columns of the transpose (of groups: of the padded group) from there on"""


@triton.jit
def group_rows(ends_ptr, groups, rows, PAD: tl.constexpr, GROUPS: tl.constexpr):
    """(number, start, rows, blocks of PAD padded rows) of each group, (GROUPS,); GROUPS is a power of two above the
    number of groups. Number ``groups`` has the rows after the last group and no block; those above it have nothing."""
    number = tl.arange(0, GROUPS)
    # The ends are data: whatever they are, no row outside of the matrix may be read or written.
    end = tl.load(ends_ptr + number, mask=number < groups, other=rows)
    start = tl.load(ends_ptr + number - 1, mask=(number > 0) & (number <= groups), other=0)
    end, start = tl.maximum(tl.minimum(end, rows), 0), tl.maximum(tl.minimum(start, rows), 0)
    size = tl.where(number <= groups, tl.maximum(end - start, 0), 0)
    blocks = tl.where(number < groups, tl.maximum((size + (PAD - 1)) // PAD, 1), 0)
    return number, start, size, blocks


@triton.jit
def value_of_group(values, number, group):
    """The value of one group from ``values`` (GROUPS,) of all."""
    return tl.sum(tl.where(number == group, values, 0), axis=0)


@triton.jit
def values_of_groups(values, one_hot):
    """The values (tiles,) of the groups that the rows of ``one_hot`` (tiles, GROUPS) select; 0 if one selects none."""
    return tl.sum(tl.where(one_hot, values[None, :], 0), axis=1)


@triton.jit
def map_tiles_of_groups(
    ends_ptr, tile_map_ptr, groups, rows, all_blocks, tiles,
    HIGH: tl.constexpr, PAD: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Store the tile map of tiles of HIGH rows, (tiles, 8) int32: group, rows of the group before the tile, first row,
    rows from there, first padded row, padded rows from there. A program stores TILES rows of it.

    ``all_blocks``: P / PAD. There are P / HIGH + ``groups`` + 2 tiles at most; a group above ``groups`` has none.
    """
    number, start, size, blocks = group_rows(ends_ptr, groups, rows, PAD, GROUPS)
    blocks_before = tl.cumsum(blocks, 0) - blocks
    rest = tl.maximum(all_blocks - tl.sum(blocks, axis=0), 0)
    blocks = tl.where(number == groups, rest, blocks)
    length = tl.maximum(size, blocks * PAD)
    tiles_of_group = (length + (HIGH - 1)) // HIGH
    tiles_until = tl.cumsum(tiles_of_group, 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    group = tl.sum((tiles_until[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    one_hot = number[None, :] == group[:, None]
    rows_before = (tile - values_of_groups(tiles_until - tiles_of_group, one_hot)) * HIGH
    first_row = values_of_groups(start, one_hot) + rows_before
    first_block = tl.minimum(values_of_groups(blocks_before, one_hot), all_blocks)
    padded_rows = tl.minimum(values_of_groups(blocks, one_hot), all_blocks - first_block) * PAD - rows_before
    at, inside = tile_map_ptr + tile * 8, tile < tiles
    tl.store(at, group, mask=inside)
    tl.store(at + 1, rows_before, mask=inside)
    tl.store(at + 2, first_row, mask=inside)
    tl.store(at + 3, values_of_groups(size, one_hot) - rows_before, mask=inside)
    tl.store(at + 4, first_block * PAD + rows_before, mask=inside)
    tl.store(at + 5, padded_rows, mask=inside)


@triton.jit
def locate_tile(tile, tile_map_ptr, rows, HIGH: tl.constexpr, PAD: tl.constexpr):
    """The Tile of HIGH rows with this number.

    PAD = 0: in a stack of matrices of ``rows`` rows. Otherwise a matrix stands for a group: ``tile_map_ptr`` as of
    ``map_tiles_of_groups``.
    """
    if PAD == 0:
        tiles = tl.cdiv(rows, HIGH)
        matrix = tile // tiles
        rows_before = (tile - matrix * tiles) * HIGH
        return Tile(
            matrix, rows_before, matrix * rows + rows_before, rows - rows_before, rows_before, rows - rows_before
        )
    else:
        at = tile_map_ptr + tile * 8
        return Tile(
            tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
        )  # fmt: skip

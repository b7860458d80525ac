"""The place of a tile of rows: in a stack of matrices, or in groups of rows whose ends are on the device.

Groups are padded with zeros to whole blocks of PAD rows, each to at least one (``numerics/groups.py``). What follows
the last group counts as one more: its rows belong to no group, and its padded rows are zeros.
"""

import triton
import triton.language as tl


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
def of_one(values, number, one):
    """The value of group ``one``."""
    return tl.sum(tl.where(number == one, values, 0), axis=0)


@triton.jit
def tile_of_group(
    tile, ends_ptr, groups, rows, all_blocks, HIGH: tl.constexpr, PAD: tl.constexpr, GROUPS: tl.constexpr
):
    """(group, rows of it before the tile, first row, rows from there, first padded row, padded rows from there) of a
    tile of HIGH rows.

    ``all_blocks``: P / PAD. There are P / HIGH + ``groups`` + 2 tiles at most; a group above ``groups`` has none.
    """
    number, start, size, blocks = group_rows(ends_ptr, groups, rows, PAD, GROUPS)
    before = tl.cumsum(blocks, 0) - blocks
    beyond = tl.maximum(all_blocks - tl.sum(blocks, axis=0), 0)
    blocks = tl.where(number == groups, beyond, blocks)
    most = tl.maximum(size, blocks * PAD)
    tiles = (most + (HIGH - 1)) // HIGH
    until = tl.cumsum(tiles, 0)
    group = tl.sum((until <= tile).to(tl.int32), axis=0)
    inner = (tile - of_one(until - tiles, number, group)) * HIGH
    first = of_one(start, number, group) + inner
    there = of_one(size, number, group) - inner
    to = tl.minimum(of_one(before, number, group), all_blocks)
    left = tl.minimum(of_one(blocks, number, group), all_blocks - to) * PAD - inner
    return group, inner, first, there, to * PAD + inner, left


@triton.jit
def place(tile, ends_ptr, count, rows, all_blocks, HIGH: tl.constexpr, PAD: tl.constexpr, GROUPS: tl.constexpr):
    """(matrix, rows of it before the tile, first row, rows from there, first column of the transpose, columns from
    there) of a tile of HIGH rows.

    GROUPS = 0: a stack of ``count`` matrices of ``rows`` rows; the column is one of their transposes. Otherwise a
    matrix stands for a group: ``count`` groups of ``rows`` rows in all, and the column is one of the transpose of the
    padded matrix.
    """
    if GROUPS == 0:
        tiles = tl.cdiv(rows, HIGH)
        matrix = tile // tiles
        inner = (tile - matrix * tiles) * HIGH
        return matrix, inner, matrix * rows + inner, rows - inner, inner, rows - inner
    else:
        return tile_of_group(tile, ends_ptr, count, rows, all_blocks, HIGH, PAD, GROUPS)

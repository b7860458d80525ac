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
def of_each(values, own):
    """The value of the group that each row of ``own`` (tiles, GROUPS) marks; 0 if it marks none."""
    return tl.sum(tl.where(own, values[None, :], 0), axis=1)


@triton.jit
def places_of_groups(
    ends_ptr, places_ptr, groups, rows, all_blocks, tiles,
    HIGH: tl.constexpr, PAD: tl.constexpr, GROUPS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Store the place of each tile of HIGH rows, (tiles, 8) int32: group, rows of it before the tile, first row, rows
    from there, first padded row, padded rows from there. A program finds TILES places.

    ``all_blocks``: P / PAD. There are P / HIGH + ``groups`` + 2 tiles at most; a group above ``groups`` has none.
    """
    number, start, size, blocks = group_rows(ends_ptr, groups, rows, PAD, GROUPS)
    before = tl.cumsum(blocks, 0) - blocks
    beyond = tl.maximum(all_blocks - tl.sum(blocks, axis=0), 0)
    blocks = tl.where(number == groups, beyond, blocks)
    most = tl.maximum(size, blocks * PAD)
    high = (most + (HIGH - 1)) // HIGH
    until = tl.cumsum(high, 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    group = tl.sum((until[None, :] <= tile[:, None]).to(tl.int32), axis=1)
    own = number[None, :] == group[:, None]
    inner = (tile - of_each(until - high, own)) * HIGH
    first = of_each(start, own) + inner
    to = tl.minimum(of_each(before, own), all_blocks)
    left = tl.minimum(of_each(blocks, own), all_blocks - to) * PAD - inner
    at, inside = places_ptr + tile * 8, tile < tiles
    tl.store(at, group, mask=inside)
    tl.store(at + 1, inner, mask=inside)
    tl.store(at + 2, first, mask=inside)
    tl.store(at + 3, of_each(size, own) - inner, mask=inside)
    tl.store(at + 4, to * PAD + inner, mask=inside)
    tl.store(at + 5, left, mask=inside)


@triton.jit
def place(tile, places_ptr, rows, HIGH: tl.constexpr, PAD: tl.constexpr):
    """(matrix, rows of it before the tile, first row, rows from there, first column of the transpose, columns from
    there) of a tile of HIGH rows.

    PAD = 0: a stack of matrices of ``rows`` rows; the column is one of their transposes. Otherwise a matrix stands for
    a group, and the column is one of the transpose of the padded matrix: ``places_ptr`` as of ``places_of_groups``.
    """
    if PAD == 0:
        tiles = tl.cdiv(rows, HIGH)
        matrix = tile // tiles
        inner = (tile - matrix * tiles) * HIGH
        return matrix, inner, matrix * rows + inner, rows - inner, inner, rows - inner
    else:
        at = places_ptr + tile * 8
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)

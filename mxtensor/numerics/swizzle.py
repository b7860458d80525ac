"""The swizzled layout in which Blackwell's block-scaled products read scales.

Scales are stored in tiles of 128 rows by 4 columns; row 32 * j + i of a tile starts at byte 16 * i + 4 * j.

Source: the cuBLAS manual, "1D Block Scaling Factors Layout"; PTX ISA, tcgen05.mma ``scale_vec`` layouts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_ROWS, TILE_COLS = 128, 4
_ATOM = 32
"""A tile consists of four atoms of 32 rows, side by side."""


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not less than ``n``."""
    return -(-n // multiple) * multiple


def swizzled_shape(rows: int, cols: int) -> tuple[int, int]:
    """(rows, cols) of the scales in whole tiles; their product is the length of the swizzled buffer."""
    return round_up(rows, TILE_ROWS), round_up(cols, TILE_COLS)


def swizzle(scale: Tensor) -> Tensor:
    """uint8 (..., R, C) -> (..., roundup(R, 128) * roundup(C, 4)), each matrix in tiles of its own.

    Padding has byte 0. A padding scale multiplies zeros, or a row that is cut off. Byte 0 is 2^-127 (E8M0)
    or 0 (UE4M3), so a zero product stays zero; with the NaN codes 255 and 127 it would not.
    """
    rows, cols = scale.shape[-2:]
    whole_rows, whole_cols = swizzled_shape(rows, cols)
    if whole_rows != rows or whole_cols != cols:
        scale = F.pad(scale, (0, whole_cols - cols, 0, whole_rows - rows))
    tiles = scale.reshape(
        *scale.shape[:-2], whole_rows // TILE_ROWS, TILE_ROWS // _ATOM, _ATOM, whole_cols // TILE_COLS, TILE_COLS
    )
    return tiles.movedim(-2, -4).transpose(-2, -3).flatten(-5)


def unswizzle(buffer: Tensor, rows: int, cols: int) -> Tensor:
    """The inverse: (..., roundup(rows, 128) * roundup(cols, 4)) -> (..., rows, cols).

    Raises ValueError for a buffer of another length.
    """
    whole_rows, whole_cols = swizzled_shape(rows, cols)
    if buffer.shape[-1] != whole_rows * whole_cols:
        raise ValueError(
            f"{rows}x{cols} scales are {whole_rows * whole_cols} bytes when swizzled, got {buffer.shape[-1]}; give the "
            "rows and columns that the buffer was made from"
        )
    tiles = buffer.reshape(
        *buffer.shape[:-1], whole_rows // TILE_ROWS, whole_cols // TILE_COLS, _ATOM, TILE_ROWS // _ATOM, TILE_COLS
    )
    whole = tiles.transpose(-2, -3).movedim(-4, -2).reshape(*buffer.shape[:-1], whole_rows, whole_cols)
    return whole.narrow(-2, 0, rows).narrow(-1, 0, cols)


def swizzle_groups(scale: Tensor, ends: Tensor) -> Tensor:
    """Swizzle scales of rows in groups, uint8 (R, C) -> (P, roundup(C, 4)): every group starts a new row of tiles.

    ``ends``: (G,) ends of the groups, never decreasing. The lengths stay on the device, so P is the largest size that G
    groups of R rows can need. The rows after the last group follow it.
    """
    rows, cols = scale.shape
    length = round_up(rows + (TILE_ROWS - 1) * ends.shape[0], TILE_ROWS)
    starts = F.pad(ends, (1, 0))  # the start of each group, and of the rows after the last one
    whole = (ends - starts.narrow(0, 0, ends.shape[0]) + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
    moved = F.pad(whole.cumsum(0), (1, 0)) - starts
    row = torch.arange(rows, device=scale.device)
    group = torch.searchsorted(ends, row.to(ends.dtype), right=True)
    target = scale.new_zeros(length, cols)
    target = target.index_copy(0, row + moved.index_select(0, group), scale)
    return swizzle(target).view(length, round_up(cols, TILE_COLS))

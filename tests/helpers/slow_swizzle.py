"""The 128x4 layout of scales, one scale at a time."""

import torch


def place(row, col, whole_cols):
    """The byte index of the scale of (row, col): tile by tile along a row of tiles, then the manual's formula."""
    tile = (row // 128) * (whole_cols // 4) + col // 4
    outer, inner = row % 128, col % 4
    return tile * 512 + (outer % 32) * 16 + (outer // 32) * 4 + inner


def slowly(scale):
    """The definition: one byte at a time; padding is 0."""
    rows, cols = scale.shape
    whole_rows, whole_cols = -(-rows // 128) * 128, -(-cols // 4) * 4
    out = [0] * (whole_rows * whole_cols)
    values = scale.tolist()
    for row in range(rows):
        for col in range(cols):
            out[place(row, col, whole_cols)] = values[row][col]
    return torch.tensor(out, dtype=torch.uint8)


def slowly_back(buffer, rows, cols):
    """(rows, cols) read from a swizzled buffer one byte at a time."""
    values, whole_cols = buffer.tolist(), -(-cols // 4) * 4
    return torch.tensor([[values[place(r, c, whole_cols)] for c in range(cols)] for r in range(rows)]).to(torch.uint8)


def scales(*shape):
    return torch.randint(1, 256, shape, dtype=torch.uint8)

"""How much a matrix of a checkpoint changes when it is quantized."""

from __future__ import annotations

import math

from torch import Tensor

from ..tensor.mxtensor import MXTensor

TILES, TILE = 4, (128, 512)
"""Parts of a large matrix whose error is measured: enough for two digits, and fast. They begin at whole blocks."""
SAMPLE = TILES * TILE[0] * TILE[1]


def relative_error(before: Tensor, after: Tensor) -> float:
    """||after - before|| / ||before|| of the whole matrix, or of TILES along its diagonal if it is large.

    Of a stack, the first matrix is measured.
    """
    if after.dim() > 2:
        before, after = before[0], after[0]
    places: list[tuple[int, int]] = [(0, 0)]
    sizes = tuple(after.shape)
    if after.numel() > SAMPLE:
        sizes = tuple(min(n, most) for n, most in zip(sizes, TILE, strict=True))
        rows, columns = after.shape[0] - sizes[0], after.shape[1] - sizes[1]
        places = [(rows * i // (TILES - 1) // 128 * 128, columns * i // (TILES - 1) // 128 * 128) for i in range(TILES)]
    noise, signal = [], []
    for row, column in places:
        tiles = (t.narrow(0, row, sizes[0]).narrow(1, column, sizes[1]) for t in (before, after))
        true, rounded = map(_values, tiles)
        noise.append(float((rounded - true).norm()))
        signal.append(float(true.norm()))
    error = math.hypot(*noise) / (math.hypot(*signal) or 1.0)
    return error if math.isfinite(error) else math.inf


def _values(t: Tensor) -> Tensor:
    return (t.dequantize() if isinstance(t, MXTensor) else t).float()

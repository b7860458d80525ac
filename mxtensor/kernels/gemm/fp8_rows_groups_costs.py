"""Which product of groups of row-scaled E4M3 is expected to be fastest: torch's, or this package's with some tile.

``torch._scaled_grouped_mm`` takes one of three tiles by the sizes of an average group (torch 2.11, ScaledGroupMM.cu).
The one for groups of which fewer than two of M, N and K are 2048 or more keeps two accumulators of 128x256 values. They
spill registers when sums go to float32: 237 TFLOP/s were measured on an H100, where the others reach 1000.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """The part of the result that one program computes, and how it is launched."""

    m: int
    n: int
    """columns of one piece"""
    split: int
    k: int
    band: int
    """row tiles that are taken before the next column of tiles"""
    warps: int
    stages: int


WIDE, NARROW = Tile(128, 128, 2, 128, 16, 8, 4), Tile(64, 128, 1, 128, 16, 4, 3)
VALUES, FEW_VALUES = Tile(128, 128, 2, 64, 16, 8, 3), Tile(64, 128, 1, 64, 16, 4, 3)
"""For values in bfloat16: on sm90 and sm100, and where a multiprocessor has less memory to share."""
TORCH_RATES = {"64x128": (340, 340, 340, 230), "128x128": (1020, 680, 680, 490), "128x256": (270, 270, 270, 200)}
"""Tile of torch's product -> TFLOP/s on an H100 for each of ``KINDS``; measured where torch takes the tile."""
TRITON_RATES = {WIDE: (920, 770, 390, 450), NARROW: (780, 600, 410, 495)}
"""Tile of this package's product -> the same."""
KINDS = ("long groups", "short groups", "very short groups", "few columns")
"""Of an average group: SHORT rows and columns of K or more; fewer rows; at most VERY_SHORT rows; fewer columns."""
SHORT, VERY_SHORT = 1024, 192
LARGE, FEW = 2048, 128


def torch_tile(m: int, n: int, k: int) -> str:
    """The tile that torch takes for products of (m, k) by (n, k) of an average group."""
    if m <= FEW or n <= FEW:
        return "64x128"
    return "128x128" if sum(size >= LARGE for size in (m, n, k)) >= 2 else "128x256"


def kind_of(m: int, k: int) -> int:
    """The place in ``KINDS`` of products with m rows and k columns."""
    if m <= VERY_SHORT:
        return 2
    return 3 if k < SHORT else 0 if m >= SHORT else 1


def fastest_triton(m: int, k: int) -> Tile:
    """The tile of this package's product for an average group."""
    kind = kind_of(m, k)
    return max(TRITON_RATES, key=lambda tile: TRITON_RATES[tile][kind])


def fastest(m: int, n: int, k: int) -> Tile | None:
    """The tile of this package's product for an average group; None if torch's is expected to be faster."""
    kind, tile = kind_of(m, k), fastest_triton(m, k)
    return tile if TRITON_RATES[tile][kind] > TORCH_RATES[torch_tile(m, n, k)][kind] else None

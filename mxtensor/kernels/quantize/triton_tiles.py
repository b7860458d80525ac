"""How much of a matrix one program of each Triton cast takes: measured on an H200.

With more values a program has fewer loads in flight than its registers could hold; with fewer it stores its scales in
smaller runs.
"""

from __future__ import annotations

Tile = tuple[int, int, int]
ROWS: dict[int, Tile] = {2: (2, 1024, 2), 4: (2, 512, 2)}
"""Bytes of a source value -> (rows, columns, warps) of a program of the cast with blocks along rows."""
PAIRS: Tile = (2, 1024, 2)
"""(rows, pairs of columns, warps) of a program of the cast from bfloat16 to 4 bits."""
FULL_ROWS: tuple[int, int] = (4096, 8)
"""(columns read at a time, warps) of a program of the cast with one scale per row."""
COLUMNS: dict[str, Tile] = {"": (4, 128, 4), "codes": (4, 64, 4), "values": (4, 64, 4)}
"""What is written for rows too -> (spans of rows, columns, warps) of the cast with blocks along columns."""
WORDS: dict[str, Tile] = {"": (8, 32, 4), "codes": (2, 64, 4), "random codes": (2, 64, 8), "values": (2, 64, 4)}
"""The same from bfloat16 to float8: (spans of rows, pairs of columns, warps). Random numbers take registers."""
EXTREMES: Tile = (64, 64, 4)
"""(rows, pairs of columns, warps) of a program of the pass for the largest scales; measured on an H100."""
ROUND: dict[bool, Tile] = {False: (2, 512, 2), True: (32, 128, 4)}
"""Whether blocks run along columns (too) -> (rows, pairs of columns, warps) of a program that fake quantizes bfloat16;
not measured."""
TRANSPOSE: Tile = (32, 64, 4)
"""(groups of four rows, columns, warps) of the cast with one scale per tensor that stores the transpose."""
DECODE: dict[int, Tile] = {8: (2, 1024, 2), 6: (2, 1024, 2), 4: (2, 1024, 2)}
"""Bits of a code -> (rows, columns, warps) of a program that dequantizes."""
AMAX: tuple[int, int, int] = (4096, 4, 8)
"""(values read at a time, how many times, warps) of a program of the pass for a tensor's amax."""

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
EXPONENTS: tuple[int, int] = (64, 2)
"""(pairs of columns, warps) of a program of the pass for the exponents; its rows are those of the cast."""
ROW_SCALED: dict[str, Tile] = {"": (2, 64, 2), "codes": (2, 64, 4), "random codes": (2, 64, 8)}
"""What is written for rows too -> (spans of rows, pairs of columns, warps) of the cast to row-scaled operands."""
ROWS_FIRST: tuple[int, dict[bool, int]] = (2048, {False: 512, True: 256})
"""Pairs of columns at a time, and for each warp in rows of fewer and of twice as many or more: of the cast of rows that
finds the exponents of columns."""
ROUND: dict[bool, Tile] = {False: (2, 512, 2), True: (32, 128, 4)}
"""Whether blocks run along columns (too) -> (rows, pairs of columns, warps) of a program that fake quantizes bfloat16;
not measured."""
TRANSPOSE: Tile = (32, 64, 4)
"""(groups of four rows, columns, warps) of the cast with one scale per tensor that stores the transpose."""
DECODE: dict[int, Tile] = {8: (2, 1024, 2), 6: (2, 1024, 2), 4: (2, 1024, 2)}
"""Bits of a code -> (rows, columns, warps) of a program that dequantizes."""
AMAX: tuple[int, int, int] = (4096, 4, 8)
"""(values read at a time, how many times, warps) of a program of the pass for a tensor's amax."""

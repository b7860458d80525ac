"""How much of a matrix one program of a Triton cast takes, by what it has to do: measured on an H200.

More values to a program mean fewer loads in flight than the registers could hold; fewer mean scales in smaller pieces.
"""

from __future__ import annotations

Tile = tuple[int, int, int]
ROWS: dict[int, Tile] = {2: (2, 1024, 2), 4: (2, 512, 2)}
"""Bytes of a source value -> (rows, columns, warps) of a program of the cast in blocks along rows."""
PAIRS: Tile = (2, 1024, 2)
"""(rows, pairs of columns, warps) of a program of the cast from bfloat16 to 4 bits."""
FULL_ROWS: tuple[int, int] = (4096, 8)
"""(columns read at a time, warps) where a row shares one scale."""
COLUMNS: dict[str, Tile] = {"": (4, 128, 4), "codes": (4, 64, 4), "values": (4, 64, 4)}
"""What is made of rows too -> (spans of rows, columns, warps) of a program of the cast in blocks along columns."""
WORDS: dict[str, Tile] = {"": (8, 32, 4), "codes": (2, 64, 4), "values": (2, 64, 4)}
"""What is made of rows too -> (spans of rows, pairs of columns, warps) from bfloat16 to float8 along columns."""
ROUND: dict[bool, Tile] = {False: (2, 512, 2), True: (32, 128, 4)}
"""Whether along columns (too) -> (rows, pairs of columns, warps) of a program that rounds bfloat16; not measured."""
TRANSPOSE: Tile = (32, 64, 4)
"""(fours of rows, columns, warps) of the cast by one scale that stores the transpose too; not measured."""
DECODE: dict[int, Tile] = {8: (2, 1024, 2), 6: (2, 1024, 2), 4: (2, 1024, 2)}
"""Bits of a code -> (rows, columns, warps) of a program that decodes."""
AMAX: tuple[int, int, int] = (4096, 4, 8)
"""(values at a time, times, warps) of a program of the pass for a tensor's amax."""

"""A table as lines of text."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = (0,), rule: bool = True
) -> str:
    """Columns of one width each, those with the numbers ``left`` aligned to the left and the others to the right.

    ``rule``: a line of dashes stands below the header.
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        return "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in pairs).rstrip()

    dashes = ["  ".join("-" * width for width in widths)] if rule else []
    return "\n".join([line(header), *dashes, *map(line, rows)])

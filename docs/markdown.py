"""Markdown made from rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: str, body: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the column names of ``header`` are separated by commas."""
    names = header.split(", ")
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [names, ["---"] * len(names), *body])

"""Places of temporary memory in one allocation: what is not needed at the same time may share a place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ALIGNMENT = 512
"""Bytes; that of torch's own allocations on a GPU."""


class Need(NamedTuple):
    """Memory that is needed from one step to another, both included."""

    first: int
    last: int
    size: int
    """bytes"""


def places(needs: Sequence[Need]) -> tuple[list[int], int]:
    """(bytes from the start of the allocation for each need, size of the allocation).

    Each goes to the lowest place that is free of what is needed at the same time; larger ones first.
    """
    found: dict[int, int] = {}
    for i in sorted(range(len(needs)), key=lambda i: (-needs[i].size, i)):
        one = needs[i]
        taken = sorted(
            (found[j], found[j] + needs[j].size)
            for j in found
            if needs[j].first <= one.last and one.first <= needs[j].last
        )
        start = 0
        for begin, end in taken:
            if start + one.size <= begin:
                break
            start = max(start, -(-end // ALIGNMENT) * ALIGNMENT)
        found[i] = start
    total = max((found[i] + needs[i].size for i in found), default=0)
    return [found[i] for i in range(len(needs))], total

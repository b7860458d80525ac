"""The bandwidth at which this process reads memory: reductions by torch over more than any cache holds.

On some machines ``sum`` is faster, on others ``amax``: the faster of the two counts, in its fastest round.
"""

from __future__ import annotations

import torch

from .harness import Prepare, Row, Work, timed

READING = ("sum", "amax")
MEGABYTES = 256


def _reading(name: str, megabytes: int) -> Prepare:
    def prepare() -> Work:
        work: Work = getattr(torch.ones(megabytes * 250_000), name)
        return work

    return prepare


def readers(megabytes: int = MEGABYTES) -> dict[str, Prepare]:
    """Contenders that read so much memory, to be timed in turn with others."""
    return {name: _reading(name, megabytes) for name in READING}


def take_bandwidth(row: Row, megabytes: int = MEGABYTES) -> float:
    """GB/s that the ``readers`` of a row have read; they are taken out of it."""
    row.relative = {name: ratio for name, ratio in row.relative.items() if name not in READING}
    return megabytes / min(row.times.pop(name) for name in READING)


def bandwidth(repeats: int) -> float:
    """GB/s that this machine reads with the current number of threads."""
    return take_bandwidth(timed(Row("bandwidth", {}), readers(), repeats, summary=min))

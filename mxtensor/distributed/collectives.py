"""The collectives of layers that are split over ranks, as ops that eager code runs and a compiled graph holds.

Each waits for its result as torch's collectives do: the host for a CPU, the stream for a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ..core.compat import functional_collectives as ops


class Ranks(NamedTuple):
    """A process group in numbers and names, which a graph may have as constants."""

    group: str
    size: int

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """Those of a process group."""
        return cls(group.group_name, dist.get_world_size(group))


def gathered(mine: Tensor, ranks: Ranks) -> Tensor:
    """(n, ...) of each rank as (size * n, ...), in the order of ranks."""
    return _of(ops.all_gather_into_tensor(mine.contiguous(), ranks.size, ranks.group))


def sum_scattered(of_all: Tensor, ranks: Ranks) -> Tensor:
    """The sum over the ranks of (size * n, ...), of which each rank gets its part (n, ...)."""
    return _of(ops.reduce_scatter_tensor(of_all.contiguous(), "sum", ranks.size, ranks.group))


def largest(mine: Tensor, ranks: Ranks) -> Tensor:
    """The largest of the ranks at each place."""
    return _of(ops.all_reduce(mine.contiguous(), "max", ranks.group))


def _of(pending: Tensor) -> Tensor:
    done: Tensor = ops.wait_tensor(pending)
    return done

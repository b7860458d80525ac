"""The launch of a Plan of small-M products: one x by one or several weights, all arguments packed once.

A later call with activations of the same layout costs an allocation of each result, one of the scratch
memory if there is any, and the launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...numerics.cast import Cast
from ...numerics.formats import Format
from ..runtime import triton_launch
from ..runtime.packed_launches import WINDOW, PackedLaunches
from .config import MOST_WEIGHTS
from .heuristics import BY_WARPS
from .launch import Weight, resolved_for, steps_of
from .scratch import scratch_of

ENDS, RESULTS, X, SCRATCH = 1 << 59, 1 << 60, 1 << 61, 1 << 62
"""Addresses that no memory has, for ends of groups, results, activations and scratch memory while the arguments are
made."""


class _At:
    """A tensor of this layout at an address."""

    def __init__(self, t: Tensor, address: int) -> None:
        self.shape, self.device, self.dtype = t.shape, t.device, t.dtype
        self.strides, self.address = t.stride(), address

    def data_ptr(self) -> int:
        return self.address

    def stride(self, dim: int | None = None) -> Any:
        return self.strides if dim is None else self.strides[dim]


class Launch:
    """The launches of the product with one weight. Stores addresses and no tensor."""

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, scratch_bytes: int, launches: PackedLaunches
    ) -> None:
        self.shapes, self.dtype, self.scratch_bytes, self.launches = shapes, dtype, scratch_bytes, launches
        self.shape = shapes[0]

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.shape, dtype=self.dtype)
        self.run(x, out.data_ptr())
        return out

    def run(self, x: Tensor, *results: int) -> None:
        """Launch all; ``results``: the addresses of the results."""
        if self.scratch_bytes:
            scratch = x.new_empty(self.scratch_bytes, dtype=torch.uint8)
            self.launches((x.data_ptr(), scratch.data_ptr(), *results))
        else:
            self.launches((x.data_ptr(), 0, *results))


class SharedLaunch(Launch):
    """The same with several weights: a call returns a list."""

    def __call__(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
        results = [x.new_empty(shape, dtype=self.dtype) for shape in self.shapes]
        self.run(x, *(t.data_ptr() for t in results))
        return results


class GroupedLaunch(Launch):
    """The same with a stack of weights and the ends of groups."""

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:  # type: ignore[override]
        out = x.new_empty(self.shape, dtype=self.dtype)
        self.run(x, out.data_ptr(), ends.data_ptr())
        return out


def make_launch(
    x: Tensor, weights: Sequence[Weight], format: Format, cols: int, cast: Cast | None, alpha: float = 1.0,
    beta: float = 1.0, out_dtype: torch.dtype | None = None, ends: Tensor | None = None, kind: type[Launch] = Launch,
) -> Launch | None:  # fmt: skip
    """The launches of x (..., K) by these weights; None if they take more than one product kernel, or a copy first.

    Results have the dtype of x unless ``out_dtype`` is given. ``ends``: of groups of rows, for a stack of weights.
    """
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    copied = ends is None and rows.shape[0] > BY_WARPS  # if not aligned
    if copied and any((w.data.data_ptr() | w.scale.data_ptr()) % 16 for w in weights):
        return None
    if len(weights) > MOST_WEIGHTS or len({w.bias.dtype for w in weights if w.bias is not None}) > 1:
        return None
    dtype = out_dtype or x.dtype
    with triton_launch.on(x.device):
        groups = 0 if ends is None else weights[0].data.shape[0]
        resolved = resolved_for(rows, weights, format, cols, groups, dtype, cast, None)
        config, blocks = resolved.config, resolved.blocks
        scratch = scratch_of(config, *rows.shape, cast, blocks) if config.converts else None
        given: Any = _At(rows, X | rows.data_ptr() & 15)
        results: list[Any] = [_At(rows, RESULTS + i * WINDOW) for i in range(len(weights))]
        at_ends: Any = None if ends is None else _At(ends, ENDS)
        steps = steps_of(given, weights, results, format, cast, resolved, scratch, SCRATCH, alpha, beta, at_ends)
        bases = (given.address, SCRATCH, *(y.address for y in results), *(() if ends is None else (ENDS,)))
        launches = PackedLaunches(x.device, steps, bases)
    shapes = [(*x.shape[:-1], w.data.shape[-2]) for w in weights]
    return kind(shapes, dtype, 0 if scratch is None else scratch.bytes, launches)

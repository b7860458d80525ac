"""Repeated products: all launches of a product with one weight, prepared once for activations of one layout.

A later call costs an allocation of the result, one of the scratch memory if there is any, and the launches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.shapes import as_matrix
from ...numerics.cast import Cast
from ...numerics.formats import Format
from ..runtime import triton_launch
from ..runtime.prepared_launches import PreparedLaunches
from .heuristics import BY_WARPS
from .launch import Weight, resolved_for, steps_of
from .scratch import scratch_of

WHERE = 1 << 60, 1 << 61, 1 << 62
"""Addresses that no memory has, for result, activations and scratch memory while the arguments are made."""


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
    """The launches of a product with one weight. Stores addresses and no tensor."""

    def __init__(self, shape: tuple[int, ...], scratch_bytes: int, launches: PreparedLaunches) -> None:
        self.shape, self.scratch_bytes, self.launches = shape, scratch_bytes, launches

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(self.shape)
        if self.scratch_bytes:
            scratch = x.new_empty(self.scratch_bytes, dtype=torch.uint8)
            self.launches((out.data_ptr(), x.data_ptr(), scratch.data_ptr()))
        else:
            self.launches((out.data_ptr(), x.data_ptr(), 0))
        return out


def prepare_launch(x: Tensor, weight: Weight, format: Format, cols: int, cast: Cast | None) -> Launch | None:
    """The launches of this weight with alpha and beta 1 and the dtype of x (..., K)."""
    rows, n = as_matrix(x), weight.data.shape[-2]
    if rows.shape[0] > BY_WARPS and (weight.data.data_ptr() | weight.scale.data_ptr()) % 16:
        return None  # the weight is copied first
    out_at, x_at, scratch_at = WHERE
    with triton_launch.on(x.device):
        resolved = resolved_for(rows, (weight,), format, cols, 0, x.dtype, cast, None)
        scratch = None if resolved.config.whole_x else scratch_of(resolved.config, *rows.shape, cast, resolved.blocks)
        given: Any = _At(rows, x_at | rows.data_ptr() & 15)
        result: Any = _At(rows, out_at)
        steps = steps_of(given, (weight,), (result,), format, cast, resolved, scratch, scratch_at)
        launches = PreparedLaunches(x.device, steps, (out_at, given.address, scratch_at))
    return Launch((*x.shape[:-1], n), 0 if scratch is None else scratch.bytes, launches)

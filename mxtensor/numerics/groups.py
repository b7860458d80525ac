"""Rows in groups, each with a weight of its own: what a cast of such a matrix is. The definition, in plain torch.

``ends`` (G,) int32 are the ends of the groups, never decreasing; they stay on the device. A group may have no rows.

A group is cast as if it were a matrix of its own:

- A block along the columns belongs to one row, so that one cast of all rows gives what a cast of each group gives.
- Blocks along the rows begin anew with each group. Each group is padded with zeros to whole blocks, and a cast of the
  padded matrix gives what a cast of each group gives, since absent values of a block count as zeros. A group without
  rows has one block of zeros, so that no product is a sum of nothing.
- A scale of a whole tensor (NVFP4, float8 per tensor) is the scale of one group.

How many rows the padded groups take depends on values. Their matrix has the largest number that G groups of so many
rows can take, which the host knows; what follows the last group is zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from .cast import Cast
from .formats import FULL
from .reference import SCALE_RULES, decode_local, encode


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of the rows of a matrix (M, ...), and their places in the padded matrix (P, ...).

    Kernels that support groups read ``given``; everything else is computed on demand. Invalid ends (beyond the rows, or
    decreasing) give groups of other rows of the matrix, or empty groups.
    """

    given: Tensor
    """int32 (G,): the end of each group, as the caller gave it"""
    rows: int
    """M"""
    block: int
    """the rows to whose multiples groups are padded"""

    @property
    def number(self) -> int:
        """G"""
        return self.given.shape[0]

    @property
    def length(self) -> int:
        """P"""
        return padded_length(self.rows, self.number, self.block)

    @cached_property
    def ends(self) -> Tensor:
        """int32 (G,): the end of each group in the matrix"""
        return self.given.clamp(0, self.rows)

    @cached_property
    def _sizes(self) -> tuple[Tensor, Tensor]:
        """int32 (G,): the starts of the groups, and the rows of the padded groups."""
        starts = F.pad(self.ends, (1, 0)).narrow(0, 0, self.number)
        sizes = ((self.ends - starts + (self.block - 1)) // self.block).clamp(min=1) * self.block
        return starts, sizes

    @cached_property
    def padded_ends(self) -> Tensor:
        """int32 (G,): the end of each group in the padded matrix, a multiple of the block"""
        return self._sizes[1].cumsum(0).clamp(max=self.length).to(torch.int32)

    @cached_property
    def of_row(self) -> Tensor:
        """int64 (M,): the group of each row; G for rows after the last group"""
        return _group_of(self.ends, self.rows)

    @cached_property
    def of_padded_row(self) -> Tensor:
        """int64 (P,): the group of each padded row; G after the last group"""
        return _group_of(self.padded_ends, self.length)

    @cached_property
    def places(self) -> Tensor:
        """int64 (M,): the padded row that is a copy of each row; P for rows after the last group"""
        starts, sizes = self._sizes
        moved = F.pad(self.padded_ends - sizes - starts, (0, 1)).index_select(0, self.of_row)
        row = torch.arange(self.rows, device=self.given.device)
        return torch.where(self.of_row < self.number, (row + moved).clamp(0, self.length), self.length)

    def padded(self, x: Tensor) -> Tensor:
        """The rows of x (M, cols) with each group padded: (P, cols)."""
        out = x.new_zeros(self.length + 1, x.shape[1])  # what follows the last group goes to the last row
        return out.index_copy_(0, self.places, x).narrow(0, 0, self.length)

    def unpadded(self, x: Tensor) -> Tensor:
        """The rows of a padded matrix (P, cols) at their places in the matrix: (M, cols); others for rows in no
        group."""
        return x.index_select(0, self.places.clamp(max=self.length - 1))


def block_of(*casts: Cast | None) -> int:
    """The rows to which groups are padded for these casts of columns: whole blocks, at least 16.

    16 values are what rotations work on, and 16 bytes the alignment that grouped products need.
    """
    blocks = [cast.format.block[1] for cast in casts if cast is not None]
    return math.lcm(16, *(n for n in blocks if n != FULL))


def padded_length(rows: int, groups: int, block: int) -> int:
    """The rows that ``groups`` groups of ``rows`` rows together take at most, each at least one block."""
    return (rows // block + groups) * block


def _group_of(ends: Tensor, rows: int) -> Tensor:
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device, dtype=ends.dtype), right=True)


# ---------------------------------------------------------------------------------------------- scales of a group


def amax_of_rows(x: Tensor, group: Tensor, count: int, dim: int) -> Tensor:
    """The amax of each row of each group, at each of its values: (M, 1) for groups of rows (dim 0), which are cast row
    by row, and (rows, P) for groups of columns (dim 1). Arguments and NaN as in ``amax_of_groups``."""
    magnitudes = x.detach().abs().to(torch.float32)
    magnitudes = torch.where(magnitudes.isnan(), float("inf"), magnitudes)
    if dim == 0:
        return magnitudes.amax(1, keepdim=True) if x.shape[1] else x.new_zeros((len(x), 1), dtype=torch.float32)
    index = group.expand_as(magnitudes)
    return magnitudes.new_zeros(len(x), count + 1).scatter_reduce(1, index, magnitudes, "amax").gather(1, index)


def amax_along(x: Tensor, dims: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    """The amax along dimensions in float32; NaN if a value is. One pass, where ``abs`` would write all values."""
    amax: Tensor = torch.linalg.vector_norm(x.detach(), float("inf"), dims, keepdim)
    return amax.to(torch.float32)


def amax_of_groups(x: Tensor, group: Tensor, count: int, dim: int) -> Tensor:
    """The amax of each group in float32, at each of its rows (dim 0: (M, 1)) or of its columns (dim 1: (1, M)).

    ``group``: the group of each row or column; ``count`` for those in no group, which have an amax of their own. NaN
    and infinity count as the largest.
    """
    along = amax_along(x, 1 - dim) if x.shape[1 - dim] else x.new_zeros(group.shape)
    along = torch.where(along.isnan(), float("inf"), along)
    largest = along.new_zeros(count + 1).scatter_reduce(0, group, along, "amax")
    return largest.index_select(0, group).unsqueeze(1 - dim)


def scaled_values_of_groups(x: Tensor, cast: Cast, amax: Tensor) -> tuple[Tensor, Tensor]:
    """x in a format with a scale of the whole tensor, where each part of x has its own ``amax``: values and scales,
    whose products are the decoded values.

    ``amax``: float32, broadcasts to x (..., rows, cols) and is the same in all values of a block. Where it differs
    along a dimension, x has whole blocks there. Blocks run along the last dimension. Values are elements, in the dtype
    of their format, or elements times block scales, in bfloat16, which represents them exactly. Scales are float32 and
    broadcast to x.
    """
    rows, cols = cast.format.block
    if rows == FULL:
        operand = encode(x, cast, amax)
        return operand.data, operand.scale
    of_blocks = amax if amax.shape[-1] == 1 else _firsts(amax, -1, cols)
    if rows > 1 and of_blocks.shape[-2] > 1:
        of_blocks = _firsts(of_blocks, -2, rows)
    operand = encode(x, cast, of_blocks)
    values, scale = decode_local(operand).to(torch.bfloat16), operand.global_scale
    assert scale is not None and cast.format.exact_in_bfloat16
    if 0 in x.shape:
        return values, scale
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(cols, -1)
    if scale.shape[-2] > 1:
        scale = scale.repeat_interleave(rows, -2)
    return values, scale


def scales_by_group(cast: Cast, amax: Tensor) -> Tensor:
    """The scales of ``scaled_values_of_groups`` alone: of groups with this amax, in its shape."""
    scale, _multiplier, global_scale = SCALE_RULES[cast.format.scale](amax, cast, amax)
    if cast.format.block[0] == FULL:
        return scale
    assert global_scale is not None
    return global_scale


def _firsts(x: Tensor, dim: int, block: int) -> Tensor:
    """The first of each block of values along a dimension of whole blocks."""
    first: Tensor = x.unflatten(dim, (-1, block)).select(dim, 0)
    return first

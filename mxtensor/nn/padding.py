"""Rows in groups, each padded with zeros to whole blocks, and back: for kernels that want whole blocks of rows.

``GroupedLinear`` takes any row counts and needs neither module. Zero rows change no amax, and a shorter last block is a
block padded with zeros, so padded rows are cast to the same codes and scales. That holds for every format and nearest
rounding; stochastic rounding draws other numbers for other shapes. Products of the padded groups differ from those of
the rows alone at most in the order in which the backend adds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..numerics.formats import FULL
from ..recipe.linear_recipe import LinearRecipe
from ..training.autocast import get_recipe
from ..training.grouped import Splits, groups_of, row_counts

WITHOUT_BLOCKS = 16
"""What float8 kernels want of a contraction, blocks or none."""
MX_BLOCK = 32
"""What TransformerEngine aligns rows to for formats with one-byte scales, NVFP4 with its blocks of 16 too."""


def align_size_of(linear_recipe: LinearRecipe | None) -> int:
    """The row counts that a recipe's kernels want: multiples of the block of formats with one-byte scales, and of 32;
    of 16 for formats with float32 scales, and without a recipe."""
    if linear_recipe is None:
        return WITHOUT_BLOCKS
    size = WITHOUT_BLOCKS
    for casts in (linear_recipe.input, linear_recipe.weight, linear_recipe.grad):
        for cast in (casts.rowwise, casts.columnwise):
            if cast is not None and cast.format.scale.bits == 8 and cast.format.block[1] != FULL:
                size = max(size, MX_BLOCK, cast.format.block[1])
    return size


class _Aligned(nn.Module):
    """What both directions know: the number of groups, and what their row counts are rounded up to."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        if align_size is not None and align_size < 1:
            raise ValueError(
                f"{type(self).__name__}: align_size is {align_size}; row counts are multiples of 1 or more"
            )
        self.num_gemms, self.align_size = num_gemms, align_size

    def padded(self, sizes: list[int]) -> list[int]:
        """Each row count rounded up: to ``align_size``, or to what the active recipe wants now."""
        recipe = get_recipe()
        size = self.align_size or align_size_of(None if recipe is None else recipe.linear_recipe())
        return [-(-n // size) * size for n in sizes]

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"


class Fp8Padding(_Aligned):
    """Zero rows after each group, up to a multiple of ``align_size``.

    ``align_size`` None: what the recipe wants that is active at each call (``align_size_of``), 16 outside autocast.
    """

    def forward(self, inp: Tensor, m_splits: Splits) -> tuple[Tensor, list[int]]:
        """inp (..., K) of sum(m_splits) rows -> (rows (padded sum, K), padded row counts); differentiable.

        Where nothing is to be padded, ``inp`` itself comes back. Raises TypeError and ValueError for m_splits that are
        no row counts of ``inp``.
        """
        name = type(self).__name__
        sizes = row_counts(m_splits, self.num_gemms, name)
        groups, padded = groups_of(inp, sizes, name), self.padded(sizes)
        if padded == sizes:
            return inp, padded
        pieces = []
        for rows, size in zip(groups, padded, strict=True):
            pieces += [rows, rows.new_zeros(size - rows.shape[0], rows.shape[1])]
        return torch.cat(pieces), padded


class Fp8Unpadding(_Aligned):
    """The inverse of ``Fp8Padding`` with the same ``align_size``, or under the same recipe."""

    def forward(self, inp: Tensor, m_splits: Splits) -> Tensor:
        """inp (..., N) of padded rows, the row counts before padding -> rows (sum(m_splits), N); differentiable.

        Where nothing was padded, ``inp`` itself comes back. Raises TypeError and ValueError for m_splits that, padded,
        are no row counts of ``inp``.
        """
        name = type(self).__name__
        sizes = row_counts(m_splits, self.num_gemms, name)
        padded = self.padded(sizes)
        groups = groups_of(inp, padded, name)
        if padded == sizes:
            return inp
        return torch.cat([rows[:size] for rows, size in zip(groups, sizes, strict=True)])

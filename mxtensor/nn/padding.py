"""Fp8Padding and Fp8Unpadding: pad each group of rows with zeros to whole blocks, and remove the padding.

They serve kernels that need whole blocks of rows. ``GroupedLinear`` accepts any row counts and needs neither module.
Zero rows do not change an amax, and a short last block equals one padded with zeros. Padded rows are therefore cast to
the same codes and scales, with every format and nearest rounding; stochastic rounding draws other numbers for other
shapes. Products of padded groups differ from those of the rows alone at most in the order of floating-point sums.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.arguments import COUNT, check, optional
from ..numerics.formats import FULL
from ..recipe.linear_recipe import LinearRecipe
from ..training.autocast import get_recipe
from ..training.grouped import Splits, groups_of, row_counts

WITHOUT_BLOCKS = 16
"""The multiple that float8 kernels need of a contraction, with or without blocks."""
MX_BLOCK = 32
"""The multiple to which TransformerEngine aligns rows for formats with one-byte scales, NVFP4 included."""


def align_size_of(linear_recipe: LinearRecipe | None) -> int:
    """The multiple of rows that the kernels of a recipe need.

    For formats with one-byte scales: their block size, at least 32. For formats with float32 scales, and without a
    recipe: 16.
    """
    if linear_recipe is None:
        return WITHOUT_BLOCKS
    size = WITHOUT_BLOCKS
    for casts in (linear_recipe.input, linear_recipe.weight, linear_recipe.grad):
        for cast in (casts.rowwise, casts.columnwise):
            if cast is not None and cast.format.scale.bits == 8 and cast.format.block[1] != FULL:
                size = max(size, MX_BLOCK, cast.format.block[1])
    return size


class _Aligned(nn.Module):
    """The number of groups, and the multiple to which their row counts are rounded up."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        check(type(self).__name__, "num_gemms", num_gemms, COUNT)
        check(type(self).__name__, "align_size", align_size, optional(COUNT))
        self.num_gemms, self.align_size = num_gemms, align_size

    def padded(self, sizes: list[int]) -> list[int]:
        """Each row count rounded up to ``align_size``, or to the multiple that the active recipe needs."""
        recipe = get_recipe()
        size = self.align_size or align_size_of(None if recipe is None else recipe.linear_recipe())
        return [-(-n // size) * size for n in sizes]

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, align_size={self.align_size}"


class Fp8Padding(_Aligned):
    """Append zero rows to each group, up to a multiple of ``align_size``.

    ``align_size=None``: at each call the multiple that the active recipe needs (``align_size_of``), 16 outside
    autocast.
    """

    def forward(self, inp: Tensor, m_splits: Splits) -> tuple[Tensor, list[int]]:
        """inp (..., K) with sum(m_splits) rows -> (rows (padded sum, K), padded row counts). Differentiable.

        If no group needs padding, returns ``inp`` itself. Raises TypeError and ValueError for m_splits that do not fit
        ``inp``.
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
        """inp (..., N) with padded rows, the row counts before padding -> rows (sum(m_splits), N). Differentiable.

        If no group was padded, returns ``inp`` itself. Raises TypeError and ValueError for m_splits whose padded counts
        do not fit ``inp``.
        """
        name = type(self).__name__
        sizes = row_counts(m_splits, self.num_gemms, name)
        padded = self.padded(sizes)
        groups = groups_of(inp, padded, name)
        if padded == sizes:
            return inp
        return torch.cat([rows[:size] for rows, size in zip(groups, sizes, strict=True)])

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
from ..core.tracing import is_captured, is_traced
from ..kernels.permute.select import chunk_rows
from ..numerics.formats import FULL
from ..recipe.linear_recipe import LinearRecipe
from ..training.autocast import get_recipe
from ..training.grouped import Splits, groups_of, row_counts
from ..training.permutation import moved

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


def _has_kernels(inp: Tensor) -> bool:
    """Whether rows are copied in one launch by the kernels of permutations. A CUDA graph would read the row counts of
    its capture from memory of the host."""
    return inp.is_cuda and not is_traced(inp) and not is_captured(inp)


def _rows(inp: Tensor) -> Tensor:
    return inp.reshape(-1, inp.shape[-1])


def _maps(sizes: list[int], padded: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The row before padding of each padded row, -1 for padding; and the padded row of each row."""
    counts = torch.tensor([sizes, padded], dtype=torch.int32, device="cpu")
    if device.type == "cuda":
        counts = counts.pin_memory().to(device, non_blocking=True)  # does not synchronize
    return chunk_rows(counts[0], None, counts[1], sum(sizes), sum(padded))


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
        if _has_kernels(inp):
            return moved(_rows(inp), None, *_maps(sizes, padded, inp.device))[0], padded
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
        if _has_kernels(inp):
            source, target = _maps(sizes, padded, inp.device)
            return moved(_rows(inp), None, target, source)[0]
        return torch.cat([rows[:size] for rows, size in zip(groups, sizes, strict=True)])

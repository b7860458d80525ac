"""Rows in groups, each for a linear layer of its own, as mixtures of experts need them: their counts, the rows of each
group, and the results put together again.

``mx.nn.GroupedLinear`` runs a layer for each group. Its copies are cast from the rows of the group only, so neither a
block along the rows nor the amax of a tensor spans two groups, and its products use the kernels of single products. The
result and every gradient are therefore bitwise identical to those of separate layers. Products of a stack of weights in
one parameter (``linear`` with ``ends``) are not used: they need a copy of all weights as one tensor, and add in another
order on CUDA.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..core.arguments import DENSE, check, described

Splits: TypeAlias = Sequence[int] | Tensor
"""The row count of each group: integers, or an integer tensor (groups,) on any device."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def row_counts(m_splits: Splits, groups: int, name: str) -> list[int]:
    """``m_splits`` as a list of ``groups`` row counts, zeros allowed. A tensor on a device synchronizes.

    Raises TypeError for values that are not integers, ValueError for another number of groups and for negative counts.
    ``name`` is the caller's name in messages.
    """
    if isinstance(m_splits, Tensor):
        if m_splits.is_meta or m_splits.layout is not torch.strided or m_splits.dtype not in INTEGERS:
            raise TypeError(f"{name}: m_splits is {described(m_splits)}; row counts are integers")
        m_splits = m_splits.reshape(-1).tolist()
    if not hasattr(m_splits, "__len__") or isinstance(m_splits, (str, bytes)):
        raise TypeError(f"{name}: m_splits is {described(m_splits)}; row counts are integers")
    if torch.compiler.is_compiling():  # symbolic integers stay as they are
        sizes = list(m_splits)
    else:
        try:
            sizes = [operator.index(n) for n in m_splits]
        except TypeError:
            raise TypeError(f"{name}: m_splits is {described(m_splits)}; row counts are integers") from None
    if len(sizes) != groups:
        raise ValueError(
            f"{name}: m_splits has {len(sizes)} row counts, there are {groups} groups: {described(m_splits)}"
        )
    if any(n < 0 for n in sizes):
        raise ValueError(f"{name}: m_splits has negative row counts: {sizes}")
    return sizes


def groups_of(x: Tensor, sizes: list[int], name: str) -> tuple[Tensor, ...]:
    """The rows of x (..., K), its leading dimensions counted as one, in groups of ``sizes``: (rows, K) each.

    Raises ValueError where x has more or fewer rows, or no dimensions.
    """
    check(name, "the input", x, DENSE)
    if x.dim() == 0:
        raise ValueError(f"{name}: the input is 0-dimensional; rows in groups are (rows, features)")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if sum(sizes) != rows.shape[0]:
        raise ValueError(
            f"{name}: m_splits {sizes} sum to {sum(sizes)}, the input has {rows.shape[0]} rows, {tuple(x.shape)}"
        )
    return torch.split(rows, sizes)


def stacked(groups: Sequence[Tensor], x: Tensor) -> Tensor:
    """The results (rows, N) of the groups of x, concatenated, with the leading dimensions of x (..., K)."""
    y = torch.cat(list(groups))
    return y.view(*x.shape[:-1], y.shape[-1])

"""The global scales of groups, or of matrices of a stack, as products take them: one for each row of each group."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ...numerics.groups import Groups
from .scaled_mm import dense
from .spec import FakeQuantized


def _scale(side: FakeQuantized) -> Tensor:
    assert side.global_scale is not None
    return side.global_scale


def scales_of_rows(side: FakeQuantized) -> Tensor:
    """float32 (rows,), contiguous, from those of rows in groups (M, K) or of a stack (G, N, K)."""
    return dense(_scale(side).expand(*side.shape[:-1], 1).reshape(-1))  # one scale stays expanded in a reshape


def scales_of_columns(side: FakeQuantized, groups: Groups) -> Tensor:
    """float32 (G * rows,), from those of the columns of padded groups (rows, P)."""
    scale = _scale(side).expand(side.shape[0], groups.length)
    starts = F.pad(groups.padded_ends, (1, 0)).narrow(0, 0, groups.number).clamp(max=groups.length - 1)
    return scale.index_select(1, starts).t().reshape(-1)


def rows_with_scales(side: FakeQuantized) -> tuple[Tensor, Tensor]:
    """Values, and ``scales_of_rows``: a side of ``fp8_rows_groups_mm.multiply``."""
    return dense(side.values), scales_of_rows(side)


def columns_with_scales(side: FakeQuantized, groups: Groups) -> tuple[Tensor, Tensor]:
    """Values, and ``scales_of_columns``."""
    return dense(side.values), scales_of_columns(side, groups)

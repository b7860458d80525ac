"""``fp8_rows`` for groups: row-scaled E4M3 through torch's or Triton's grouped product, one for a stack of weights.

For operands that are cast for training, with unlimited range (the glossary of ``numerics/row_scaled.py``): only rows
with values of about 2^63 or more are out of range. There is no exact product of groups that would be written over them,
so that such a row gives NaN. Codes that were stored may have such rows for other reasons, and are left to other
kernels.

A row of the columnwise copies has a scale for each group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.kernel import Kernel, Spec
from ...numerics.formats import Format
from ...numerics.groups import Groups
from ..quantize.select_pair import cast_pair
from ..runtime import triton_launch
from ..runtime.availability import exported
from . import group_scales
from .fp8_rows import MIN_ROWS
from .fp8_rows_by_codes import why_not_rows
from .fp8_rows_groups_mm import multiply, scaling_of
from .row_operand import INNER, RowOperand
from .scaled_grouped_mm import why_not_groups
from .spec import FakeQuantized, Form, GemmArgs, GemmOperand, Unquantized, has_group_scales

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _refuses(spec: Spec, a: GemmOperand, b: GemmOperand, count: int, args: GemmArgs) -> str | None:
    """The refusals that both products share."""
    reason = triton_launch.missing(spec) or exported(spec)
    if reason is not None:
        return reason
    for side, format in zip((a, b), spec.formats, strict=True):
        if isinstance(side, RowOperand) or _is_float8_by_group(side):
            continue
        if not isinstance(format, Format) or not isinstance(side, Unquantized):
            return "multiplies operands that are cast for it in training"
        one = side.x if side.x.dim() == 2 else side.x.select(0, 0)
        reason = why_not_rows(one, side.cast)
        if reason is not None:
            return reason
    scaling = scaling_of(spec.device)
    return scaling if isinstance(scaling, str) else why_not_groups(scaling, count, args)


def _is_float8_by_group(side: GemmOperand) -> bool:
    """Whether an operand is float8 codes whose groups, or matrices, have a scale each."""
    return has_group_scales(side) and isinstance(side, FakeQuantized) and side.values.dtype in FLOAT8


def refuses(spec: Spec, a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> str | None:
    (rows, inner), (count, width, _) = spec.shapes
    if width % INNER or inner % INNER:
        return f"needs K and N in multiples of {INNER}, got {inner} and {width}"
    if rows < MIN_ROWS * count:
        return f"is slower than others for {rows} rows in {count} groups"
    return _refuses(spec, a, b, count, args)


def refuses_wgrad(spec: Spec, a: GemmOperand, b: GemmOperand, groups: Groups, args: GemmArgs) -> str | None:
    (height, padded), (width, _) = spec.shapes
    if height % INNER or width % INNER:
        return f"needs K and N in multiples of {INNER}, got {width} and {height}"
    if padded < MIN_ROWS * groups.number:
        return f"is slower than others for {padded} rows in {groups.number} groups"
    return _refuses(spec, a, b, groups.number, args)


# ---------------------------------------------------------------------------------------------- operands


def row_scaled_side(side: GemmOperand) -> RowOperand:
    """The row-scaled operand of a matrix, or of a stack (G, N, K) with its rows one after the other."""
    if isinstance(side, RowOperand):
        return side
    assert isinstance(side, Unquantized)
    made = cast_pair(side.x, side.cast, Form.ROWS, None, torch.bfloat16)[0]
    assert isinstance(made, RowOperand)
    return made


# ---------------------------------------------------------------------------------------------- products


def scales_of_groups(side: RowOperand, count: int) -> Tensor:
    """float32 (count * rows,): the scales of all rows, group by group."""
    scales = side.row_scale.flatten()
    return scales if side.groups == count else scales.repeat(count)


def _rows(side: GemmOperand) -> tuple[Tensor, Tensor]:
    """(codes, scales of rows) of rows in groups (M, K), or of a stack (G, N, K)."""
    if isinstance(side, FakeQuantized):
        return group_scales.rows_with_scales(side)
    made = row_scaled_side(side)
    codes = made.codes.view(torch.float8_e4m3fn)
    return codes.view(*made.shape[:-1], codes.shape[1]), made.row_scale.flatten()


def _columns(side: GemmOperand, groups: Groups) -> tuple[Tensor, Tensor]:
    """(codes, scales of rows of each group) of the columns of groups."""
    if isinstance(side, FakeQuantized):
        return group_scales.columns_with_scales(side, groups)
    made = row_scaled_side(side)
    return made.codes.view(torch.float8_e4m3fn), scales_of_groups(made, groups.number)


def run(a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> Tensor:
    return multiply(*_rows(a), *_rows(b), ends, a.shape[0])


def run_wgrad(a: GemmOperand, b: GemmOperand, groups: Groups, args: GemmArgs) -> Tensor:
    return multiply(*_columns(a, groups), *_columns(b, groups), groups.given, groups.rows, groups.block)


GROUPED = Kernel("fp8_rows", refuses, run, "cuda")
GROUPED_WGRAD = Kernel("fp8_rows", refuses_wgrad, run_wgrad, "cuda")

"""The operands of products by a stack of weights: each matrix, and each group of rows, is cast as if it were alone.

x is rows in groups (M, K) with ``Groups``, or one matrix for each weight (G, M, K); the stack itself is (G, N, K).
``numerics/groups.py`` defines the cast of a group.

Formats whose scales belong to blocks of a few values use the casts of a layer: blocks along a row know no groups, and
blocks along the rows are those of the padded matrix. Where a scale belongs to a whole tensor (NVFP4, float8), operands
are rounded values beside scales: each matrix and each group has its own, from its amax. With delayed scaling one
history serves the whole stack, and its scale serves all matrices, or all groups.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.gemm import emulated
from ..kernels.gemm.spec import FakeQuantized, Form, GemmOperand
from ..kernels.quantize.by_group import quantized_by_group
from ..kernels.quantize.hadamard import rotated
from ..kernels.quantize.select_pair import cast_groups
from ..kernels.quantize.two_casts import columnwise_cast
from ..numerics.cast import Cast
from ..numerics.formats import FULL, Rounding
from ..numerics.groups import Groups, amax_along, amax_of_groups, amax_of_rows, block_of
from ..numerics.operand import Operand
from ..recipe.linear_recipe import LinearRecipe, TensorCasts
from .operands import Want, copies, rounds_twice


def layout_of(ends: Tensor, rows: int, linear_recipe: LinearRecipe) -> Groups:
    """The groups of so many rows, padded as the columnwise copies of input and gradient need it."""
    return Groups(ends, rows, block_of(linear_recipe.input.columnwise, linear_recipe.grad.columnwise))


def has_values_beside_scales(weight_dim: int, linear_recipe: LinearRecipe) -> bool:
    """Whether the operands of a product by a weight with so many dimensions are values beside scales."""
    return weight_dim > 2 and (linear_recipe.has_tensor_scales or linear_recipe.delayed is not None)


def copies_of(
    x: Tensor, casts: TensorCasts, wants: tuple[Want, Want], scales: tuple[Tensor, ...], groups: Groups | None,
    beside_scales: bool = False,
) -> list[GemmOperand | None]:  # fmt: skip
    """``copies`` of a matrix, of a stack of matrices, or, with ``groups``, of rows in groups: then the columnwise copy
    (cols, P) is that of the padded matrix. ``beside_scales``: ``has_values_beside_scales`` of the layer."""
    if beside_scales and (x.dim() > 2 or groups is not None):
        return (_with_scale_of_history if scales else _with_own_scales)(x, casts, wants, scales, groups)
    if groups is None:
        return copies(x, casts, wants, scales)
    if Form.ROWS in wants:
        return _row_scaled(x, casts, wants, groups)
    out: list[GemmOperand | None] = [None, None]
    if wants[0] is not None:
        out[0] = _rows(x, casts, wants[0], groups)
    if wants[1] is not None:
        out[1] = _padded_columns(x, casts, wants[1], (), groups)
    return out


def _row_scaled(
    x: Tensor, casts: TensorCasts, wants: tuple[Want, Want], groups: Groups
) -> list[GemmOperand | None]:  # fmt: skip
    """Copies of rows in groups of which some are row-scaled: those from one cast that knows the groups, if they can."""
    row, column = casts.rowwise, casts.columnwise
    out: list[GemmOperand | None] = [None, None]
    made = None
    if wants[1] is Form.ROWS and column is not None and casts.signs is None and not rounds_twice(casts):
        made = cast_groups(x, column, groups, wants[0] is Form.ROWS and row == column)
    if made is not None:
        out = [*made]
    elif wants[1] is not None:
        out[1] = _padded_columns(x, casts, wants[1], (), groups)
    if wants[0] is not None and out[0] is None:
        out[0] = _rows(x, casts, wants[0], groups)
    return out


def _padded_columns(
    x: Tensor, casts: TensorCasts, want: Want, scales: tuple[Tensor, ...], groups: Groups
) -> GemmOperand | None:
    """The columnwise copy of rows in groups, from a copy of the rows in which each group is padded."""
    return copies(groups.padded(x), casts, (None, want), scales)[1]


def _rows(x: Tensor, casts: TensorCasts, want: Want, groups: Groups) -> GemmOperand | None:
    """The rowwise copy of rows in groups; tiles that cover several rows begin anew with each group."""
    row = casts.rowwise
    if row is None or not row.format.rows_are_blocked:
        return copies(x, casts, (want, None), ())[0]
    exact = torch.bfloat16 if row.format.exact_in_bfloat16 else torch.float32
    dtype = want if isinstance(want, torch.dtype) else exact
    padded = copies(groups.padded(x), casts, (dtype, None), ())[0]
    assert isinstance(padded, FakeQuantized)
    return replace(padded, values=groups.unpadded(padded.values))


# ---------------------------------------------------------------------------------------------- values beside scales


def _with_scale_of_history(
    x: Tensor, casts: TensorCasts, wants: tuple[Want, Want], scales: tuple[Tensor, ...], groups: Groups | None
) -> list[GemmOperand | None]:
    """``copies_of`` with delayed scaling: codes, beside the one scale that the history gives. Codes do not depend on
    the orientation, so that one cast gives both copies."""
    row, column = casts.rowwise, casts.columnwise
    rows, columns = (None if want is None else Form.CODES for want in wants)
    if groups is None:
        return [_beside_scale(side) for side in copies(x, casts, (rows, columns), scales)]
    x = torch.where((groups.of_row < groups.number).unsqueeze(1), x, 0)  # other rows have no part in the amax
    out: list[GemmOperand | None] = [None, None]
    if row is not None and row == column and casts.signs is None and row.rounding is Rounding.NEAREST:
        made = _beside_scale(copies(x, casts, (Form.CODES, None), scales)[0])
        assert isinstance(made, FakeQuantized)
        out[0] = made if rows is not None else None
        if columns is not None:
            codes = groups.padded(made.values.view(torch.uint8)).view(made.values.dtype)
            out[1] = replace(made, values=codes.transpose(-1, -2))
        return out
    if rows is not None:
        out[0] = _beside_scale(copies(x, casts, (rows, None), scales)[0])
    if columns is not None:
        out[1] = _beside_scale(_padded_columns(x, casts, columns, scales, groups))
    return out


def _beside_scale(side: GemmOperand | None) -> GemmOperand | None:
    """An operand with one scale as values beside it; others as they are."""
    if not isinstance(side, Operand):
        return side
    return FakeQuantized(side.data, side.scale.reshape((1,) * len(side.shape)), side.format)


def _with_own_scales(
    x: Tensor, casts: TensorCasts, wants: tuple[Want, Want], scales: tuple[Tensor, ...], groups: Groups | None
) -> list[GemmOperand | None]:
    """``copies_of`` where each matrix or group has a scale of its own, from its amax."""
    row, column = casts.rowwise, casts.columnwise
    out: list[GemmOperand | None] = [None, None]
    of_rounded = rounds_twice(casts)  # the columnwise copy is cast from the values of the rowwise one
    if row is None:
        out[0] = x
    elif groups is not None and row.format.rows_are_blocked and row.format.block[0] != FULL:
        padded = groups.padded(x)
        amax = amax_of_groups(padded, groups.of_padded_row, groups.number, 0)
        made = _fake_quantized(padded, row, amax)
        scale = made.global_scale
        out[0] = FakeQuantized(
            groups.unpadded(made.values), None if scale is None else groups.unpadded(scale), row.format
        )
    elif wants[0] is not None or of_rounded:
        out[0] = _fake_quantized(x, row, _amax(x, row, groups, 0))
    if wants[1] is None:
        return out if wants[0] is not None else [None, None]
    source = emulated.values(out[0], torch.float32) if of_rounded and isinstance(out[0], FakeQuantized) else x
    columns = (source if groups is None else groups.padded(source)).transpose(-1, -2)
    if column is None:
        out[1] = columns
    else:
        if casts.signs is not None:
            columns = rotated(columns, casts.signs)
        out[1] = _fake_quantized(columns, columnwise_cast(column), _amax(columns, column, groups, 1))
    return [out[0] if wants[0] is not None else None, out[1]]


def _amax(x: Tensor, cast: Cast, groups: Groups | None, dim: int) -> Tensor:
    """The amax of each group along ``dim``, or of each matrix of a stack, or of their rows, broadcasting to x."""
    rows = cast.format.row_scaled
    if groups is not None:
        of_groups = amax_of_rows if rows else amax_of_groups
        return of_groups(x, groups.of_row if dim == 0 else groups.of_padded_row, groups.number, dim)
    if 0 in x.shape:
        return x.new_zeros((*x.shape[:-2], x.shape[-2] if rows else 1, 1), dtype=torch.float32)
    return amax_along(x, -1 if rows else (-2, -1), keepdim=True)


def _fake_quantized(x: Tensor, cast: Cast, amax: Tensor) -> FakeQuantized:
    if cast.format.has_tensor_scale:
        return FakeQuantized(*quantized_by_group(x, cast, amax), cast.format)
    plain = TensorCasts(cast)
    values = copies(x, plain, (torch.float32, None), ())[0]
    assert isinstance(values, FakeQuantized) and values.global_scale is None
    return values

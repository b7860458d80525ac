"""The operands of a linear layer's products: which copies of a matrix are made, and what is saved for backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.gemm import emulated
from ..kernels.operands import FakeQuantized, Form, GemmOperand, RowOperand, Unquantized
from ..kernels.quantize.by_group import quantized_by_group
from ..kernels.quantize.choose_cast import dequantize_operand, quantize_operand
from ..kernels.quantize.choose_pair import cast_groups, cast_pair, cast_rows_first, columnwise_cast
from ..kernels.quantize.hadamard import rotated
from ..numerics.cast import Cast
from ..numerics.formats import FULL, Rounding
from ..numerics.groups import Groups, amax_along, amax_of_groups, amax_of_rows, block_of
from ..numerics.operand import Operand
from ..recipe.linear_recipe import LinearRecipe, TensorCasts
from ..tensor.mxtensor import MXTensor
from .delayed_scaling import WEIGHT, Scales, scales_of
from .training_weight import values_of

Want = Form | torch.dtype | None
"""The form in which a copy is wanted: Form.CODES, Form.ROWS, the dtype of its values, or None for no copy."""
SAVED = (Form.CODES, Form.ROWS)
"""Forms of one byte a value or less, which are saved for the backward pass."""


# ---------------------------------------------------------------------------------------------- one matrix


def _form(want: Want) -> Form | None:
    return Form.VALUES if isinstance(want, torch.dtype) else want


def _copy(x: Tensor, cast: Cast, want: Want, side: int, scales: tuple[Tensor, ...]) -> GemmOperand:
    """One copy of a matrix, rowwise (0) or columnwise (1)."""
    form = _form(want)
    dtype = want if isinstance(want, torch.dtype) else torch.bfloat16
    rowwise, columnwise = (form, None) if side == 0 else (None, form)
    gemm_operand = cast_pair(x, cast, rowwise, columnwise, dtype, *scales)[side]
    assert gemm_operand is not None
    return gemm_operand


def copies(
    x: Tensor, casts: TensorCasts, wants: tuple[Want, Want], scales: tuple[Tensor, ...]
) -> list[GemmOperand | None]:
    """The operands of a matrix (or of a stack of them) for its two products, from one pass if the casts allow."""
    row, column = casts.rowwise, casts.columnwise
    twice = rounds_twice(casts)
    if None not in wants and row is not None and row == column and casts.signs is None and not twice:
        dtypes = {want for want in wants if isinstance(want, torch.dtype)}
        first, second = map(_form, wants)
        if len(dtypes) < 2 and (first is second or Form.ROWS not in (first, second)):
            return list(cast_pair(x, row, first, second, next(iter(dtypes), torch.bfloat16), *scales))
    out: list[GemmOperand | None] = [None, None]
    if wants[0] is not None:
        out[0] = x if row is None else _copy(x, row, wants[0], 0, scales)
    if wants[1] is not None:
        source, side = columnwise_source(x, casts, out[0])
        out[1] = source.transpose(-1, -2) if column is None else _copy(source, column, wants[1], side, scales)
    return out


def rows_first(x: Tensor, casts: TensorCasts, wants: tuple[Want, Want]) -> tuple[RowOperand, Tensor] | None:
    """The rowwise copy of a weight, and what ``cast_columns_later`` needs for the columnwise one; None if its copies
    take casts that know nothing of each other."""
    cast = casts.rowwise
    if wants != (Form.ROWS, Form.ROWS) or cast is None or cast != casts.columnwise:
        return None
    return None if casts.signs is not None or rounds_twice(casts) else cast_rows_first(x, cast)


def columnwise_source(x: Tensor, casts: TensorCasts, rowwise: GemmOperand | None) -> tuple[Tensor, int]:
    """What the columnwise copy of x is cast from, and how: by columns (1), or by rows (0) as it is transposed already.

    ``rowwise``: that copy of x, if it has been made.
    """
    if rounds_twice(casts):
        assert casts.rowwise is not None
        return _exact(rowwise if isinstance(rowwise, Operand) else quantize_operand(x, casts.rowwise)), 1
    if casts.signs is not None and casts.columnwise is not None:
        return rotated(x.transpose(-1, -2), casts.signs), 0
    return x, 1


def standing_for(x: Tensor, cast: Cast | None) -> GemmOperand:
    """An operand before its cast, to find out which kernel will run."""
    return x if cast is None else Unquantized(x, cast)


def of_shape(shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    """A plain tensor of this shape with the memory of one value, to find out which kernel will run."""
    return like.new_empty((1,) * len(shape), dtype=dtype).expand(shape)


# ---------------------------------------------------------------------------------------------- weights


def rounds_twice(casts: TensorCasts) -> bool:
    """Whether the columnwise copy is made of the rowwise one: cast from its values, a second rounding, or (without a
    cast) those values themselves. Square tiles need neither."""
    row, column = casts.rowwise, casts.columnwise
    return casts.from_rowwise and row is not None and not (row == column and row.format.square)


def _exact(operand: Operand) -> Tensor:
    """The values of an operand, in the narrowest dtype that represents them exactly."""
    narrow = operand.format.exact_in_bfloat16 and not operand.format.global_scale
    return dequantize_operand(operand, torch.bfloat16 if narrow else torch.float32)


def cached_operands(weight: Tensor, linear_recipe: LinearRecipe) -> tuple[Operand | None, Operand | None] | None:
    """The (rowwise, columnwise) operands of a quantized weight; None for a high-precision weight.

    Raises ValueError if the copy that fprop needs is missing.
    """
    values = values_of(weight)
    if not isinstance(values, MXTensor):
        return None
    if values.rowwise is None:
        raise ValueError(
            f"linear: the quantized weight {tuple(weight.shape)} has no copy blocked along in_features; quantize "
            "it with orientation='both'"
        )
    if is_gathered(weight) and rounds_twice(linear_recipe.weight):
        return values.rowwise, None
    return values.rowwise, values.columnwise


def is_gathered(weight: Tensor) -> bool:
    """Whether this is a parameter for training of which FSDP2 has gathered codes. FSDP2 frees and fills their storage
    between forward and backward, so that the parameter is saved and not its operands."""
    return values_of(weight) is not weight and isinstance(values_of(weight), MXTensor)


def dgrad_weight(weight: Tensor, linear_recipe: LinearRecipe, x: Tensor, columnwise: Operand | None) -> GemmOperand:
    """The operand of a quantized weight in dgrad, to find out which kernel will run; x: any tensor on its device."""
    if columnwise is not None:
        return columnwise
    values = of_shape((weight.shape[1], weight.shape[0]), weight.dtype, x)
    return standing_for(values, linear_recipe.weight.columnwise if is_gathered(weight) else None)


def transposed(weight: Tensor, linear_recipe: LinearRecipe, want: Want, scales: tuple[Tensor, ...]) -> GemmOperand:
    """The operand that dgrad takes of a weight that was saved whole, cast in the backward pass."""
    values = values_of(weight)
    if not isinstance(values, MXTensor):
        gemm_operand = copies(values, linear_recipe.weight, (None, want), scales)[1]
        assert gemm_operand is not None
        return gemm_operand
    rowwise, columnwise = cached_operands(weight, linear_recipe)  # type: ignore[misc]
    if columnwise is not None:
        return columnwise
    if not is_gathered(weight):  # no columnwise copy: the exact values, because a second cast would round again
        return values.dequantize().detach().t()
    assert rowwise is not None and linear_recipe.weight.columnwise is not None
    return _copy(_exact(rowwise), linear_recipe.weight.columnwise, want, 1, scales)


def weight_copies(
    weight: Tensor, linear_recipe: LinearRecipe, scales: Scales | None = None
) -> tuple[Operand | None, Operand | None]:
    """The (rowwise, columnwise) operands of a high-precision weight (N, K), for later calls, as ``cached``."""
    column = None if linear_recipe.weight.columnwise is None else Form.CODES
    both = copies(values_of(weight).detach(), linear_recipe.weight, (Form.CODES, column), scales_of(scales, WEIGHT))
    return both[0], both[1]  # type: ignore[return-value]


# ---------------------------------------------------------------------------------------------- for backward


class SavedOperand(NamedTuple):
    """How ``save_for_backward`` stores an operand: the number of tensors, format and shape."""

    tensors: int
    format: Any = None
    shape: tuple[int, ...] = ()
    form: Form = Form.CODES
    groups: int = 1

    def gemm_operand(self, saved: Iterator[Tensor]) -> Any:
        """The operand, from the tensors that were saved."""
        mine = [next(saved) for _ in range(self.tensors)]
        if self.format is None:
            return mine[0] if mine else None
        if self.form is Form.VALUES:
            return FakeQuantized(mine[0], mine[1] if len(mine) > 1 else None, self.format)
        if self.form is Form.ROWS:
            if len(mine) == 1:
                return RowOperand.inside(mine[0], self.format, self.shape, self.groups)
            codes, row_scale, out_of_range, scale = mine
            return RowOperand(codes, row_scale, out_of_range, scale, self.format, self.shape, groups=self.groups)
        return Operand.from_tensors(mine, self.format, self.shape)


def saved(gemm_operand: GemmOperand | None) -> tuple[SavedOperand, list[Tensor]]:
    """An operand as tensors for ``save_for_backward``, and how to read them."""
    if gemm_operand is None:
        return SavedOperand(0), []
    if isinstance(gemm_operand, Tensor):
        return SavedOperand(1), [gemm_operand]
    if isinstance(gemm_operand, RowOperand):
        memory = [*gemm_operand[:4]] if gemm_operand.memory is None else [gemm_operand.memory]
        how = gemm_operand.format, gemm_operand.shape, Form.ROWS, gemm_operand.groups
        return SavedOperand(len(memory), *how), memory
    if isinstance(gemm_operand, FakeQuantized):
        both = [t for t in (gemm_operand.values, gemm_operand.global_scale) if t is not None]
        return SavedOperand(len(both), gemm_operand.format, form=Form.VALUES), both
    assert isinstance(gemm_operand, Operand)
    tensors = gemm_operand.tensors
    return SavedOperand(len(tensors), gemm_operand.format, gemm_operand.shape), [*tensors]


# ---------------------------------------------------------------------------------------------- grouped

# With a stack of weights each matrix, and each group of rows, is cast as if it were alone.
# x is rows in groups (M, K) with ``Groups``, or one matrix for each weight (G, M, K); the stack itself is (G, N, K).
# ``numerics/groups.py`` defines the cast of a group.
#
# Formats whose scales belong to blocks of a few values use the casts of a layer: blocks along a row know no groups, and
# blocks along the rows are those of the padded matrix. Where a scale belongs to a whole tensor (NVFP4, float8),
# operands are rounded values beside scales: each matrix and each group has its own, from its amax. With delayed scaling
# one history serves the whole stack, and its scale serves all matrices, or all groups.


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

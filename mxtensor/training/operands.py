"""The operands of a linear layer's products: which copies of a matrix are made, and what is saved for backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.gemm.row_operand import RowOperand
from ..kernels.gemm.spec import FakeQuantized, Form, GemmOperand, Unquantized
from ..kernels.quantize.hadamard import rotated
from ..kernels.quantize.select import dequantize_operand, quantize_operand
from ..kernels.quantize.select_pair import cast_pair, cast_rows_first
from ..numerics.cast import Cast
from ..numerics.operand import Operand
from ..recipe.linear_recipe import LinearRecipe, TensorCasts
from ..tensor.mxtensor import MXTensor
from .training_weight import values_of

Want = Form | torch.dtype | None
"""The form in which a copy is wanted: Form.CODES, Form.ROWS, the dtype of its values, or None for no copy."""
SAVED = (Form.CODES, Form.ROWS)
"""Forms of one byte a value or less, which are saved for the backward pass."""


class Scales(NamedTuple):
    """Delayed scaling: float32 (3,), one value for each of input, weight and grad."""

    amax: Tensor
    """gives the scales of this step"""
    record: Tensor
    """becomes the larger of its value and the amax of this step"""
    grad_record: Tensor | None = None
    """what the backward pass writes instead; None: ``record``"""


INPUT, WEIGHT, GRAD = range(3)


def scales_of(scales: Scales | None, index: int) -> tuple[Tensor, ...]:
    """The amax and the record of delayed scaling for the cast of a tensor in its first pass: of an input or a weight in
    the forward pass, of a gradient in the backward pass. Empty without delayed scaling."""
    if scales is None:
        return ()
    record = scales.grad_record if index == GRAD and scales.grad_record is not None else scales.record
    return scales.amax.select(0, index), record.select(0, index)


def amax_of(scales: Scales | None, index: int) -> tuple[Tensor, ...]:
    """``scales_of`` for the cast of an input or a weight in the backward pass: the forward pass has recorded it, and
    later steps may have read the record since."""
    return () if scales is None else (scales.amax.select(0, index),)


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

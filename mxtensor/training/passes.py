"""The forward and the backward pass of a linear layer, as functions of tensors: casts and three products.

    fprop  y  = x.rowwise     @ w.rowwise^T       (M, K) by (N, K), bias added in float32
    dgrad  dx = g.rowwise     @ w.columnwise^T    (M, N) by (K, N)
    wgrad  dw = g.columnwise  @ x.columnwise^T    (N, M) by (K, M)

A stack of weights (G, N, K) has the same passes, with x (G, M, K), or x (M, K) with groups of rows (``Groups``), whose
columnwise copies are those of padded groups, (K, P): wgrad (N, P) by (K, P) gives (G, N, K).

A bias wider than the result is rounded to the dtype of the result first, as under torch.autocast.

Each tensor is cast once for both of its products, from its high-precision values. A copy that its kernel multiplies as
values (``select.wanted_form``) is written as values. An input is saved for the backward pass as codes: about half the
bytes of the bfloat16 input that torch would save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.explain import measure, record
from ..core.kernel import Spec
from ..core.shapes import as_matrix
from ..core.tracing import is_traced
from ..kernels.gemm import emulated
from ..kernels.gemm.select import gemm, grouped_gemm, grouped_wanted_form, grouped_wgrad, plan_of, wanted_form
from ..kernels.gemm.spec import Form, GemmArgs, GemmOperand, data_of
from ..kernels.quantize.select_pair import cast_columns_later
from ..numerics.groups import Groups
from ..numerics.operand import Operand
from ..recipe.kernel_preference import KernelPreference
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from .operands import (
    GRAD,
    INPUT,
    SAVED,
    WEIGHT,
    SavedOperand,
    Scales,
    Want,
    copies,
    dgrad_weight,
    of_shape,
    rows_first,
    saved,
    scales_of,
    standing_for,
    transposed,
)
from .stack_operands import copies_of
from .training_weight import values_of

WgradHook = Callable[[Callable[[torch.dtype], Tensor]], Tensor | None]


@dataclass(frozen=True)
class Options:
    """How one layer computes its products."""

    linear_recipe: LinearRecipe
    dtype: torch.dtype | None = None
    """Of the result, such as that of torch.autocast; None: the dtype of the input."""
    save_input: bool = False
    """Save the input itself for wgrad and cast it there: for inputs that are saved elsewhere too."""
    on_wgrad: WgradHook | None = None
    """Called in backward with wgrad as a function of its dtype; what it returns is the weight's gradient."""

    @property
    def prefer(self) -> str | None:
        """The name of the product kernel that the recipe requires; None if it requires none."""
        preference = self.linear_recipe.kernel_preference
        return None if preference is KernelPreference.AUTO else preference.value


# ---------------------------------------------------------------------------------------------- casts and products


def _want(
    op: str, a: GemmOperand, b: GemmOperand, dtype: torch.dtype, prefer: str | None, groups: Groups | None,
    own_scales: bool = False,
) -> Want:  # fmt: skip
    """The form in which the kernel that will run this product wants operands that are cast for it."""
    if own_scales:
        return torch.float32
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return dtype
    if groups is not None:
        return grouped_wanted_form(op, a, b, groups, GemmArgs(dtype), prefer)
    return wanted_form(op, a, b, GemmArgs(dtype), prefer)


def product(
    op: str, a: GemmOperand | None, b: GemmOperand | None, dtype: torch.dtype, bias: Tensor | None, prefer: str | None,
    groups: Groups | None = None,
) -> Tensor:  # fmt: skip
    """``a @ b^T + bias`` in ``dtype``: by a product kernel, or by torch if both operands are plain."""
    assert a is not None and b is not None
    bias = None if bias is None else bias.to(dtype)
    if isinstance(a, Tensor) and isinstance(b, Tensor) and groups is None:
        return _high_precision(op, a, b, dtype, bias)
    a, b = (f.to(dtype) if isinstance(f, Tensor) else f for f in (a, b))
    if groups is None:
        return gemm(op, a, b, GemmArgs(dtype, bias), prefer=prefer)
    if op == "wgrad":
        return grouped_wgrad(op, a, b, groups, GemmArgs(dtype), prefer=prefer)
    return grouped_gemm(op, a, b, groups.ends, GemmArgs(dtype), prefer=prefer)


def _high_precision(op: str, a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    reason = {"quantized": "the recipe leaves this product in high precision"}
    shapes = tuple(a.shape), tuple(b.shape)
    spec = Spec(op, shapes, (a.dtype, b.dtype), dtype, a.device, is_traced(a, b))
    with measure(record(spec, "high precision", reason)):
        if b.dim() > 2:
            return torch.matmul(a.to(dtype), b.to(dtype).mT)
        return torch.nn.functional.linear(a.to(dtype), b.to(dtype), bias)


def _runs_fast(a: Any, b: Any, dtype: torch.dtype, prefer: str | None) -> bool:
    """Whether a kernel other than the emulation computes wgrad in ``dtype``.

    Hopper has none for float32 results of float8 operands; there wgrad is rounded to bfloat16 first.
    """
    if data_of(a).device.type != "cuda" or (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return True
    kernel = plan_of("wgrad", a, b, GemmArgs(dtype), prefer).kernel
    return kernel is None or kernel.name != emulated.KERNEL.name


# ---------------------------------------------------------------------------------------------- the two passes


class SavedOperands(NamedTuple):
    """How the forward pass has saved the operands of the backward pass."""

    x: SavedOperand
    weight: SavedOperand
    dgrad_want: Want
    """The form in which dgrad wants its operands."""
    w_extremes: bool = False
    """Whether what the cast of the weight for dgrad needs of its columns comes before the weight."""


class Inputs(NamedTuple):
    """What the backward pass knows of the inputs of the forward pass."""

    needs: tuple[bool, ...]
    """Whether x, weight and bias need a gradient."""
    shape: tuple[int, ...]
    """Of x."""
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None, torch.dtype]
    """Of x, weight, bias and the result."""
    stacked: bool = False
    """Whether the weight is a stack."""


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, scales: Scales | None,
    cached: tuple[Operand | None, Operand | None] | None, needs: tuple[bool, ...], groups: Groups | None = None,
) -> tuple[Tensor, list[Tensor], SavedOperands]:  # fmt: skip
    """The result, the tensors to save for the backward pass, and how to read them. ``needs``: whether x, weight and
    bias need a gradient."""
    linear_recipe, prefer, rows = options.linear_recipe, options.prefer, as_matrix(x) if weight.dim() == 2 else x
    dtype = options.dtype or x.dtype
    need_dx, need_dw, _ = needs
    own_scales = weight.dim() > 2 and linear_recipe.has_tensor_scales
    w = values_of(weight)  # a quantized weight has ``cached`` operands instead
    grad_like = of_shape((*rows.shape[:-1], weight.shape[-2]), dtype, rows)
    if cached is None:
        w_row_like, w_col_like = _standing_for_both(w, linear_recipe, need_dx)
    else:
        w_row_like = cached[0]  # type: ignore[assignment]
        w_col_like = dgrad_weight(weight, linear_recipe, rows, cached[1]) if need_dx else None
    weight_like = w_row_like, w_col_like
    fprop_want, dgrad_want = _weight_wants(rows, grad_like, *weight_like, options, dtype, groups, own_scales)
    saves = need_dw and not (options.save_input or own_scales)
    wants = fprop_want, _saved_want(rows, grad_like, options, dtype, groups) if saves else None
    x_row, x_col = copies_of(rows, linear_recipe.input, wants, scales_of(scales, INPUT), groups, own_scales)
    w_row: GemmOperand | None
    w_col: GemmOperand | None
    if cached is not None:
        w_row, w_col, w_extremes = *cached, None
    else:
        wants = fprop_want, dgrad_want
        w_row, w_col, w_extremes = _weight_operands(w, linear_recipe, wants, scales_of(scales, WEIGHT), own_scales)
    y = product("fprop", x_row, w_row, dtype, bias, prefer, groups)
    x_saved, x_tensors = saved(x_col if x_col is not None else x if need_dw else None)
    # A quantized weight is saved whole, like any parameter: torch sees that it was written before the backward pass.
    w_saved, w_tensors = saved(weight if w_col is None or isinstance(w, MXTensor) else w_col)
    # As in torch's own linear layer: FSDP2 warns of modules whose result is a view.
    y = torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], weight.shape[-2]))
    extremes = [] if w_extremes is None else [w_extremes]  # the weight is the last
    return y, [*x_tensors, *extremes, *w_tensors], SavedOperands(x_saved, w_saved, dgrad_want, bool(extremes))


def _saved_want(rows: Tensor, grad_like: Tensor, options: Options, dtype: torch.dtype, groups: Groups | None) -> Want:
    """The form in which the columnwise copy of the input is saved for wgrad; None if the recipe has no such copy."""
    linear_recipe = options.linear_recipe
    if linear_recipe.input.columnwise is None:
        return None
    g_like = standing_for(_columns_like(grad_like, groups), linear_recipe.grad.columnwise)
    x_like = standing_for(_columns_like(rows, groups), linear_recipe.input.columnwise)
    want = _want("wgrad", g_like, x_like, dtype, options.prefer, groups)
    return Form.ROWS if want is Form.ROWS else Form.CODES


def _weight_operands(
    w: Tensor, linear_recipe: LinearRecipe, wants: tuple[Want, Want], scales: Any, own_scales: bool
) -> tuple[GemmOperand | None, GemmOperand | None, Tensor | None]:
    """(operand of fprop, operand of dgrad to save, what the later cast for dgrad needs of the columns).

    Most weights are cast again for dgrad, whose operand would take half of the memory of the weight until then: a third
    of a cast more, which is little beside the products. A scale of the whole tensor would need its amax again.
    """
    column = linear_recipe.weight.columnwise
    saves = wants[1] in SAVED and column is not None and column.format.has_tensor_scale
    made = None if saves or own_scales else rows_first(w, linear_recipe.weight, wants)
    if made is not None:
        return made[0], None, made[1]
    wants = wants if saves else (wants[0], None)
    w_row, w_col = copies_of(w, linear_recipe.weight, wants, scales, None, own_scales)
    return w_row, w_col, None


def cast_weight(
    x: Tensor, weight: Tensor, options: Options, need_dx: bool, groups: Groups | None = None
) -> list[GemmOperand | None]:
    """Both operands of a weight for a layer with this input, in the forms that its products take."""
    rows, w, dtype = as_matrix(x) if weight.dim() == 2 else x, values_of(weight), options.dtype or x.dtype
    grad_like = of_shape((*rows.shape[:-1], weight.shape[-2]), dtype, rows)
    sides = _standing_for_both(w, options.linear_recipe, need_dx)
    return copies(w, options.linear_recipe.weight, _weight_wants(rows, grad_like, *sides, options, dtype, groups), ())


def _standing_for_both(w: Tensor, linear_recipe: LinearRecipe, need_dx: bool) -> tuple[GemmOperand, GemmOperand | None]:
    """The operands of a weight in fprop and, if needed, in dgrad, before their casts."""
    casts = linear_recipe.weight
    return standing_for(w, casts.rowwise), standing_for(w.mT, casts.columnwise) if need_dx else None


def _weight_wants(
    rows: Tensor, grad_like: Tensor, w_row_like: GemmOperand, w_col_like: GemmOperand | None, options: Options,
    dtype: torch.dtype, groups: Groups | None = None, own_scales: bool = False,
) -> tuple[Want, Want]:  # fmt: skip
    """The forms in which fprop and dgrad want their operands; None for dgrad without ``w_col_like``."""
    linear_recipe, rest = options.linear_recipe, (dtype, options.prefer, groups, own_scales)
    want = _want("fprop", standing_for(rows, linear_recipe.input.rowwise), w_row_like, *rest)
    if w_col_like is None:
        return want, None
    return want, _want("dgrad", standing_for(grad_like, linear_recipe.grad.rowwise), w_col_like, *rest)


def _weight_for_dgrad(
    weight: Tensor, linear_recipe: LinearRecipe, extremes: Tensor | None, want: Want, scales: Any, own_scales: bool
) -> GemmOperand | None:
    """The operand of dgrad from a weight that was saved as it is; ``extremes``: what ``_weight_operands`` gave."""
    if extremes is not None:
        assert linear_recipe.weight.columnwise is not None
        return cast_columns_later(values_of(weight), linear_recipe.weight.columnwise, extremes)
    if weight.dim() > 2:
        return copies_of(values_of(weight), linear_recipe.weight, (None, want), scales, None, own_scales)[1]
    return transposed(weight, linear_recipe, want, scales)


def _columns_like(rows: Tensor, groups: Groups | None) -> Tensor:
    """A tensor with the shape of the columnwise copy of ``rows``, to find out which kernel will run."""
    return rows.mT if groups is None else of_shape((rows.shape[-1], groups.length), rows.dtype, rows)


def backward(
    grad: Tensor, tensors: Iterable[Tensor], operands: SavedOperands, inputs: Inputs, options: Options,
    scales: Scales | None, groups: Groups | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of x, weight and bias; ``tensors`` are those that ``forward`` gave to save."""
    x_saved, w_saved, dgrad_want, has_extremes = operands
    linear_recipe, prefer, tensors = options.linear_recipe, options.prefer, iter(tensors)
    need_dx, need_dw, need_db = inputs.needs
    x_dtype, w_dtype, bias_dtype, dtype = inputs.dtypes
    dx = dw = db = None
    x_col = x_saved.gemm_operand(tensors)
    w_extremes = next(tensors) if has_extremes else None
    weight = w_saved.gemm_operand(tensors)
    own_scales = inputs.stacked and linear_recipe.has_tensor_scales
    g = grad if inputs.stacked else as_matrix(grad)
    wgrad_want: Want = None
    if need_dw:
        if x_saved.format is None:
            rows = x_col if inputs.stacked else as_matrix(x_col)
            x_col = standing_for(_columns_like(rows, groups), linear_recipe.input.columnwise)
        g_like = standing_for(_columns_like(g, groups), linear_recipe.grad.columnwise)
        wgrad_want = _want("wgrad", g_like, x_col, dtype, prefer, groups, own_scales)
    wants = dgrad_want, wgrad_want
    g_row, g_col = copies_of(g, linear_recipe.grad, wants, scales_of(scales, GRAD), groups, own_scales)
    if need_dx:
        w_col = weight
        if w_saved.format is None:
            given = dgrad_want, scales_of(scales, WEIGHT), own_scales
            w_col = _weight_for_dgrad(weight, linear_recipe, w_extremes, *given)
        dx = product("dgrad", g_row, w_col, dtype, None, prefer, groups).to(x_dtype).view(inputs.shape)
        del g_row, w_col
    if need_dw:
        if x_saved.format is None:
            wants = (None, wgrad_want)
            x_col = copies_of(rows, linear_recipe.input, wants, scales_of(scales, INPUT), groups, own_scales)[1]

        def wgrad(result: torch.dtype) -> Tensor:
            as_asked = result is dtype or _runs_fast(g_col, x_col, result, prefer)
            return product("wgrad", g_col, x_col, result if as_asked else dtype, None, prefer, groups).to(result)

        dw = wgrad(dtype).to(w_dtype) if options.on_wgrad is None else options.on_wgrad(wgrad)
    if need_db:
        assert bias_dtype is not None
        db = g.sum(0, dtype=torch.float32).to(bias_dtype)
    return dx, dw, db

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
from ..kernels.gemm.spec import GemmArgs
from ..kernels.operands import Form, GemmOperand, data_of
from ..kernels.quantize.choose_pair import cast_columns_later
from ..numerics.groups import Groups
from ..numerics.operand import Operand
from ..recipe.linear_recipe import KernelPreference, LinearRecipe, TensorCasts
from ..tensor.mxtensor import MXTensor
from .casts import (
    SAVED,
    SavedOperand,
    Want,
    copies,
    copies_of,
    dgrad_weight,
    has_values_beside_scales,
    of_shape,
    rows_first,
    saved,
    standing_for,
    transposed,
)
from .delayed_scaling import GRAD, INPUT, WEIGHT, Scales, amax_of, scales_of
from .training_weight import values_of

# ---------------------------------------------------------------------------------------------- products

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


class Products(NamedTuple):
    """The three products of one layer: what decides how they run, beside their operands."""

    recipe: LinearRecipe
    prefer: str | None
    """``Options.prefer``"""
    dtype: torch.dtype
    """of the results"""
    groups: Groups | None
    """of the rows, if a stack of weights multiplies groups"""
    beside_scales: bool
    """``has_values_beside_scales``"""

    @classmethod
    def of(cls, options: Options, x: Tensor, weight: Tensor, groups: Groups | None) -> Products:
        """The products of a layer with this input and weight."""
        recipe = options.linear_recipe
        beside_scales = has_values_beside_scales(weight.dim(), recipe)
        return cls(recipe, options.prefer, options.dtype or x.dtype, groups, beside_scales)

    def want(self, op: str, a: GemmOperand, b: GemmOperand) -> Want:
        """The form in which the kernel that will run this product wants operands that are cast for it."""
        dtype, prefer = self.dtype, self.prefer
        if self.beside_scales:
            return torch.float32
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return dtype
        if self.groups is not None:
            return grouped_wanted_form(op, a, b, self.groups, GemmArgs(dtype), prefer)
        return wanted_form(op, a, b, GemmArgs(dtype), prefer)

    def copies(self, x: Tensor, casts: TensorCasts, wants: tuple[Want, Want], scales: Any) -> list[GemmOperand | None]:
        """The copies of an input or a gradient for two products, in these forms."""
        return copies_of(x, casts, wants, scales, self.groups, self.beside_scales)

    def run(
        self, op: str, a: GemmOperand | None, b: GemmOperand | None, bias: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """``a @ b^T + bias``, in ``dtype`` if it is given."""
        return product(op, a, b, dtype or self.dtype, bias, self.prefer, self.groups)


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


def runs_fast(a: Any, b: Any, dtype: torch.dtype, prefer: str | None) -> bool:
    """Whether a kernel other than the emulation computes wgrad in ``dtype``.

    Hopper has none for float32 results of float8 operands; there wgrad is rounded to bfloat16 first.
    """
    if data_of(a).device.type != "cuda" or (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return True
    kernel = plan_of("wgrad", a, b, GemmArgs(dtype), prefer).kernel
    return kernel is None or kernel.name != emulated.KERNEL.name


# ---------------------------------------------------------------------------------------------- passes


class SavedOperands(NamedTuple):
    """How the forward pass has saved the operands of the backward pass."""

    x: SavedOperand
    weight: SavedOperand
    dgrad_want: Want
    """The form in which dgrad wants its operands."""
    w_exponents: bool = False
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


class Wants(NamedTuple):
    """The forms in which the products of a layer want the operands that its forward pass casts."""

    fprop: Want
    dgrad: Want
    """None: the input needs no gradient"""
    saved: Want
    """Of the columnwise copy of the input, which is saved for wgrad. None: there is no such copy"""


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, scales: Scales | None,
    cached: tuple[Operand | None, Operand | None] | None, needs: tuple[bool, ...], groups: Groups | None = None,
) -> tuple[Tensor, list[Tensor], SavedOperands]:  # fmt: skip
    """The result, the tensors to save for the backward pass, and how to read them. ``needs``: whether x, weight and
    bias need a gradient. ``cached``: both operands of the weight, which a quantized one has; None: cast it."""
    rows, products = _rows_for(x, weight), Products.of(options, x, weight, groups)
    need_dx, need_dw, _ = needs
    sides = _weight_sides(rows, weight, products.recipe, cached, need_dx)
    wants = _wants(products, rows, weight, sides, need_dw and not options.save_input)
    x_wants = wants.fprop, wants.saved
    x_row, x_col = products.copies(rows, products.recipe.input, x_wants, scales_of(scales, INPUT))
    w_row: GemmOperand | None
    w_col: GemmOperand | None
    if cached is not None:
        w_row, w_col, w_exponents = *cached, None
    else:
        w_row, w_col, w_exponents = _weight_operands(values_of(weight), products, wants, scales_of(scales, WEIGHT))
    y = products.run("fprop", x_row, w_row, bias)
    x_saved, x_tensors = saved(x_col if x_col is not None else x if need_dw else None)
    # A quantized weight is saved whole, like any parameter: torch sees that it was written before the backward pass.
    whole = w_col is None or isinstance(values_of(weight), MXTensor)
    w_saved, w_tensors = saved(weight if whole else w_col)
    # As in torch's own linear layer: FSDP2 warns of modules whose result is a view.
    y = torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], weight.shape[-2]))
    exponents = [] if w_exponents is None else [w_exponents]  # the weight is the last
    return y, [*x_tensors, *exponents, *w_tensors], SavedOperands(x_saved, w_saved, wants.dgrad, bool(exponents))


def cast_weight(
    x: Tensor, weight: Tensor, options: Options, need_dx: bool, groups: Groups | None = None
) -> list[GemmOperand | None]:
    """Both operands of a weight for a layer with this input, in the forms that its products take."""
    rows, products = _rows_for(x, weight), Products.of(options, x, weight, groups)
    sides = _weight_sides(rows, weight, products.recipe, None, need_dx)
    wants = _wants(products, rows, weight, sides, False)
    return copies(values_of(weight), products.recipe.weight, (wants.fprop, wants.dgrad), ())


def operands_of_inputs(grad: Tensor, weight: Tensor, options: Options, need_dx: bool, need_dw: bool) -> SavedOperands:
    """How ``backward`` reads the input and the weight themselves, saved in this order, the input if wgrad needs it."""
    rows = of_shape((*as_matrix(grad).shape[:-1], weight.shape[-1]), options.dtype or grad.dtype, grad)
    products = Products.of(options, rows, weight, None)
    sides = _weight_sides(rows, weight, products.recipe, None, need_dx)
    return SavedOperands(
        SavedOperand(int(need_dw)), SavedOperand(1), _wants(products, rows, weight, sides, False).dgrad
    )


def _rows_for(x: Tensor, weight: Tensor) -> Tensor:
    """The input as a matrix, unless the weight is a stack."""
    return as_matrix(x) if weight.dim() == 2 else x


def _weight_sides(
    rows: Tensor, weight: Tensor, linear_recipe: LinearRecipe,
    cached: tuple[Operand | None, Operand | None] | None, need_dx: bool,
) -> tuple[GemmOperand, GemmOperand | None]:  # fmt: skip
    """What stands for the operands of a weight in fprop and, if needed, in dgrad, before their casts."""
    if cached is not None:
        return cached[0], dgrad_weight(weight, linear_recipe, rows, cached[1]) if need_dx else None  # type: ignore[return-value]
    w, casts = values_of(weight), linear_recipe.weight
    return standing_for(w, casts.rowwise), standing_for(w.mT, casts.columnwise) if need_dx else None


def _wants(
    products: Products, rows: Tensor, weight: Tensor, sides: tuple[GemmOperand, GemmOperand | None], saves: bool
) -> Wants:
    """The forms for a weight with these ``sides``; ``saves``: whether wgrad gets the input from the forward pass."""
    (w_row, w_col), of_x, of_grad = sides, products.recipe.input, products.recipe.grad
    grad = of_shape((*rows.shape[:-1], weight.shape[-2]), products.dtype, rows)
    fprop = products.want("fprop", standing_for(rows, of_x.rowwise), w_row)
    dgrad = None if w_col is None else products.want("dgrad", standing_for(grad, of_grad.rowwise), w_col)
    if not saves or (products.beside_scales and products.recipe.delayed is None) or of_x.columnwise is None:
        return Wants(fprop, dgrad, None)
    g_like = standing_for(_columns_like(grad, products.groups), of_grad.columnwise)
    wgrad = products.want("wgrad", g_like, standing_for(_columns_like(rows, products.groups), of_x.columnwise))
    return Wants(fprop, dgrad, Form.ROWS if wgrad is Form.ROWS else Form.CODES)


def _weight_operands(
    w: Tensor, products: Products, wants: Wants, scales: Any
) -> tuple[GemmOperand | None, GemmOperand | None, Tensor | None]:
    """(operand of fprop, operand of dgrad to save, what the later cast for dgrad needs of the columns).

    Most weights are cast again for dgrad, whose operand would take half of the memory of the weight until then: a third
    of a cast more, which is little beside the products. A scale of the whole tensor would need its amax again.
    """
    casts, beside_scales = products.recipe.weight, products.beside_scales
    saves = wants.dgrad in SAVED and casts.columnwise is not None and casts.columnwise.format.has_tensor_scale
    made = None if saves or beside_scales else rows_first(w, casts, (wants.fprop, wants.dgrad))
    if made is not None:
        return made[0], None, made[1]
    w_row, w_col = copies_of(w, casts, (wants.fprop, wants.dgrad if saves else None), scales, None, beside_scales)
    return w_row, w_col, None


def _weight_for_dgrad(
    weight: Tensor, products: Products, exponents: Tensor | None, want: Want, scales: Any
) -> GemmOperand | None:
    """The operand of dgrad from a weight that was saved as it is; ``exponents``: what ``_weight_operands`` gave."""
    linear_recipe = products.recipe
    if exponents is not None:
        assert linear_recipe.weight.columnwise is not None
        return cast_columns_later(values_of(weight), linear_recipe.weight.columnwise, exponents)
    if weight.dim() > 2:
        return copies_of(values_of(weight), linear_recipe.weight, (None, want), scales, None, products.beside_scales)[1]
    return transposed(weight, linear_recipe, want, scales)


def _columns_like(rows: Tensor, groups: Groups | None) -> Tensor:
    """A tensor with the shape of the columnwise copy of ``rows``, to find out which kernel will run."""
    return rows.mT if groups is None else of_shape((rows.shape[-1], groups.length), rows.dtype, rows)


def backward(
    grad: Tensor, tensors: Iterable[Tensor], operands: SavedOperands, inputs: Inputs, options: Options,
    scales: Scales | None, groups: Groups | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of x, weight and bias; ``tensors`` are those that ``forward`` gave to save."""
    x_saved, w_saved, dgrad_want, has_exponents = operands
    linear_recipe, tensors = options.linear_recipe, iter(tensors)
    need_dx, need_dw, need_db = inputs.needs
    x_dtype, w_dtype, bias_dtype, dtype = inputs.dtypes
    beside_scales = has_values_beside_scales(3 if inputs.stacked else 2, linear_recipe)
    products = Products(linear_recipe, options.prefer, dtype, groups, beside_scales)
    dx = dw = db = None
    x_col = x_saved.gemm_operand(tensors)
    w_exponents = next(tensors) if has_exponents else None
    weight = w_saved.gemm_operand(tensors)
    g = grad if inputs.stacked else as_matrix(grad)
    wgrad_want: Want = None
    if need_dw:
        if x_saved.format is None:
            rows = x_col if inputs.stacked else as_matrix(x_col)
            x_col = standing_for(_columns_like(rows, groups), linear_recipe.input.columnwise)
        g_like = standing_for(_columns_like(g, groups), linear_recipe.grad.columnwise)
        wgrad_want = products.want("wgrad", g_like, x_col)
    g_row, g_col = products.copies(g, linear_recipe.grad, (dgrad_want, wgrad_want), scales_of(scales, GRAD))
    if need_dx:
        w_col = weight
        if w_saved.format is None:
            w_col = _weight_for_dgrad(weight, products, w_exponents, dgrad_want, amax_of(scales, WEIGHT))
        dx = products.run("dgrad", g_row, w_col).to(x_dtype).view(inputs.shape)
        del g_row, w_col
    if need_dw:
        if x_saved.format is None:
            x_col = products.copies(rows, linear_recipe.input, (None, wgrad_want), amax_of(scales, INPUT))[1]

        def wgrad(result: torch.dtype) -> Tensor:
            as_asked = result is dtype or runs_fast(g_col, x_col, result, products.prefer)
            return products.run("wgrad", g_col, x_col, dtype=result if as_asked else dtype).to(result)

        dw = wgrad(dtype).to(w_dtype) if options.on_wgrad is None else options.on_wgrad(wgrad)
    if need_db:
        assert bias_dtype is not None
        db = g.sum(0, dtype=torch.float32).to(bias_dtype)
    return dx, dw, db

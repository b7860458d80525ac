"""The three products of a linear layer and their one autograd function.

    fprop  y  = x.rowwise     @ w.rowwise^T       (M, K) by (N, K), bias added in float32
    dgrad  dx = g.rowwise     @ w.columnwise^T    (M, N) by (K, N)
    wgrad  dw = g.columnwise  @ x.columnwise^T    (N, M) by (K, M)

A bias wider than the result is rounded to the dtype of the result first, as under torch.autocast.

Each tensor is cast once for both of its products, from its high-precision values. A copy that its kernel multiplies as
values (``select.values_dtype``) is written as values. A copy for the backward pass is saved as codes: about half the
bytes of the bfloat16 input that torch would save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.compat import disable_torch_function, nonstrict_trace
from ..core.explain import measure, record
from ..core.kernel import Spec
from ..core.select import dispatch_context, restore_context
from ..core.shapes import as_matrix
from ..core.torch_autocast import without_autocast
from ..core.tracing import is_recorded, is_traced
from ..kernels.gemm import emulated
from ..kernels.gemm.select import gemm, plan_of, values_dtype
from ..kernels.gemm.spec import Form, GemmArgs, GemmOperand, data_of
from ..numerics.operand import Operand
from ..recipe.kernel_preference import KernelPreference
from ..recipe.linear_recipe import LinearRecipe, recipe_by_key
from .operands import (
    GRAD,
    INPUT,
    WEIGHT,
    Scales,
    Want,
    cached_operands,
    copies,
    dgrad_weight,
    is_gathered,
    of_shape,
    saved,
    scales_of,
    standing_for,
    transposed,
)
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
        """The name of the product kernel that the recipe asks for; None if it asks for none."""
        preference = self.linear_recipe.kernel_preference
        return None if preference is KernelPreference.AUTO else preference.value


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    scales: Scales | None = None,
    cached: tuple[Operand | None, Operand | None] | None = None,
) -> Tensor:
    """``x @ weight^T + bias`` with its gradients, cast as ``options.linear_recipe`` says.

    x (..., K), weight (N, K), bias (N,); result (..., N). An MXTensor weight is used as it is; so is ``cached``,
    the (rowwise, columnwise) operands of ``weight`` from an earlier call. Raises TypeError for dtypes that have no
    gradient, ValueError where shapes or devices do not fit.
    """
    if torch.compiler.is_dynamo_compiling():
        assert options.on_wgrad is None and cached is None, "these options are for eager code"
        tensors = [t for t in (bias, *(scales or ())) if t is not None]
        dtype = str(options.dtype or x.dtype).removeprefix("torch.")
        return _traced(options.linear_recipe.key, dtype, options.save_input, bias is not None, x, weight, *tensors)
    return _linear(x, weight, bias, options, scales, cached)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, scales: Any, cached: Any) -> Tensor:
    with disable_torch_function():  # an enclosing autocast has seen the call already
        _check(x, weight, bias)
        cached = cached_operands(weight, options.linear_recipe) if cached is None else cached
        return _Linear.apply(x, weight, bias, options, scales, cached)  # type: ignore[no-any-return]


@nonstrict_trace
def _traced(key: str, dtype: str, save_input: bool, has_bias: bool, x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
    """``linear`` for Dynamo, which leaves it to AOTAutograd: kernels are chosen and logged as in eager code. Arguments
    are tensors and plain constants only."""
    bias, scales = (rest[0], rest[1:]) if has_bias else (None, rest)
    options = Options(recipe_by_key(key), getattr(torch, dtype), save_input)
    return _linear(x, weight, bias, options, Scales(*scales) if scales else None, None)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if is_recorded():
        raise NotImplementedError(
            "linear: torch.jit.trace cannot record a layer that trains quantized; use torch.export or torch.compile, "
            "or trace a model that was quantized for inference"
        )
    for name, t in (("input", x), ("weight", weight), ("bias", bias)):
        if t is not None and not t.dtype.is_floating_point:
            raise TypeError(f"linear: the {name} is {str(t.dtype).removeprefix('torch.')}; convert it to a float dtype")
        if t is not None and t.device != x.device:
            raise ValueError(f"linear: the input is on {x.device}, the {name} on {t.device}; move one with .to()")
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: input {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit: a weight is (out_features, "
            "in_features), and the input's last dimension is in_features"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"linear: bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")


# ---------------------------------------------------------------------------------------------- casts and products


def _want(op: str, a: GemmOperand, b: GemmOperand, dtype: torch.dtype, prefer: str | None) -> Want:
    """The form in which the kernel that will run this product wants operands that are cast for it."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return dtype
    return values_dtype(op, a, b, GemmArgs(dtype), prefer) or Form.CODES


def product(
    op: str, a: GemmOperand | None, b: GemmOperand | None, dtype: torch.dtype, bias: Tensor | None, prefer: str | None
) -> Tensor:
    """``a @ b^T + bias`` in ``dtype``: by a product kernel, or by torch if both operands are plain."""
    assert a is not None and b is not None
    bias = None if bias is None else bias.to(dtype)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        a, b = (f.to(dtype) if isinstance(f, Tensor) else f for f in (a, b))
        return gemm(op, a, b, GemmArgs(dtype, bias), prefer=prefer)
    reason = {"quantized": "the recipe leaves this product in high precision"}
    shapes = tuple(a.shape), tuple(b.shape)
    spec = Spec(op, shapes, (a.dtype, b.dtype), dtype, a.device, is_traced(a, b))
    with measure(record(spec, "high precision", reason)):
        return torch.nn.functional.linear(a.to(dtype), b.to(dtype), bias)


def _runs_fast(a: Any, b: Any, dtype: torch.dtype, prefer: str | None) -> bool:
    """Whether a result in ``dtype`` costs no more than one in the dtype of the layer.

    Hopper computes float32 results of float8 operands by emulation only; there wgrad is rounded to bfloat16 first.
    """
    if data_of(a).device.type != "cuda" or (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return True
    kernel = plan_of("wgrad", a, b, GemmArgs(dtype), prefer).kernel
    return kernel is None or kernel.name != emulated.KERNEL.name


# ---------------------------------------------------------------------------------------------- the function


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, scales: Scales | None,
        cached: tuple[Operand | None, Operand | None] | None,
    ) -> Tensor:  # fmt: skip
        linear_recipe, prefer, rows = options.linear_recipe, options.prefer, as_matrix(x)
        dtype = options.dtype or x.dtype
        need_dx, need_dw, _ = ctx.needs_input_grad[:3]
        w = values_of(weight)  # a quantized weight has ``cached`` operands instead
        with without_autocast(x.device):
            grad_like = of_shape(rows.shape[0], weight.shape[0], dtype, rows)
            b_row: Any = cached[0] if cached is not None else standing_for(w, linear_recipe.weight.rowwise)
            want = _want("fprop", standing_for(rows, linear_recipe.input.rowwise), b_row, dtype, prefer)
            dgrad_want: Want = None
            if need_dx:
                if cached is not None:
                    b_col = dgrad_weight(weight, linear_recipe, rows, cached[1])
                else:
                    b_col = standing_for(w.t(), linear_recipe.weight.columnwise)
                dgrad_want = _want("dgrad", standing_for(grad_like, linear_recipe.grad.rowwise), b_col, dtype, prefer)

            later = (
                Form.CODES
                if need_dw and linear_recipe.input.columnwise is not None and not options.save_input
                else None
            )
            x_row, x_col = copies(rows, linear_recipe.input, (want, later), scales_of(scales, INPUT))
            w_row: GemmOperand | None
            w_col: GemmOperand | None
            if cached is not None:
                w_row, w_col = cached
            else:
                # Codes are saved for dgrad. Values, twice as large, are cast again from the weight.
                now = Form.CODES if dgrad_want is Form.CODES and linear_recipe.weight.columnwise is not None else None
                w_row, w_col = copies(w, linear_recipe.weight, (want, now), scales_of(scales, WEIGHT))
            y = product("fprop", x_row, w_row, dtype, bias, prefer)
        x_saved, x_tensors = saved(x_col if x_col is not None else x if need_dw else None)
        w_saved, w_tensors = saved(weight if w_col is None or is_gathered(weight) else w_col)
        ctx.save_for_backward(*x_tensors, *w_tensors)
        ctx.saved, ctx.options, ctx.scales, ctx.dgrad_want = (x_saved, w_saved), options, scales, dgrad_want
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype, dtype
        ctx.shape, ctx.dispatch_context = tuple(x.shape), dispatch_context()
        # As in torch's own linear layer: FSDP2 warns of modules whose result is a view.
        return torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], weight.shape[0]))  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x_saved, w_saved), options, tensors = ctx.saved, ctx.options, iter(ctx.saved_tensors)
        linear_recipe, prefer = options.linear_recipe, options.prefer
        need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
        x_dtype, w_dtype, bias_dtype, dtype = ctx.dtypes
        dx = dw = db = None
        with disable_torch_function(), without_autocast(grad.device), restore_context(*ctx.dispatch_context):
            x_col, weight = x_saved.gemm_operand(tensors), w_saved.gemm_operand(tensors)
            g = as_matrix(grad)
            wgrad_want: Want = None
            if need_dw:
                if x_saved.format is None:
                    rows = as_matrix(x_col)
                    x_col = standing_for(rows.t(), linear_recipe.input.columnwise)
                wgrad_want = _want("wgrad", standing_for(g.t(), linear_recipe.grad.columnwise), x_col, dtype, prefer)
            g_row, g_col = copies(g, linear_recipe.grad, (ctx.dgrad_want, wgrad_want), scales_of(ctx.scales, GRAD))
            if need_dx:
                w_col = weight
                if w_saved.format is None:
                    w_col = transposed(weight, linear_recipe, ctx.dgrad_want, scales_of(ctx.scales, WEIGHT))
                dx = product("dgrad", g_row, w_col, dtype, None, prefer).to(x_dtype).view(ctx.shape)
                del g_row, w_col
            if need_dw:
                if x_saved.format is None:
                    wants = (None, wgrad_want)
                    x_col = copies(rows, linear_recipe.input, wants, scales_of(ctx.scales, INPUT))[1]

                def wgrad(result: torch.dtype) -> Tensor:
                    as_asked = result is dtype or _runs_fast(g_col, x_col, result, prefer)
                    return product("wgrad", g_col, x_col, result if as_asked else dtype, None, prefer).to(result)

                dw = wgrad(dtype).to(w_dtype) if options.on_wgrad is None else options.on_wgrad(wgrad)
            if need_db:
                db = g.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None, None, None

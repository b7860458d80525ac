"""``linear``: a linear layer with its gradients, the one autograd function of training.

``passes.py`` has the two passes, ``prepared.py`` what repeated calls run instead, and ``graph_ops.py`` what a compiled
graph holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.compat import disable_torch_function, nonstrict_trace
from ..core.select import dispatch_context, restore_context
from ..core.torch_autocast import without_autocast
from ..core.tracing import is_recorded
from ..numerics.operand import Operand
from ..recipe.linear_recipe import recipe_by_key
from . import graph_ops, prepared
from .operands import Scales, cached_operands
from .passes import Inputs, Options, forward


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


# ---------------------------------------------------------------------------------------------- the function


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, scales: Scales | None,
        cached: tuple[Operand | None, Operand | None] | None,
    ) -> Tensor:  # fmt: skip
        needs = ctx.needs_input_grad[:3]
        layer: Any = None
        tensors: Sequence[Tensor]
        with without_autocast(x.device):
            if cached is None and graph_ops.takes(x, weight, bias, options, scales):
                y, tensors, operands = graph_ops.forward(x, weight, bias, options, needs)
                layer = tuple(weight.shape)
            elif cached is None:
                y, tensors, operands, layer = prepared.forward(x, weight, bias, options, scales, needs)
            else:
                y, tensors, operands = forward(x, weight, bias, options, scales, cached, needs)
        ctx.save_for_backward(*tensors)
        dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype, options.dtype or x.dtype
        ctx.call = operands, Inputs(needs, tuple(x.shape), dtypes), options, scales, layer
        ctx.dispatch_context = dispatch_context()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # a checkpoint recomputes the layer here
        with disable_torch_function(), without_autocast(grad.device), restore_context(*ctx.dispatch_context):
            operands, inputs, options, scales, layer = ctx.call
            if isinstance(layer, tuple):
                found = graph_ops.backward(grad, tensors, operands, inputs, options, layer)
            else:
                found = prepared.backward(grad, tensors, operands, inputs, options, scales, layer)
            return *found, None, None, None

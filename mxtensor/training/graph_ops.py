"""A layer in a compiled graph on a GPU: one op for its forward pass, and one for its backward pass.

A graph of casts and products calls six custom ops for a layer; each call goes through torch's dispatcher and Python.
Here the graph holds two, whose repeated calls run programs (``kernels/runtime/recorded_op.py``). They compute what
``passes.py`` computes in eager code, bit for bit. The gradient of a bias is not a part of them: the compiler adds it up
with what makes the gradient of the result. While a graph is traced the passes run too: they choose kernels, log
them and say what is saved; their own ops have no users and torch removes them.

Layers of delayed scaling, with stochastic rounding, random signs or a product in high precision, with symbolic shapes,
and those inside ``kernels()`` stay graphs of casts and products.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import custom_ops
from ..core.compat import functorch_interpreter, is_exporting
from ..core.explain import LOGS
from ..core.select import forced_kernel
from ..core.torch_autocast import without_autocast
from ..core.tracing import is_traced
from ..kernels.runtime.recorded_op import recorded
from ..numerics.formats import Rounding
from ..recipe.linear_recipe import LinearRecipe, recipe_by_key
from . import passes
from .operands import Scales
from .passes import Inputs, Options, SavedOperands
from .training_weight import values_of

DEVICES = {"cuda"}
"""Types of devices on which a call of an op costs more than its work. On a CPU the compiler sees into the passes."""
_saved: dict[Hashable, SavedOperands] = {}
"""Kind of layer -> how its forward pass saves the operands of its backward pass."""


def _rounds_to_nearest(recipe: LinearRecipe) -> bool:
    """Whether every operand is cast, without random numbers."""
    for casts in (recipe.input, recipe.weight, recipe.grad):
        for cast in (casts.rowwise, casts.columnwise):
            if cast is None or cast.rounding is not Rounding.NEAREST:
                return False
        if casts.signs is not None or casts.from_rowwise:
            return False
    return True


def takes(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, scales: Scales | None) -> bool:
    """Whether these passes are two ops of the graph that is being traced."""
    w = values_of(weight)
    if weight.dim() > 2:
        return False
    if x.device.type not in DEVICES or not is_traced(x, w, bias) or scales is not None or options.on_wgrad is not None:
        return False
    if is_exporting() or functorch_interpreter() is not None or forced_kernel() is not None:
        return False
    plain = all(type(n) is int for n in (*x.shape, *w.shape))
    return plain and _rounds_to_nearest(options.linear_recipe)


def _kind(recipe: str, dtype: torch.dtype, save_input: bool, needs: Sequence[bool], *inputs: Any) -> Hashable:
    return recipe, dtype, save_input, tuple(needs), *(tuple(i) if isinstance(i, list) else i for i in inputs)


def _passes_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, dtype: torch.dtype, save_input: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, list[Tensor], SavedOperands]:  # fmt: skip
    """``passes.forward``, whose decisions were logged when the graph was traced."""
    options = Options(recipe_by_key(recipe), dtype, save_input)
    with LOGS.block(None), without_autocast(x.device):
        out = passes.forward(x, weight, bias, options, None, None, tuple(needs))
    bias_dtype = None if bias is None else bias.dtype
    kind = _kind(recipe, dtype, save_input, needs, list(x.shape), x.dtype, list(weight.shape), weight.dtype, bias_dtype)
    _saved[kind] = out[2]
    return out


@custom_ops.define("mxtensor::linear_forward")
@recorded
def linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, dtype: torch.dtype, save_input: bool, needs: list[bool]
) -> list[Tensor]:
    """The result of a layer and what it saves for its backward pass, without its inputs."""
    y, tensors, _ = _passes_forward(x, weight, bias, recipe, dtype, save_input, needs)
    return [y, *(t for t in tensors if t is not x and t is not weight)]


@custom_ops.fake_of(linear_forward)
def _(x, weight, bias, recipe, dtype, save_input, needs):  # type: ignore[no-untyped-def]
    y, tensors, _ = _passes_forward(x, weight, bias, recipe, dtype, save_input, needs)
    return [y, *(t for t in tensors if t is not x and t is not weight)]


@custom_ops.define("mxtensor::linear_backward")
@recorded
def linear_backward(
    grad: Tensor, tensors: list[Tensor], recipe: str, dtype: torch.dtype, save_input: bool, needs: list[bool],
    x_shape: list[int], x_dtype: torch.dtype, w_shape: list[int], w_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> list[Tensor]:  # fmt: skip
    """The gradients of x and weight that are needed; ``tensors`` are those that the forward pass has saved."""
    kind = _kind(recipe, dtype, save_input, needs, x_shape, x_dtype, w_shape, w_dtype, bias_dtype)
    inputs = Inputs((*needs[:2], False), tuple(x_shape), (x_dtype, w_dtype, bias_dtype, dtype))
    options = Options(recipe_by_key(recipe), dtype, save_input)
    with LOGS.block(None), without_autocast(grad.device):
        out = passes.backward(grad, tensors, _saved[kind], inputs, options, None)
    return [t for t in out if t is not None]


@custom_ops.fake_of(linear_backward)
def _(grad, tensors, recipe, dtype, save_input, needs, x_shape, x_dtype, w_shape, w_dtype, bias_dtype):  # type: ignore[no-untyped-def]
    results = ((x_shape, x_dtype), (w_shape, w_dtype))
    return [grad.new_empty(shape, dtype=d) for need, (shape, d) in zip(needs[:2], results, strict=True) if need]


# ---------------------------------------------------------------------------------------------- while it is traced


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, needs: tuple[bool, ...]
) -> tuple[Tensor, list[Tensor], SavedOperands]:
    """``passes.forward`` of a layer that ``takes`` accepts."""
    _, tensors, operands = passes.forward(x, weight, bias, options, None, None, needs)
    dtype = options.dtype or x.dtype
    y, *made = linear_forward(
        x, values_of(weight), bias, options.linear_recipe.key, dtype, options.save_input, list(needs)
    )
    new = iter(made)
    return y, [t if t is x or t is weight else next(new) for t in tensors], operands


def backward(
    grad: Tensor, tensors: Sequence[Tensor], operands: SavedOperands, inputs: Inputs, options: Options,
    weight_shape: tuple[int, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """``passes.backward`` of such a layer. The bias's gradient is a sum that the compiler fuses with its neighbours."""
    db = passes.backward(grad, tensors, operands, inputs, options, None)[2]
    needs, x_shape, (x_dtype, w_dtype, bias_dtype, dtype), _ = inputs
    if not any(needs[:2]):
        return None, None, db
    found = iter(
        linear_backward(
            grad, [values_of(t) for t in tensors], options.linear_recipe.key, dtype, options.save_input, list(needs),
            list(x_shape), x_dtype, list(weight_shape), w_dtype, bias_dtype,
        )
    )  # fmt: skip
    dx, dw = (next(found) if need else None for need in needs[:2])
    return dx, dw, db

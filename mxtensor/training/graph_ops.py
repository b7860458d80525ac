"""A layer in a compiled graph on a GPU: one op for its forward pass, and one for its backward pass.

A graph of casts and products calls six custom ops for a layer; each call goes through torch's dispatcher and Python.
Here the graph holds two, whose repeated calls run programs (``core/repeated.py``). They compute what
``passes.py`` computes in eager code, bit for bit. The gradient of a bias is not a part of them: the compiler adds it up
with what makes the gradient of the result. While a graph is traced the passes run too: they choose kernels, log
them and say what is saved; their own ops have no users and torch removes them.

In a graph for any number of rows nothing can be chosen while it is traced. Its two ops choose when they run, and save
the input itself: what a cast would save depends on the kernel. One graph serves every batch size.

Layers of delayed scaling, with stochastic rounding, random signs or a product in high precision, and those inside
``kernels()`` stay graphs of casts and products.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import custom_ops
from ..core.autograd import without_autocast
from ..core.compat import functorch_interpreter, is_exporting
from ..core.explain import LOGS, record
from ..core.kernel import Spec
from ..core.repeated import recorded
from ..core.select import forced_kernel
from ..core.tracing import is_traced
from ..numerics.formats import Rounding
from ..recipe.linear_recipe import LinearRecipe, recipe_by_key
from . import passes
from .casts import SavedOperand
from .delayed_scaling import Scales
from .passes import Inputs, Options, SavedOperands
from .training_weight import values_of

DEVICES = {"cuda"}
"""Types of devices on which a call of an op costs more than its work. On a CPU the compiler sees into the passes."""
CHOSEN_LATER = "chosen when it runs"
_saved: dict[Hashable, SavedOperands] = {}
"""Kind of layer -> how its forward pass saves the operands of its backward pass. Only a pass that runs writes it."""


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
    return all(type(n) is int for n in w.shape) and _rounds_to_nearest(options.linear_recipe)


def _is_for_any_rows(shape: Sequence[int]) -> bool:
    """Whether a graph is traced for inputs of other shapes, too."""
    return any(type(n) is not int for n in shape)


def _kind(recipe: str, dtype: torch.dtype, save_input: bool, needs: Sequence[bool], *inputs: Any) -> Hashable:
    return recipe, dtype, save_input, tuple(needs), *(tuple(i) if isinstance(i, list) else i for i in inputs)


def _passes_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, dtype: torch.dtype, save_input: bool,
    needs: Sequence[bool],
) -> tuple[list[Tensor], SavedOperands]:  # fmt: skip
    """What the op returns, and how the operands are saved. The decisions were logged when the graph was traced."""
    options = Options(recipe_by_key(recipe), dtype, save_input)
    with LOGS.block(None), without_autocast(x.device):
        y, tensors, saved = passes.forward(x, weight, bias, options, None, None, tuple(needs))
    return [y, *(t for t in tensors if t is not x and t is not weight)], saved


@custom_ops.define("mxtensor::linear_forward")
@recorded
def linear_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, dtype: torch.dtype, save_input: bool, needs: list[bool]
) -> list[Tensor]:
    """The result of a layer and what it saves for its backward pass, without its inputs."""
    results, saved = _passes_forward(x, weight, bias, recipe, dtype, save_input, needs)
    bias_dtype, shapes = None if bias is None else bias.dtype, (list(x.shape), list(weight.shape))
    kind = _kind(recipe, dtype, save_input, needs, shapes[0], x.dtype, shapes[1], weight.dtype, bias_dtype, x.device)
    _saved[kind] = saved
    return results


@custom_ops.fake_of(linear_forward)
def _(x, weight, bias, recipe, dtype, save_input, needs):  # type: ignore[no-untyped-def]
    return _passes_forward(x, weight, bias, recipe, dtype, save_input, needs)[0]


@custom_ops.define("mxtensor::linear_backward")
@recorded
def linear_backward(
    grad: Tensor, tensors: list[Tensor], recipe: str, dtype: torch.dtype, save_input: bool, needs: list[bool],
    x_shape: list[int], x_dtype: torch.dtype, w_shape: list[int], w_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> list[Tensor]:  # fmt: skip
    """The gradients of x and weight that are needed; ``tensors`` are those that the forward pass has saved."""
    kind = _kind(recipe, dtype, save_input, needs, x_shape, x_dtype, w_shape, w_dtype, bias_dtype, grad.device)
    inputs = Inputs((*needs[:2], False), tuple(x_shape), (x_dtype, w_dtype, bias_dtype, dtype))
    options = Options(recipe_by_key(recipe), dtype, save_input)
    with LOGS.block(None), without_autocast(grad.device):
        out = passes.backward(grad, tensors, _saved[kind], inputs, options, None)
    return [t for t in out if t is not None]


@custom_ops.fake_of(linear_backward)
def _(grad, tensors, recipe, dtype, save_input, needs, x_shape, x_dtype, w_shape, w_dtype, bias_dtype):  # type: ignore[no-untyped-def]
    results = ((x_shape, x_dtype), (w_shape, w_dtype))
    return [grad.new_empty(shape, dtype=d) for need, (shape, d) in zip(needs[:2], results, strict=True) if need]


# ---------------------------------------------------------------------------------------------- for any number of rows


@custom_ops.define("mxtensor::linear_of_rows")
@recorded
def linear_of_rows(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, dtype: torch.dtype) -> Tensor:
    """The result of a layer whose backward pass gets its inputs."""
    return _passes_forward(x, weight, bias, recipe, dtype, True, (False, False, False))[0][0]


@custom_ops.fake_of(linear_of_rows)
def _(x, weight, bias, recipe, dtype):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=dtype)


@custom_ops.define("mxtensor::linear_of_rows_backward")
@recorded
def linear_of_rows_backward(
    grad: Tensor, inputs: list[Tensor], recipe: str, dtype: torch.dtype, x_dtype: torch.dtype, need_dx: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradients of x, if it is needed, and of the weight, if ``inputs`` has x before the weight."""
    weight, need_dw, options = inputs[-1], len(inputs) == 2, Options(recipe_by_key(recipe), dtype, True)
    shape = *grad.shape[:-1], weight.shape[1]
    dtypes = x_dtype, weight.dtype, None, dtype
    with LOGS.block(None), without_autocast(grad.device):
        saved = passes.operands_of_inputs(grad, weight, options, need_dx, need_dw)
        out = passes.backward(grad, inputs, saved, Inputs((need_dx, need_dw, False), shape, dtypes), options, None)
    return [t for t in out if t is not None]


@custom_ops.fake_of(linear_of_rows_backward)
def _(grad, inputs, recipe, dtype, x_dtype, need_dx):  # type: ignore[no-untyped-def]
    weight = inputs[-1]
    dx = [grad.new_empty(*grad.shape[:-1], weight.shape[1], dtype=x_dtype)] if need_dx else []
    return [*dx, *([weight.new_empty(weight.shape)] if len(inputs) == 2 else [])]


def _forward_of_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, needs: tuple[bool, ...]
) -> tuple[Tensor, list[Tensor], SavedOperands]:
    dtype, w = options.dtype or x.dtype, values_of(weight)
    casts, reason = options.linear_recipe, {"quantized": "chosen in each call: the number of rows is not known here"}
    formats = tuple(x.dtype if cast is None else cast.format for cast in (casts.input.rowwise, casts.weight.rowwise))
    record(Spec("fprop", (tuple(x.shape), tuple(w.shape)), formats, dtype, x.device, True), CHOSEN_LATER, reason)
    y = linear_of_rows(x, w, bias, casts.key, dtype)
    saves = [x] if needs[1] else []
    return y, [*saves, weight], SavedOperands(SavedOperand(len(saves)), SavedOperand(1), None)


def _backward_of_rows(
    grad: Tensor, tensors: Sequence[Tensor], inputs: Inputs, options: Options
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    (need_dx, need_dw, need_db), _, (x_dtype, _, bias_dtype, dtype), _ = inputs
    db = grad.flatten(0, -2).sum(0, dtype=torch.float32).to(bias_dtype) if need_db else None
    if not (need_dx or need_dw):
        return None, None, db
    given = [values_of(t) for t in tensors]
    found = iter(linear_of_rows_backward(grad, given, options.linear_recipe.key, dtype, x_dtype, need_dx))
    return next(found) if need_dx else None, next(found) if need_dw else None, db


# ---------------------------------------------------------------------------------------------- while it is traced


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, needs: tuple[bool, ...]
) -> tuple[Tensor, list[Tensor], SavedOperands]:
    """``passes.forward`` of a layer that ``takes`` accepts."""
    if _is_for_any_rows(x.shape):
        return _forward_of_rows(x, weight, bias, options, needs)
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
    if _is_for_any_rows(inputs.shape):
        return _backward_of_rows(grad, tensors, inputs, options)
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

"""``linear``: a linear layer with its gradients, the one autograd function of training.

``passes.py`` has the two passes. On a GPU their calls are repeated calls (``core/repeated.py``). ``graph_ops.py`` has
what a compiled graph holds.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.autograd import differentiable_once, remember_input, without_autocast
from ..core.compat import (
    disable_torch_function,
    functorch_interpreter,
    is_batched_gradient,
    is_exporting,
    is_jit_tracing,
    is_sharded,
    nonstrict_trace,
)
from ..core.names import dtype_name
from ..core.repeated import may_repeat, repeated
from ..core.select import dispatch_context, forced_kernel, restore_context
from ..core.shapes import as_matrix, over_rows
from ..core.tracing import is_captured, is_traced
from ..numerics.groups import Groups
from ..numerics.operand import Operand
from ..recipe.linear_recipe import LinearRecipe, recipe_by_key
from ..tensor.mxtensor import MXTensor
from . import graph_ops
from .accumulate import WeightOperands, cached_in_block
from .casts import cached_operands, layout_of
from .delayed_scaling import Scales
from .passes import Inputs, Options, SavedOperands, backward, cast_weight, forward
from .recompute import in_first_pass
from .training_weight import values_of

_log = logging.getLogger("mxtensor")
only_once = differentiable_once("linear: a layer that trains quantized", "compute inside mx.autocast(enabled=False)")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    scales: Scales | None = None,
    cached: tuple[Operand | None, Operand | None] | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """``x @ weight^T + bias`` with its gradients, cast as ``options.linear_recipe`` says.

    x (..., K), weight (N, K), bias (N,); result (..., N). An MXTensor weight is used as it is; so is ``cached``,
    the (rowwise, columnwise) operands of ``weight`` from an earlier call.

    A stack of weights (G, N, K) has no bias. Without ``ends``, x (G, M, K) has a matrix for each weight. With ``ends``,
    int32 (G,), rows ``ends[g - 1]`` to ``ends[g]`` of x (M, K) are multiplied by ``weight[g]``; rows after the last end
    give zeros. Each matrix and each group is cast as if it were alone (``casts.py``).

    A nested tensor x gives one with the same lengths: all its rows are one matrix.

    Raises TypeError for dtypes that have no gradient, ValueError where shapes or devices do not fit,
    NotImplementedError inside transforms of ``torch.func``.
    """
    if x.is_nested:
        if weight.dim() != 2:
            raise NotImplementedError(
                f"linear: a nested tensor cannot be multiplied by a stack of weights {tuple(weight.shape)} that trains "
                "quantized; pass its parts, x.unbind(), one by one, or compute inside mx.autocast(enabled=False)"
            )
        return over_rows(lambda rows: linear(rows, weight, bias, options, scales, cached), x)
    if torch.compiler.is_dynamo_compiling():
        assert options.on_wgrad is None and cached is None, "these options are for eager code"
        given = (bias, ends)
        tensors = [t for t in (*given, *(scales or ())) if t is not None]
        dtype = dtype_name(options.dtype or x.dtype)
        has = "".join("x" if t is not None else "-" for t in given)
        return _traced(options.linear_recipe.key, dtype, options.save_input, has, x, weight, *tensors)
    return _linear(x, weight, bias, options, scales, cached, ends)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, scales: Scales | None,
    cached: tuple[Operand | None, Operand | None] | None, ends: Tensor | None,
) -> Tensor:  # fmt: skip
    with disable_torch_function():  # an enclosing autocast has seen the call already
        _check(x, weight, bias)
        if weight.dim() == 2:
            _check_matrix(x, weight, bias)
            cached = cached_operands(weight, options.linear_recipe) if cached is None else cached
        else:
            _check_stack(x, weight, ends)
        will_train = _will_train(options)
        y: Tensor = _Linear.apply(x, weight, bias, options, scales, cached, ends, _trains(x, weight), will_train)
        if OBSERVERS:
            notify(y, LayerCall(x, weight, options.linear_recipe, scales, ends))
        return y


@nonstrict_trace
def _traced(key: str, dtype: str, save_input: bool, has: str, x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
    """``linear`` for Dynamo, which leaves it to AOTAutograd: kernels are chosen and logged as in eager code. Arguments
    are tensors and plain constants only. ``has``: an x for a bias and for ends, a - for none."""
    tensors = iter(rest)
    bias, ends = (next(tensors) if mark == "x" else None for mark in has)
    scales = list(tensors)
    options = Options(recipe_by_key(key), getattr(torch, dtype), save_input)
    return _linear(x, weight, bias, options, Scales(*scales) if scales else None, None, ends)


def _trains(x: Tensor, weight: Tensor) -> bool:
    """Whether there will be a backward pass. The function cannot know: torch disables gradients inside of it."""
    if not torch.is_grad_enabled():
        return False
    if not is_exporting():
        return True
    if x.requires_grad or weight.requires_grad:
        _warn_of_export()
    return False


def _will_train(options: Options) -> bool:
    """Whether this pass, without gradients, is repeated with them and has to draw the same random numbers: it makes all
    copies that the other one makes."""
    return not torch.is_grad_enabled() and in_first_pass() and options.linear_recipe.draws_forward


@cache
def _warn_of_export() -> None:
    _log.warning(
        "torch.export: the program of a layer that trains quantized has no backward pass, and gives no gradients; "
        "export inside torch.no_grad(), and train the module itself"
    )


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if is_jit_tracing():
        raise NotImplementedError(
            "linear: torch.jit.trace cannot record a layer that trains quantized; use torch.export or torch.compile, "
            "or trace a model that was quantized for inference"
        )
    _refuse_transforms(x)
    if x.layout is not torch.strided:
        layout = str(x.layout).removeprefix("torch.")
        raise TypeError(
            f"linear: the input is {layout}; convert it with .to_dense(), or compute inside mx.autocast(enabled=False)"
        )
    if is_sharded(x):
        raise NotImplementedError(
            f"linear: the input {tuple(x.shape)} is a DTensor, and the weight is not; pass the part of this rank, "
            "x.to_local(), or split the layer with mx.parallel.ColwiseParallel or RowwiseParallel"
        )
    for name, t in (("input", x), ("weight", weight), ("bias", bias)):
        if t is not None and not t.dtype.is_floating_point:
            raise TypeError(f"linear: the {name} is {dtype_name(t.dtype)}; convert it to a float dtype")
        if t is not None and t.device != x.device:
            raise ValueError(f"linear: the input is on {x.device}, the {name} on {t.device}; move one with .to()")


def _refuse_transforms(t: Tensor) -> None:
    if functorch_interpreter() is not None or is_batched_gradient(t):
        raise NotImplementedError(
            "linear: transforms of torch.func (grad, vmap, jvp, ...) and batched gradients cannot see into a layer "
            "that trains quantized; compute inside mx.autocast(enabled=False)"
        )


def _check_matrix(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear: input {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit: a weight is (out_features, "
            "in_features), and the input's last dimension is in_features"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"linear: bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}")


def _check_stack(x: Tensor, weight: Tensor, ends: Tensor | None) -> None:
    groups, _, inner = weight.shape
    if ends is None:
        if x.dim() != 3 or x.shape[0] != groups or x.shape[2] != inner:
            raise ValueError(
                f"linear: input {tuple(x.shape)} and stack of weights {tuple(weight.shape)} do not fit: a stack is "
                "(weights, out_features, in_features), and the input (weights, rows, in_features)"
            )
        return
    if x.dim() != 2 or x.shape[1] != inner or tuple(ends.shape) != (groups,) or not groups:
        raise ValueError(
            f"linear: input {tuple(x.shape)}, stack of weights {tuple(weight.shape)} and ends {tuple(ends.shape)} do "
            "not fit: a stack is (groups, out_features, in_features), the input (rows, in_features), and there is one "
            "end for each group"
        )
    if ends.dtype is not torch.int32 or ends.device != x.device:
        kind = dtype_name(ends.dtype)
        raise ValueError(f"linear: the ends of groups must be int32 on {x.device}, got {kind} on {ends.device}")


# ---------------------------------------------------------------------------------------------- the function


def _groups(ends: Tensor | None, rows: int, options: Options) -> Groups | None:
    """The groups of the rows of an input that end at ``ends``."""
    return None if ends is None else layout_of(ends, rows, options.linear_recipe)


def _accumulated(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, need_dx: bool, ends: Tensor | None
) -> WeightOperands | None:
    """The operands of the weight in the ``accumulate`` block that is open; None if the layer casts it."""
    rows = tuple(x.shape[:-1]) if weight.dim() > 2 else as_matrix(x).shape[0]
    kind = rows, ends is not None, x.dtype, options.dtype, need_dx, forced_kernel()

    def make() -> WeightOperands:
        return WeightOperands.of(*cast_weight(x, weight, options, need_dx, _groups(ends, x.shape[0], options)))

    return cached_in_block(weight, options.linear_recipe, kind, (x, bias), make)


class _BackwardInfo(NamedTuple):
    """What the backward pass of a layer gets beside its saved tensors."""

    saved: Saved
    inputs: Inputs
    options: Options
    scales: Scales | None
    has_ends: bool
    """Whether the last saved tensor is ``ends``."""
    graph_weight: tuple[int, ...] | None
    """The shape of the weight, if ``graph_ops`` runs both passes."""


@dataclass(frozen=True, eq=False, slots=True)
class Saved:
    """What a forward pass has saved. Passes that save in the same way share one object: keys compare it by identity."""

    operands: SavedOperands
    weight: bool = False
    """Whether the last tensor is the weight itself, the parameter: a program gives the tensors before it."""
    repeats: bool = False
    """Whether the backward pass may be a repeated call."""


_saved = lru_cache(maxsize=4096)(Saved)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, scales: Scales | None, needs: tuple[bool, ...],
    cached: WeightOperands | None, ends: Tensor | None,
) -> tuple[Tensor, Sequence[Tensor], Saved]:  # fmt: skip
    """``passes.forward`` of a high-precision weight, as a repeated call where it may be one. ``cached``: the operands
    of the weight, from an earlier call."""

    def work() -> tuple[list[Tensor], Saved]:
        groups = _groups(ends, x.shape[0], options)
        operands = None if cached is None else cached.operands()
        y, tensors, how = forward(x, weight, bias, options, scales, operands, needs, groups)
        others = [t for t in tensors if t is not weight]
        return [y, *others], (_saved if repeats else Saved)(how, len(others) < len(tensors), repeats)

    w = values_of(weight)
    repeats = may_repeat(x, w, bias, ends)
    if repeats:
        amax, record = (None, None) if scales is None else scales[:2]
        facts = "fprop", options.linear_recipe.key, needs, options.dtype, options.save_input
        inputs = x, w, bias, amax, record, ends
        if cached is not None:
            facts, inputs = (*facts, cached.row, cached.column), (*inputs, *cached.tensors)  # type: ignore[assignment]
        made, how = repeated(facts, inputs, work)
    else:
        made, how = work()
    y, *tensors = made
    assert y is not None
    return y, [*tensors, weight] if how.weight else tensors, how  # type: ignore[list-item, return-value]


def _backward(
    grad: Tensor, tensors: Sequence[Tensor], how: Saved, inputs: Inputs, options: Options, scales: Scales | None,
    ends: Tensor | None,
) -> Sequence[Tensor | None]:  # fmt: skip
    """``passes.backward``, as a repeated call where it may be one."""

    def work() -> tuple[Sequence[Tensor | None], None]:
        groups = _groups(ends, inputs.shape[0], options)
        return backward(grad, tensors, how.operands, inputs, options, scales, groups), None

    given = [values_of(t) for t in tensors] if how.weight else tensors
    if not how.repeats or options.on_wgrad is not None or not may_repeat(grad, *given, ends):
        return work()[0]
    facts = "dgrad, wgrad", options.linear_recipe.key, how, inputs
    return repeated(facts, (grad, *given, ends, *(scales or ())), work)[0]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, scales: Scales | None,
        cached: tuple[Operand | None, Operand | None] | None, ends: Tensor | None, trains: bool, will_train: bool,
    ) -> Tensor:  # fmt: skip
        needs = tuple(trains and need for need in ctx.needs_input_grad[:3])
        if will_train:
            needs = (True, weight.requires_grad, False)
        graph_weight: tuple[int, ...] | None = None
        tensors: Sequence[Tensor]
        stacked, quantized = weight.dim() > 2, isinstance(values_of(weight), MXTensor)
        with without_autocast(x.device):
            if cached is None and graph_ops.takes(x, weight, bias, options, scales):
                y, tensors, operands = graph_ops.forward(x, weight, bias, options, needs)
                graph_weight, how = tuple(weight.shape), Saved(operands)
            elif quantized and (stacked or cached is not None):
                groups = _groups(ends, x.shape[0], options)
                y, tensors, operands = forward(x, weight, bias, options, scales, cached, needs, groups)
                how = Saved(operands)
            else:
                made = None if cached is None else WeightOperands.of(*cached)
                if made is None and (scales is None or not stacked):
                    made = _accumulated(x, weight, bias, options, needs[0], ends)
                y, tensors, how = _forward(x, weight, bias, options, scales, needs, made, ends)
        ctx.save_for_backward(*tensors, *(() if ends is None else (ends,)))
        dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype, options.dtype or x.dtype
        inputs = Inputs(needs, tuple(x.shape), dtypes, stacked)
        ctx.info = _BackwardInfo(how, inputs, options, scales, ends is not None, graph_weight)
        ctx.dispatch_context = dispatch_context()
        remember_input(ctx, x)
        return y

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        raise NotImplementedError(
            "linear: a layer that trains quantized has no forward-mode derivative; compute inside "
            "mx.autocast(enabled=False)"
        )

    @staticmethod
    @only_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_transforms(grad)
        tensors = ctx.saved_tensors  # a checkpoint recomputes the layer here
        with disable_torch_function(), without_autocast(grad.device), restore_context(*ctx.dispatch_context):
            how, inputs, options, scales, has_ends, graph_weight = ctx.info
            found: Sequence[Tensor | None]
            if graph_weight is not None:
                found = graph_ops.backward(grad, tensors, how.operands, inputs, options, graph_weight)
            else:
                ends, tensors = (tensors[-1], tensors[:-1]) if has_ends else (None, tensors)
                found = _backward(grad, tensors, how, inputs, options, scales, ends)
            return *found, None, None, None, None, None, None


# ---------------------------------------------------------------------------------------------- observers

# ``linear`` passes each call whose result needs a gradient to every observer, such as ``mx.monitor``. Calls of compiled
# graphs and of CUDA graphs are not observed. Without an observer this costs one look at an empty list.


class LayerCall(NamedTuple):
    """The arguments of ``linear``."""

    x: Tensor
    weight: Tensor
    recipe: LinearRecipe
    scales: Scales | None
    ends: Tensor | None


class Observer(Protocol):
    def of_call(self, call: LayerCall) -> Callable[[Tensor], None] | None:
        """See a call. Returns what sees the gradient of its result, or None."""


SHARDS = "_mx_shards"
"""The attribute of a weight whose rows are several parameters: these, in order."""
OBSERVERS: list[weakref.ref[Observer]] = []


def add(observer: Observer) -> weakref.ref[Observer]:
    """Register ``observer``, until ``remove`` is called or nothing else references it."""
    reference = weakref.ref(observer, remove)
    OBSERVERS.append(reference)
    return reference


def remove(reference: weakref.ref[Observer]) -> None:
    """Remove an observer, if it is still registered."""
    OBSERVERS[:] = [other for other in OBSERVERS if other is not reference]


def notify(y: Tensor, call: LayerCall) -> None:
    """Call all observers with a call whose result is ``y``."""
    if not y.requires_grad or is_traced(call.x) or is_captured(call.x):
        return
    for reference in tuple(OBSERVERS):
        observer = reference()
        sees = None if observer is None else observer.of_call(call)
        if sees is not None:
            y.register_hook(sees)

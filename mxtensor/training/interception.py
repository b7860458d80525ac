"""Torch functions that multiply by a weight, each put as one linear layer: how unmodified models are reached.

Three ways lead here: the torch function protocol of TrainingWeight, the mode of ``autocast``, and torch's own
attention, whose body runs over a ``linear`` of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.compat import disable_subclass_torch_function, disable_torch_function
from ..core.compat_hooks import attention_over
from ..core.torch_autocast import autocast_dtype
from ..recipe.linear_recipe import HIGH_PRECISION, LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..training import recompute
from .delayed_scaling import DelayedState
from .linear import Options, linear
from .operands import Scales
from .training_weight import STATE, WEIGHT_FUNCTIONS, TrainingWeight, values_of

# ---------------------------------------------------------------------------------------------- spellings


class Call(NamedTuple):
    """A call as a linear layer, its arguments as they were given."""

    input: Any
    weight: Any
    bias: Any = None
    transposed: bool = False
    """The weight is (K, N), and a layer only if it is a parameter."""


def _linear(input: Any, weight: Any, bias: Any = None) -> Call:
    return Call(input, weight, bias)


def _mm(input: Any, mat2: Any, **rest: Any) -> Call | None:
    return None if rest else Call(input, mat2, transposed=True)


def _matmul(input: Any, other: Any, **rest: Any) -> Call | None:
    return None if rest else Call(input, other, transposed=True)


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1, **rest: Any) -> Call | None:
    return Call(mat1, mat2, input, transposed=True) if alpha == beta == 1 and not rest else None


SPELLINGS: dict[Any, Callable[..., Call | None]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
}
"""torch function -> its arguments as a layer; None where another option makes it none."""


def _call(func: Any, args: Any, kwargs: Any, kind: type[Tensor], transposed: type[Tensor]) -> Call | None:
    """The call as a layer if what stands in the weight's place is of ``kind``, or ``transposed`` if it is (K, N)."""
    call = SPELLINGS[func](*args, **kwargs)
    if call is None or not isinstance(call.weight, transposed if call.transposed else kind):
        return None
    x, weight, bias, _ = call
    if call.transposed and not (
        x.dim() >= 2 and weight.dim() == 2 and (bias is None or tuple(bias.shape) == (weight.shape[1],))
    ):
        return None
    return call


# ---------------------------------------------------------------------------------------------- one layer


def _home(weight: Tensor) -> tuple[Any, str]:
    """The parameter that ``weight`` is, or is a part of, and the attribute of it that holds the layer's state."""
    base = None if torch.compiler.is_dynamo_compiling() else weight._base
    if base is None or base.numel() == weight.numel():
        return (weight if base is None else base), STATE
    return base, f"{STATE}_{weight.storage_offset()}_{weight.numel()}"


def delayed_state(weight: Tensor, linear_recipe: LinearRecipe) -> DelayedState:
    """The state of delayed scaling of the layer with this weight; a new one where its recipe has changed.

    Raises RuntimeError where torch.compile would have to make one, and for a weight that is computed anew in each
    step, with which no history can stay.
    """
    home, name = _home(weight)
    state: DelayedState | None = getattr(home, name, None)
    if state is not None and state.linear_recipe == linear_recipe:
        if state.amax.device != weight.device:
            state = state.to(weight.device)
            setattr(home, name, state)
        return state
    # Not by Dynamo alone: AOTAutograd gives weights of quantize_ without attributes, and is no compiler in torch 2.11.
    if torch.compiler.is_compiling() or type(values_of(weight)) not in (Tensor, torch.nn.Parameter):
        raise RuntimeError(
            "delayed scaling has no amax history for this layer, and torch.compile cannot make one: run one step "
            "in eager mode before you compile, inside mx.autocast(recipe=DelayedScaling()), not by mx.quantize_"
        )
    if home.grad_fn is not None:
        raise RuntimeError(
            f"delayed scaling keeps its amax history with the weight, and this one, of shape {tuple(weight.shape)}, is "
            "computed anew in each step; use a recipe without a history, such as Float8CurrentScaling()"
        )
    recompute.install()
    state = DelayedState(linear_recipe, weight.device)
    setattr(home, name, state)
    return state


def _scales(weight: Tensor, linear_recipe: LinearRecipe, group: Any) -> Scales | None:
    return None if linear_recipe.delayed is None else delayed_state(weight, linear_recipe).step(group)


def _dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype that torch.autocast gives a linear layer; None outside it. Raises ValueError for two dtypes there."""
    dtype = autocast_dtype(x)
    if dtype is None and x.dtype != weight.dtype and x.dtype.is_floating_point:
        raise ValueError(
            f"linear: input and weight must have one dtype, got {x.dtype} and {weight.dtype}; convert one with .to(), "
            "or use torch.autocast"
        )
    return dtype


def check_recipe(
    weight: Tensor, linear_recipe: LinearRecipe, name: str = "", made_for: LinearRecipe | None = None
) -> None:
    """Raise RuntimeError where a quantized weight is not in the format that the active recipe gives weights."""
    values = values_of(weight)
    if not isinstance(values, MXTensor):
        return
    wanted, made = linear_recipe.weight.rowwise, linear_recipe if values is weight else weight.linear_recipe  # type: ignore[attr-defined]
    if made is not linear_recipe and made.weight != linear_recipe.weight:
        raise RuntimeError(
            f"Recipe mismatch for {_named(name, weight)}: FSDP2 has gathered it in the codes of {made}, the active "
            f"recipe is {linear_recipe}; give quantize_ a recipe with quantized_gather=False"
        )
    if wanted is None or wanted.format != values.format:
        by = "" if made_for is None else f", made for {made_for}"
        raise RuntimeError(
            f"Recipe mismatch for {_named(name, weight)}: the weight is held in {values.format}{by}, the active recipe "
            f"is {linear_recipe}; use the recipe that the weight was made for, or a high-precision weight, which takes any"
        )


def _named(name: str, weight: Tensor) -> str:
    return name or f"a weight of shape {tuple(weight.shape)}"


def run(layer: Call, linear_recipe: LinearRecipe, group: Any = None) -> Tensor:
    """A layer quantized as ``linear_recipe`` says."""
    x, given, bias, transposed = layer
    weight = given.t() if transposed else given
    with disable_subclass_torch_function():  # through it, each look at the weight costs as much as an op
        check_recipe(weight, linear_recipe)
        options = Options(linear_recipe, _dtype(x, weight))
    return linear(x, weight, bias, options, _scales(given, linear_recipe, group))


# ---------------------------------------------------------------------------------------------- the ways in


def _plain(func: Any, args: Any, kwargs: Any) -> Any:
    with disable_subclass_torch_function():
        return func(*args, **kwargs)


def _for_weight(func: Any, args: Any, kwargs: Any) -> Any:
    layer = _call(func, args, kwargs, TrainingWeight, TrainingWeight)
    if layer is None or isinstance(layer.input, TrainingWeight):  # two weights: an adapter that is merged, say
        return _plain(func, args, kwargs)
    return run(layer, layer.weight.linear_recipe)


def _for_mode(linear_recipe: LinearRecipe | None, group: Any, func: Any, args: Any, kwargs: Any) -> Any:
    if linear_recipe is None:  # neither an outer mode nor a weight's own roles count here
        dynamo = torch.compiler.is_dynamo_compiling()
        layer = _call(func, args, kwargs, TrainingWeight, TrainingWeight) if dynamo else None
        if layer is not None:  # AOTAutograd, where no mode is left, would ask the weight for its roles
            return run(layer, HIGH_PRECISION)
        with disable_torch_function():
            return func(*args, **kwargs)
    layer = _call(func, args, kwargs, Tensor, torch.nn.Parameter)
    return func(*args, **kwargs) if layer is None else run(layer, linear_recipe, group)


def _weight_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(input, weight, bias)


_attention = attention_over(_weight_linear)


def _attention_for_weight(func: Any, args: Any, kwargs: Any) -> Any:
    return _attention(*args, **kwargs)


WEIGHT_FUNCTIONS.update(dict.fromkeys(SPELLINGS, _for_weight))
WEIGHT_FUNCTIONS[F.multi_head_attention_forward] = _attention_for_weight
MODE_FUNCTIONS: dict[Any, Callable[..., Any]] = dict.fromkeys(SPELLINGS, _for_mode)
"""torch function -> rule(roles, group, func, args, kwargs) inside ``autocast``; roles None: not to quantize."""
MODE_BODIES = {F.multi_head_attention_forward: _attention}
"""torch function -> what does the same over layers that ``autocast`` is to see in their turn."""

"""Torch functions that multiply by a weight run as linear layers: the rules, and the recipe and state of a layer.

Three callers use the rules of this file: ``TrainingWeight.__torch_function__``, the mode of ``autocast``, and torch's
own attention, whose body calls our ``linear`` instead of torch's. ``training/__init__.py`` shows the whole way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.autograd import autocast_dtype
from ..core.compat import disable_subclass_torch_function, disable_torch_function, is_sharded
from ..core.compat_compile import let_dynamo_intercept
from ..core.compat_hooks import attention_over
from ..core.when_imported import after_import
from ..ops.bodies import BODIES, on_components
from ..recipe.linear_recipe import HIGH_PRECISION, LinearRecipe
from ..tensor.mxtensor import MXTensor
from . import recompute
from .delayed_scaling import LOADED, STATE, DelayedState, Scales, owner_of
from .grouped import GATHERED, PRODUCTS, is_of_stack, note_if_experts
from .linear import linear
from .passes import Options
from .training_weight import SEEN, WEIGHT_FUNCTIONS, Seen, TrainingWeight, values_of


class Call(NamedTuple):
    """The arguments of a call, read as a linear layer."""

    input: Any
    weight: Any
    bias: Any = None
    transposed: bool = False
    """The weight, or each one of a stack, is (K, N). Such a call is a layer only if (K, N) is a parameter."""
    ends: Any = None
    """Rows of the input in groups, one for each weight of a stack, end here."""
    flipped: bool = False
    """The result is the transpose of the layer's: the weight was the left operand."""


def _linear(input: Any, weight: Any, bias: Any = None) -> Call:
    return Call(input, weight, bias)


def _mm(input: Any, mat2: Any, **rest: Any) -> Call | None:
    return None if rest else Call(input, mat2, transposed=True)


def _matmul(input: Any, other: Any, **rest: Any) -> Call | None:
    return None if rest else Call(input, other, transposed=True)


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1, **rest: Any) -> Call | None:
    return Call(mat1, mat2, input, transposed=True) if alpha == beta == 1 and not rest else None


CALLS: dict[Any, Callable[..., Call | None]] = {
    F.linear: _linear,
    torch.ops.aten.linear: _linear,
    torch.ops.aten.linear.default: _linear,  # of programs of torch.export
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
}
"""torch function -> its arguments as a layer; None if its options make it something else."""


# ---------------------------------------------------------------------------------------------- stacks of weights

IsWeight = Callable[[Tensor], bool]
"""Whether an operand is a weight."""


def _of_batches(a: Tensor, b: Tensor, is_weight: IsWeight, broadcasts: bool) -> Call | None:
    """A product of two batches of matrices of which one is a stack of weights."""
    if b.dim() == 3 and is_weight(b):
        x = _as_batch(a, b.shape[0], broadcasts)
        return None if x is None or is_weight(a) else Call(x, b, transposed=True)
    if a.dim() == 3 and is_weight(a):
        x = _as_batch(b, a.shape[0], broadcasts)
        return None if x is None or is_weight(b) else Call(x.transpose(1, 2), a, flipped=True)
    return None


def _as_batch(x: Tensor, size: int, broadcasts: bool) -> Tensor | None:
    """x as a batch of ``size`` matrices; None if it cannot be one."""
    if x.dim() == 3 and x.shape[0] == size:
        return x
    if broadcasts and (x.dim() == 2 or (x.dim() == 3 and x.shape[0] == 1)):
        return x.expand(size, x.shape[-2], x.shape[-1])
    return None


def _bmm(is_weight: IsWeight, input: Any, mat2: Any, **rest: Any) -> Call | None:
    return None if rest else _of_batches(input, mat2, is_weight, broadcasts=False)


def _stacked_matmul(is_weight: IsWeight, input: Any, other: Any, **rest: Any) -> Call | None:
    return None if rest or not isinstance(other, Tensor) else _of_batches(input, other, is_weight, broadcasts=True)


def _grouped_mm(
    is_weight: IsWeight, self: Any = None, mat2: Any = None, offs: Any = None, bias: Any = None, out_dtype: Any = None,
    input: Any = None,
) -> Call | None:  # fmt: skip
    a = input if self is None else self
    if bias is not None or out_dtype not in (None, a.dtype):
        return None
    if offs is None:
        return _of_batches(a, mat2, is_weight, broadcasts=False)
    rows_by_stack = a.dim() == 2 and mat2.dim() == 3 and is_weight(mat2) and not is_weight(a)
    return Call(a, mat2, transposed=True, ends=offs) if rows_by_stack else None


def _grouped_mm_fallback(is_weight: IsWeight, input: Any, weight: Any, offs: Any) -> Call | None:
    """transformers' op for the same product, for dtypes that torch's compiler refuses; ends may be int64."""
    return _grouped_mm(is_weight, input, weight, offs.to(torch.int32))


STACK_CALLS: dict[Any, Callable[..., Call | None]] = {
    torch.bmm: _bmm,
    Tensor.bmm: _bmm,
    torch.matmul: _stacked_matmul,
    Tensor.matmul: _stacked_matmul,
    Tensor.__matmul__: _stacked_matmul,
    torch._grouped_mm: _grouped_mm,
}
"""torch function -> its arguments as a layer of a stack, given what is a weight; None if they are something else."""
FALLBACKS = {"grouped_mm_fallback": _grouped_mm_fallback}
"""Op of the namespace ``transformers`` -> the same."""


# ---------------------------------------------------------------------------------------------- calls


def _call(func: Any, args: Any, kwargs: Any, is_weight: IsWeight, is_transposed_weight: IsWeight) -> Call | None:
    """The call as a layer of one weight. None if its second matrix is not a weight, or (K, N) and not a parameter."""
    reader = CALLS.get(func)
    call = None if reader is None else reader(*args, **kwargs)
    if call is None or not isinstance(call.weight, Tensor):
        return None
    x, weight, bias = call[:3]
    if not call.transposed and weight.dim() != 2:  # a product with a vector, or an error of torch's
        return None
    if not (is_transposed_weight if call.transposed else is_weight)(weight):
        return None
    if call.transposed and not (
        x.dim() >= 2 and weight.dim() == 2 and (bias is None or tuple(bias.shape) == (weight.shape[1],))
    ):
        return None
    return call


def _stack_call(func: Any, args: Any, kwargs: Any, is_weight: IsWeight) -> Call | None:
    """The call as a layer of a stack of weights; None if it is something else."""
    reader = STACK_CALLS.get(func)
    return None if reader is None else reader(is_weight, *args, **kwargs)


def _is_training_weight(t: Tensor) -> bool:
    return isinstance(t, TrainingWeight)


def _is_tensor(t: Tensor) -> bool:
    return True


def _is_parameter_or_slice(t: Tensor) -> bool:
    return isinstance(t, torch.nn.Parameter) or (t.dim() == 2 and is_of_stack(t))


def _read(
    func: Any, args: Any, kwargs: Any, is_weight: IsWeight = _is_training_weight,
    is_transposed_weight: IsWeight = _is_training_weight, is_stack: IsWeight = _is_training_weight,
) -> Call | None:  # fmt: skip
    """The call as a layer of one weight, or of a stack; None if it is something else."""
    layer = _call(func, args, kwargs, is_weight, is_transposed_weight)
    return _stack_call(func, args, kwargs, is_stack) if layer is None else layer


# ---------------------------------------------------------------------------------------------- one layer


def _state_owner(weight: Tensor) -> tuple[Any, str]:
    """The parameter that ``weight`` is or is a view of, and the name of its attribute for the state of this layer."""
    base = None if torch.compiler.is_dynamo_compiling() else weight._base
    whole = weight if base is None else base
    stack = getattr(whole, GATHERED, None)
    if isinstance(stack, Tensor):  # some matrices of a stack, which share its state
        return owner_of(stack), STATE
    if base is None or base.numel() == weight.numel():
        return owner_of(whole), STATE
    return owner_of(base), f"{STATE}_{weight.storage_offset()}_{weight.numel()}"


def delayed_state(weight: Tensor, linear_recipe: LinearRecipe) -> DelayedState:
    """The delayed-scaling state of the layer with this weight; it goes on in a new one if its recipe has changed.

    Raises RuntimeError if torch.compile would have to create one, and for a weight that is computed in each step, which
    cannot store a history.
    """
    parameter, name = _state_owner(weight)
    state: DelayedState | None = getattr(parameter, name, None)
    if state is not None and state.linear_recipe == linear_recipe:
        if state.amax.device != weight.device:
            state = state.to(weight.device)
            setattr(parameter, name, state)
        return state
    # Not only under Dynamo: AOTAutograd passes weights without their attributes.
    if torch.compiler.is_dynamo_compiling() or type(values_of(weight)) not in (Tensor, torch.nn.Parameter):
        raise RuntimeError(
            "delayed scaling has no amax history for this layer, and torch.compile cannot create one: run one step "
            "in eager mode before compiling, inside mx.autocast(recipe=DelayedScaling()) and not with mx.quantize_"
        )
    if parameter.grad_fn is not None:
        raise RuntimeError(
            f"delayed scaling stores its amax history on the weight, and this weight of shape {tuple(weight.shape)} is "
            "computed in each step; use a recipe without a history, such as Float8CurrentScaling()"
        )
    recompute.install()
    state = DelayedState(linear_recipe, weight.device) if state is None else state.under(linear_recipe, weight.device)
    loaded = parameter.__dict__.pop(LOADED + name.removeprefix(STATE), None)
    if loaded is not None:
        state.load_state_dict(loaded)
    recompute.restore_later(parameter, name)
    setattr(parameter, name, state)
    return state


def _scales(weight: Tensor, linear_recipe: LinearRecipe, group: Any) -> Scales | None:
    return None if linear_recipe.delayed is None else delayed_state(weight, linear_recipe).step(group)


def _dtype(x: Tensor, weight: Tensor, groups: bool) -> torch.dtype | None:
    """The dtype of torch.autocast for a linear layer; None outside it, and for groups of rows, which it leaves alone.
    Raises ValueError for two dtypes outside it."""
    dtype = None if groups else autocast_dtype(x)
    if dtype is None and x.dtype != weight.dtype and x.dtype.is_floating_point:
        raise ValueError(
            f"linear: input and weight must have one dtype, got {x.dtype} and {weight.dtype}; convert one with .to(), "
            "or use torch.autocast"
        )
    return dtype


def check_recipe(
    weight: Tensor, linear_recipe: LinearRecipe, name: str = "", made_for: LinearRecipe | None = None
) -> None:
    """Raise RuntimeError if a quantized weight is not in the weight format of the active recipe."""
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
        by = "" if made_for is None else f", by {made_for}"
        raise RuntimeError(
            f"Recipe mismatch for {_named(name, weight)}: the weight is stored in {values.format}{by}, the active "
            f"recipe is {linear_recipe}; use the recipe of the weight, or a high-precision weight"
        )


def _named(name: str, weight: Tensor) -> str:
    return name or f"a weight of shape {tuple(weight.shape)}"


def run(layer: Call, linear_recipe: LinearRecipe, group: Any = None) -> Tensor:
    """The result of a layer whose products run by ``linear_recipe``."""
    x, given, bias, transposed, ends, flipped = layer
    weight = given.transpose(-1, -2) if transposed else given
    with disable_subclass_torch_function():  # with it, reading an attribute of the weight costs as much as an op
        check_recipe(weight, linear_recipe)
        options = Options(linear_recipe, _dtype(x, weight, ends is not None))
    y = linear(x, weight, bias, options, _scales(given, linear_recipe, group), None, ends)
    return y.transpose(-1, -2) if flipped else y


def _check_whole(weight: Tensor) -> None:
    """Raise NotImplementedError for a layer under ``autocast`` that tensor parallelism has split."""
    if is_sharded(weight):
        raise NotImplementedError(
            f"autocast: the weight {tuple(weight.shape)} is a DTensor, {weight.placements}, and its layer is "  # type: ignore[attr-defined]
            "torch's own; call quantize_(model, recipe) before parallelize_module, with the styles of mx.parallel"
        )


# ---------------------------------------------------------------------------------------------- rules


def _plain(func: Any, args: Any, kwargs: Any, seen: Seen) -> Any:
    with disable_subclass_torch_function():
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        with SEEN.block(seen):
            return func(*args, **kwargs)


def _for_weight(func: Any, args: Any, kwargs: Any) -> Any:
    """The rule of WEIGHT_FUNCTIONS: the recipe is that of the weight."""
    layer = _read(func, args, kwargs)
    if layer is None or isinstance(layer.input, TrainingWeight):  # two weights, as when an adapter is merged
        noted = note_if_experts(func, args, kwargs)
        return _plain(func, args, kwargs, Seen.NOTED if noted else Seen.UNREAD)
    return run(layer, layer.weight.linear_recipe)


def _for_mode(linear_recipe: LinearRecipe | None, group: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The rule of MODE_FUNCTIONS: the recipe is that of ``autocast``."""
    if linear_recipe is None:  # neither an outer mode nor the recipe of a weight applies here
        layer = None
        if torch.compiler.is_dynamo_compiling():  # AOTAutograd, which sees no mode, would use the recipe of the weight
            layer = _read(func, args, kwargs)
        if layer is not None:
            return run(layer, HIGH_PRECISION)
        with disable_torch_function():
            if torch.compiler.is_dynamo_compiling():
                return func(*args, **kwargs)
            with SEEN.block(Seen.NOTED):
                return func(*args, **kwargs)
    layer = _read(func, args, kwargs, _is_tensor, _is_parameter_or_slice, is_of_stack)
    if linear_recipe is HIGH_PRECISION and (layer is None or is_sharded(layer.weight)):
        return _for_mode(None, group, func, args, kwargs)
    if layer is not None:
        _check_whole(layer.weight)
        return run(layer, linear_recipe, group)
    note_if_experts(func, args, kwargs, in_mode=True)
    return func(*args, **kwargs)


def _weight_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(input, weight, bias)


_attention = attention_over(_weight_linear)


def _attention_for_weight(func: Any, args: Any, kwargs: Any) -> Any:
    return _attention(*args, **kwargs)


WEIGHT_FUNCTIONS.update(dict.fromkeys([*CALLS, *STACK_CALLS, *PRODUCTS], _for_weight))
WEIGHT_FUNCTIONS.update(dict.fromkeys(BODIES, on_components))
WEIGHT_FUNCTIONS[F.multi_head_attention_forward] = _attention_for_weight
MODE_FUNCTIONS: dict[Any, Callable[..., Any]] = dict.fromkeys([*CALLS, *STACK_CALLS], _for_mode)
"""torch function -> rule(linear_recipe, group, func, args, kwargs) for ``autocast``; recipe None: do not quantize.
HIGH_PRECISION: nor may the mode of a block around the graph that is being traced, when it runs."""
MODE_BODIES = {F.multi_head_attention_forward: _attention}
"""torch function -> the same function with linear layers that ``autocast`` intercepts."""


def _read_fallbacks() -> None:
    """Read transformers' own grouped product too, which stands in for torch's in compiled models."""
    for name, reader in FALLBACKS.items():
        func = getattr(torch.ops.transformers, name, None)
        if func is not None:
            STACK_CALLS[func], WEIGHT_FUNCTIONS[func], MODE_FUNCTIONS[func] = reader, _for_weight, _for_mode


after_import("transformers.integrations.moe", _read_fallbacks)
after_import("torch._dynamo.variables.torch", lambda: let_dynamo_intercept(torch._grouped_mm))

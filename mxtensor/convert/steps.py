"""``quantize_`` in two steps: quantization-aware training, and static scales of NVFP4 inputs.

mx.quantize_(model, "mxfp4", step="prepare")    mx.quantize_(model, "nvfp4", step="observe")
train(model)                                    model(data)
mx.quantize_(model, "mxfp4", step="convert")    mx.quantize_(model, "nvfp4", step="convert")
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..core.arguments import described, warn
from ..core.compat import is_sharded
from ..numerics.formats import FORMATS
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..training.prepared_linear import FakeQuantizedLinear, ObservedLinear, StaticInputLinear
from .changes import Change, check_shards, checked_changes, convert
from .configs import by_name, choose
from .model_size import warn_of_unquantized
from .weights import FilterFn, Weight, by_tensor_parallelism, refuse_sharded

NVFP4 = FORMATS["nvfp4"]
STEPS = ("prepare", "observe", "convert")


def run_step(model: nn.Module, config: Any, filter_fn: FilterFn | None, include_head: bool, step: Any) -> None:
    """One of STEPS. Raises ValueError for another one, and for a config or an option that the step cannot use."""
    if not isinstance(step, str) or step not in STEPS:
        raise ValueError(f"quantize_: step is {described(step)}; choose one of {', '.join(map(repr, STEPS))}, or None")
    if config is None and step != "convert":
        raise ValueError(f"quantize_: the step {step!r} needs a config, such as 'nvfp4'")
    if step == "prepare":
        if include_head:
            raise ValueError("quantize_: the step 'prepare' leaves heads out; pass a filter_fn in its place")
        _prepare(model, config, filter_fn)
    elif step == "observe":
        _observe(model, config, filter_fn, include_head)
    else:
        _convert(model, config, filter_fn)


# ---------------------------------------------------------------------------------------------- the first step


def _prepare(model: nn.Module, config: Any, filter_fn: FilterFn | None) -> None:
    """Let the linear layers of ``model`` compute with rounded values. All of them, or none if this raises."""
    chosen, _ = choose(model, config, filter_fn, sharded=lambda module, weight: True)
    linear = [(w, recipe) for w, recipe in chosen if type(w.module) in (nn.Linear, FakeQuantizedLinear)]
    changes = checked_changes(model, linear)
    for change in changes:
        _check_prepared(change)
    others = [weight.fqn for weight, _ in chosen if weight not in [w for w, _ in linear]]
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        names = ", ".join(others[:3])
        warn(f"quantize_: {names}{more} stay in high precision: the step 'prepare' is for nn.Linear only")
    elif not changes:
        warn("quantize_ changed nothing: no nn.Linear passed the filter of the step 'prepare'")
    done: list[FakeQuantizedLinear] = []
    try:
        for change in changes:
            for module, _ in change.places:
                assert isinstance(module, nn.Linear)
                if not isinstance(module, FakeQuantizedLinear):
                    done.append(module)  # type: ignore[arg-type]  # it is one from here on
                FakeQuantizedLinear.from_linear(module, change.recipe)
    except BaseException:
        for module in done:
            FakeQuantizedLinear.to_linear(module)
        raise


def _check_prepared(change: Change) -> None:
    if change.recipe.trains:
        raise ValueError(
            f"quantize_: quantization-aware training simulates a format for inference, and {change.recipe} trains "
            f"({change.fqn}); pass a format such as 'mxfp4'"
        )
    others = [type(m).__name__ for m, _ in change.places if type(m) not in (nn.Linear, FakeQuantizedLinear)]
    if others:
        raise ValueError(
            f"quantize_: {change.fqn} is also the weight of {', '.join(others)}, which would not be trained with "
            "rounded values; leave it out by filter_fn"
        )


def _observe(model: nn.Module, config: Any, filter_fn: FilterFn | None, include_head: bool) -> None:
    """Let linear layers watch the amax of their inputs: those to quantize, and those with NVFP4 weights."""
    chosen, _ = choose(model, config, filter_fn, include_head)
    chosen = [(weight, recipe) for weight, recipe in chosen if type(weight.module) is nn.Linear]
    for weight, recipe in chosen:
        _static(recipe, weight.fqn)
    wanted = {weight.module for weight, _ in chosen}
    for name, module in model.named_modules():
        quantized = type(module) is nn.Linear and _casts_inputs(module.weight)
        if quantized and (filter_fn is None or filter_fn(module, name)):
            wanted.add(module)
    for module in wanted:
        assert isinstance(module, nn.Linear)
        ObservedLinear.from_linear(module)
    if not wanted:
        warn("quantize_ changed nothing: no nn.Linear passed the filter of the step 'observe'")


def _casts_inputs(weight: Any) -> bool:
    if not isinstance(weight, MXTensor) or weight.rowwise is None or weight.recipe.activation is None:
        return False
    return bool(weight.format == NVFP4 and weight.recipe.activation.format == NVFP4)


def _static(recipe: LinearRecipe, fqn: str) -> LinearRecipe:
    """The recipe whose inputs have no global scale: their static scale is in its place."""
    formats = () if recipe.trains else (recipe.stored.format, recipe.activation and recipe.activation.format)
    if formats != (NVFP4, NVFP4):
        raise ValueError(
            f"quantize_: {recipe} is the recipe of {fqn}, and inputs have static scales in NVFP4 only; pass 'nvfp4' to "
            "the steps 'observe' and 'convert'"
        )
    return LinearRecipe.inference(recipe.stored, "nvfp4_single_level", recipe.kernel_preference)


# ---------------------------------------------------------------------------------------------- the second step


def _convert(model: nn.Module, config: Any, filter_fn: FilterFn | None) -> None:
    """Quantize the weights of prepared and observed layers that are not quantized yet, then make the layers plain ones,
    or those with static scales. Without a config the weights stay as they are."""
    layers = {
        module: fqn
        for fqn, module in model.named_modules()
        if isinstance(module, (FakeQuantizedLinear, ObservedLinear)) and (filter_fn is None or filter_fn(module, fqn))
    }
    for module, fqn in layers.items():
        if isinstance(module, ObservedLinear) and (config is not None or isinstance(module.weight, MXTensor)):
            _check_observed(module, fqn)
    chosen: list[tuple[Weight, LinearRecipe]] = []
    if config is not None:
        wanted = (lambda module, fqn: module in layers) if by_name(config) is None else filter_fn
        for one, recipe in choose(model, config, wanted, sharded=by_tensor_parallelism)[0]:
            if one.module in layers:
                is_observed = isinstance(one.module, ObservedLinear)
                chosen.append((one, _static(recipe, one.fqn) if is_observed else recipe))
    changes = checked_changes(model, chosen)
    for change in changes:
        if isinstance(change.places[0][0], FakeQuantizedLinear):
            _check_prepared(change)
    check_shards(changes)
    convert(model, changes)
    for module in layers:
        if isinstance(module, FakeQuantizedLinear):
            module.to_linear()
        elif isinstance(module.weight, MXTensor):
            weight = module.weight
            if _casts_inputs(weight):
                static = MXTensor(weight.rowwise, None, _static(weight.recipe, ""), weight.dtype)
                module.weight = nn.Parameter(static, requires_grad=False)
            StaticInputLinear.from_observed(module)
        else:
            module.to_linear()
    if not layers:
        warn("quantize_ changed nothing: no layer is prepared; call it with step='prepare' or 'observe' before")
    elif filter_fn is None:
        warn_of_unquantized(model, include_head=True)


def _check_observed(module: ObservedLinear, fqn: str) -> None:
    """Raise ValueError for a layer that has seen no input, or one that is not finite, for float16 and for a shard."""
    if is_sharded(module.weight):
        refuse_sharded(module.weight, f"{fqn}.weight")
    if not 0 < float(module.input_amax) < float("inf"):
        raise ValueError(
            f"quantize_: {fqn} has seen inputs with the amax {float(module.input_amax):g}; run data through the model "
            "between the steps 'observe' and 'convert'"
        )
    if module.weight.dtype is torch.float16:
        raise ValueError(
            f"quantize_: {fqn} is float16, in which outputs over a static scale may be too large; use bfloat16"
        )

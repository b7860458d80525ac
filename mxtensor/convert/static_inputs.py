"""Static scales of NVFP4 activations under torchao's names: ``prepare``, run data through the model, ``convert``.

mx.quantize_(model, mx.NVFP4DynamicActivationNVFP4WeightConfig(step="prepare"))
model(data)
mx.quantize_(model, mx.NVFP4DynamicActivationNVFP4WeightConfig(step="convert"))
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..numerics.formats import FORMATS
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..training.static_input_linear import ObservedLinear, StaticInputLinear
from .changes import Change, checked_changes
from .choose import choose
from .configs import NVFP4DynamicActivationNVFP4WeightConfig
from .torchao import from_torchao
from .weights import FilterFn

NVFP4 = FORMATS["nvfp4"]
KINDS = {NVFP4DynamicActivationNVFP4WeightConfig.__name__: NVFP4DynamicActivationNVFP4WeightConfig}
STEPS = ("prepare", "convert")


def static_config_of(config: Any) -> NVFP4DynamicActivationNVFP4WeightConfig | None:
    """A config with a step, ours or torchao's; None for another object. Raises ValueError for an unknown step."""
    if isinstance(config, type) or getattr(config, "step", None) is None:
        return None
    if not isinstance(config, NVFP4DynamicActivationNVFP4WeightConfig):
        config = from_torchao(config, KINDS)
        if config is None:
            return None
    step = str(getattr(config.step, "value", config.step)).lower()
    if step not in STEPS:
        raise ValueError(
            f"NVFP4DynamicActivationNVFP4WeightConfig: step is {config.step!r}; choose one of 'prepare', 'convert', or "
            "None for scales of each input"
        )
    found: NVFP4DynamicActivationNVFP4WeightConfig = replace(config, step=step)
    return found


def prepare(
    model: nn.Module, config: NVFP4DynamicActivationNVFP4WeightConfig, filter_fn: FilterFn | None, head: bool
) -> int:
    """Let linear layers watch their inputs: those to quantize, and those whose weights are NVFP4 already.

    Returns how many.
    """
    chosen, _ = choose(model, _dynamic(config), filter_fn, head)
    wanted = {weight.module for weight, _ in chosen if type(weight.module) is nn.Linear}
    for name, module in model.named_modules():
        quantized = type(module) is nn.Linear and _casts_inputs(module.weight)
        if quantized and (filter_fn is None or filter_fn(module, name)):
            wanted.add(module)
    for module in wanted:
        assert isinstance(module, nn.Linear)
        ObservedLinear.from_linear(module)
    return len(wanted)


def _dynamic(config: NVFP4DynamicActivationNVFP4WeightConfig) -> NVFP4DynamicActivationNVFP4WeightConfig:
    """Both tensors with a global scale."""
    return replace(config, step=None, use_dynamic_per_tensor_scale=True)


def _casts_inputs(weight: Any) -> bool:
    if not isinstance(weight, MXTensor) or weight.rowwise is None or weight.recipe.activation is None:
        return False
    return bool(weight.format == NVFP4 and weight.recipe.activation.format == NVFP4)


def _static(recipe: LinearRecipe) -> LinearRecipe:
    """The recipe whose inputs have no global scale."""
    return LinearRecipe.inference(recipe.stored, "nvfp4_single_level", recipe.kernel_preference)


def changes_of(
    model: nn.Module, config: NVFP4DynamicActivationNVFP4WeightConfig, filter_fn: FilterFn | None
) -> list[Change]:
    """The changes of weights of observed layers that are not quantized yet.

    Raises ValueError for a layer that has seen no input, or one that is not finite, and for float16.
    """
    for name, module in model.named_modules():
        if isinstance(module, ObservedLinear):
            if not 0 < float(module.input_amax) < float("inf"):
                raise ValueError(
                    f"quantize_: {name} has seen inputs with the amax {float(module.input_amax):g}; run data through "
                    "the model between the steps 'prepare' and 'convert'"
                )
            if module.weight.dtype is torch.float16:
                raise ValueError(
                    f"quantize_: {name} is float16, in which outputs over a static scale may be too large; use bfloat16"
                )

    def observed(module: nn.Module, name: str) -> bool:
        return isinstance(module, ObservedLinear) and (filter_fn is None or bool(filter_fn(module, name)))

    chosen, _ = choose(model, _dynamic(config), observed)
    return checked_changes(model, [(weight, _static(recipe)) for weight, recipe in chosen])


def finish(model: nn.Module, filter_fn: FilterFn | None) -> int:
    """Give observed layers with quantized weights their static scales; returns how many."""
    found = [
        module for name, module in model.named_modules()
        if isinstance(module, ObservedLinear) and (filter_fn is None or filter_fn(module, name))
    ]  # fmt: skip
    for module in found:
        weight: Any = module.weight
        if _casts_inputs(weight):
            static = MXTensor(weight.rowwise, None, _static(weight.recipe), weight.dtype)
            module.weight = nn.Parameter(static, requires_grad=False)
        StaticInputLinear.from_observed(module)
    return len(found)

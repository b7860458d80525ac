"""State dicts of modules with quantized parameters: one hook saves, one hook loads.

    register_state_dict_hooks(module)

A TrainingWeight is saved as an ordinary tensor over the same memory. At loading, values take the format or the recipe
that the module's parameter has; ``load_state_dict(assign=True)`` would otherwise replace the parameter by a plain one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..tensor.mxtensor import MXTensor, quantize_as
from .training_weight import STATE, TrainingWeight, local_of, sharded_like


def register_state_dict_hooks(module: nn.Module) -> None:
    """Save the module's TrainingWeights as plain tensors, and load values in the format or recipe of its parameters."""
    module.register_state_dict_post_hook(save_plain)
    module.register_load_state_dict_pre_hook(load_as_parameters)


def save_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Replace each TrainingWeight in a new state dict by its high-precision values."""
    for name in module._parameters:
        value = state_dict.get(prefix + name)
        weight = local_of(value)
        if isinstance(weight, TrainingWeight):
            state_dict[prefix + name] = sharded_like(value, weight.high_precision)


def load_as_parameters(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
    missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
) -> None:  # fmt: skip
    """Give each value of a state dict the format or the recipe of the parameter that it is loaded into.

    Adds to ``error_msgs`` if a value is quantized in another format than the parameter: quantizing it again would lose
    precision silently. (torch passes ``strict=True`` to every hook, whatever ``load_state_dict`` was called with.)
    """
    assign = bool(local_metadata.get("assign_to_params_buffers"))
    for name, parameter in module._parameters.items():
        key = prefix + name
        value = state_dict.get(key)
        if parameter is None or value is None:
            continue
        if isinstance(parameter, MXTensor):
            if isinstance(value, MXTensor) and value.format != parameter.format:
                error_msgs.append(
                    f"format mismatch for {key}: the checkpoint holds {value.format}, the model "
                    f"{parameter.format}; quantize the model in that format, or load the values' dequantize()"
                )
                state_dict[key] = parameter.detach()  # the parameter stays; torch raises the error at the end
            elif assign and not isinstance(value, MXTensor) and value.shape == parameter.shape:
                new = quantize_as(value, parameter.recipe, parameter.copies)
                state_dict[key] = nn.Parameter(new, requires_grad=parameter.requires_grad)
        elif assign and isinstance(local_of(parameter), TrainingWeight):
            state_dict[key] = _with_recipe(value, parameter)


def _with_recipe(value: Any, parameter: nn.Parameter) -> Any:
    """``value`` as a parameter with the recipe of ``parameter``; ``value`` itself if it has a recipe already."""
    weight, values = local_of(parameter), local_of(value)
    if not isinstance(values, Tensor) or isinstance(values, TrainingWeight):
        return value
    if values is not value:  # a DTensor, loaded into a sharded parameter
        local = TrainingWeight(values.detach(), weight.linear_recipe, weight.shard)
        return nn.Parameter(sharded_like(value, local), parameter.requires_grad)
    if isinstance(value, MXTensor):  # from a model for inference
        value = value.dequantize()
    out = nn.Parameter(TrainingWeight(value.detach(), weight.linear_recipe), weight.requires_grad)
    state = getattr(weight, STATE, None)
    if state is not None:  # a history on another device, meta for one, has no values to go on with
        same = state.history.device == value.device
        setattr(out, STATE, state if same else type(state)(state.linear_recipe, value.device))
    return out

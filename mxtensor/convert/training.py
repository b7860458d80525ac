"""``quantize_`` for training: parameters stay high-precision and carry the roles of their layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics.cast import Cast
from ..numerics.formats import FORMATS, ScaleCalculationMode, get_mx_format
from ..recipe.base import one_weight_copy
from ..recipe.kernel_preference import KernelPreference
from ..recipe.linear_recipe import LinearRecipe, TensorCasts
from ..tensor.mxtensor import MXTensor
from ..training.interception import delayed_state
from ..training.training_weight import STATE, TrainingWeight, local_of, sharded_like, values_of

RECIPE_KERNELS = {
    "emulated": KernelPreference.EMULATED,
    "cublas": KernelPreference.AUTO,
    "cutlass": KernelPreference.AUTO,
}
"""torchao's names of kernels -> ours."""


@dataclass(frozen=True)
class MXLinearConfig:
    """MX training of linear layers (fields as torchao has them): one element dtype for all, or one for each role."""

    block_size: int = 32
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn
    elem_dtype_weight_override: torch.dtype | str | None = None
    elem_dtype_grad_output_override: torch.dtype | str | None = None
    kernel_preference: KernelPreference | str = KernelPreference.AUTO
    scale_calculation_mode: ScaleCalculationMode | str = ScaleCalculationMode.RCEIL
    single_weight_copy: bool = False
    """As that of recipes: dgrad's copy of a weight is cast from fprop's, what FSDP2 needs to gather one copy."""
    quantized_gather: bool = True
    """As that of recipes: FSDP2 gathers codes where that changes no bit."""

    @classmethod
    def from_recipe_name(cls, name: str) -> MXLinearConfig:
        """torchao's recipe names: ``mxfp8_emulated``, ``mxfp8_cublas``, ``mxfp8_cublas_rceil``, ``mxfp4_emulated`` ...

        The part after the format names the kernel (``emulated``, else the fastest there is) and the scaling mode.
        Raises ValueError for a format it does not know.
        """
        name = str(getattr(name, "value", name))
        element, _, kernel = name.removesuffix("_rceil").partition("_")
        if element not in ("mxfp8", "mxfp4") or kernel not in RECIPE_KERNELS:
            kernels = ", ".join(f"_{k}" for k in RECIPE_KERNELS)
            raise ValueError(f"unknown recipe name {name!r}; choose mxfp8 or mxfp4 with one of {kernels}, then _rceil")
        mode = ScaleCalculationMode.RCEIL if name.endswith("_rceil") else ScaleCalculationMode.FLOOR
        format = FORMATS[element]
        return cls(elem_dtype=format.name, kernel_preference=RECIPE_KERNELS[kernel], scale_calculation_mode=mode)

    def linear_recipe(self) -> LinearRecipe:
        """The casts that this stands for. Raises ValueError for a format, block or mode it does not know."""

        def casts(override: torch.dtype | str | None) -> TensorCasts:
            format = get_mx_format(self.elem_dtype if override is None else override, self.block_size)
            return TensorCasts.of(Cast.of(format, self.scale_calculation_mode))

        weight = casts(self.elem_dtype_weight_override)
        return LinearRecipe(
            casts(None),
            one_weight_copy(weight) if self.single_weight_copy else weight,
            casts(self.elem_dtype_grad_output_override),
            None,
            KernelPreference.of(self.kernel_preference),
            "MXLinearConfig",
            self.quantized_gather,
        )


def training_parameter(weight: nn.Parameter, linear_recipe: LinearRecipe) -> nn.Parameter:
    """A parameter over the same memory that carries ``linear_recipe``."""
    out = nn.Parameter(TrainingWeight(values_of(weight).detach(), linear_recipe), requires_grad=weight.requires_grad)
    if linear_recipe.delayed is not None:
        delayed_state(out, linear_recipe)
    return out


def plain_in_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """After a module's state dict is made: what is saved are ordinary tensors over the parameters' memory."""
    for name in module._parameters:
        value = state_dict.get(prefix + name)
        weight = local_of(value)
        if isinstance(weight, TrainingWeight):
            state_dict[prefix + name] = sharded_like(value, weight.high_precision)


def register_hooks(module: nn.Module) -> None:
    """State dicts of the module hold plain tensors, and loading one keeps the roles of its parameters."""
    module.register_state_dict_post_hook(plain_in_state_dict)
    module.register_load_state_dict_pre_hook(keep_recipe)


def keep_recipe(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
    missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
) -> None:  # fmt: skip
    """Before a state dict is loaded: ``assign=True`` would put a plain parameter in the place of one with roles."""
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        value, weight = state_dict.get(prefix + name), local_of(parameter)
        if not local_metadata.get("assign_to_params_buffers") or not isinstance(weight, TrainingWeight):
            continue
        values = local_of(value)
        if not isinstance(values, Tensor) or isinstance(values, TrainingWeight):
            continue
        if values is not value:  # a shard for a shard
            new = TrainingWeight(values.detach(), weight.linear_recipe, weight.shard)
            state_dict[prefix + name] = nn.Parameter(sharded_like(value, new), parameter.requires_grad)
            continue
        if isinstance(value, MXTensor):  # of a model for inference
            value = value.dequantize()
        value = nn.Parameter(value, requires_grad=weight.requires_grad)
        state_dict[prefix + name] = made = training_parameter(value, weight.linear_recipe)
        state = getattr(weight, STATE, None)
        if state is not None and state.history.device == value.device:  # not of a model that was made on meta
            setattr(made, STATE, state)

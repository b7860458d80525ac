"""What ``quantize_`` quantizes by: torchao's configs, and the names and recipes that stand for a LinearRecipe.

mx.quantize_(model, mx.MXDynamicActivationMXWeightConfig(weight_dtype="mxfp4"))
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from ..core.arguments import check_fields, described
from ..core.names import find, operands_of, suggestion
from ..core.peer_names import instead_of
from ..numerics.cast import Cast
from ..numerics.formats import FORMATS, Format, ScaleCalculationMode, get_mx_format
from ..recipe import RECIPES
from ..recipe.base import Recipe, one_weight_copy
from ..recipe.kernel_preference import KernelPreference
from ..recipe.known_fields import KnownFields
from ..recipe.linear_recipe import LinearRecipe, TensorCasts
from .float8_configs import Float8DynamicActivationFloat8WeightConfig, Float8WeightOnlyConfig
from .float8_linear_config import Float8LinearConfig
from .fqn_config import FqnToConfig
from .torchao import from_torchao
from .training_configs import Float8TrainingOpConfig, MXFP8TrainingOpConfig, NVFP4TrainingConfig


@dataclass
class MXDynamicActivationMXWeightConfig(KnownFields):
    """MX weights, and activations cast to MX on the fly (torchao's fields)."""

    block_size: int = 32
    activation_dtype: torch.dtype | str = torch.float8_e4m3fn
    weight_dtype: torch.dtype | str = torch.float8_e4m3fn
    kernel_preference: KernelPreference | str = KernelPreference.AUTO
    scaling_mode: ScaleCalculationMode | str = ScaleCalculationMode.RCEIL

    def linear_recipe(self) -> LinearRecipe:
        """The casts of weight and activation as a recipe. Raises ValueError for an unknown format, block or mode."""
        check_fields(self)
        weight, activation = (
            Cast.of(get_mx_format(dtype, self.block_size), self.scaling_mode)
            for dtype in (self.weight_dtype, self.activation_dtype)
        )
        return LinearRecipe.inference(weight, activation, KernelPreference.of(self.kernel_preference))


def _nvfp4(use_dynamic_per_tensor_scale: bool) -> Cast:
    return Cast(FORMATS["nvfp4" if use_dynamic_per_tensor_scale else "nvfp4_single_level"])


@dataclass
class NVFP4DynamicActivationNVFP4WeightConfig(KnownFields):
    """NVFP4 weights, and activations cast to NVFP4 on the fly (torchao's fields)."""

    use_triton_kernel: bool = True
    """Accepted for compatibility with torchao; the device decides which kernels can run."""
    use_dynamic_per_tensor_scale: bool = True
    step: Any = None
    """For ``quantize_``: ``"prepare"`` lets layers watch the amax of their inputs, and ``"convert"`` quantizes weights
    and gives each layer a static scale of its inputs for that amax, so that inference takes no amax over a tensor."""
    kernel_preference: KernelPreference | str = KernelPreference.AUTO

    def linear_recipe(self) -> LinearRecipe:
        """The casts of weight and activation as a recipe. Raises ValueError for an unknown format, block or mode."""
        check_fields(self)
        if self.step is not None:
            raise ValueError(
                f"NVFP4DynamicActivationNVFP4WeightConfig: step={self.step!r} is for quantize_ alone; leave it out"
            )
        cast = _nvfp4(self.use_dynamic_per_tensor_scale)
        return LinearRecipe.inference(cast, cast, KernelPreference.of(self.kernel_preference))


@dataclass
class NVFP4WeightOnlyConfig(KnownFields):
    """NVFP4 weights and high-precision activations (torchao's fields)."""

    use_dynamic_per_tensor_scale: bool = True
    kernel_preference: KernelPreference | str = KernelPreference.AUTO

    def linear_recipe(self) -> LinearRecipe:
        """The casts of weight and activation as a recipe. Raises ValueError for an unknown format, block or mode."""
        check_fields(self)
        cast = _nvfp4(self.use_dynamic_per_tensor_scale)
        return LinearRecipe.inference(cast, None, KernelPreference.of(self.kernel_preference))


RECIPE_KERNELS = {
    "emulated": KernelPreference.EMULATED,
    "cublas": KernelPreference.AUTO,
    "cutlass": KernelPreference.AUTO,
}
"""torchao's kernel names -> KernelPreference."""


@dataclass
class MXLinearConfig(KnownFields):
    """MX training of linear layers: one element dtype for all tensors, or one for each.

    The fields are those of torchao before 0.18, which has ``MXFP8TrainingOpConfig`` instead; the defaults are those of
    0.18.
    """

    block_size: int = 32
    elem_dtype: torch.dtype | str = torch.float8_e4m3fn
    elem_dtype_weight_override: torch.dtype | str | None = None
    elem_dtype_grad_output_override: torch.dtype | str | None = None
    kernel_preference: KernelPreference | str = KernelPreference.AUTO
    scale_calculation_mode: ScaleCalculationMode | str = ScaleCalculationMode.RCEIL
    single_weight_copy: bool = False
    """As in recipes: dgrad's copy of a weight is cast from fprop's copy. FSDP2 needs this to gather one copy."""
    quantized_gather: bool = True
    """As in recipes: FSDP2 gathers codes when the result is bitwise identical."""

    @classmethod
    def from_recipe_name(cls, name: str) -> MXLinearConfig:
        """torchao's recipe names: ``mxfp8_emulated``, ``mxfp8_cublas``, ``mxfp8_cublas_rceil``, ``mxfp4_emulated`` ...

        The part after the format names the kernel (``emulated``; otherwise the fastest available). Scales are RCEIL,
        as in the recipes of torchao 0.18, with ``_rceil`` or without it. Raises ValueError for an unknown name.
        """
        name = getattr(name, "value", name)
        name = re.sub(r"[-\s]+", "_", name.lower()) if isinstance(name, str) else described(name)
        element, _, kernel = name.removesuffix("_rceil").partition("_")
        if element not in ("mxfp8", "mxfp4") or kernel not in RECIPE_KERNELS:
            kernels = ", ".join(f"_{k}" for k in RECIPE_KERNELS)
            raise ValueError(f"unknown recipe name {name!r}; choose mxfp8 or mxfp4 with one of {kernels}, then _rceil")
        return cls(elem_dtype=FORMATS[element].name, kernel_preference=RECIPE_KERNELS[kernel])

    def linear_recipe(self) -> LinearRecipe:
        """The casts of the three products as a recipe. Raises ValueError for an unknown format, block or mode."""
        check_fields(self)

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


TORCHAO: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        Float8DynamicActivationFloat8WeightConfig, Float8LinearConfig, Float8TrainingOpConfig, Float8WeightOnlyConfig,
        MXDynamicActivationMXWeightConfig, MXFP8TrainingOpConfig, MXLinearConfig,
        NVFP4DynamicActivationNVFP4WeightConfig, NVFP4TrainingConfig, NVFP4WeightOnlyConfig,
    )
}  # fmt: skip
"""torchao's configs by name: an object of torchao's own class with this name is read by its fields."""

Config = (
    str
    | torch.dtype
    | Format
    | LinearRecipe
    | MXDynamicActivationMXWeightConfig
    | NVFP4DynamicActivationNVFP4WeightConfig
    | NVFP4WeightOnlyConfig
    | MXLinearConfig
    | Float8DynamicActivationFloat8WeightConfig
    | Float8WeightOnlyConfig
    | Float8LinearConfig
    | Float8TrainingOpConfig
    | MXFP8TrainingOpConfig
    | NVFP4TrainingConfig
    | Recipe
    | FqnToConfig
)
"""What ``quantize_`` accepts."""


def by_name(config: Any) -> FqnToConfig | None:
    """A config that has a config for each name, ours or torchao's; None for another."""
    if isinstance(config, FqnToConfig):
        return config
    kinds = {FqnToConfig.__name__: FqnToConfig}
    return None if isinstance(config, type) else from_torchao(config, kinds)


def recipe_of(config: Any) -> LinearRecipe:
    """The LinearRecipe of a config: a LinearRecipe itself, an object with ``linear_recipe()``, a config object of
    torchao, or the name of a format.

    A name (``"mxfp8"``, ``"mxfp8-weight-only"``, ``"mxfp4-weight-mxint8-activation"``), a dtype or a Format gives an
    inference recipe. Raises ValueError for an unknown format name, TypeError for any other object.
    """
    if isinstance(config, type):
        raise TypeError(f"cannot quantize with the class {config.__name__}; pass an instance: {config.__name__}()")
    if isinstance(config, LinearRecipe):
        return config
    if hasattr(config, "linear_recipe"):
        return config.linear_recipe()  # type: ignore[no-any-return]
    if isinstance(config, str):
        return _recipe_called(config)
    if isinstance(config, (torch.dtype, Format)):
        return LinearRecipe.inference(config, config)
    ours = from_torchao(config, TORCHAO)
    if ours is not None:
        return ours.linear_recipe()  # type: ignore[no-any-return]
    instead = instead_of(type(config).__name__)
    if instead:
        raise TypeError(f"cannot quantize with {described(config)}{instead}")
    raise TypeError(
        f"cannot quantize with {described(config)}; pass a format name like 'mxfp8' or 'mxfp8-weight-only', a "
        "LinearRecipe, or one of the configs MXDynamicActivationMXWeightConfig, "
        "NVFP4DynamicActivationNVFP4WeightConfig, NVFP4WeightOnlyConfig; to train, MXLinearConfig or a recipe such as "
        "MXFP8BlockScaling()"
    )


CLASSES = {kind.__name__: f"mx.recipe.{kind.__name__}" for kind in RECIPES} | {
    kind.__name__: f"mx.{kind.__name__}"
    for kind in (
        MXDynamicActivationMXWeightConfig, NVFP4DynamicActivationNVFP4WeightConfig, NVFP4WeightOnlyConfig,
        MXLinearConfig,
    )
}  # fmt: skip
"""Name of a class of configs -> where it is."""


def _recipe_called(text: str) -> LinearRecipe:
    """The inference recipe of a name: a format's, or one that ``operands_of`` takes apart."""
    weight, activation = operands_of(text)
    try:
        return LinearRecipe.inference(weight, activation)
    except ValueError:
        named = find(text, CLASSES)
        if named is not None:
            raise ValueError(f"{text!r} names a class; pass an instance, {CLASSES[named]}()") from None
        short = [f"{format}-weight-only" for format in (*FORMATS, *FORMATS.aliases)]
        hint = suggestion(text, [*CLASSES, *short]) if len(text) > 5 else ""
        if hint and activation == text and not suggestion(text, FORMATS):
            raise ValueError(f"unknown format or config {text!r}; {hint}") from None
        raise

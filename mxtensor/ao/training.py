"""torchao's configs of training: MX, MXFP8, NVFP4 and float8.

quantize_(model, MXFP8TrainingOpConfig(wgrad_with_hp=True))
convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("rowwise"))
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from ..core.arguments import check_fields, described
from ..numerics.cast import Cast
from ..numerics.formats import FORMATS, ScaleCalculationMode, get_mx_format
from ..recipe import NVFP4BlockScaling
from ..recipe.base import KnownFields, one_weight_copy
from ..recipe.linear_recipe import KernelPreference, LinearRecipe, TensorCasts


class MXFP8TrainingRecipe(Enum):
    """torchao's names for ``MXFP8TrainingOpConfig.from_recipe``."""

    MXFP8_RCEIL = "mxfp8_rceil"
    MXFP8_RCEIL_WGRAD_WITH_HP = "mxfp8_rceil_wgrad_with_hp"
    MXFP8_EMULATED_RCEIL = "mxfp8_emulated_rceil"


def _check_out_dtype(config: Any) -> None:
    if config.out_dtype not in (None, torch.bfloat16):
        raise ValueError(
            f"{type(config).__name__}: out_dtype {config.out_dtype} is not available: results have the dtype of the "
            "input; leave it torch.bfloat16 or None"
        )


@dataclass
class MXFP8TrainingOpConfig(KnownFields):
    """MXFP8 training of linear layers (torchao's fields)."""

    kernel_preference: KernelPreference | str = KernelPreference.AUTO
    out_dtype: torch.dtype | None = torch.bfloat16
    """Accepted for compatibility with torchao; results have the dtype of the input."""
    wgrad_with_hp: bool = False
    """Compute wgrad in high precision."""
    scale_calculation_mode: ScaleCalculationMode | str = ScaleCalculationMode.RCEIL
    pad_token_groups_for_grouped_mm: bool = False
    """Accepted for compatibility with torchao; groups of any size need no padding."""

    @classmethod
    def from_recipe(cls, recipe: MXFP8TrainingRecipe | str) -> MXFP8TrainingOpConfig:
        """The config with torchao's name: a member of ``MXFP8TrainingRecipe`` or its value.

        Raises ValueError for another name.
        """
        name, names = getattr(recipe, "value", recipe), [member.value for member in MXFP8TrainingRecipe]
        if name not in names:
            raise ValueError(f"{cls.__name__}: recipe {name!r} is not available; choose one of {', '.join(names)}")
        return cls("emulated" if "emulated" in name else "auto", wgrad_with_hp=name.endswith("_wgrad_with_hp"))

    def linear_recipe(self) -> LinearRecipe:
        """The casts of the three products as a recipe. Raises ValueError for an unknown mode or preference."""
        _check_out_dtype(self)
        cast = Cast.of(FORMATS["mxfp8_e4m3"], self.scale_calculation_mode)
        both = TensorCasts(cast, cast)
        other = TensorCasts(cast) if self.wgrad_with_hp else both
        preference = KernelPreference.of(self.kernel_preference)
        return LinearRecipe(other, both, other, None, preference, type(self).__name__)


@dataclass
class Float8TrainingOpConfig(KnownFields):
    """Float8 training of linear layers (torchao's fields)."""

    float8_dtype: torch.dtype = torch.float8_e4m3fn
    out_dtype: torch.dtype | None = torch.bfloat16
    """Accepted for compatibility with torchao; results have the dtype of the input."""
    pad_token_groups_for_grouped_mm: bool = False
    """Accepted for compatibility with torchao; groups of any size need no padding."""
    float8_linear_recipe: str = "rowwise"
    """``rowwise``: E4M3, power-of-two scales for each row; ``rowwise_with_gw_hp``: the same, one scale for dgrad's
    weight and wgrad in high precision; ``tensorwise``: one scale for each tensor, E5M2 gradients."""

    def linear_recipe(self) -> LinearRecipe:
        """The casts of the three products as a recipe. Raises ValueError for what is not available."""
        _check_out_dtype(self)
        if self.float8_dtype is not torch.float8_e4m3fn:
            raise ValueError(
                f"{type(self).__name__}: float8_dtype {self.float8_dtype} is not available; leave it "
                "torch.float8_e4m3fn"
            )
        name = getattr(self.float8_linear_recipe, "value", self.float8_linear_recipe)
        if name not in FLOAT8_RECIPES:
            raise ValueError(
                f"{type(self).__name__}: float8_linear_recipe {name!r} is not available; choose one of "
                f"{', '.join(FLOAT8_RECIPES)}"
            )
        recipe = Float8LinearConfig.from_recipe_name(name).linear_recipe()
        return replace(recipe, name=type(self).__name__, quantized_gather=True)


@dataclass
class NVFP4TrainingConfig(KnownFields):
    """NVFP4 training of linear layers (torchao's fields), by the casts of ``NVFP4BlockScaling``."""

    kernel_preference: KernelPreference | str = KernelPreference.AUTO
    process_group: Any = None
    """Must be None: ``mx.parallel`` has the styles of tensor parallelism."""
    world_size: int | None = None
    rht_sign_vector: Any = None
    """16 signs (-1 or 1) of the random Hadamard transform; None: those of ``NVFP4BlockScaling``."""

    def linear_recipe(self) -> LinearRecipe:
        """The casts of the three products as a recipe. Raises ValueError for what is not available."""
        if self.process_group is not None:
            raise ValueError(
                f"{type(self).__name__}: process_group is not available; use mx.parallel.ColwiseParallel and "
                "RowwiseParallel"
            )
        recipe = NVFP4BlockScaling(kernel_preference=self.kernel_preference).linear_recipe()
        if self.rht_sign_vector is None:
            return replace(recipe, name=type(self).__name__)
        signs = [int(sign) for sign in self.rht_sign_vector]
        if len(signs) != 16 or not {*signs} <= {-1, 1}:
            raise ValueError(f"{type(self).__name__}: rht_sign_vector is {signs}; use 16 values of -1 or 1")
        bits = sum((sign < 0) << place for place, sign in enumerate(signs))
        input, grad = (replace(casts, signs=bits) for casts in (recipe.input, recipe.grad))
        return replace(recipe, input=input, grad=grad, name=type(self).__name__)


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


# ---------------------------------------------------------------------------------------------- float8 by its operands

TYPES = ("dynamic", "disabled")
GRANULARITIES = {"tensorwise": "tensor", "axiswise": "row"}
"""torchao's granularity -> the part of a float8 tensor that has one scale, in the names of formats."""
ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
E4M3, E5M2 = ELEMENTS


class Float8LinearRecipeName(Enum):
    """torchao's names for ``Float8LinearConfig.from_recipe_name``."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


FLOAT8_RECIPES = tuple(member.value for member in Float8LinearRecipeName)


@dataclass
class CastConfig(KnownFields):
    """How ``Float8LinearConfig`` casts one operand (torchao's fields)."""

    scaling_type: Any = "dynamic"
    """``dynamic``, or ``disabled`` for high precision; or torchao's member."""
    scaling_granularity: Any = "tensorwise"
    """``tensorwise``: one scale; ``axiswise``: one for each row of the contraction; or torchao's member."""
    target_dtype: torch.dtype | None = None
    """torch.float8_e4m3fn or torch.float8_e5m2; None: E5M2 for gradients, E4M3 for the others."""


@dataclass
class Float8LinearConfig(KnownFields):
    """Float8 training of linear layers, with a cast for each operand of the three products (torchao's fields).

    None for a cast ``..._for_...`` is the cast of the same tensor for its other product.
    """

    cast_config_input: Any = field(default_factory=CastConfig)
    cast_config_input_for_grad_weight: Any = None
    cast_config_weight: Any = field(default_factory=CastConfig)
    cast_config_weight_for_grad_input: Any = None
    cast_config_grad_output: Any = field(default_factory=CastConfig)
    cast_config_grad_output_for_grad_weight: Any = None
    gemm_config_output: Any = None
    """This and the next two: accepted for compatibility with torchao; products accumulate in float32."""
    gemm_config_grad_input: Any = None
    gemm_config_grad_weight: Any = None
    enable_fsdp_float8_all_gather: bool = False
    """FSDP2 gathers codes when the result is bitwise identical (``LinearRecipe.quantized_gather``)."""
    pad_inner_dim: bool = False
    """Accepted for compatibility with torchao; sizes need no padding."""
    emulate: bool = False
    """Products of dequantized operands, in plain torch."""
    force_recompute_fp8_weight_in_bwd: bool = False
    """Accepted for compatibility with torchao, where it has no effect either."""
    round_scales_to_power_of_2: bool = False

    @classmethod
    def from_recipe_name(cls, recipe_name: Any) -> Float8LinearConfig:
        """torchao's recipes: ``tensorwise``, ``rowwise``, ``rowwise_with_gw_hp``, or torchao's member.

        Raises ValueError for another name.
        """
        name = getattr(recipe_name, "value", recipe_name)
        if name not in FLOAT8_RECIPES:
            raise ValueError(
                f"{cls.__name__}: recipe {described(name)} is not available; choose one of {', '.join(FLOAT8_RECIPES)}"
            )
        row, off = CastConfig("dynamic", "axiswise", E4M3), CastConfig("disabled")
        if name == "tensorwise":
            return cls()
        if name == "rowwise":
            return cls(row, None, row, None, row, round_scales_to_power_of_2=True)
        return cls(row, off, row, CastConfig(), row, off, round_scales_to_power_of_2=True)

    def linear_recipe(self) -> LinearRecipe:
        """The casts of the three products as a recipe. Raises ValueError for what is not available."""
        casts = {
            tensor: (
                self._cast(f"cast_config_{tensor}", None, dtype),
                self._cast(f"cast_config_{tensor}_for_{product}", f"cast_config_{tensor}", dtype),
            )
            for tensor, product, dtype in (
                ("input", "grad_weight", E4M3), ("weight", "grad_input", E4M3), ("grad_output", "grad_weight", E5M2)
            )
        }  # fmt: skip
        input, weight, grad = casts["input"], casts["weight"], casts["grad_output"]
        for product, one, other, names in (
            ("output", input[0], weight[0], "cast_config_input and cast_config_weight"),
            ("grad_input", grad[0], weight[1], "cast_config_grad_output and cast_config_weight_for_grad_input"),
            ("grad_weight", grad[1], input[1], "cast_config_..._for_grad_weight of input and grad_output"),
        ):
            if (one is None) != (other is None):
                raise ValueError(
                    f"{type(self).__name__}: one operand of {product} is disabled and the other is not; set both of "
                    f"{names} to disabled, or none"
                )
        return LinearRecipe(
            TensorCasts(*input), TensorCasts(*weight), TensorCasts(*grad),
            kernel_preference=KernelPreference.EMULATED if self.emulate else KernelPreference.AUTO,
            name=type(self).__name__,
            quantized_gather=bool(self.enable_fsdp_float8_all_gather),
        )  # fmt: skip

    def _cast(self, name: str, otherwise: str | None, default: torch.dtype) -> Cast | None:
        """The cast that a field describes; None: high precision."""
        given = getattr(self, name)
        if given is None and otherwise is not None:
            given = getattr(self, otherwise)
        if not hasattr(given, "scaling_type") or not hasattr(given, "scaling_granularity"):
            raise TypeError(f"{type(self).__name__}: {name} is {described(given)}; pass a CastConfig")
        kind, part = (
            getattr(value, "value", value) for value in (given.scaling_type, given.scaling_granularity)
        )  # fmt: skip
        dtype = getattr(given, "target_dtype", None) or default
        for field_name, value, choices in (
            ("scaling_type", kind, TYPES), ("scaling_granularity", part, tuple(GRANULARITIES)),
            ("target_dtype", dtype, tuple(ELEMENTS)),
        ):  # fmt: skip
            if value not in choices:
                raise ValueError(
                    f"{type(self).__name__}: {field_name} {value!r} of {name} is not available; choose one of "
                    f"{', '.join(map(str, choices))}"
                )
        if kind == "disabled":
            return None
        end = "_pow2" if self.round_scales_to_power_of_2 else ""
        return Cast.of(f"float8_{ELEMENTS[dtype]}_{GRANULARITIES[part]}{end}")

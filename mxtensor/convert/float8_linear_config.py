"""torchao's ``Float8LinearConfig``: float8 training of linear layers, with a cast for each operand of the products.

mx.quantize_(model, mx.Float8LinearConfig.from_recipe_name("rowwise"))
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.arguments import described
from ..numerics.cast import Cast
from ..recipe.kernel_preference import KernelPreference
from ..recipe.known_fields import KnownFields
from ..recipe.linear_recipe import LinearRecipe, TensorCasts

TYPES = ("dynamic", "disabled")
GRANULARITIES = {"tensorwise": "tensor", "axiswise": "row"}
"""torchao's granularity -> the part of a float8 tensor that has one scale, in the names of formats."""
ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
E4M3, E5M2 = ELEMENTS


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
        row = CastConfig("dynamic", "axiswise", E4M3)
        if name == "tensorwise":
            return cls()
        if name == "rowwise":
            return cls(row, None, row, None, row, round_scales_to_power_of_2=True)
        if name == "rowwise_with_gw_hp":
            off = CastConfig("disabled")
            return cls(row, off, row, CastConfig(), row, off, round_scales_to_power_of_2=True)
        raise ValueError(
            f"{cls.__name__}: recipe {described(name)} is not available; choose one of tensorwise, rowwise, "
            "rowwise_with_gw_hp"
        )

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

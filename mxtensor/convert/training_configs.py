"""The training configs of torchao 0.18: MXFP8, float8 and NVFP4.

mx.quantize_(model, mx.MXFP8TrainingOpConfig(wgrad_with_hp=True))
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from ..numerics.cast import Cast
from ..numerics.formats import FORMATS, ScaleCalculationMode
from ..recipe.block_scaling import NVFP4BlockScaling
from ..recipe.kernel_preference import KernelPreference
from ..recipe.known_fields import KnownFields
from ..recipe.linear_recipe import LinearRecipe, TensorCasts


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
        row, tensor = Cast.of("float8_e4m3_row_pow2"), Cast.of("float8_e4m3_tensor_pow2")
        casts = {
            "rowwise": (TensorCasts.of(row),) * 3,
            "rowwise_with_gw_hp": (TensorCasts(row), TensorCasts(row, tensor), TensorCasts(row)),
            "tensorwise": tuple(map(TensorCasts.of, ("float8_e4m3_tensor",) * 2 + ("float8_e5m2_tensor",))),
        }
        name = str(getattr(self.float8_linear_recipe, "value", self.float8_linear_recipe))
        if name not in casts:
            raise ValueError(
                f"{type(self).__name__}: float8_linear_recipe {name!r} is not available; choose one of "
                f"{', '.join(casts)}"
            )
        input, weight, grad = casts[name]
        return LinearRecipe(input, weight, grad, name=type(self).__name__)


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

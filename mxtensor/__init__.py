"""mxtensor: a torch.Tensor in OCP MX, NVFP4 or float8 that unmodified PyTorch code runs on."""

import torch as _torch

from . import ops as _ops  # noqa: F401  (fills OP_TABLE)
from .codec import Operand
from .convert import (
    MXDynamicActivationMXWeightConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4WeightOnlyConfig,
    quantize_,
)
from .dispatch import explain, kernels, strict
from .formats import (
    DTYPE_FP6_E2M3,
    DTYPE_FP6_E3M2,
    FORMATS,
    Format,
    Orientation,
    Rounding,
    ScaleCalculationMode,
    get_format,
)
from .roles import Cast, KernelPreference, LinearRecipe
from .tensor import MXTensor, quantize, rebuild

__version__ = "0.1.0"

__all__ = [
    "DTYPE_FP6_E2M3",
    "DTYPE_FP6_E3M2",
    "FORMATS",
    "Cast",
    "Format",
    "KernelPreference",
    "LinearRecipe",
    "MXDynamicActivationMXWeightConfig",
    "MXTensor",
    "NVFP4DynamicActivationNVFP4WeightConfig",
    "NVFP4WeightOnlyConfig",
    "Operand",
    "Orientation",
    "Rounding",
    "ScaleCalculationMode",
    "explain",
    "get_format",
    "kernels",
    "quantize",
    "quantize_",
    "strict",
]

_torch.serialization.add_safe_globals([rebuild])

"""mxtensor: a torch.Tensor in OCP MX, NVFP4 or float8 that unmodified PyTorch code runs on."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

import torch as _torch

from . import ops as _ops  # noqa: F401  (fills OP_TABLE)
from . import recipe
from .convert.quantize import (
    MXDynamicActivationMXWeightConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4WeightOnlyConfig,
    quantize_,
)
from .core.dispatch import explain, kernels, strict
from .numerics.cast import Cast
from .numerics.formats import (
    DTYPE_FP6_E2M3,
    DTYPE_FP6_E3M2,
    FORMATS,
    Format,
    Orientation,
    Rounding,
    ScaleCalculationMode,
    get_format,
)
from .numerics.operand import Operand
from .recipe.linear_recipe import KernelPreference, LinearRecipe
from .te import tensor_attributes as _te_names  # noqa: F401  (gives MXTensor TransformerEngine's names)
from .tensor.mxtensor import MXTensor, quantize, rebuild

if TYPE_CHECKING:
    from . import checkpoint, nn, optim, parallel
    from .compile.inference_options import inference_options
    from .convert.mxfp8 import MXFP8Config, MXFP8Linear, to_mxfp8
    from .convert.training import MXLinearConfig
    from .te.general_gemm import general_gemm, get_workspace
    from .te.quantizer_base import DType, Quantizer
    from .te.quantizers import (
        Float8BlockQuantizer,
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
        MXFP8Quantizer,
        MXQuantizer,
        NVFP4Quantizer,
    )
    from .training.autocast import autocast
    from .training.grad_scaler import MXFP8GradientScaler
    from .training.model_init import quantized_model_init

__version__ = "0.1.0"

__all__ = [
    "DTYPE_FP6_E2M3",
    "DTYPE_FP6_E3M2",
    "FORMATS",
    "Cast",
    "DType",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Format",
    "KernelPreference",
    "LinearRecipe",
    "MXDynamicActivationMXWeightConfig",
    "MXFP8Config",
    "MXFP8GradientScaler",
    "MXFP8Linear",
    "MXFP8Quantizer",
    "MXLinearConfig",
    "MXQuantizer",
    "MXTensor",
    "NVFP4DynamicActivationNVFP4WeightConfig",
    "NVFP4Quantizer",
    "NVFP4WeightOnlyConfig",
    "Operand",
    "Orientation",
    "Quantizer",
    "Rounding",
    "ScaleCalculationMode",
    "autocast",
    "checkpoint",
    "explain",
    "general_gemm",
    "get_format",
    "get_workspace",
    "inference_options",
    "kernels",
    "nn",
    "optim",
    "parallel",
    "quantize",
    "quantize_",
    "quantized_model_init",
    "recipe",
    "strict",
    "to_mxfp8",
]

_TRAINING = {
    "ambient": ("autocast",),
    "checkpoint": ("checkpoint",),
    "compiled": ("inference_options",),
    "convert_training": ("MXLinearConfig",),
    "grad_scaler": ("MXFP8GradientScaler",),
    "model_init": ("quantized_model_init",),
    "mxfp8": ("MXFP8Config", "MXFP8Linear", "to_mxfp8"),
    "nn": ("nn",),
    "optim": ("optim",),
    "parallel": ("parallel",),
    "quantizer_base": ("DType", "Quantizer"),
    "quantizers": (
        "Float8BlockQuantizer", "Float8CurrentScalingQuantizer", "Float8Quantizer", "MXFP8Quantizer", "MXQuantizer",
        "NVFP4Quantizer",
    ),
    "te_gemm": ("general_gemm", "get_workspace"),
}  # fmt: skip
"""Module -> what is loaded from it on first use, for it brings torch's compiler, slower to import than all of torch."""
_HOME = {name: module for module, names in _TRAINING.items() for name in names}


def __getattr__(name: str) -> _Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _import_module(f".{_HOME[name]}", __name__)
    found = globals()[name] = module if _HOME[name] == name else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_torch.serialization.add_safe_globals([rebuild])

"""mxtensor: a torch.Tensor subclass in OCP MX, NVFP4 and float8 formats for unmodified PyTorch code."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

import torch as _torch

from . import ops as _ops  # noqa: F401  (fills OP_TABLE)
from . import recipe
from .compile.defaults import compile_passes
from .convert.configs import (
    MXDynamicActivationMXWeightConfig,
    MXLinearConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4WeightOnlyConfig,
)
from .convert.float8_configs import Float8DynamicActivationFloat8WeightConfig, Float8WeightOnlyConfig
from .convert.float8_linear_config import CastConfig, Float8LinearConfig
from .convert.format_plan import Plan
from .convert.fqn_config import FqnToConfig
from .convert.model_size import model_size
from .convert.qat import MXFakeQuantizeConfig, NVFP4FakeQuantizeConfig, QATConfig, QATStep
from .convert.quantize import quantize_
from .convert.training_configs import (
    Float8TrainingOpConfig,
    MXFP8TrainingOpConfig,
    MXFP8TrainingRecipe,
    NVFP4TrainingConfig,
)
from .core.dispatch import strict
from .core.explain import explain
from .core.peer_names import instead_of as _instead_of
from .core.select import kernels
from .integrations import TransformersConfig
from .numerics.cast import Cast
from .numerics.choices import FourOverSix
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
from .recipe.kernel_preference import KernelPreference
from .recipe.linear_recipe import LinearRecipe
from .tensor.mxtensor import MXTensor
from .tensor.pickles import rebuild, rebuild_with_attributes
from .tensor.quantize import quantize
from .training.fake_quantized_linear import FakeQuantizedLinear, FakeQuantizer

if TYPE_CHECKING:
    from . import checkpoints, nn
    from .calibration.bias import BiasCorrection
    from .calibration.calibrate import calibrate
    from .calibration.methods import GPTQ, BestScales
    from .calibration.planner import plan
    from .calibration.sampling import sampled_data
    from .calibration.smoothing import AWQ, SmoothQuant
    from .compile.inference_options import inference_options
    from .convert.mxfp8 import MXFP8Config, MXFP8Linear, to_mxfp8
    from .distributed import checkpoint, parallel
    from .integrations.decoding import compile_decoding
    from .integrations.kv_cache import KVCache
    from .report.monitor import monitor
    from .report.tune_model import tune
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
    from .training import optim
    from .training.accumulate import accumulate
    from .training.autocast import autocast
    from .training.grad_scaler import MXFP8GradientScaler
    from .training.model_init import quantized_model_init
    from .training.track import track_delayed_scaling

__version__ = "0.1.0"

__all__ = [
    "AWQ",
    "DTYPE_FP6_E2M3",
    "DTYPE_FP6_E3M2",
    "FORMATS",
    "GPTQ",
    "BestScales",
    "BiasCorrection",
    "Cast",
    "CastConfig",
    "DType",
    "FakeQuantizedLinear",
    "FakeQuantizer",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8LinearConfig",
    "Float8Quantizer",
    "Float8TrainingOpConfig",
    "Float8WeightOnlyConfig",
    "Format",
    "FourOverSix",
    "FqnToConfig",
    "KVCache",
    "KernelPreference",
    "LinearRecipe",
    "MXDynamicActivationMXWeightConfig",
    "MXFP8Config",
    "MXFP8GradientScaler",
    "MXFP8Linear",
    "MXFP8Quantizer",
    "MXFP8TrainingOpConfig",
    "MXFP8TrainingRecipe",
    "MXFakeQuantizeConfig",
    "MXLinearConfig",
    "MXQuantizer",
    "MXTensor",
    "NVFP4DynamicActivationNVFP4WeightConfig",
    "NVFP4FakeQuantizeConfig",
    "NVFP4Quantizer",
    "NVFP4TrainingConfig",
    "NVFP4WeightOnlyConfig",
    "Operand",
    "Orientation",
    "Plan",
    "QATConfig",
    "QATStep",
    "Quantizer",
    "Rounding",
    "ScaleCalculationMode",
    "SmoothQuant",
    "TransformersConfig",
    "accumulate",
    "autocast",
    "calibrate",
    "checkpoint",
    "checkpoints",
    "compile_decoding",
    "compile_passes",
    "explain",
    "general_gemm",
    "get_format",
    "get_workspace",
    "inference_options",
    "kernels",
    "model_size",
    "monitor",
    "nn",
    "optim",
    "parallel",
    "plan",
    "quantize",
    "quantize_",
    "quantized_model_init",
    "recipe",
    "sampled_data",
    "strict",
    "to_mxfp8",
    "track_delayed_scaling",
    "tune",
]

_LAZY = {
    "calibration.calibrate": ("calibrate",),
    "calibration.bias": ("BiasCorrection",),
    "calibration.methods": ("BestScales", "GPTQ"),
    "calibration.planner": ("plan",),
    "calibration.sampling": ("sampled_data",),
    "calibration.smoothing": ("AWQ", "SmoothQuant"),
    "checkpoints": ("checkpoints",),
    "compile.inference_options": ("inference_options",),
    "convert.mxfp8": ("MXFP8Config", "MXFP8Linear", "to_mxfp8"),
    "distributed.checkpoint": ("checkpoint",),
    "distributed.parallel": ("parallel",),
    "integrations.decoding": ("compile_decoding",),
    "integrations.kv_cache": ("KVCache",),
    "nn": ("nn",),
    "report.monitor": ("monitor",),
    "report.tune_model": ("tune",),
    "te.general_gemm": ("general_gemm", "get_workspace"),
    "te.quantizer_base": ("DType", "Quantizer"),
    "te.quantizers": (
        "Float8BlockQuantizer", "Float8CurrentScalingQuantizer", "Float8Quantizer", "MXFP8Quantizer", "MXQuantizer",
        "NVFP4Quantizer",
    ),
    "training.autocast": ("autocast",),
    "training.accumulate": ("accumulate",),
    "training.grad_scaler": ("MXFP8GradientScaler",),
    "training.model_init": ("quantized_model_init",),
    "training.optim": ("optim",),
    "training.track": ("track_delayed_scaling",),
}  # fmt: skip
"""Module -> the names loaded on first use: it imports torch's compiler, which takes longer than importing torch."""
_MODULES = ("checkpoint", "checkpoints", "nn", "optim", "parallel")
"""Names that are the module itself."""
_HOME = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> _Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_instead_of(name)}")
    module = _import_module(f".{_HOME[name]}", __name__)
    found = globals()[name] = module if name in _MODULES else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_torch.serialization.add_safe_globals([rebuild, rebuild_with_attributes])

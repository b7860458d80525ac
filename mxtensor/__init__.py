"""mxtensor: a torch.Tensor subclass in OCP MX, NVFP4 and float8 formats for unmodified PyTorch code."""

from .cli import startup as _startup  # noqa: F401  (before torch, whose import takes seconds)

# isort: split
from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

import torch as _torch

from . import ops as _ops  # noqa: F401  (fills OP_TABLE)
from . import recipe
from .compile.defaults import compile_passes
from .convert.format_plan import Plan
from .convert.model_size import model_size
from .convert.quantize import quantize_
from .core.dispatch import strict
from .core.explain import explain
from .core.peer_names import instead_of as _instead_of
from .core.select import kernels
from .integrations import TransformersConfig
from .numerics.cast import Cast
from .numerics.choices import FourOverSix
from .numerics.formats import FORMATS, Format, Orientation, Rounding, get_format
from .numerics.operand import Operand
from .recipe.linear_recipe import LinearRecipe
from .tensor.mxtensor import MXTensor
from .tensor.pickles import rebuild, rebuild_with_attributes
from .tensor.quantize import quantize

if TYPE_CHECKING:
    from . import checkpoints
    from .calibration.calibrate import calibrate
    from .calibration.methods import GPTQ, BestScales, BiasCorrection
    from .calibration.planner import plan
    from .calibration.sampling import sampled_data
    from .calibration.smoothing import AWQ, SmoothQuant
    from .compile.inference_options import inference_options
    from .distributed import checkpoint, parallel
    from .integrations.decoding import compile_decoding
    from .integrations.kv_cache import KVCache
    from .report.monitor import monitor
    from .report.tune import tune
    from .training import optim
    from .training.accumulate import accumulate
    from .training.autocast import autocast
    from .training.grad_scaler import MXFP8GradientScaler
    from .training.mxfp8 import MXFP8Config, MXFP8Linear, to_mxfp8
    from .training.state_dict import track_delayed_scaling

__version__ = "0.1.0"

__all__ = [
    "AWQ",
    "FORMATS",
    "GPTQ",
    "BestScales",
    "BiasCorrection",
    "Cast",
    "Format",
    "FourOverSix",
    "KVCache",
    "LinearRecipe",
    "MXFP8Config",
    "MXFP8GradientScaler",
    "MXFP8Linear",
    "MXTensor",
    "Operand",
    "Orientation",
    "Plan",
    "Rounding",
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
    "get_format",
    "inference_options",
    "kernels",
    "model_size",
    "monitor",
    "optim",
    "parallel",
    "plan",
    "quantize",
    "quantize_",
    "recipe",
    "sampled_data",
    "strict",
    "to_mxfp8",
    "track_delayed_scaling",
    "tune",
]

_LAZY = {
    "ao": ("ao",),
    "calibration.calibrate": ("calibrate",),
    "calibration.methods": ("BestScales", "BiasCorrection", "GPTQ"),
    "calibration.planner": ("plan",),
    "calibration.sampling": ("sampled_data",),
    "calibration.smoothing": ("AWQ", "SmoothQuant"),
    "checkpoints": ("checkpoints",),
    "compile.inference_options": ("inference_options",),
    "training.mxfp8": ("MXFP8Config", "MXFP8Linear", "to_mxfp8"),
    "distributed.checkpoint": ("checkpoint",),
    "distributed.parallel": ("parallel",),
    "integrations.decoding": ("compile_decoding",),
    "integrations.kv_cache": ("KVCache",),
    "report.monitor": ("monitor",),
    "report.tune": ("tune",),
    "training.autocast": ("autocast",),
    "te": ("te",),
    "training.accumulate": ("accumulate",),
    "training.grad_scaler": ("MXFP8GradientScaler",),
    "training.optim": ("optim",),
    "training.state_dict": ("track_delayed_scaling",),
}  # fmt: skip
"""Module -> the names loaded on first use: it imports torch's compiler, which takes longer than importing torch."""
_MODULES = ("ao", "checkpoint", "checkpoints", "optim", "parallel", "te")
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

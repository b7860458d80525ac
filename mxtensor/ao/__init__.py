"""torchao's names: ``from mxtensor.ao import quantize_`` stands for ``from torchao.quantization import quantize_``.

The names of ``torchao.quantization``, ``torchao.quantization.qat``, ``torchao.float8``,
``torchao.prototype.mx_formats`` and ``torchao.prototype.moe_training.config`` are all in this one module. ``mx`` itself
needs none of them, and no other room imports this one: ``mx.quantize_`` takes names of formats, recipes and dicts of
them, and any object with the methods ``linear_recipe()`` or ``config_and_step()``, which the configs here have.

Start with ``quantize.py``; the configs of inference are in ``configs.py``, those of training in ``training.py``, and
those of quantization-aware training in ``qat.py``.
"""

from ..core.peer_names import instead_of
from ..numerics.formats import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2, ScaleCalculationMode
from ..recipe.linear_recipe import KernelPreference
from ..tensor.mxtensor import MXTensor
from ..training.prepared_linear import FakeQuantizedLinear, FakeQuantizer
from .configs import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    FqnToConfig,
    MXDynamicActivationMXWeightConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4WeightOnlyConfig,
    PerBlock,
    PerRow,
    PerTensor,
)
from .qat import MXFakeQuantizeConfig, NVFP4FakeQuantizeConfig, QATConfig, QATStep
from .quantize import config_of, convert_to_float8_training, quantize_
from .training import (
    CastConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    Float8TrainingOpConfig,
    MXFP8TrainingOpConfig,
    MXFP8TrainingRecipe,
    MXLinearConfig,
    NVFP4TrainingConfig,
)

__all__ = [
    "DTYPE_FP6_E2M3",
    "DTYPE_FP6_E3M2",
    "CastConfig",
    "FakeQuantizedLinear",
    "FakeQuantizer",
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "Float8TrainingOpConfig",
    "Float8WeightOnlyConfig",
    "FqnToConfig",
    "KernelPreference",
    "MXDynamicActivationMXWeightConfig",
    "MXFP8TrainingOpConfig",
    "MXFP8TrainingRecipe",
    "MXFakeQuantizeConfig",
    "MXLinearConfig",
    "MXTensor",
    "NVFP4DynamicActivationNVFP4WeightConfig",
    "NVFP4FakeQuantizeConfig",
    "NVFP4TrainingConfig",
    "NVFP4WeightOnlyConfig",
    "PerBlock",
    "PerRow",
    "PerTensor",
    "QATConfig",
    "QATStep",
    "ScaleCalculationMode",
    "config_of",
    "convert_to_float8_training",
    "quantize_",
]


def __getattr__(name: str) -> object:
    instead = instead_of(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")

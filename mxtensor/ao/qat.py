"""torchao's names of quantization-aware training: ``prepare``, train, ``convert``.

quantize_(model, QATConfig("mxfp4", step="prepare"))
train(model)
quantize_(model, QATConfig("mxfp4", step="convert"))
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from ..core.arguments import check_fields, described
from ..numerics.cast import Cast
from ..numerics.formats import FORMATS, ScaleCalculationMode, get_mx_format
from ..recipe.base import KnownFields
from ..recipe.linear_recipe import KernelPreference, LinearRecipe


class QATStep(str, Enum):
    """The two steps of quantization-aware training."""

    PREPARE = "prepare"
    CONVERT = "convert"


@dataclass
class MXFakeQuantizeConfig(KnownFields):
    """How a tensor is rounded to an MX format while a model trains (torchao's fields)."""

    dtype: torch.dtype | str = "mxfp4"
    block_size: int = 32
    scaling_mode: ScaleCalculationMode | str = ScaleCalculationMode.RCEIL
    kernel_preference: KernelPreference | str = KernelPreference.EMULATED
    """Accepted for compatibility with torchao; ``kernel_preference`` of a ``base_config`` names the product kernel."""

    def cast(self) -> Cast:
        """Raises ValueError for an unknown format, block or mode."""
        check_fields(self)
        return Cast.of(get_mx_format(self.dtype, self.block_size), self.scaling_mode)


@dataclass
class NVFP4FakeQuantizeConfig(KnownFields):
    """How a tensor is rounded to NVFP4 while a model trains (torchao's fields)."""

    use_per_tensor_scale: bool = True
    use_swizzled_scales: bool = False
    """Accepted for compatibility with torchao; the order of scales in memory changes no value."""
    use_triton_kernel: bool = False
    """Accepted for compatibility with torchao; the device decides which kernels can run."""

    def cast(self) -> Cast:
        """The cast of weights or activations."""
        check_fields(self)
        return Cast(FORMATS["nvfp4" if self.use_per_tensor_scale else "nvfp4_single_level"])


@dataclass
class QATConfig(KnownFields):
    """A step of quantization-aware training, for ``quantize_`` (torchao's fields).

    ``step="prepare"``: linear layers compute with rounded values, and their parameters stay in high precision and
    train; gradients pass the rounding unchanged. ``step="convert"``: their weights are quantized, as ``quantize_``
    does by ``base_config``. ``base_config``: what ``quantize_`` takes for inference, an ``FqnToConfig`` or a ``Plan``
    too. In its place ``prepare`` takes ``weight_config`` and ``activation_config``, each an ``MXFakeQuantizeConfig`` or
    an ``NVFP4FakeQuantizeConfig``; ``convert`` without ``base_config`` gives plain layers back, in high precision.

    Raises ValueError for an unknown step, and for configs that do not go together.
    """

    base_config: Any = None
    activation_config: Any = None
    weight_config: Any = None
    step: QATStep | str = field(default=QATStep.PREPARE, kw_only=True)

    def __post_init__(self) -> None:
        self.checked_step()

    def checked_step(self) -> QATStep:
        """The step. The fields may have changed since the config was made."""
        name = str(getattr(self.step, "value", self.step)).lower()
        names = [step.value for step in QATStep]
        if name not in names:
            raise ValueError(f"QATConfig: step is {self.step!r}; choose one of {', '.join(map(repr, names))}")
        step, tensors = QATStep(name), (self.activation_config, self.weight_config)
        if self.base_config is not None and any(config is not None for config in tensors):
            raise ValueError("QATConfig: base_config says how both tensors are cast; leave the other configs out")
        if step is QATStep.CONVERT and any(config is not None for config in tensors):
            raise ValueError("QATConfig: the step 'convert' takes base_config only, or nothing")
        if step is QATStep.PREPARE and self.base_config is None and self.weight_config is None:
            raise ValueError("QATConfig: 'prepare' needs base_config or weight_config, such as QATConfig('mxfp4')")
        return step

    def config_and_step(self) -> tuple[Any, str]:
        """What ``mx.quantize_`` takes in its place."""
        step = self.checked_step()
        if step is QATStep.CONVERT or self.base_config is not None:
            return self.base_config, step.value
        activation = None if self.activation_config is None else _cast_of(self.activation_config)
        return LinearRecipe.inference(_cast_of(self.weight_config), activation), step.value


def _cast_of(config: Any) -> Cast:
    if not isinstance(config, (MXFakeQuantizeConfig, NVFP4FakeQuantizeConfig)):
        raise TypeError(
            f"QATConfig: cannot round with {described(config)}; pass an MXFakeQuantizeConfig or an "
            "NVFP4FakeQuantizeConfig"
        )
    return config.cast()

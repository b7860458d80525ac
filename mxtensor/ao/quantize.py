"""torchao's functions: ``quantize_`` and ``convert_to_float8_training``, which read torchao's own config objects too.

An object of torchao is read by the name of its class and its fields; torchao is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from ..convert.changes import ModuleT
from ..convert.quantize import quantize_ as quantize_by_ours
from ..convert.weights import FilterFn
from .configs import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    FqnToConfig,
    MXDynamicActivationMXWeightConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4WeightOnlyConfig,
)
from .qat import MXFakeQuantizeConfig, NVFP4FakeQuantizeConfig, QATConfig
from .training import (
    CastConfig,
    Float8LinearConfig,
    Float8TrainingOpConfig,
    MXFP8TrainingOpConfig,
    MXLinearConfig,
    NVFP4TrainingConfig,
)

CONFIGS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        CastConfig, Float8DynamicActivationFloat8WeightConfig, Float8LinearConfig, Float8TrainingOpConfig,
        Float8WeightOnlyConfig, FqnToConfig, MXDynamicActivationMXWeightConfig, MXFakeQuantizeConfig,
        MXFP8TrainingOpConfig, MXLinearConfig, NVFP4DynamicActivationNVFP4WeightConfig, NVFP4FakeQuantizeConfig,
        NVFP4TrainingConfig, NVFP4WeightOnlyConfig, QATConfig,
    )
}  # fmt: skip
"""The configs by the names of their classes, which are torchao's."""
KERNELS = ("torch", "mslk", "triton")
"""torchao's kernel preferences that name a library: here ``auto`` finds the kernel."""


def config_of(config: Any) -> Any:
    """The config of this module that a config object of torchao stands for; so for the configs in a dict, an
    ``FqnToConfig`` or a ``QATConfig``. Anything else is returned as it is.

    ``mx.calibrate`` and other functions take the result. Raises ValueError for a field that is not available here,
    unless it has its default.
    """
    if isinstance(config, Mapping):
        return {name: config_of(value) for name, value in config.items()}
    kind = next((CONFIGS[base.__name__] for base in type(config).__mro__ if base.__name__ in CONFIGS), None)
    if kind is None:
        return config
    names = {field.name for field in fields(kind)}
    given = {name: config_of(getattr(config, name)) for name in names if hasattr(config, name)}
    if isinstance(config, kind):
        changed = {name: value for name, value in given.items() if value is not getattr(config, name)}
        return replace(config, **changed) if changed else config  # type: ignore[type-var]
    for field in fields(config) if is_dataclass(config) else ():
        value = getattr(config, field.name, field.default)
        if field.name not in names and field.default is not MISSING and value != field.default:
            raise ValueError(
                f"{kind.__name__}: {field.name}={value!r} is not available; leave it at its default, {field.default!r}"
            )
    if getattr(given.get("kernel_preference"), "value", None) in KERNELS:
        given["kernel_preference"] = "auto"
    return kind(**given)


def quantize_(
    model: ModuleT, config: Any, filter_fn: FilterFn | None = None, device: torch.device | str | None = None,
    **options: Any,
) -> ModuleT:  # fmt: skip
    """``mx.quantize_``, which has the ``options``, with torchao's arguments and for torchao's own config objects too.

    ``device``: where the model is moved before. Returns ``model``. Raises what ``mx.quantize_`` and ``config_of``
    raise.
    """
    config = config_of(config)
    if device is not None and isinstance(model, nn.Module):
        model.to(device)
    return quantize_by_ours(model, config, filter_fn, **options)


def convert_to_float8_training(
    module: ModuleT, *, module_filter_fn: Callable[[nn.Module, str], bool] | None = None, config: Any = None
) -> ModuleT:
    """``quantize_`` by a ``Float8LinearConfig``, as torchao calls it; None: its defaults."""
    return quantize_(module, Float8LinearConfig() if config is None else config, module_filter_fn)

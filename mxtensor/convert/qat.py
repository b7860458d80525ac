"""Quantization-aware training under torchao's names: ``prepare``, train, ``convert``.

mx.quantize_(model, mx.QATConfig("mxfp4", step="prepare"))
train(model)
mx.quantize_(model, mx.QATConfig("mxfp4", step="convert"))
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from ..core.arguments import check_fields, described
from ..numerics.cast import Cast
from ..numerics.formats import FORMATS, ScaleCalculationMode, get_mx_format
from ..recipe.kernel_preference import KernelPreference
from ..recipe.known_fields import KnownFields
from ..recipe.linear_recipe import LinearRecipe
from ..training.fake_quantized_linear import FakeQuantizedLinear
from .changes import Change, check_shards, checked_changes
from .choose import choose
from .configs import by_name
from .sharded import always, by_tensor_parallelism
from .torchao import from_torchao
from .weights import FilterFn, Weight


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
    """Accepted for compatibility with torchao; products are of rounded values, in high precision."""

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


FAKE_QUANTIZE_CONFIGS = {kind.__name__: kind for kind in (MXFakeQuantizeConfig, NVFP4FakeQuantizeConfig)}


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

    def base(self) -> Any:
        """What the casts of ``prepare`` are read from: ``base_config``, or a recipe of the configs of both tensors."""
        if self.base_config is not None:
            return self.base_config
        activation = None if self.activation_config is None else _cast_of(self.activation_config)
        return LinearRecipe.inference(_cast_of(self.weight_config), activation)


def _cast_of(config: Any) -> Cast:
    if not isinstance(config, tuple(FAKE_QUANTIZE_CONFIGS.values())):
        ours = from_torchao(config, FAKE_QUANTIZE_CONFIGS)
        if ours is None:
            raise TypeError(
                f"QATConfig: cannot round with {described(config)}; pass an MXFakeQuantizeConfig or an "
                "NVFP4FakeQuantizeConfig"
            )
        config = ours
    return config.cast()  # type: ignore[no-any-return]


def qat_config_of(config: Any) -> QATConfig | None:
    """A QATConfig, ours or torchao's; None for another object."""
    if isinstance(config, QATConfig):
        return config
    return None if isinstance(config, type) else from_torchao(config, {QATConfig.__name__: QATConfig})


# ---------------------------------------------------------------------------------------------- the steps


def prepare(model: nn.Module, config: QATConfig, filter_fn: FilterFn | None) -> None:
    """Let the linear layers of ``model`` compute with rounded values. All of them, or none if this raises."""
    chosen, _ = choose(model, config.base(), filter_fn, sharded=always)
    linear = [(w, recipe) for w, recipe in chosen if type(w.module) in (nn.Linear, FakeQuantizedLinear)]
    changes = checked_changes(model, linear)
    for change in changes:
        _check(change)
    _warn_of_others([weight for weight, _ in chosen if weight not in [w for w, _ in linear]], bool(changes))
    done: list[FakeQuantizedLinear] = []
    try:
        for change in changes:
            for module, _ in change.places:
                assert isinstance(module, nn.Linear)
                if not isinstance(module, FakeQuantizedLinear):
                    done.append(module)  # type: ignore[arg-type]  # it is one from here on
                FakeQuantizedLinear.from_linear(module, change.recipe)
    except BaseException:
        for module in done:
            FakeQuantizedLinear.to_linear(module)
        raise


def _check(change: Change) -> None:
    if change.recipe.trains:
        raise ValueError(
            f"quantize_: QATConfig simulates a format for inference, and {change.recipe} trains ({change.fqn}); pass a "
            "format such as 'mxfp4'"
        )
    others = [type(m).__name__ for m, _ in change.places if type(m) not in (nn.Linear, FakeQuantizedLinear)]
    if others:
        raise ValueError(
            f"quantize_: {change.fqn} is also the weight of {', '.join(others)}, which would not be trained with "
            "rounded values; leave it out by filter_fn"
        )


def _warn_of_others(others: Sequence[Weight], some: bool) -> None:
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        names = ", ".join(weight.fqn for weight in others[:3])
        warnings.warn(
            f"quantize_: {names}{more} stay in high precision: QATConfig prepares nn.Linear only",
            UserWarning,
            stacklevel=5,
        )
    elif not some:
        warnings.warn(
            "quantize_ changed nothing: no nn.Linear passed the filter of QATConfig", UserWarning, stacklevel=5
        )


def prepared_changes(model: nn.Module, config: QATConfig, filter_fn: FilterFn | None) -> list[Change]:
    """For the step ``convert``: the changes of all prepared layers whose weights are not quantized yet."""
    if config.base_config is None:
        return []

    def prepared(module: nn.Module, fqn: str) -> bool:
        return isinstance(module, FakeQuantizedLinear) and (filter_fn is None or bool(filter_fn(module, fqn)))

    wanted = prepared if by_name(config.base_config) is None else filter_fn
    chosen, _ = choose(model, config.base_config, wanted, sharded=by_tensor_parallelism)
    changes = checked_changes(model, [(w, recipe) for w, recipe in chosen if isinstance(w.module, FakeQuantizedLinear)])
    for change in changes:
        _check(change)
    check_shards(changes)
    return changes


def restore(model: nn.Module, filter_fn: FilterFn | None) -> int:
    """Make prepared layers plain ones again; returns their number."""
    found = [
        module
        for fqn, module in model.named_modules()
        if isinstance(module, FakeQuantizedLinear) and (filter_fn is None or filter_fn(module, fqn))
    ]
    for module in found:
        module.to_linear()
    return len(found)

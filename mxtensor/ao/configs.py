"""torchao's configs of inference: MX, NVFP4 and float8 weights, and a config for each name.

quantize_(model, MXDynamicActivationMXWeightConfig(weight_dtype="mxfp4"))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..core.arguments import check_fields, described
from ..numerics.cast import Cast
from ..numerics.formats import FORMATS, ScaleCalculationMode, get_mx_format
from ..recipe.base import KnownFields
from ..recipe.linear_recipe import KernelPreference, LinearRecipe


@dataclass
class MXDynamicActivationMXWeightConfig(KnownFields):
    """MX weights, and activations cast to MX on the fly (torchao's fields)."""

    block_size: int = 32
    activation_dtype: torch.dtype | str = torch.float8_e4m3fn
    weight_dtype: torch.dtype | str = torch.float8_e4m3fn
    kernel_preference: KernelPreference | str = KernelPreference.AUTO
    scaling_mode: ScaleCalculationMode | str = ScaleCalculationMode.RCEIL

    def linear_recipe(self) -> LinearRecipe:
        """The casts of weight and activation as a recipe. Raises ValueError for an unknown format, block or mode."""
        check_fields(self)
        weight, activation = (
            Cast.of(get_mx_format(dtype, self.block_size), self.scaling_mode)
            for dtype in (self.weight_dtype, self.activation_dtype)
        )
        return LinearRecipe.inference(weight, activation, KernelPreference.of(self.kernel_preference))


def _nvfp4(use_dynamic_per_tensor_scale: bool) -> Cast:
    return Cast(FORMATS["nvfp4" if use_dynamic_per_tensor_scale else "nvfp4_single_level"])


@dataclass
class NVFP4DynamicActivationNVFP4WeightConfig(KnownFields):
    """NVFP4 weights, and activations cast to NVFP4 on the fly (torchao's fields)."""

    use_triton_kernel: bool = True
    """Accepted for compatibility with torchao; the device decides which kernels can run."""
    use_dynamic_per_tensor_scale: bool = True
    step: Any = None
    """For ``quantize_``: ``"prepare"`` lets layers watch the amax of their inputs, and ``"convert"`` quantizes weights
    and gives each layer a static scale of its inputs for that amax, so that inference takes no amax over a tensor."""
    kernel_preference: KernelPreference | str = KernelPreference.AUTO

    def config_and_step(self) -> tuple[Any, str | None]:
        """What ``mx.quantize_`` takes in its place. Raises ValueError for an unknown step."""
        if self.step is None:
            return self, None
        steps = {"prepare": "observe", "convert": "convert"}
        step = str(getattr(self.step, "value", self.step)).lower()
        if step not in steps:
            raise ValueError(
                f"NVFP4DynamicActivationNVFP4WeightConfig: step is {self.step!r}; choose one of 'prepare', 'convert', "
                "or None for scales of each input"
            )
        return replace(self, step=None, use_dynamic_per_tensor_scale=True).linear_recipe(), steps[step]

    def linear_recipe(self) -> LinearRecipe:
        """The casts of weight and activation as a recipe. Raises ValueError for an unknown format, block or mode."""
        check_fields(self)
        if self.step is not None:
            raise ValueError(
                f"NVFP4DynamicActivationNVFP4WeightConfig: step={self.step!r} is for quantize_ alone; leave it out"
            )
        cast = _nvfp4(self.use_dynamic_per_tensor_scale)
        return LinearRecipe.inference(cast, cast, KernelPreference.of(self.kernel_preference))


@dataclass
class NVFP4WeightOnlyConfig(KnownFields):
    """NVFP4 weights and high-precision activations (torchao's fields)."""

    use_dynamic_per_tensor_scale: bool = True
    kernel_preference: KernelPreference | str = KernelPreference.AUTO

    def linear_recipe(self) -> LinearRecipe:
        """The casts of weight and activation as a recipe. Raises ValueError for an unknown format, block or mode."""
        check_fields(self)
        cast = _nvfp4(self.use_dynamic_per_tensor_scale)
        return LinearRecipe.inference(cast, None, KernelPreference.of(self.kernel_preference))


# ---------------------------------------------------------------------------------------------- float8

BLOCKS = {"PerTensor": "tensor", "PerRow": "row", "(1, 128)": "1x128", "(128, 128)": "128x128"}
"""torchao's granularity, by the name of its class or its block -> the end of the name of a format."""


@dataclass(frozen=True)
class PerTensor:
    """torchao's granularity: one scale for a tensor."""


@dataclass(frozen=True)
class PerRow:
    """torchao's granularity: one scale for each row, which is each output of a weight and each token."""

    dim: int = -1


@dataclass(frozen=True)
class PerBlock:
    """torchao's granularity: one scale for each block of (1, 128) or (128, 128) values."""

    block_size: Sequence[int]


def _float8(owner: Any, dtype: Any, granularity: Any) -> Cast:
    """The cast to ``dtype`` with a scale for each part. A granularity is torchao's object, or the name of its class."""
    element = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}.get(dtype)
    name = granularity if isinstance(granularity, str) else type(granularity).__name__
    if name == "PerGroup":
        name = f"(1, {granularity.group_size})"
    elif name == "PerBlock":
        name = str(tuple(granularity.block_size))
    if element is None:
        raise ValueError(
            f"{type(owner).__name__}: {dtype} is not available; choose torch.float8_e4m3fn or torch.float8_e5m2"
        )
    if name not in BLOCKS:
        raise ValueError(
            f"{type(owner).__name__}: granularity {granularity!r} is not available; choose PerTensor, PerRow, or "
            "blocks of (1, 128) or (128, 128)"
        )
    return Cast.of(f"float8_{element}_{BLOCKS[name]}")


@dataclass
class Float8WeightOnlyConfig(KnownFields):
    """Float8 weights and high-precision activations (torchao's fields)."""

    weight_dtype: torch.dtype = torch.float8_e4m3fn
    set_inductor_config: bool = True
    """Accepted for compatibility with torchao; no setting of the compiler is changed."""
    version: int = 2
    granularity: Any = "PerRow"
    """torchao's object, or the name of its class: one scale for a tensor (PerTensor) or for each row (PerRow)."""

    def linear_recipe(self) -> LinearRecipe:
        """The cast of the weight as a recipe. Raises ValueError for an unknown dtype or granularity."""
        return LinearRecipe.inference(_float8(self, self.weight_dtype, self.granularity))


@dataclass
class Float8DynamicActivationFloat8WeightConfig(KnownFields):
    """Float8 weights, and activations cast to float8 on the fly (torchao's fields)."""

    activation_dtype: torch.dtype = torch.float8_e4m3fn
    weight_dtype: torch.dtype = torch.float8_e4m3fn
    granularity: Any = None
    """torchao's object, the name of its class, or two of them, for activations and weights. None: PerTensor."""
    packing_format: Any = "plain"
    mm_config: Any = None
    """Accepted for compatibility with torchao; products accumulate in float32."""
    activation_value_lb: float | None = None
    activation_value_ub: float | None = None
    kernel_preference: KernelPreference | str = KernelPreference.AUTO
    set_inductor_config: bool = True
    """Accepted for compatibility with torchao; no setting of the compiler is changed."""
    version: int = 2
    alg_id: int = 0

    def linear_recipe(self) -> LinearRecipe:
        """The casts of weight and activation as a recipe. Raises ValueError for what is not available."""
        bounds = (self.activation_value_lb, self.activation_value_ub)
        if bounds != (None, None) or str(getattr(self.packing_format, "value", self.packing_format)) != "plain":
            raise ValueError(
                f"{type(self).__name__}: bounds of activations {bounds} and packing_format {self.packing_format!r} are "
                "not available; leave them at None and 'plain'"
            )
        both = self.granularity
        both = "PerTensor" if both is None else both
        activation, weight = both if isinstance(both, (list, tuple)) else (both, both)
        return LinearRecipe.inference(
            _float8(self, self.weight_dtype, weight),
            _float8(self, self.activation_dtype, activation),
            KernelPreference.of(self.kernel_preference),
        )


# ---------------------------------------------------------------------------------------------- a config for each name


@dataclass
class FqnToConfig(KnownFields):
    """A config for each module or parameter, by its fully qualified name (torchao's fields): as a dict of configs, for
    which see ``mx.quantize_``.

    As in torchao, the name of a module is not a key of the modules inside it: ``"re:layers\\.0\\..*"`` is. Raises
    TypeError for anything but a dict with strings as keys, ValueError for two different tables.
    """

    fqn_to_config: Mapping[str, Any] = field(default_factory=dict)
    module_fqn_to_config: Mapping[str, Any] = field(default_factory=dict)
    """torchao's former name of the same table."""
    version: int = 1

    def __post_init__(self) -> None:
        self.config_and_step()

    def config_and_step(self) -> tuple[Mapping[str, Any], None]:
        """The dict, checked: it may have changed since the config was made."""
        one, other = self.fqn_to_config, self.module_fqn_to_config
        for table in (one, other):
            if not isinstance(table, Mapping) or not all(isinstance(key, str) for key in table):
                raise TypeError(
                    f"{type(self).__name__} takes a dict of names to configs, with strings as keys, not "
                    f"{described(table)}"
                )
        if one and other and one != other:
            raise ValueError(
                f"{type(self).__name__}: fqn_to_config and module_fqn_to_config differ; pass only one of them"
            )
        return one or other, None

"""Conversion of whole models: ``quantize_`` puts MXTensor parameters into torch's own modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import nn

from ..numerics.cast import Cast
from ..numerics.formats import FORMATS, Format, Orientation, ScaleCalculationMode, get_mx_format
from ..recipe.base import Recipe
from ..recipe.kernel_preference import KernelPreference
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor, quantize_as
from ..training.training_weight import is_sharded, values_of

ModuleT = TypeVar("ModuleT", bound=nn.Module)
FilterFn = Callable[[nn.Module, str], bool]
WEIGHT_ONLY = "-weight-only"


@dataclass(frozen=True)
class MXDynamicActivationMXWeightConfig:
    """MX weights, and activations cast to MX on the fly (fields as torchao has them)."""

    block_size: int = 32
    activation_dtype: torch.dtype | str = torch.float8_e4m3fn
    weight_dtype: torch.dtype | str = torch.float8_e4m3fn
    kernel_preference: KernelPreference | str = KernelPreference.AUTO
    scaling_mode: ScaleCalculationMode | str = ScaleCalculationMode.RCEIL

    def linear_recipe(self) -> LinearRecipe:
        """The formats and rules this stands for."""
        weight, activation = (
            Cast.of(get_mx_format(dtype, self.block_size), self.scaling_mode)
            for dtype in (self.weight_dtype, self.activation_dtype)
        )
        return LinearRecipe.inference(weight, activation, KernelPreference.of(self.kernel_preference))


def _nvfp4(use_dynamic_per_tensor_scale: bool) -> Cast:
    return Cast(FORMATS["nvfp4" if use_dynamic_per_tensor_scale else "nvfp4_single_level"])


@dataclass(frozen=True)
class NVFP4DynamicActivationNVFP4WeightConfig:
    """NVFP4 weights, and activations cast to NVFP4 on the fly (fields as torchao has them)."""

    use_triton_kernel: bool = True
    """Accepted for torchao's sake: the kernel is chosen by what the device can run."""
    use_dynamic_per_tensor_scale: bool = True
    kernel_preference: KernelPreference | str = KernelPreference.AUTO

    def linear_recipe(self) -> LinearRecipe:
        """The formats and rules this stands for."""
        cast = _nvfp4(self.use_dynamic_per_tensor_scale)
        return LinearRecipe.inference(cast, cast, KernelPreference.of(self.kernel_preference))


@dataclass(frozen=True)
class NVFP4WeightOnlyConfig:
    """NVFP4 weights under high-precision activations (fields as torchao has them)."""

    use_dynamic_per_tensor_scale: bool = True
    kernel_preference: KernelPreference | str = KernelPreference.AUTO

    def linear_recipe(self) -> LinearRecipe:
        """The formats and rules this stands for."""
        cast = _nvfp4(self.use_dynamic_per_tensor_scale)
        return LinearRecipe.inference(cast, None, KernelPreference.of(self.kernel_preference))


Config = (
    str
    | torch.dtype
    | Format
    | LinearRecipe
    | MXDynamicActivationMXWeightConfig
    | NVFP4DynamicActivationNVFP4WeightConfig
    | NVFP4WeightOnlyConfig
    | Recipe
    | LinearRecipe
)


def recipe_of(config: Any) -> LinearRecipe:
    """The LinearRecipe that a config stands for: one itself, an object that makes one, or the name of a format.

    A name (``"mxfp8"``, ``"mxfp8-weight-only"``), a dtype or a Format is an inference recipe. Raises ValueError for an
    unknown format name, TypeError for anything else.
    """
    if isinstance(config, type):
        raise TypeError(f"cannot quantize by the class {config.__name__}; pass an instance: {config.__name__}()")
    if isinstance(config, LinearRecipe):
        return config
    if hasattr(config, "linear_recipe"):
        return config.linear_recipe()  # type: ignore[no-any-return]
    if isinstance(config, str) and config.endswith(WEIGHT_ONLY):
        return LinearRecipe.inference(config.removesuffix(WEIGHT_ONLY))
    if isinstance(config, (str, torch.dtype, Format)):
        return LinearRecipe.inference(config, config)
    raise TypeError(
        f"cannot quantize by {config!r}; pass a format name like 'mxfp8' or 'mxfp8-weight-only', a LinearRecipe, or "
        "one of the configs MXDynamicActivationMXWeightConfig, NVFP4DynamicActivationNVFP4WeightConfig, "
        "NVFP4WeightOnlyConfig; to train, MXLinearConfig or a recipe such as MXFP8BlockScaling()"
    )


# ---------------------------------------------------------------------------------------------- which weights


@dataclass(frozen=True)
class Kind:
    """A kind of module and its weights that enter a product (or, for an embedding, a lookup)."""

    matches: Callable[[nn.Module], bool]
    names: tuple[str, ...]
    orientation: Orientation = Orientation.ROWWISE
    """Which dimension products contract: the last of (out, in), or the one before it of (in, out)."""
    trains: bool = True
    """Whether the three products of training can be quantized."""


def _is(kind: type[nn.Module]) -> Callable[[nn.Module], bool]:
    return lambda module: isinstance(module, kind)


def _is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D, by name: a linear layer (GPT-2's) whose weight is (in, out)."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


EXPERTS = (("gate_up_proj", "down_proj"), ("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj"))
"""Parameters that hold all experts of a module, from the first product to the last; a row for each way to have them."""


def _are_experts(names: tuple[str, ...], transposed: bool) -> Callable[[nn.Module], bool]:
    """transformers' mixture of experts, by its parameters: (experts, out, in), or transposed (experts, in, out).

    Llama 4's does not say which: ``down`` takes half of what ``gate_up`` gives, and gives what that takes.
    """

    def matches(module: nn.Module) -> bool:
        weights = [weight for name in names if (weight := module._parameters.get(name)) is not None]
        if len(weights) < len(names) or any(weight.dim() != 3 for weight in weights):
            return False
        first, (low, high) = tuple(weights[0].shape[1:]), weights[-1].shape[1:]
        by_shape = first == (high, 2 * low) and first != (2 * high, low)
        return getattr(module, "is_transposed", by_shape) == transposed

    return matches


def _are_parallel_experts(module: nn.Module) -> bool:
    """transformers' ParallelExperts (JetMoe's), by name: one linear layer for each expert, (experts, out, in)."""
    weight = module._parameters.get("weight")
    named = any(kind.__name__.endswith("ParallelExperts") for kind in type(module).__mro__)
    return named and weight is not None and weight.dim() == 3


KINDS = (
    Kind(_is(nn.Linear), ("weight",)),
    Kind(_is(nn.MultiheadAttention), ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")),
    Kind(_is(nn.Embedding), ("weight",), trains=False),
    Kind(_is_conv1d, ("weight",), Orientation.COLUMNWISE),
    *(Kind(_are_experts(names, transposed=False), names, trains=False) for names in EXPERTS),
    *(Kind(_are_experts(names, transposed=True), names, Orientation.COLUMNWISE, trains=False) for names in EXPERTS),
    Kind(_are_parallel_experts, ("weight",), trains=False),
)
"""Every kind of module that ``quantize_`` knows; the first that matches counts."""

SKIPPED_NAMES = ("lm_head", "router", "gate")
"""Last parts of module names that the default filter leaves in high precision: heads and expert routers."""


def default_filter(module: nn.Module, fqn: str) -> bool:
    """Linear layers and attention; not heads, routers or embeddings, where rounding costs most and saves least."""
    return not isinstance(module, nn.Embedding) and fqn.rpartition(".")[2] not in SKIPPED_NAMES


def _tied_to_lookups(model: nn.Module) -> set[int]:
    """Identities of the embedding weights: a linear layer that holds one is a head, whatever its name."""
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


def _weights(model: nn.Module, filter_fn: FilterFn) -> Iterator[tuple[nn.Module, str, Kind]]:
    """(module, parameter name, kind of module) of every weight to quantize."""
    for fqn, module in model.named_modules():
        kind = next((kind for kind in KINDS if kind.matches(module)), None)
        if kind is not None and filter_fn(module, fqn):
            for name in kind.names:
                weight = getattr(module, name, None)
                if weight is not None and not isinstance(weight, MXTensor):
                    _check_parameter(weight, f"{fqn}.{name}" if fqn else name)
                    yield module, name, kind


def _check_parameter(weight: Any, fqn: str) -> None:
    if nn.parameter.is_lazy(weight):
        raise ValueError(f"quantize_: {fqn} has no values yet; run one batch through the lazy module first")
    if not isinstance(weight, nn.Parameter):
        raise ValueError(
            f"quantize_: {fqn} is no parameter, but computed from others (parametrize, weight_norm, prune); remove "
            "that first, leave the layer out by filter_fn, or train inside mx.autocast(recipe=...)"
        )
    if is_sharded(weight):
        raise ValueError(
            f"quantize_: {fqn} is sharded already, {tuple(weight.shape)} as {weight.placements}; call quantize_ before "  # type: ignore[attr-defined]
            "fully_shard or parallelize_module"
        )


def _progress(items: list[Any], values: int) -> Iterable[Any]:
    """A bar on large models, where tqdm is installed."""
    if values < 100_000_000:
        return items
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, desc="quantizing", unit="weight")  # type: ignore[no-any-return]


def keep_quantized(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
    missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
) -> None:  # fmt: skip
    """Before a state dict is loaded: weights arrive in the format that the module holds.

    High-precision values are quantized, also under ``assign=True``, which would put a plain parameter in the place of
    an MXTensor. Values in another format are an error: quantizing twice loses what nobody asked to lose. (torch hands
    every hook ``strict=True``, whatever ``load_state_dict`` was called with.)
    """
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if not isinstance(parameter, MXTensor) or value is None:
            continue
        if isinstance(value, MXTensor):
            if value.format != parameter.format:
                error_msgs.append(
                    f"format mismatch for {prefix}{name}: the checkpoint holds {value.format}, the model "
                    f"{parameter.format}; quantize the model in that format, or load the values' dequantize()"
                )
                state_dict[prefix + name] = parameter.detach()  # what is there stays; the error is raised at the end
        elif local_metadata.get("assign_to_params_buffers") and value.shape == parameter.shape:
            new = quantize_as(value, parameter.recipe, parameter.copies)
            state_dict[prefix + name] = nn.Parameter(new, requires_grad=parameter.requires_grad)


def _found(model: nn.Module, filter_fn: FilterFn | None) -> list[tuple[nn.Module, str, Kind]]:
    found = list(_weights(model, filter_fn or default_filter))
    if filter_fn is None:
        lookups = _tied_to_lookups(model)
        found = [(module, name, kind) for module, name, kind in found if id(getattr(module, name)) not in lookups]
    return found


def quantize_(model: ModuleT, config: Config, filter_fn: FilterFn | None = None) -> ModuleT:
    """Quantize the linear and attention layers of ``model``, in place, for inference or for training.

    The modules stay torch's own classes; a shared weight stays shared. ``config`` for inference: the name of any format
    (weights, and activations on the fly in the same format), ``"NAME-weight-only"``, a LinearRecipe or one of torchao's
    configs; weights become frozen MXTensor parameters. For training: MXLinearConfig or a recipe; weights stay
    high-precision parameters, to optimizers and state dicts as before, and their three products run quantized.

    ``filter_fn(module, fqn) -> bool`` sees every nn.Linear, nn.MultiheadAttention and nn.Embedding, and of transformers
    every Conv1D and every module of stacked experts; without one, embeddings, whatever shares a weight with one,
    ``lm_head`` and routers are skipped. Embeddings and experts are not trained quantized. Returns ``model``.

    Raises ValueError or TypeError for a config it does not know, ValueError for a weight that is no parameter (as under
    weight_norm), both before anything is changed; warns where no layer matches. An optimizer for training is made
    afterwards: parameters are new objects over the same memory.
    """
    recipe = recipe_of(config)
    found = [f for f in _found(model, filter_fn) if f[2].trains or not recipe.trains]
    if not found:
        done = any(isinstance(parameter, MXTensor) for parameter in model.parameters())
        why = (
            "its weights are quantized already, and frozen; quantize the model anew from its high-precision values"
            if done
            else f"no nn.Linear, nn.MultiheadAttention or nn.Embedding of {type(model).__name__} passed the filter"
        )
        warnings.warn(f"quantize_ changed nothing: {why}", UserWarning, stacklevel=2)
    originals: dict[int, nn.Parameter] = {}  # alive, so that no other parameter takes over an identity
    shared: dict[int, nn.Parameter] = {}
    for module, name, kind in _progress(found, sum(getattr(m, n).numel() for m, n, _ in found)):
        weight = getattr(module, name)
        if id(weight) not in shared:
            originals[id(weight)] = weight
            shared[id(weight)] = _parameter(weight, module, kind, recipe)
        setattr(module, name, shared[id(weight)])
    changed = dict.fromkeys(module for module, _, _ in found)
    if recipe.trains:  # an embedding, say, that the filter left out trains the same values
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if id(parameter) in originals:
                    setattr(module, name, shared[id(parameter)])
                    changed[module] = None
    for module in changed:
        if recipe.trains:
            _training().register_hooks(module)
        else:
            module.register_load_state_dict_pre_hook(keep_quantized)
    return model


def _training() -> Any:
    """``convert.training``, which brings torch's compiler with it: imported for those who train."""
    return import_module(".training", __package__)


def _parameter(weight: nn.Parameter, module: nn.Module, kind: Kind, recipe: LinearRecipe) -> nn.Parameter:
    """The parameter that replaces ``weight``."""
    if recipe.trains:
        if kind.orientation is Orientation.COLUMNWISE:  # products contract the dimension that FSDP2 shards
            recipe = replace(recipe, quantized_gather=False)
        return _training().training_parameter(weight, recipe)  # type: ignore[no-any-return]
    if isinstance(module, nn.Embedding):
        recipe = LinearRecipe.inference(recipe.stored, None, recipe.kernel_preference)
    return nn.Parameter(quantize_as(values_of(weight), recipe, kind.orientation), requires_grad=False)

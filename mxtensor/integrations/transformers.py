"""A quantizer in transformers' public registry: weights are quantized one by one while a model is loaded.

Saved, a model has the layout "native" of ``mxtensor.checkpoints``, so that ``from_pretrained`` reads what ``convert``
writes. Imported when transformers' registry is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoints import native
from ..checkpoints.recipes import is_skipped, warn_of_unmatched_skip, with_parameters
from ..checkpoints.source import open_safetensors
from ..convert.configs import recipe_of
from ..convert.instance_methods import show_format
from ..convert.quantize import inference_recipe
from ..convert.weights import KINDS, Kind, default_filter
from ..core.arguments import described
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from ..training.state_dict import register_state_dict_hooks

METHOD = "mxtensor"
SIDES = tuple(f"_{side}_{name}" for side in ("rowwise", "columnwise") for name in ("data", "scale", "global_scale"))


@register_quantization_config(METHOD)
class MXQuantizationConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a model: see :class:`mxtensor.TransformersConfig`."""

    def __init__(self, format: str | None = None, skip: Sequence[str] = (), **unused: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers' enum has its own methods only
        if format is not None and not isinstance(format, str):
            raise TypeError(f"TransformersConfig takes the name of a format, not {described(format)}")
        if isinstance(skip, str) or not all(isinstance(name, str) for name in skip):
            raise TypeError(f"TransformersConfig: skip must be names of modules, got {described(skip)}")
        self.format, self.skip = format, list(skip)
        if format is not None and recipe_of(format).trains:
            raise ValueError(f"TransformersConfig: {format} trains, and stores no codes; pass a format for inference")

    @property
    def recipe(self) -> LinearRecipe:
        """The casts by which weights are quantized. Raises ValueError for a checkpoint that is quantized already."""
        if self.format is None:
            raise ValueError("this model was quantized tensor by tensor; its configuration names no format")
        return recipe_of(self.format)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str, str]:
    """The module of a parameter, the parameter's name in it, and the module's name."""
    path, _, leaf = name.rpartition(".")
    return (model.get_submodule(path) if path else model), leaf, path


def mapped(device_map: dict[str, Any]) -> dict[str, Any]:
    """``device_map`` with the CPU for the disk: tensors of a file are its pages there, not memory.

    accelerate's own offload to disk would write values; the checkpoint already has the codes.
    """
    return {name: "cpu" if device == "disk" else device for name, device in device_map.items()}


def _prepare(module: nn.Module) -> None:
    register_state_dict_hooks(module)
    show_format(module)


class Quantize(ConversionOps):
    """Quantizes one parameter of a checkpoint in high precision."""

    def __init__(self, hf_quantizer: MXQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: dict[str, Any], *patterns: Any, **kwargs: Any) -> dict[str, Any]:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        value = next(iter(input_dict.values()))
        value = value[0] if isinstance(value, list) else value
        module, leaf, _ = _place(model, name)
        kind = self.hf_quantizer.kind_of(model, name)
        if kind is None:
            return {name: value}
        value = value.to(getattr(module, leaf).dtype)
        quantized = quantize_as(
            value, inference_recipe([module], self.hf_quantizer.quantization_config.recipe), kind.orientation
        )
        _prepare(module)
        return {name: nn.Parameter(quantized, requires_grad=False)}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


class Deserialize(ConversionOps):
    """Builds one parameter from its codes and scales.

    transformers casts no tensor for an operation that has the attribute ``hf_quantizer``: scales stay float32.
    """

    def __init__(self, hf_quantizer: MXQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo: object) -> Deserialize:
        """Itself: transformers copies the operations of a converter for each parameter, and there is one quantizer."""
        return self

    def convert(self, input_dict: dict[str, Any], *patterns: Any, **kwargs: Any) -> dict[str, Any]:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        found = {key: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        stored = self.hf_quantizer.stored_name(name)
        self.hf_quantizer.loaded.add(stored)
        entry = native.entry_of(stored, self.hf_quantizer.metadata[native.PREFIX + stored])
        tensors = [_ending(found, source.removeprefix(stored), name) for source in entry.sources]
        module, leaf, _ = _place(model, name)
        _prepare(module)
        value = entry.build(*tensors).to(getattr(module, leaf).dtype)
        return {name: nn.Parameter(value, requires_grad=False)}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


def _ending(found: dict[str, Tensor], end: str, name: str) -> Tensor:
    for key, value in found.items():
        if key.endswith(end) and not key.removesuffix(end).endswith("_global"):
            return value
    raise ValueError(f"{name}: the checkpoint lacks {name}{end}")


@register_quantizer(METHOD)
class MXQuantizer(HfQuantizer):
    """How transformers loads and saves a model with MXTensors."""

    requires_calibration = False
    quantization_config: MXQuantizationConfig

    def __init__(self, quantization_config: MXQuantizationConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.metadata: dict[str, str] = {}
        self.loaded: set[str] = set()
        self._tied: set[str] = set()

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        device_map = kwargs.get("device_map")
        if not self.pre_quantized:
            if isinstance(device_map, dict) and "disk" in device_map.values():
                raise NotImplementedError(
                    "weights that are quantized while they are loaded are in no file; save the quantized model, or use "
                    "`mxtensor quantize`, and load that with 'disk' in device_map"
                )
            _ = self.quantization_config.recipe
        elif isinstance(device_map, dict) and "weights_only" not in kwargs:  # the one that accelerate has chosen
            device_map.update(mapped(device_map))

    def update_device_map(self, device_map: Any) -> Any:
        return mapped(device_map) if isinstance(device_map, dict) else device_map

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> Any:
        for file in (checkpoint_files or ()) if self.pre_quantized else ():
            if str(file).endswith(".safetensors"):
                with open_safetensors(file) as handle:
                    self.metadata |= handle.metadata() or {}
        if not self.pre_quantized:
            warn_of_unmatched_skip("TransformersConfig", self.quantization_config.skip, with_parameters(model))
        lookups = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        self._tied = {key for pair in tied.items() if lookups & set(pair) for key in pair}
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        rest = [name for name in self._names() if name not in self.loaded] if self.pre_quantized else []
        if rest:
            raise ValueError(
                f"{rest[0]} and {len(rest) - 1} other quantized tensors of the checkpoint have no parameter in "
                f"{type(model).__name__}, which stacks experts; quantize its high-precision checkpoint with "
                "quantization_config=mx.TransformersConfig(format)"
            )
        return model

    def _names(self) -> list[str]:
        """The quantized tensors of the checkpoint, by its metadata."""
        return [key.removeprefix(native.PREFIX) for key in self.metadata if key.startswith(native.PREFIX)]

    def kind_of(self, model: nn.Module, name: str) -> Kind | None:
        """The kind of module whose parameter ``name`` is to be quantized; None leaves it in high precision."""
        module, leaf, path = _place(model, name)
        kind = next((kind for kind in KINDS if leaf in kind.names and kind.matches(module)), None)
        skipped = not default_filter(module, path) or is_skipped(path, self.quantization_config.skip)
        return None if kind is None or skipped or name in self._tied else kind

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        if self.pre_quantized:
            return native.PREFIX + param_name in self.metadata
        return self.kind_of(model, param_name) is not None

    @property
    def quantized_element_size(self) -> float | None:
        format = self.quantization_config.format
        return None if format is None else recipe_of(format).stored.format.bits_per_value / 8

    def stored_name(self, name: str) -> str:
        """The name in the metadata of the parameter that the model calls ``name``, which transformers may have renamed.

        Raises ValueError if there is none.
        """
        found = native.closest(name, self._names())
        if found is None:
            raise ValueError(f"{name}: the metadata of the checkpoint does not say its format")
        return found

    def get_quantize_ops(self) -> ConversionOps:
        return Quantize(self)

    @property
    def serialized_names(self) -> dict[str, list[str]]:  # type: ignore[override]
        """Name of a parameter -> the names under which its codes and scales are stored."""
        leaves = sorted({name.rpartition(".")[2] for name in self._names()})
        return {leaf: [re.escape(leaf) + end for end in SIDES] for leaf in leaves} if self.pre_quantized else {}

    def get_load_operations(self) -> dict[str, Any]:
        return {"deserialize": Deserialize}

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        state: dict[str, Tensor] = {}
        metadata: dict[str, str] = {}
        for name, value in model.state_dict().items():
            if not isinstance(value, MXTensor):
                state[name] = value
            elif name not in tied:
                state |= native.stored_tensors(name, value)
                metadata |= native.header(name, value)
        return state, metadata

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        done: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if isinstance(parameter, MXTensor):
                    values = parameter.dequantize(dtype or parameter.dtype)
                    module._parameters[name] = done.setdefault(id(parameter), nn.Parameter(values))
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """For adapters: the weights are frozen."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True

"""A quantizer in transformers' public registry: weights are quantized one by one while a model is loaded.

Saved, a model has the layout "native" of ``mxtensor.checkpoints``, so that ``from_pretrained`` reads what ``convert``
writes. Imported when transformers' registry is.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoints import native
from ..checkpoints.layout import MERGES
from ..checkpoints.names import Loaded, check_skip, is_skipped, loaded_by, with_parameters
from ..checkpoints.reading import open_safetensors
from ..convert.changes import count_codes
from ..convert.configs import recipe_of
from ..convert.weights import KINDS, FilterFn, Kind, default_filter, warn_of_no_head
from ..core.arguments import FLAG, check, described
from ..core.compat import local_of
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.huge_pages import use_huge_pages
from ..tensor.mxtensor import MXTensor
from .transformers_load import (
    SIDES,
    Deserialize,
    Quantize,
    Splitting,
    Stack,
    check_loaded,
    check_shards,
    conversions_of,
    for_codes,
    has,
    heads_of,
    keep_codes,
    pairs_in_files,
    patterns_of,
    place,
    prepare,
    scoped,
    sparing,
    state_of,
    take_scales,
)

METHOD = "mxtensor"


@register_quantization_config(METHOD)
class MXQuantizationConfig(QuantizationConfigMixin):
    """The ``quantization_config`` of a model: see :class:`mxtensor.TransformersConfig`."""

    def __init__(
        self, format: str | None = None, skip: Sequence[str] = (), include_head: bool = False, **unused: Any
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers' enum has its own methods only
        if format is not None and not isinstance(format, str):
            raise TypeError(
                f"TransformersConfig takes the name of a format, not {described(format)}; for a format for each name "
                "(a dict, a plan) call mx.checkpoints.convert, or mx.quantize_ after loading"
            )
        if isinstance(skip, str) or not all(isinstance(name, str) for name in skip):
            raise TypeError(f"TransformersConfig: skip must be names of modules, got {described(skip)}")
        if "modules_to_not_convert" in unused:
            raise TypeError("TransformersConfig: modules_to_not_convert has the name skip here")
        check("TransformersConfig", "include_head", include_head, FLAG)
        self.format, self.skip, self.include_head = format, list(skip), include_head
        if format is not None and recipe_of(format).trains:
            raise ValueError(f"TransformersConfig: {format} trains, and stores no codes; pass a format for inference")

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict: transformers asks ``config.quantization_config`` of a loaded model so, if it is passed as
        ``config``."""
        return getattr(self, name, default)

    @property
    def recipe(self) -> LinearRecipe:
        """The casts by which weights are quantized. Raises ValueError for a checkpoint that is quantized already."""
        if self.format is None:
            raise ValueError("this model was quantized tensor by tensor; its configuration names no format")
        return recipe_of(self.format)


@register_quantizer(METHOD)
class MXQuantizer(HfQuantizer):
    """How transformers loads and saves a model with MXTensors."""

    requires_calibration = False
    quantization_config: MXQuantizationConfig

    def __init__(self, quantization_config: MXQuantizationConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.metadata: dict[str, str] = {}
        self.loaded: set[str] = set()
        self._in_files: set[str] = set()
        self._stored: dict[str, str] = {}
        """Parameter -> its name in the metadata. That is the name in the files, or, of a saved model, its own."""
        self.stacked: dict[str, dict[str, list[str]]] = {}
        """Parameter that stacks matrices -> transformers' pattern -> the matrices that it takes, in their order."""
        self._taken: dict[str, Loaded] = {}
        self._left: set[str] = set()
        """Parameters that stay in high precision although the default filter accepts them."""
        self._heads: set[str] = set()
        """Those that are quantized although it does not."""
        self._files: tuple[Any, ...] = ()
        self._usual: FilterFn | None = None
        self._transforms: list[Any] = []
        self._merges: dict[Any, WeightConverter] = {}
        self._unchecked: nn.Module | None = None
        self._model: nn.Module | None = None
        """The model until ``update_weight_conversions``."""
        self._unsaved: list[Any] | None = None
        """All operations of a model of which codes were saved: a few of them are for values only."""

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
            device_map.update(self.update_device_map(device_map))

    def update_device_map(self, device_map: Any) -> Any:
        """``device_map`` with the CPU for the disk: tensors of a file are its pages there, not memory.

        accelerate's own offload to disk would write values; the checkpoint already has the codes.
        """
        if not isinstance(device_map, dict):
            return device_map
        return {name: "cpu" if device == "disk" else device for name, device in device_map.items()}

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> Any:
        self._model = model
        for file in (checkpoint_files or ()) if self.pre_quantized else ():
            if str(file).endswith(".safetensors"):
                with open_safetensors(file) as handle:
                    self.metadata |= handle.metadata() or {}
                    self._in_files |= set(handle.keys())
        codes = next((name for name in self._in_files if name.endswith(SIDES)), None)
        if codes is not None and not self._names():
            raise ValueError(
                f"{codes}: its file has no metadata that says its format: another program has written the file without "
                "it; make the checkpoint again"
            )
        if self.pre_quantized and checkpoint_files and not self._names():
            warnings.warn(
                f"{checkpoint_files[0]}: the quantization_config is that of mxtensor, and no tensor is quantized: the "
                "model stays in high precision. Remove it from config.json, and to quantize the model pass "
                "quantization_config=mx.TransformersConfig(format)",
                UserWarning,
                stacklevel=2,
            )
        if not self.pre_quantized:
            parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
            check_skip("TransformersConfig", self.quantization_config.skip, with_parameters(model), parameters)
            self._files = tuple(checkpoint_files or ())
            if self.quantization_config.include_head:
                warn_of_no_head("TransformersConfig", model)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.pre_quantized:
            check_loaded(model, self._names(), self.loaded, self._taken)
        for module in model.modules():  # after transformers has tied weights
            if any(isinstance(local_of(parameter), MXTensor) for parameter in module.parameters(recurse=False)):
                prepare(module)
        use_huge_pages(model.parameters())
        count_codes(model)
        used = getattr(model, "_weight_conversions", None) or ()
        model._weight_conversions = [  # codes are stored as they are
            one for one in self._transforms if one in used or self._merges.get(one) in used
        ]
        # needed for loading only: the model keeps its quantizer, and has no pickle with a local function
        self._usual, self._transforms, self._merges, self._unchecked = None, [], {}, None
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """transformers' renamings and operations for this model, which 5.21 passes, with those that read codes."""
        model, self._model = self._model if model is None else model, None
        self._transforms = list(weight_conversions)
        if not self.pre_quantized:
            self._usual, chooses = default_filter(model), self.quantization_config.include_head
            pairs = pairs_in_files(model, self._files, self._transforms) if chooses else None
            self._left, chosen = heads_of(model, self.quantization_config.skip, pairs)
            self._heads = chosen if chooses else set()
            return self._transforms
        in_files = [name for name in self._names() if any(name + side in self._in_files for side in SIDES)]
        self._taken = loaded_by(model, in_files, self._transforms)
        self._stored = {name: name for name in self._names() if name not in self._taken}
        self._stored |= {parameter: name for name, one in self._taken.items() for parameter in one.parameters}
        self._unchecked = model
        take_scales(model, self._stored, self.metadata, self._in_files, self._transforms)
        for name, taken in self._taken.items():
            for parameter in taken.parameters if taken.operations in MERGES else ():
                self.stacked.setdefault(parameter, defaultdict(list))[taken.source or ""].append(name)
        for one in self._transforms:
            if isinstance(one, WeightConverter) and tuple(type(op).__name__ for op in one.operations) in MERGES:
                sources = [source + side for source in one.source_patterns for side in SIDES]
                merge = WeightConverter(sources, patterns_of(one)[1], [Stack(self, one)], one.force_cpu)
                self._merges[one] = scoped(merge, one)
        own = {name + side for name, taken in self._taken.items() if taken[:2] == ((name,), ()) for side in SIDES}
        renamings = [sparing(other, own) for one in weight_conversions for other in (one, *for_codes(one))]
        # the first that matches is taken, and a pattern of older versions of transformers matches longer names, too
        return [*self._splits(), *self._merges.values(), *self.get_weight_conversions(), *renamings]

    def get_weight_conversions(self) -> list[Any]:
        """What reads the codes of a parameter that no operation of the model changes."""
        return [WeightConverter(names, leaf, [Deserialize(self)]) for leaf, names in self.serialized_names.items()]

    def get_new_dtype(self, *args: Any) -> Any:
        """What transformers asks for each tensor before it reads any, when ranks have their parts of the model."""
        self.check_shards()
        return super().get_new_dtype(*args)

    def check_shards(self) -> None:
        """Raise NotImplementedError, once, for tensors that ranks cannot read in their parts."""
        if self._unchecked is not None:
            model, self._unchecked = self._unchecked, None
            check_shards(model, self._stored, self.metadata)

    def _splits(self) -> Iterator[WeightConverter]:
        """transformers' operations that split one tensor, for codes."""
        for one in self._transforms:
            targets = one.target_patterns
            if isinstance(one, WeightConverter) and len(one.source_patterns) == 1 and len(targets) > 1:
                end = "" if targets[0].endswith("weight") else ".weight"  # it may be for the bias, too
                (source,), pieces = patterns_of(one)
                sources = [f"{source}{re.escape(end)}{side}" for side in SIDES]
                operations = [Deserialize(self, one)]
                split = Splitting(sources, [f"{piece}{end}" for piece in pieces], operations, one.force_cpu)
                yield scoped(split, one)

    def _names(self) -> list[str]:
        """The quantized tensors of the checkpoint, by its metadata."""
        return [key.removeprefix(native.PREFIX) for key in self.metadata if key.startswith(native.PREFIX)]

    def kind_of(self, model: nn.Module, name: str) -> Kind | None:
        """The kind of module whose parameter ``name`` is to be quantized; None leaves it in high precision."""
        module, leaf, path = place(model, name)
        kind = next((kind for kind in KINDS if leaf in kind.names and kind.matches(module)), None)
        usual = self._usual is not None and self._usual(module, path) and name not in self._left
        skipped = is_skipped(name, self.quantization_config.skip)
        return kind if name in self._heads or (usual and not skipped) else None

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a parameter is quantized, or another one of those that one tensor is split into."""
        if self.pre_quantized:
            return param_name in self._stored
        siblings = [param_name]
        for one in self._transforms:
            first, *others = one.target_patterns
            if first in param_name:
                names = (param_name.replace(first, other) for other in others)
                siblings += [other for other in names if has(model, other)]
        return any(self.kind_of(model, name) is not None for name in siblings)

    @property
    def quantized_element_size(self) -> float | None:
        format = self.quantization_config.format
        return None if format is None else recipe_of(format).stored.format.bits_per_value / 8

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes of a value, by which transformers divides a model among devices."""
        size = self.quantized_element_size
        quantized = size is not None and self.param_needs_quantization(model, param_name)
        return size if quantized and size is not None else param.element_size()

    def stored_name(self, name: str) -> str:
        """The name in the metadata of the parameter that the model calls ``name``, which transformers may have renamed.

        Raises ValueError if there is none.
        """
        found = self._stored.get(name) or native.closest(name, self._names())
        if found is None:
            raise ValueError(f"{name}: the metadata of the checkpoint does not say its format")
        return found

    def get_quantize_ops(self) -> ConversionOps:
        return Quantize(self)

    @property
    def serialized_names(self) -> dict[str, list[str]]:  # type: ignore[override]
        """Name of a parameter -> the names under which its codes and scales are stored."""
        leaves = sorted({name.rpartition(".")[2] for name in (*self._names(), *self._stored)})
        return {leaf: [re.escape(leaf) + end for end in SIDES] for leaf in leaves} if self.pre_quantized else {}

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        state, metadata = state_of(model)
        self._unsaved = conversions_of(model) if self._unsaved is None else self._unsaved
        model._weight_conversions = keep_codes(self._unsaved, [name for name in state if name.endswith(SIDES)])
        return state, metadata

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        if self._unsaved is not None:
            model._weight_conversions, self._unsaved = self._unsaved, None
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # a word after save_pretrained
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

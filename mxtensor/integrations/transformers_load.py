"""What the quantizer for transformers does with tensors on their way from files to a model, and back.

``hf_quantizer`` is the ``MXQuantizer`` of ``transformers.py``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, PrefixChange, WeightConverter, WeightRenaming

from ..checkpoints import native
from ..convert.instance_methods import show_format
from ..core.local import is_sharded, local_of
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from ..training.state_dict import register_state_dict_hooks

patterns_of: Callable[[Any], tuple[list[str], list[str]]] = attrgetter(
    "_original_source_patterns", "_original_target_patterns"
)
"""Sources and targets of a renaming as transformers' own lists write them; its public fields have others."""
SIDES = tuple(f"_{side}_{name}" for side in ("rowwise", "columnwise") for name in ("data", "scale", "global_scale"))


def place(model: nn.Module, name: str) -> tuple[nn.Module, str, str]:
    """The module of a parameter, the parameter's name in it, and the module's name."""
    path, _, leaf = name.rpartition(".")
    return (model.get_submodule(path) if path else model), leaf, path


def dtype_of(model: nn.Module, name: str) -> torch.dtype:
    """The dtype in which transformers loads a parameter: its own, or float32 where the model asks for it.

    The output layers of T5's MLPs (``wo``) overflow in float16. Weights that a quantizer makes are not cast to it.
    """
    module, leaf, _ = place(model, name)
    own: torch.dtype = getattr(module, leaf).dtype
    # What transformers itself asks when it loads; it has no public name.
    plan_of = getattr(model, "_get_dtype_plan", None)
    plan: dict[str, torch.dtype] = {} if plan_of is None else plan_of(own)
    return next((dtype for part, dtype in plan.items() if re.search(part.replace("*", ".*"), name)), own)


def has(model: nn.Module, name: str) -> bool:
    """Whether a model has a parameter."""
    try:
        return isinstance(model.get_parameter(name), nn.Parameter)
    except AttributeError:
        return False


def prepare(module: nn.Module) -> None:
    """Add what ``quantize_`` adds to a module with a quantized weight."""
    register_state_dict_hooks(module)
    show_format(module)


class Quantize(ConversionOps):
    """Quantizes what transformers makes of one tensor in high precision: several parameters, if it splits it."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: dict[str, Any], *patterns: Any, **kwargs: Any) -> dict[str, Any]:
        names = input_dict if len(input_dict) > 1 else (kwargs["full_layer_name"],)
        values = (value[0] if isinstance(value, list) else value for value in input_dict.values())
        return {name: self._quantized(kwargs["model"], name, v) for name, v in zip(names, values, strict=True)}

    def _quantized(self, model: nn.Module, name: str, value: Tensor) -> Tensor:
        kind, value = self.hf_quantizer.kind_of(model, name), value.to(dtype_of(model, name))
        if kind is None:
            return value
        recipe = (
            self.hf_quantizer.quantization_config.recipe
        )  # an embedding has that of the head that shares its weight
        return nn.Parameter(quantize_as(value, recipe, kind.orientation), requires_grad=False)

    @property
    def reverse_op(self) -> ConversionOps:
        return self


class Deserialize(ConversionOps):
    """Builds one parameter from its codes and scales.

    transformers casts no tensor for an operation that has the attribute ``hf_quantizer``: scales stay float32.
    """

    supports_many_to_many = True  # codes and scales of one tensor, which transformers splits afterwards

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo: object) -> Deserialize:
        """Itself: transformers copies the operations of a converter for each parameter, and there is one quantizer."""
        return self

    def convert(self, input_dict: dict[str, Any], *patterns: Any, **kwargs: Any) -> dict[str, Any]:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        found = {key: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        stored = self.hf_quantizer.stored_name(name)
        self.hf_quantizer.loaded.add(stored)
        module, leaf, _ = place(model, name)
        parameter = getattr(module, leaf)
        part = tuple(local_of(parameter).shape) if is_sharded(parameter) else None
        entry = native.entry_of(stored, self.hf_quantizer.metadata[native.PREFIX + stored], part)
        tensors = [_ending(found, source.removeprefix(stored), name) for source in entry.sources]
        value = entry.build(*tensors).to(dtype_of(model, name))
        return {name: nn.Parameter(value, requires_grad=False)}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


class Stack(ConversionOps):
    """Makes one parameter of the codes of many matrices, as transformers stacks experts.

    ``one``: transformers' operations for values. Nothing is made of matrices whose codes have no common format.
    """

    def __init__(self, hf_quantizer: Any, one: WeightConverter) -> None:
        self.hf_quantizer, self.one = hf_quantizer, one

    def __deepcopy__(self, memo: object) -> Stack:
        """Itself, as ``Deserialize``."""
        return self

    def convert(self, input_dict: dict[str, Any], *patterns: Any, **kwargs: Any) -> dict[str, Any]:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        stored, sources = self.hf_quantizer.stacked[name], self.one.source_patterns
        found: dict[str, Any] = {source: self._matrices(input_dict, source, stored[source]) for source in sources}
        recipes = {matrix.recipe for matrices in found.values() for matrix in matrices}
        if not all(found.values()) or len(recipes) > 1:
            return {}
        for operation in self.one.operations:
            found = operation.convert(found, **kwargs | {"source_patterns": sources})
        ((target, value),) = found.items()
        if not isinstance(value, MXTensor):
            return {}
        self.hf_quantizer.loaded.update(*stored.values())
        return {target: nn.Parameter(value.to(dtype_of(model, name)), requires_grad=False)}

    def _matrices(self, given: dict[str, Any], source: str, names: list[str]) -> list[Any]:
        """The matrices of one of transformers' patterns; none if some are plain, or have other numbers of tensors."""
        entries = [native.entry_of(one, self.hf_quantizer.metadata[native.PREFIX + one]) for one in names]
        ends = {tuple(end.removeprefix(one) for end in e.sources) for one, e in zip(names, entries, strict=True)}
        columns = [given.pop(source + end, []) for end in next(iter(ends), ())]
        if len(ends) != 1 or source in given or any(len(column) != len(names) for column in columns):
            return []
        return [entry.build(*tensors) for entry, *tensors in zip(entries, *columns, strict=True)]

    @property
    def reverse_op(self) -> ConversionOps:
        return self


class Freeze(ConversionOps):
    """Makes parameters of what transformers has split a quantized tensor into."""

    def convert(self, input_dict: dict[str, Any], *patterns: Any, **kwargs: Any) -> dict[str, Any]:
        return {  # each with a scale of its own, where the whole had one: transformers stores no shared memory
            target: nn.Parameter(value.clone(), requires_grad=False) for target, value in input_dict.items()
        }

    @property
    def reverse_op(self) -> ConversionOps:
        return self


def shards_of(parameter: Any) -> dict[int, int]:
    """Dimension -> number of equal parts of which ranks have some.

    A rank has one of them, or one of each of several groups (``split_factor``: gates and ups in one stack).
    """
    shards: dict[int, int] = {}
    if is_sharded(parameter):
        for placement, ranks in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            if hasattr(placement, "dim"):  # not replicated
                dim = placement.dim % parameter.dim()
                shards[dim] = shards.get(dim, 1) * ranks * getattr(placement, "split_factor", 1)
    return shards


def check_shards(model: nn.Module, stored: dict[str, str], metadata: dict[str, str]) -> None:
    """Raise NotImplementedError for a quantized tensor of a checkpoint that ranks cannot read in their parts.

    ``stored``: parameter -> name of its tensor in the metadata.
    """
    times = Counter(stored.values())
    for name, tensor in stored.items():
        shards = shards_of(model.get_parameter(name)) if has(model, name) else {}
        if not shards:
            continue
        reason = native.why_not_sharded(tensor, metadata[native.PREFIX + tensor], shards)
        reason = f"{name} is a part of it" if times[tensor] > 1 else reason
        if reason is not None:
            raise NotImplementedError(
                f"{tensor} is quantized in the checkpoint, and ranks cannot read it in parts: {reason}; load the "
                "high-precision checkpoint with quantization_config=mx.TransformersConfig(format)"
            )


def _ending(found: dict[str, Tensor], end: str, name: str) -> Tensor:
    for key, value in found.items():
        if key.endswith(end) and not key.removesuffix(end).endswith("_global"):
            return value
    raise ValueError(f"{name}: the checkpoint lacks {name}{end}")


def for_codes(one: Any) -> Iterator[Any]:
    """A renaming of whole tensors, such as ``input_linear.weight``, for their codes and scales."""
    (source, *_), (target, *_) = patterns_of(one)
    if type(one) is WeightRenaming and source[-1:].isalnum():
        yield from (one.copy([source + side], [target + side]) for side in SIDES)


class Sparing(WeightRenaming):
    """A renaming that leaves ``keys`` alone: those of codes whose parameter has its own name in the files.

    transformers keeps such a name of a parameter, which it finds in the model, but not those of its codes.
    """

    __slots__ = ("keys",)

    def __init__(self, source_patterns: Any, target_patterns: Any, keys: Collection[str] = ()) -> None:
        super().__init__(source_patterns, target_patterns)
        self.keys = keys

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return (source_key, None) if source_key in self.keys else super().rename_source_key(source_key)


def sparing(one: Any, keys: Collection[str]) -> Any:
    """``one``, or a ``Sparing`` one if it is a renaming that would change one of ``keys``."""
    if type(one) is not WeightRenaming or all(one.rename_source_key(key)[0] == key for key in keys):
        return one
    sources, targets = patterns_of(one)
    copy = Sparing([*sources], [*targets], keys)  # it may change its lists
    copy.scope_prefix, copy.base_model_prefix = one.scope_prefix, one.base_model_prefix
    return copy


def keep_codes(model: Any, names: Collection[str]) -> None:
    """Tell transformers to store what it has split one by one if it is codes, and the biases with it.

    Joined codes have no format.
    """
    transforms: Iterable[Any] | None = getattr(model, "_weight_conversions", None)
    if transforms is None:  # as transformers' own, for a model that was not loaded
        found = get_model_conversion_mapping(model, add_legacy=False)
        transforms = [one for one in found if not isinstance(one, PrefixChange)]

    def joins(one: Any) -> bool:
        reverse = one.reverse_transform()
        return any(reverse.rename_source_key(name)[1] is not None for name in names)

    model._weight_conversions = [one for one in transforms if not (isinstance(one, WeightConverter) and joins(one))]

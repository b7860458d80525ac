"""What the quantizer for transformers does with tensors on their way from files to a model, and back.

Operations on tensors, renamings of codes, which heads and static scales the files have, what is saved.

``hf_quantizer`` is the ``MXQuantizer`` of ``transformers.py``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

from ..checkpoints import native
from ..checkpoints.names import (
    Loaded,
    is_skipped,
    loaded_by,
    stored_by_others,
    tied_groups,
    tied_keys,
    tied_to_embeddings,
)
from ..checkpoints.store import opened
from ..convert.changes import show_format
from ..convert.weights import heads
from ..core.compat import is_sharded, local_of
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from ..training.prepared_linear import SCALE, StaticInputLinear, has_static_inputs
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


def in_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` with another dtype, which is the outer one of a quantized tensor."""
    return value.with_dtype(dtype) if isinstance(value, MXTensor) else value.to(dtype)


def prepare(module: nn.Module) -> None:
    """Add what ``quantize_`` adds to a module with a quantized weight."""
    register_state_dict_hooks(module)
    show_format(module)


# ---------------------------------------------------------------------------------------------- operations


class _Operation(ConversionOps):
    """transformers casts no tensor for an operation that has the attribute ``hf_quantizer``: scales stay float32."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def __deepcopy__(self, memo: object) -> _Operation:
        """Itself: transformers copies the operations of a converter for each parameter, and there is one quantizer."""
        return self

    @property
    def reverse_op(self) -> ConversionOps:
        return self


class Quantize(_Operation):
    """Quantizes what transformers makes of one tensor in high precision: several parameters, if it splits it."""

    def convert(self, input_dict: dict[str, Any], *patterns: Any, **kwargs: Any) -> dict[str, Any]:
        model, recipe = kwargs["model"], self.hf_quantizer.quantization_config.recipe
        names = input_dict if len(input_dict) > 1 else (kwargs["full_layer_name"],)
        found: dict[str, Any] = {}
        for name, value in zip(names, input_dict.values(), strict=True):
            kind = self.hf_quantizer.kind_of(model, name)
            values = (value[0] if isinstance(value, list) else value).to(dtype_of(model, name))
            if kind is not None:  # an embedding has the recipe of the head that shares its weight
                values = nn.Parameter(quantize_as(values, recipe, kind.orientation), requires_grad=False)
            found[name] = values
        return found


class Deserialize(_Operation):
    """Builds one parameter from its codes and scales.

    ``one``: transformers' operations that split it into several; each gets a scale of its own, where the whole had one:
    transformers stores no shared memory.
    """

    def __init__(self, hf_quantizer: Any, one: WeightConverter | None = None) -> None:
        super().__init__(hf_quantizer)
        self.one = one

    def convert(self, input_dict: dict[str, Any], *patterns: Any, **kwargs: Any) -> dict[str, Any]:
        self.hf_quantizer.check_shards()
        name, model = kwargs["full_layer_name"], kwargs["model"]
        found = {key: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        stored = self.hf_quantizer.stored_name(name)
        self.hf_quantizer.loaded.add(stored)
        module, leaf, _ = place(model, name)
        parameter = getattr(module, leaf)
        part = tuple(local_of(parameter).shape) if is_sharded(parameter) else None
        entry = native.entry_of(stored, self.hf_quantizer.metadata[native.PREFIX + stored], part)
        assert entry.build is not None
        tensors = []
        for end in (source.removeprefix(stored) for source in entry.sources):
            keys = [k for k in found if k.endswith(end) and not k.removesuffix(end).endswith("_global")]
            if not keys:
                raise ValueError(f"{name}: the checkpoint lacks {name}{end}")
            tensors.append(found[keys[0]])
        made: dict[str, Any] = {name: in_dtype(entry.build(*tensors), dtype_of(model, name))}
        for operation in () if self.one is None else self.one.operations:
            made = operation.convert(made, **kwargs)
        values = made if self.one is None else {target: value.clone() for target, value in made.items()}
        return {target: nn.Parameter(value, requires_grad=False) for target, value in values.items()}


class Stack(_Operation):
    """Makes one parameter of the codes of many matrices, as transformers stacks experts.

    ``one``: transformers' operations for values. Nothing is made of matrices whose codes have no common format.
    """

    def __init__(self, hf_quantizer: Any, one: WeightConverter) -> None:
        super().__init__(hf_quantizer)
        self.one = one

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
        return {target: nn.Parameter(in_dtype(value, dtype_of(model, name)), requires_grad=False)}

    def _matrices(self, given: dict[str, Any], source: str, names: list[str]) -> list[Any]:
        """The matrices of one of transformers' patterns; none if some are plain, or have other numbers of tensors."""
        entries = [native.entry_of(one, self.hf_quantizer.metadata[native.PREFIX + one]) for one in names]
        ends = {tuple(end.removeprefix(one) for end in e.sources) for one, e in zip(names, entries, strict=True)}
        columns = [given.pop(source + end, []) for end in next(iter(ends), ())]
        if len(ends) != 1 or source in given or any(len(column) != len(names) for column in columns):
            return []
        return [entry.build(*tensors) for entry, *tensors in zip(entries, *columns, strict=True)]


class Splitting(WeightConverter):
    """Takes the codes and scales of one tensor, and gives what transformers splits the tensor into.

    transformers itself takes several tensors to several only by operations that it knows; before 5.21 nobody can add
    one (``supports_many_to_many``).
    """

    __slots__ = ()

    def __init__(
        self, source_patterns: Any, target_patterns: Any, operations: Sequence[ConversionOps], force_cpu: bool = False
    ) -> None:
        WeightTransform.__init__(self, source_patterns, target_patterns)
        self.operations, self.force_cpu = [*operations], force_cpu


# ---------------------------------------------------------------------------------------------- checks


def check_loaded(model: nn.Module, names: Iterable[str], loaded: Collection[str], taken: dict[str, Loaded]) -> None:
    """Raise ValueError if a parameter lacks its codes. Others, such as those of a head that this class of models does
    not have, are among the unexpected keys that transformers reports.

    ``names``: quantized tensors of the checkpoint; ``loaded``: those that were read; ``taken``: what became of them.
    """
    rest = sorted(set(names) - set(loaded))
    lost = [name for name in rest if taken.get(name, Loaded()).parameters or has(model, name)]
    kind = type(model).__name__
    if lost:
        raise ValueError(
            f"{lost[0]} and {len(lost) - 1} other quantized tensors of the checkpoint cannot be stacked, as {kind} "
            "stacks experts: the formats differ, or the global scales (NVFP4), or blocks do not end with a matrix; "
            "quantize the high-precision checkpoint with quantization_config=mx.TransformersConfig(format)"
        )
    if rest and not loaded:
        raise ValueError(
            f"{kind} has no parameter for any of the {len(rest)} quantized tensors of the checkpoint, such as "
            f"{rest[0]}; load a class whose parameters have these names, such as the one in config.json"
        )


def check_shards(model: nn.Module, stored: dict[str, str], metadata: dict[str, str]) -> None:
    """Raise NotImplementedError for a quantized tensor of a checkpoint that ranks cannot read in their parts.

    ``stored``: parameter -> name of its tensor in the metadata.
    """
    times = Counter(stored.values())
    for name, tensor in stored.items():
        parameter: Any = model.get_parameter(name) if has(model, name) else None
        shards: dict[int, int] = {}  # dimension -> number of equal parts of which ranks have some
        if is_sharded(parameter):
            for placement, ranks in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
                if hasattr(placement, "dim"):  # not replicated
                    dim = placement.dim % parameter.dim()
                    # a rank may have a part of each of several groups: gates and ups in one stack
                    shards[dim] = shards.get(dim, 1) * ranks * getattr(placement, "split_factor", 1)
        if not shards:
            continue
        reason = native.why_not_sharded(tensor, metadata[native.PREFIX + tensor], shards)
        reason = f"{name} is a part of it" if times[tensor] > 1 else reason
        if reason is not None:
            raise NotImplementedError(
                f"{tensor} is quantized in the checkpoint, and ranks cannot read it in parts: {reason}; load the "
                "high-precision checkpoint with quantization_config=mx.TransformersConfig(format)"
            )


# ---------------------------------------------------------------------------------------------- names of codes


def scoped(copy: Any, one: Any) -> Any:
    """``copy`` with the part of the model to which ``one`` belongs: older versions of transformers have no ``copy``."""
    copy.scope_prefix, copy.base_model_prefix = one.scope_prefix, one.base_model_prefix
    return copy


def for_codes(one: Any) -> Iterator[Any]:
    """A renaming of whole tensors, such as ``input_linear.weight``, for their codes and scales."""
    (source, *_), (target, *_) = patterns_of(one)
    if type(one) is WeightRenaming and source[-1:].isalnum():
        yield from (scoped(WeightRenaming([source + side], [target + side]), one) for side in SIDES)


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
    return scoped(Sparing([*sources], [*targets], keys), one)  # it may change its lists


# ---------------------------------------------------------------------------------------------- what files have


def heads_of(
    model: nn.Module, skip: Sequence[str], pairs: Mapping[str, str] | None = None
) -> tuple[set[str], set[str]]:
    """Parameters that the default filter leaves in high precision, and those that ``include_head`` quantizes: heads,
    and embeddings that share a weight with one. ``pairs``: what is tied, as ``tied_keys``, which is the default."""
    pairs = tied_keys(model) if pairs is None else pairs
    lookups, tied = tied_to_embeddings(model, pairs)
    made = {f"{fqn}.weight" for fqn in heads(model)} | (tied - lookups)
    chosen: set[str] = set()
    groups = tied_groups(pairs)
    for head in made:
        names = next((group for group in groups if head in group), {head})
        if not any(is_skipped(name, skip) for name in names):
            chosen |= names
    return made | tied, chosen


def pairs_in_files(model: nn.Module, files: Iterable[Any], transforms: Iterable[Any]) -> dict[str, str]:
    """``tied_keys``, without the pairs for which the files have different values: transformers does not tie them."""
    pairs = dict(tied_keys(model))
    if not pairs:
        return pairs
    holders: dict[str, Any] = {}
    for file in files:
        with opened(file) as checkpoint:
            holders |= dict.fromkeys(checkpoint.tensors, file)
    wanted = {name for pair in pairs.items() for name in pair}
    stored = {
        parameter: name
        for name, loaded in loaded_by(model, holders, transforms).items()
        for parameter in wanted.intersection(loaded.parameters)
    }
    for pair in list(pairs.items()):
        names = [stored[parameter] for parameter in pair if parameter in stored]
        if len(set(names)) == 2:
            values = []
            for name in names:
                with opened(holders[name]) as checkpoint:
                    values.append(checkpoint.tensor(name))
            if not torch.equal(*values):
                del pairs[pair[0]]
    return pairs


def take_scales(
    model: nn.Module,
    stored: Mapping[str, str],
    metadata: Mapping[str, str],
    in_files: Collection[str],
    transforms: Iterable[Any],
) -> None:
    """Make layers of ``model`` those with a static scale of inputs, where the files have one (``M.input_scale``).

    transformers loads what the model has a place for, and a new model has linear layers only. ``stored``: parameter ->
    name of its tensor in the metadata. Raises ValueError for a scale of a quantized weight that the model has, but not
    as a linear layer of its own.
    """
    scales = {name for name in in_files if name.endswith(f".{SCALE}")}
    if not scales:
        return
    static = {
        parameter
        for parameter, name in stored.items()
        if has(model, parameter) and has_static_inputs(native.recipe_of_entry(name, metadata[native.PREFIX + name]))
    }
    static |= {name for name, source in tied_keys(model).items() if source in static}
    made: dict[str, StaticInputLinear] = {}
    for parameter in static:
        module, leaf, path = place(model, parameter)
        if type(module) is nn.Linear and leaf == "weight":
            scale = torch.ones((), dtype=module.weight.dtype, device=module.weight.device)
            made[f"{path}.{SCALE}"] = StaticInputLinear.from_linear(module, scale)
    found = loaded_by(model, scales, transforms)
    taken = {name for loaded in found.values() for name in loaded.parameters}
    for name, layer in made.items():
        if name not in taken:  # inputs without a global scale, chosen as a format
            layer.to_linear()
    weights = {stored[parameter] for parameter in static if parameter in stored}
    lost = [
        name for name in sorted(scales) if not found[name].parameters and f"{name.removesuffix(SCALE)}weight" in weights
    ]
    if lost:
        raise ValueError(
            f"{lost[0]} and {len(lost) - 1} other static scales of inputs are in the checkpoint, and "
            f"{type(model).__name__} has no linear layer of their names to take them; quantize the high-precision "
            "checkpoint with quantization_config=mx.TransformersConfig(format)"
        )


# ---------------------------------------------------------------------------------------------- saving


def state_of(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a model by the names under which they are stored, and the metadata of those that are quantized."""
    tied, there = stored_by_others(model), dict(model.named_parameters(remove_duplicate=False))
    state: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    written: set[int] = set()
    for name, value in model.state_dict().items():
        if not isinstance(value, MXTensor):
            state[name] = value
        elif name not in tied:
            shared = id(there.get(name)) in written  # but not as the model says: transformers would drop a name
            codes: Any = value.clone() if shared else value
            state |= native.stored_tensors(name, codes)
            metadata |= native.header(name, value)
            written.add(id(there.get(name, value)))
    return state, metadata


def conversions_of(model: Any) -> list[Any]:
    """What transformers changed when it loaded a model, and reverses when it saves the model."""
    transforms: Iterable[Any] | None = getattr(model, "_weight_conversions", None)
    if transforms is None:  # as transformers' own, for a model that was not loaded
        found = get_model_conversion_mapping(model, add_legacy=False)
        transforms = [one for one in found if not isinstance(one, PrefixChange)]
    return list(transforms)


def keep_codes(transforms: Iterable[Any], names: Collection[str]) -> list[Any]:
    """Those with which transformers stores what it has split one by one if it is codes, and the biases with it.

    Joined codes have no format.
    """

    def joins(one: Any) -> bool:
        reverse = one.reverse_transform()
        return any(reverse.rename_source_key(name)[1] is not None for name in names)

    return [one for one in transforms if not (isinstance(one, WeightConverter) and joins(one))]

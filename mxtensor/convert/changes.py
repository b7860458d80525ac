"""The changes of ``quantize_``: every weight is checked, and then they are replaced one by one.

A module keeps torch's class. How it describes itself (``print(model)``, transformers' memory footprint) changes by
methods of the instance.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from ..core.arguments import check_plain
from ..core.compat import is_sharded, local_of
from ..core.explain import LOGS
from ..core.names import dtype_name
from ..core.progress import with_progress
from ..numerics.formats import Orientation
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.attributes import set_attributes, user_attributes
from ..tensor.huge_pages import use_huge_pages
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from ..training.state_dict import register_state_dict_hooks
from ..training.training_weight import TrainingWeight, values_of
from .weights import Weight, codes_of_others, is_lookup, refuse_sharded

ModuleT = TypeVar("ModuleT", bound=nn.Module)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Change(NamedTuple):
    """One weight, and all its places (module, name of the parameter). It does not hold the weight."""

    places: list[tuple[nn.Module, str]]
    orientation: Orientation
    values: int
    recipe: LinearRecipe
    fqn: str


def checked_changes(model: nn.Module, weights: Sequence[tuple[Weight, LinearRecipe]]) -> list[Change]:
    """The changes of ``quantize_``, in the order of the modules.

    Raises TypeError for a weight that is not floating-point, ValueError for one that is sparse, has one dimension or no
    memory, or is shared by layers with different recipes, and what the format raises for the shape.
    """
    changes: dict[int, Change] = {}  # by the id of a weight: all of them are alive here
    tried: set[tuple[object, ...]] = set()
    for weight, recipe in weights:
        value = weight.value
        if id(value) not in changes:
            _check(weight)
            if not recipe.trains:
                _try(weight, recipe, tried)
            changes[id(value)] = Change([], weight.kind.orientation, value.numel(), recipe, weight.fqn)
        change = changes[id(value)]
        if change.recipe != recipe:
            raise ValueError(
                f"quantize_: {change.fqn} and {weight.fqn} are one weight; give both the same config, not "
                f"{change.recipe} and {recipe}"
            )
        change.places.append((weight.module, weight.name))
    for module in model.modules():  # one that the filter skipped, such as an embedding, can share a weight
        for name, parameter in module._parameters.items():
            same = changes.get(id(parameter))
            if same is not None and (module, name) not in same.places:
                same.places.append((module, name))
    return list(changes.values())


def check_shards(changes: Sequence[Change]) -> None:
    """Raise ValueError for a DTensor that would train, NotImplementedError for one whose shards cannot be quantized one
    by one. Nothing is communicated: all ranks decide alike."""
    for change in changes:
        weight: Any = change.places[0][0]._parameters[change.places[0][1]]
        if not is_sharded(weight):
            continue
        if change.recipe.trains:
            refuse_sharded(weight, change.fqn)
        from ..tensor.quantize_shards import why_not_by_shards

        reason = why_not_by_shards(weight, change.recipe.stored, change.orientation)
        if reason is not None:
            raise NotImplementedError(
                f"quantize_: the shards of {change.fqn} {tuple(weight.shape)}, {weight.placements}, cannot be "
                f"quantized one by one: {reason}; use a format with a scale for each block, or quantize a model that "
                "is not sharded and has loaded the full state dict"
            )


def check_replicas(model: nn.Module, changes: Sequence[Change]) -> None:
    """Raise ValueError for weights that would be new parameters, of which DistributedDataParallel reduces the old."""
    for module in model.modules():
        if not isinstance(module, nn.parallel.DistributedDataParallel):
            continue
        reduced = {id(p) for p in module.parameters() if p.requires_grad}
        for change in changes:
            weight = change.places[0][0]._parameters[change.places[0][1]]
            if id(weight) in reduced and not (change.recipe.trains and isinstance(weight, TrainingWeight)):
                raise ValueError(
                    f"quantize_: {change.fqn} is inside DistributedDataParallel, which reduces the gradients of the "
                    "parameters that it was made with, and quantize_ makes new ones; call quantize_ before "
                    "DistributedDataParallel"
                )


def _check(weight: Weight) -> None:
    value, name = values_of(local_of(weight.value)), weight.fqn
    check_plain(f"quantize_: {name}", value)
    if value.dtype not in DTYPES:
        codes = codes_of_others(weight.module)
        if codes:
            raise TypeError(
                f"quantize_: {name} is {dtype_name(value.dtype)}, codes of another library beside {codes}; convert the "
                "checkpoint by mx.checkpoints.convert and load the result, or leave the layer out by filter_fn"
            )
        raise TypeError(
            f"quantize_: {name} is {dtype_name(value.dtype)}; weights are float32, bfloat16, float16 "
            "or float64: convert it, or leave the layer out by filter_fn"
        )
    if value.layout is not torch.strided or value.is_nested:
        layout = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise ValueError(
            f"quantize_: {name} is {layout}; convert it by to_dense(), or leave the layer out by filter_fn"
        )
    if value.dim() < 2:
        raise ValueError(
            f"quantize_: {name} has the shape {tuple(value.shape)}; a weight is a matrix, or a stack of them: leave "
            "the layer out by filter_fn (another library may have partitioned it)"
        )
    has_memory = type(value) in (torch.Tensor, nn.Parameter) and not value.is_meta and value.numel() > 0
    if has_memory and value.untyped_storage().nbytes() == 0:
        raise ValueError(
            f"quantize_: the memory of {name} is freed, as that of a sharded weight; call quantize_ before the model "
            "is sharded"
        )


def _try(weight: Weight, recipe: LinearRecipe, tried: set[tuple[object, ...]]) -> None:
    """Quantize a weight of this kind without values: what the format refuses, it refuses here."""
    value = values_of(weight.value)
    kind = (tuple(value.shape), value.dtype, weight.kind.orientation, recipe)
    if kind in tried:
        return
    tried.add(kind)
    try:
        with torch.no_grad(), LOGS.block(None):
            quantize_as(torch.empty(value.shape, dtype=value.dtype, device="meta"), recipe, weight.kind.orientation)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise type(error)(f"quantize_: {weight.fqn} {tuple(value.shape)}: {error}") from error


# ---------------------------------------------------------------------------------------------- the replacement


def convert(model: ModuleT, changes: Sequence[Change], made: Mapping[str, MXTensor] | None = None) -> ModuleT:
    """Replace weights one by one. ``made``: those that are quantized already, by their names.

    What is shared by two weights is their memory, or nothing: for training, all replaced parameters can wait for the
    end, in case of a failure; for inference, each is freed at once.
    """
    made = made or {}
    undo: list[Callable[[], object]] = []
    undo_one: list[Callable[[], object]] = []
    replaced: dict[str, nn.Parameter] = {}
    try:
        quantized = all(change.fqn in made for change in changes)
        for change in changes if quantized else with_progress(changes, "quantizing", "weight"):
            original = _replace(change, undo if change.recipe.trains else undo_one, made.get(change.fqn))
            undo_one.clear()  # and the original is free
            if original is not None:
                replaced[change.fqn] = original
        if replaced:
            from .training import check_optimizers

            check_optimizers(replaced)
    except BaseException:
        for one in reversed([*undo, *undo_one]):
            one()
        raise
    if any(not change.recipe.trains for change in changes):
        count_codes(model)
        use_huge_pages(model.parameters())
    return model


def _replace(change: Change, undo: list[Callable[[], object]], made: MXTensor | None = None) -> nn.Parameter | None:
    """Replace a weight in all its places; ``undo`` gets what restores each one before it changes.

    A weight that trains stays the same parameter, for optimizers and all others that have it. If torch cannot change it
    in place, the result is the old parameter, which is no longer the model's.
    """
    if change.recipe.trains:
        from . import training

    module, name = change.places[0]
    original = getattr(module, name)
    in_place = change.recipe.trains and isinstance(original, TrainingWeight)
    if in_place:
        undo.append(training.undo_of(original))
        training.change_recipe(original, _training_recipe(original, change.orientation, change.recipe))
        parameter = original
    else:
        modules = [module for module, _ in change.places]
        parameter = _parameter(original, modules, change.orientation, change.recipe, made)
    for module, name in change.places:
        register_state_dict_hooks(module)
        show_format(module)
        if not in_place:
            undo.append(partial(setattr, module, name, original))
            setattr(module, name, parameter)
    if in_place or not change.recipe.trains:
        return None
    if not training.exchange(original, parameter):
        return original  # type: ignore[no-any-return]
    undo.append(partial(training.exchange, original, parameter))
    for module, name in change.places:  # also a write that Dynamo sees: its guards of a parameter look for no more
        setattr(module, name, original)
    return None


def _parameter(
    weight: nn.Parameter, modules: Sequence[nn.Module], orientation: Orientation, recipe: LinearRecipe,
    made: MXTensor | None,
) -> nn.Parameter:  # fmt: skip
    """The parameter that replaces ``weight`` of ``modules``, with its attributes."""
    if recipe.trains:
        from .training import training_parameter

        parameter = training_parameter(weight, _training_recipe(weight, orientation, recipe))
    else:
        if made is None:
            made = quantize_as(values_of(weight), inference_recipe(modules, recipe), orientation)
        parameter = nn.Parameter(made, requires_grad=False)
    return set_attributes(parameter, user_attributes(weight))  # type: ignore[no-any-return]


def _training_recipe(weight: nn.Parameter, orientation: Orientation, recipe: LinearRecipe) -> LinearRecipe:
    """The recipe that a weight carries: FSDP2 gathers codes of matrices (out, in) only."""
    whole = orientation is Orientation.COLUMNWISE or weight.dim() > 2
    return replace(recipe, quantized_gather=False) if whole else recipe


def inference_recipe(modules: Sequence[nn.Module], recipe: LinearRecipe) -> LinearRecipe:
    """The recipe of a stored weight of ``modules``: if all of them are lookups, there is no activation to cast."""
    if all(is_lookup(module) for module in modules):
        return LinearRecipe.inference(recipe.stored, None, recipe.kernel_preference)
    return recipe


# ---------------------------------------------------------------------------------------------- descriptions


class InstanceMethod:
    """``function(module, ...)`` as an attribute of ``module``. A copy of the module has one of its own.

    It does not hold the module, which would else be freed by the garbage collector only, long after its last use.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self.function, self._module = function, weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None:  # a shallow copy is left of it
            raise RuntimeError(
                f"{self.function.__name__}: the module is gone that quantize_ converted; copy modules by copy.deepcopy"
            )
        return self.function(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> InstanceMethod:
        module: Any = self._module()
        return InstanceMethod(self.function, memo.get(id(module), module))

    def __reduce__(self) -> Any:
        return InstanceMethod, (self.function, self._module())


def describe_weights(module: nn.Module) -> str:
    """``extra_repr`` of the module's class, then the format or the recipe of each weight that has one."""
    texts, activations = [], []
    for name, parameter in module._parameters.items():
        weight: Any = local_of(parameter)
        if isinstance(weight, MXTensor):
            texts.append(f"{name}={weight.format}")
            activations.append(weight.recipe.activation)
        elif isinstance(weight, TrainingWeight):
            texts.append(f"{name}={weight.linear_recipe}")
    formats = {str(cast.format) for cast in activations if cast is not None}
    texts += [f"activation={format}" for format in sorted(formats)]
    return ", ".join(text for text in (type(module).extra_repr(module), *texts) if text)


def footprint(module: nn.Module, return_buffers: bool = True) -> int:
    """transformers' ``get_memory_footprint()``, in which a quantized weight counts its codes and scales."""
    nbytes: int = type(module).get_memory_footprint(module, return_buffers)  # type: ignore[attr-defined]
    for weight in map(local_of, module.parameters()):
        if isinstance(weight, MXTensor):  # torch counts its outer dtype
            nbytes += weight.nbytes - weight.numel() * weight.element_size()
    return nbytes


def show_format(module: nn.Module) -> None:
    """Let ``print`` show the formats of the module's weights."""
    module.__dict__["extra_repr"] = InstanceMethod(describe_weights, module)


def count_codes(model: nn.Module) -> None:
    """Let ``get_memory_footprint`` of ``model`` and of the models in it count codes, if they are of transformers."""
    for module in model.modules():
        if callable(getattr(type(module), "get_memory_footprint", None)):
            module.__dict__["get_memory_footprint"] = InstanceMethod(footprint, module)

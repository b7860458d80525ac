"""The changes of ``quantize_``: every weight that it will replace, checked before the first one changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.arguments import check_plain
from ..core.explain import LOGS
from ..core.local import is_sharded, local_of
from ..core.names import dtype_name
from ..numerics.formats import Orientation
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.quantize_as import quantize_as
from ..training.training_weight import values_of
from .sharded import refuse_sharded
from .weights import Weight, codes_of_others

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

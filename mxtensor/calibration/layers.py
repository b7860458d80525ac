"""The layers that are calibrated, and parameters that take the place of others in a model.

A layer is calibrated if its one weight is a matrix. Methods work on matrices (out, in). A linear layer stores its
weight so; transformers' Conv1D stores (in, out).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..convert.changes import Change
from ..convert.weights import KINDS
from ..numerics.formats import Orientation
from ..numerics.operand import Operand, transposed
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor


def orientation_of(module: nn.Module) -> Orientation | None:
    """The layout of the weight of a layer that multiplies its input by one matrix; None for any other module."""
    kind = next((kind for kind in KINDS if kind.matches(module)), None)
    if kind is None or not kind.multiplies or kind.names != ("weight",):
        return None
    weight: Tensor = module.weight  # type: ignore[assignment]
    return kind.orientation if weight.dim() == 2 else None


def calibrated(changes: Iterable[Change]) -> dict[nn.Module, Change]:
    """The layers that multiply by their weights, one for each weight; an embedding alone and stacks have none."""
    found = {}
    for change in changes:
        for module, name in change.places:
            if name == "weight" and orientation_of(module) is change.orientation:
                found[module] = change
                break
    return found


def weight_of(change: Change) -> nn.Parameter:
    """The weight that a change replaces."""
    module, name = change.places[0]
    return getattr(module, name)  # type: ignore[no-any-return]


def check_values(caller: str, changes: Iterable[Change]) -> None:
    """Raise ValueError for a weight without values."""
    for change in changes:
        if weight_of(change).is_meta:
            raise ValueError(
                f"{caller}: {change.fqn} is on the device meta and has no values; load the model, without offload"
            )


def oriented(weight: Tensor, orientation: Orientation | None) -> Tensor:
    """A weight with this layout as (out, in), and the other way around."""
    return weight.mT if orientation is Orientation.COLUMNWISE else weight


def stored_as(operand: Operand, orientation: Orientation, recipe: LinearRecipe, dtype: torch.dtype) -> MXTensor:
    """The MXTensor whose matrix (out, in) is ``operand``, with the copy that ``quantize_`` would store."""
    if orientation is Orientation.ROWWISE:
        return MXTensor(operand, None, recipe, dtype)
    if operand.format.square:
        return MXTensor(transposed(operand).map(Tensor.contiguous), None, recipe, dtype)
    return MXTensor(None, operand, recipe, dtype)


class Edit(NamedTuple):
    """A parameter for one place in a model."""

    module: nn.Module
    name: str
    value: nn.Parameter


def edits_of(model: nn.Module, values: Mapping[str, Tensor], changes: Iterable[Change] = ()) -> list[Edit]:
    """New values by the names of parameters, frozen; those of ``changes`` in all of their places."""
    places = {change.fqn: change.places for change in changes}
    edits = []
    for fqn, value in values.items():
        module, _, name = fqn.rpartition(".")
        parameter = nn.Parameter(value, requires_grad=False)
        edits += [Edit(*place, parameter) for place in places.get(fqn) or [(model.get_submodule(module), name)]]
    return edits


@contextmanager
def in_place(edits: Iterable[Edit]) -> Iterator[None]:
    """The parameters of ``edits`` in the model, and afterwards those of before."""
    replaced: list[Edit] = []
    try:
        for module, name, value in edits:
            replaced.append(Edit(module, name, getattr(module, name)))
            setattr(module, name, value)
        yield
    finally:
        restore(replaced)


def restore(replaced: Iterable[Edit]) -> None:
    """Put parameters back, the last one first."""
    for module, name, value in reversed(list(replaced)):
        setattr(module, name, value)

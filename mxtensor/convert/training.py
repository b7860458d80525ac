"""The parameter that ``quantize_`` makes for training, and another recipe for one that it has made."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping

import torch
from torch import nn

from ..recipe.linear_recipe import LinearRecipe
from ..training import recompute
from ..training.histories import delayed_states
from ..training.interception import delayed_state
from ..training.training_weight import TrainingWeight, values_of

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where torch keeps the hooks of a parameter. Handles remove a hook from the dict itself."""


def training_parameter(weight: nn.Parameter, linear_recipe: LinearRecipe) -> nn.Parameter:
    """A parameter over the same memory that carries ``linear_recipe``, with a history if its scaling is delayed."""
    out = nn.Parameter(TrainingWeight(values_of(weight).detach(), linear_recipe), requires_grad=weight.requires_grad)
    if linear_recipe.delayed is not None:
        for name, state in delayed_states(weight).items():  # from autocast with the same recipe, or of a slice
            setattr(out, name, state)
        delayed_state(out, linear_recipe)
    _prepare_checkpoints(linear_recipe)
    out.grad = weight.grad
    for name in HOOKS:
        hooks = getattr(weight, name)
        if hooks is not None:
            setattr(out, name, hooks)
    return out


def exchange(weight: nn.Parameter, other: nn.Parameter) -> bool:
    """Give each of two parameters what the other is; False if torch cannot. Whoever has ``weight`` goes on with it."""
    try:
        torch.utils.swap_tensors(weight, other)
    except (RuntimeError, TypeError):  # saved for a backward pass, or used by C++ or a weak reference; another layout
        return False
    return True


def check_optimizers(replaced: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError if an optimizer would update one of these parameters, which are no longer those of the model."""
    names = {id(weight): name for name, weight in replaced.items()}
    for optimizer in gc.get_objects():
        if not issubclass(type(optimizer), torch.optim.Optimizer):
            continue
        groups = getattr(optimizer, "param_groups", [])  # none in one that is being made
        found = [names[id(p)] for group in groups for p in group["params"] if id(p) in names]
        if found:
            raise ValueError(
                f"quantize_: {found[0]} is a parameter of an optimizer, {type(optimizer).__name__}, and saved in the "
                "graph of a result, so that it cannot change in place; delete the result before quantize_, or make "
                "the optimizer after it"
            )


def _prepare_checkpoints(linear_recipe: LinearRecipe) -> None:
    """Let reentrant checkpoints tell a layer that draws random numbers of their first pass."""
    if linear_recipe.draws_forward:
        recompute.install()


def undo_of(weight: TrainingWeight) -> Callable[[], None]:
    """What gives ``weight`` back the recipe and the histories that it has now."""
    linear_recipe, states = weight.linear_recipe, delayed_states(weight)

    def undo() -> None:
        _set(weight, linear_recipe, states)

    return undo


def change_recipe(weight: TrainingWeight, linear_recipe: LinearRecipe) -> None:
    """Give ``weight`` another recipe, in place: optimizers, hooks and DistributedDataParallel have this parameter. Its
    histories go on if scaling stays delayed, and end otherwise."""
    _set(weight, linear_recipe, {} if linear_recipe.delayed is None else delayed_states(weight))
    if linear_recipe.delayed is not None:
        delayed_state(weight, linear_recipe)
    _prepare_checkpoints(linear_recipe)


def _set(weight: TrainingWeight, linear_recipe: LinearRecipe, states: dict[str, object]) -> None:
    for name in delayed_states(weight):
        delattr(weight, name)
    for name, state in states.items():
        setattr(weight, name, state)
    weight.linear_recipe = linear_recipe

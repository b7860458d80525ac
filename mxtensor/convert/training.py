"""What ``quantize_`` does for training alone: the parameter that it makes, another recipe for one that it has made, and
experts of an unknown kind.

Products of such experts stay in high precision: ``quantize_`` names them, ``explain()`` logs them, and ``strict()``
raises. They are experts by the name of their class, and their parameters have names that ``weights.py`` does not know.
What their forward pass does with a parameter is not known either, so that all that is noted is a call of the module.

Imported inside functions: this brings torch's compiler, which takes longer to import than all of torch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.compat import called_while_traced
from ..core.compat_compile import run_uncompiled
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..training import recompute
from ..training.autocast import autocast_state
from ..training.delayed_scaling import delayed_states
from ..training.grouped import note_experts
from ..training.interception import delayed_state
from ..training.training_weight import TrainingWeight, values_of
from .weights import Weight

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where torch keeps the hooks of a parameter. Handles remove a hook from the dict itself."""


def training_parameter(weight: nn.Parameter, linear_recipe: LinearRecipe) -> nn.Parameter:
    """A parameter over the same memory that carries ``linear_recipe``, with a history if its scaling is delayed."""
    out = nn.Parameter(TrainingWeight(values_of(weight).detach(), linear_recipe), requires_grad=weight.requires_grad)
    if linear_recipe.delayed is not None:
        for name, state in delayed_states(weight).items():  # from autocast with the same recipe, or of a slice
            setattr(out, name, state)
        delayed_state(out, linear_recipe)
    if linear_recipe.draws_forward:  # reentrant checkpoints tell a layer that draws random numbers of their first pass
        recompute.install()
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


def undo_of(weight: TrainingWeight) -> Callable[[], None]:
    """What gives ``weight`` back the recipe and the histories that it has now."""
    return partial(_set, weight, weight.linear_recipe, delayed_states(weight))


def change_recipe(weight: TrainingWeight, linear_recipe: LinearRecipe) -> None:
    """Give ``weight`` another recipe, in place: optimizers, hooks and DistributedDataParallel have this parameter. Its
    histories go on if scaling stays delayed, and end otherwise."""
    _set(weight, linear_recipe, {} if linear_recipe.delayed is None else delayed_states(weight))
    if linear_recipe.delayed is not None:
        delayed_state(weight, linear_recipe)
    if linear_recipe.draws_forward:
        recompute.install()


def _set(weight: TrainingWeight, linear_recipe: LinearRecipe, states: dict[str, object]) -> None:
    for name in delayed_states(weight):
        delattr(weight, name)
    for name, state in states.items():
        setattr(weight, name, state)
    weight.linear_recipe = linear_recipe


# ---------------------------------------------------------------------------------------------- unknown experts

LISTED = 3
"""Modules that the warning names."""


def describe(left_out: Sequence[Weight], model: nn.Module) -> str:
    """The sentence about weights that stay in high precision: how many parameters, their share, some modules."""
    weights = {id(weight.value): weight.value.numel() for weight in left_out}
    numbers = {id(parameter): parameter.numel() for parameter in model.parameters()}
    number, share = sum(weights.values()), sum(weights.values()) / max(sum(numbers.values()), 1)
    names = list(dict.fromkeys(weight.module_name or type(weight.module).__name__ for weight in left_out))
    named = ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
    return (
        f"{named} stay in high precision, with {number:,} of {sum(numbers.values()):,} parameters ({share:.0%}): they "
        "are stacked experts"
    )


def watch(module: nn.Module, name: str) -> None:
    """Log and refuse the products by the parameter ``name`` of a module of experts, in each forward pass."""
    if not any(isinstance(hook, _Note) and hook.name == name for hook in module._forward_pre_hooks.values()):
        module.register_forward_pre_hook(_Note(name), with_kwargs=True)


@called_while_traced
def _is_inside_autocast() -> bool:
    return autocast_state() is not None


class _Note:
    """A hook of the module. ``autocast`` sees the products themselves."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        weight = module._parameters.get(self.name)
        if weight is None or isinstance(weight, MXTensor):
            return
        if not _is_inside_autocast():
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            x = next((value for value in given if value.is_floating_point()), weight)
            note_experts(f"{type(module).__name__}.{self.name}", x, weight)


run_uncompiled(_is_inside_autocast, _Note.__call__)

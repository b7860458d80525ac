"""The parameter that ``quantize_`` makes for training."""

from __future__ import annotations

from torch import nn

from ..recipe.linear_recipe import LinearRecipe
from ..training.interception import delayed_state
from ..training.training_weight import TrainingWeight, delayed_states, values_of


def training_parameter(weight: nn.Parameter, linear_recipe: LinearRecipe) -> nn.Parameter:
    """A parameter over the same memory that carries ``linear_recipe``, with a history if its scaling is delayed."""
    out = nn.Parameter(TrainingWeight(values_of(weight).detach(), linear_recipe), requires_grad=weight.requires_grad)
    if linear_recipe.delayed is not None:
        for name, state in delayed_states(weight).items():  # from autocast with the same recipe, or of a slice
            setattr(out, name, state)
        delayed_state(out, linear_recipe)
    out.grad = weight.grad
    return out

"""Experts of an unknown kind, whose products a recipe for training leaves in high precision: ``quantize_`` names them,
``explain()`` logs them, and ``strict()`` raises.

They are experts by the name of their class, and their parameters have names that ``weights.py`` does not know. What
their forward pass does with a parameter is not known either, so that all that is noted is a call of the module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..core.compat import called_while_traced
from ..core.compat_compile import run_uncompiled
from ..tensor.mxtensor import MXTensor
from ..training.autocast import autocast_state
from ..training.experts import note_experts
from .weights import Weight

NAMED = 3
"""Modules that the warning names."""


def describe(left_out: Sequence[Weight], model: nn.Module) -> str:
    """The sentence about weights that stay in high precision: how many parameters, their share, some modules."""
    weights = {id(weight.value): weight.value.numel() for weight in left_out}
    numbers = {id(parameter): parameter.numel() for parameter in model.parameters()}
    number, share = sum(weights.values()), sum(weights.values()) / max(sum(numbers.values()), 1)
    names = list(dict.fromkeys(weight.module_name or type(weight.module).__name__ for weight in left_out))
    named = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
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

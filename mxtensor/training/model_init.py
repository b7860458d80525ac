"""``quantized_model_init``: modules of ``mxtensor.nn`` made inside hold their weights as MXTensors."""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics.formats import Orientation
from ..recipe import Recipe
from ..recipe.default import recipe_or_default
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import quantize_as


@dataclass(frozen=True)
class ModelInit:
    """What the innermost ``quantized_model_init`` says."""

    linear_recipe: LinearRecipe | None
    """None: not to quantize."""
    preserve: bool
    """Whether the values that were quantized are kept."""
    thread: int


_model_init: ContextVar[ModelInit | None] = ContextVar("mxtensor_model_init", default=None)


def init_recipe() -> LinearRecipe | None:
    """The roles that modules made here hold their weights by; None for high precision."""
    state = _state()
    return None if state is None else state.linear_recipe


def _state() -> ModelInit | None:
    state = _model_init.get()
    # As with autocast, a context that was copied to another thread does not count there.
    return state if state is not None and state.thread == threading.get_ident() else None


class quantized_model_init(ContextDecorator):  # noqa: N801  (as TransformerEngine writes it)
    """Inside the block, modules of ``mxtensor.nn`` are made with weights in the format that ``recipe`` gives weights.

    The weights hold both orientations, what the forward and the backward pass need; rowwise only where gradients are
    off (``torch.no_grad``, ``torch.inference_mode``); formats of square blocks one copy, which serves both. They are
    parameters that train: their gradients are plain tensors. Biases and norms stay in high precision.

    ``recipe`` (default ``MXFP8BlockScaling()``) is read on entry. ``preserve_high_precision_init_val``: each weight
    keeps a copy of its first values on the CPU, for the master weights of an optimizer;
    ``weight.get_high_precision_init_val()`` gives it and ``weight.clear_high_precision_init_val()`` lets it go. Blocks
    nest, the inner one wins, ``enabled=False`` inside leaves high precision. Holds for this thread and asyncio task.

    Raises TypeError for what is no recipe; ValueError for a recipe with impossible fields, or whose weights are cast
    in two ways, which one MXTensor cannot hold.
    """

    def __init__(
        self, enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
    ) -> None:
        self.recipe = recipe_or_default("quantized_model_init", enabled, recipe)
        self.preserve = preserve_high_precision_init_val
        self._before: list[ModelInit | None] = []

    def __enter__(self) -> quantized_model_init:
        linear_recipe = None if self.recipe is None else self.recipe.linear_recipe()
        if linear_recipe is not None and linear_recipe.weight.columnwise not in (None, linear_recipe.weight.rowwise):
            raise ValueError(
                f"quantized_model_init: {linear_recipe} casts weights to {linear_recipe.weight.rowwise} for fprop and to "
                f"{linear_recipe.weight.columnwise} for dgrad; one MXTensor holds one format: give the weight one cast"
            )
        self._before.append(_model_init.get())
        _model_init.set(ModelInit(linear_recipe, self.preserve, threading.get_ident()))
        return self

    def __exit__(self, *exception: Any) -> None:
        _model_init.set(self._before.pop())


def weight_parameter(values: Tensor) -> nn.Parameter:
    """A weight (out, in) of these values as ``quantized_model_init`` wants it; a plain parameter where it says nothing.

    A recipe that leaves weights in high precision leaves these too.
    """
    state = _state()
    cast = None if state is None or state.linear_recipe is None else state.linear_recipe.weight.rowwise
    if cast is None:
        return nn.Parameter(values)
    both = torch.is_grad_enabled() and state.linear_recipe.weight.columnwise is not None  # type: ignore[union-attr]
    orientation = Orientation.BOTH if both else Orientation.ROWWISE
    parameter = nn.Parameter(quantize_as(values, LinearRecipe.inference(cast), orientation))
    if state.preserve:  # type: ignore[union-attr]
        preserve(parameter, values)
    return parameter


def preserve(parameter: Any, values: Tensor | None) -> None:
    """Keep these values with a parameter, on the CPU; None and meta tensors: nothing yet."""
    values = None if values is None or values.is_meta else values.detach().cpu()
    parameter._high_precision_init_val = values
    parameter.get_high_precision_init_val = MethodType(_get, parameter)
    parameter.clear_high_precision_init_val = MethodType(_clear, parameter)


def _get(parameter: Any) -> Tensor | None:
    """The values that were quantized, on the CPU; None once they are cleared."""
    return getattr(parameter, "_high_precision_init_val", None)


def preserves(parameter: Any) -> bool:
    """Whether a parameter is one that keeps its first values."""
    return hasattr(parameter, "get_high_precision_init_val")


def _clear(parameter: Any) -> None:
    """Let the values go."""
    if hasattr(parameter, "_high_precision_init_val"):
        del parameter._high_precision_init_val

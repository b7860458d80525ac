"""``quantized_model_init``, in which modules are created with MXTensor weights, ``autocast``, and their old names."""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.arguments import FLAG, check, described
from ..core.peer_names import refuse_arguments
from ..core.scopes import Scope, Scopes
from ..numerics.formats import Orientation
from ..recipe import Recipe
from ..recipe.block_scaling import recipe_or_default
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.quantize_as import quantize_as
from ..training.autocast import autocast as own_autocast


class ModelInit(NamedTuple):
    """The state of one ``quantized_model_init`` block."""

    linear_recipe: LinearRecipe | None
    """None: do not quantize."""
    preserve: bool
    """Whether each weight preserves its initial high-precision values."""


OUTSIDE = ModelInit(None, False)
_model_init: Scopes[ModelInit] = Scopes("model_init", OUTSIDE)


def model_init() -> ModelInit:
    """The state of the innermost block; outside of all, nothing is quantized."""
    scope = _model_init.innermost()
    # As with autocast, a context that was copied to another thread does not apply there.
    return scope.value if scope is not None and scope.thread == threading.get_ident() else OUTSIDE


class quantized_model_init(ContextDecorator):  # noqa: N801  (as TransformerEngine writes it)
    """Inside the block, TransformerEngine's modules are created with weights in the weight format of ``recipe``.

    A weight has a rowwise and a columnwise copy, for the forward and the backward pass. It has the rowwise copy only if
    gradients are disabled (``torch.no_grad``, ``torch.inference_mode``), and one copy for both if the format has square
    blocks. Such weights train: their gradients are plain tensors. Biases and norms stay in high precision.

    ``recipe`` (default ``MXFP8BlockScaling()``) is read on entry. ``preserve_high_precision_init_val``: each weight
    stores a copy of its initial values on the CPU, for the master weights of an optimizer.
    ``weight.get_high_precision_init_val()`` returns it, ``weight.clear_high_precision_init_val()`` deletes it. Blocks
    nest, and the innermost applies; a block with ``enabled=False`` creates high-precision weights. The setting is local
    to the thread and asyncio task.

    Raises TypeError for an object that is not a recipe; ValueError for a recipe with impossible fields, or with two
    different casts for the weight, since one MXTensor has one format.
    """

    def __init__(
        self, enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
    ) -> None:
        self.recipe = recipe_or_default("quantized_model_init", enabled, recipe)
        self.preserve = preserve_high_precision_init_val
        check("quantized_model_init", "preserve_high_precision_init_val", self.preserve, FLAG)
        self._entered: list[Scope[ModelInit]] = []
        """The open blocks of all threads and tasks."""

    def __enter__(self) -> quantized_model_init:
        linear_recipe = None if self.recipe is None else self.recipe.linear_recipe()
        if linear_recipe is not None and linear_recipe.weight.columnwise not in (None, linear_recipe.weight.rowwise):
            raise ValueError(
                f"quantized_model_init: {linear_recipe} casts weights to {linear_recipe.weight.rowwise} for fprop and "
                f"to {linear_recipe.weight.columnwise} for dgrad; one MXTensor has one format: use one cast for both"
            )
        self._entered.append(_model_init.enter(ModelInit(linear_recipe, self.preserve)))
        return self

    def __exit__(self, *exception: Any) -> None:
        _model_init.leave_one_of(self._entered)


def weight_parameter(values: Tensor) -> nn.Parameter:
    """The parameter for a weight (out, in) with these values: quantized inside ``quantized_model_init``, else plain.

    It is plain too if the recipe leaves weights in high precision.
    """
    linear_recipe, preserves = model_init()
    cast = None if linear_recipe is None else linear_recipe.weight.rowwise
    if linear_recipe is None or cast is None:
        return nn.Parameter(values)
    both = torch.is_grad_enabled() and linear_recipe.weight.columnwise is not None
    orientation = Orientation.BOTH if both else Orientation.ROWWISE
    parameter = nn.Parameter(quantize_as(values, LinearRecipe.inference(cast), orientation))
    if preserves:
        preserve(parameter, values)
    return parameter


def preserve(parameter: Any, values: Tensor | None) -> None:
    """Store these values with a parameter, on the CPU. None and meta tensors store nothing yet."""
    values = None if values is None or values.is_meta else values.detach().cpu()
    parameter._high_precision_init_val = values
    parameter.get_high_precision_init_val = MethodType(_get, parameter)
    parameter.clear_high_precision_init_val = MethodType(_clear, parameter)


def _get(parameter: Any) -> Tensor | None:
    """The initial values, on the CPU; None after they are cleared."""
    return parameter._high_precision_init_val  # type: ignore[no-any-return]


def _clear(parameter: Any) -> None:
    """Delete the initial values."""
    parameter._high_precision_init_val = None


# ---------------------------------------------------------------------------------------------- names of contexts


def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> quantized_model_init:
    """TransformerEngine's old name of :class:`quantized_model_init`."""
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


def autocast(
    enabled: bool = True, calibrating: bool = False, recipe: Recipe | None = None, amax_reduction_group: Any = None,
    _graph: bool = False, **others: Any,
) -> own_autocast:  # fmt: skip
    """:class:`mxtensor.autocast` with the order of TransformerEngine's arguments. ``_graph`` has no effect.

    Raises NotImplementedError for ``calibrating=True``, and what ``mxtensor.autocast`` raises.
    """
    if calibrating is not False and calibrating is not None:
        raise NotImplementedError(
            f"autocast: calibrating={described(calibrating)} is not available: amax histories come from passes that "
            "run quantized; leave it out, or use mx.calibrate(model, data, format)"
        )
    refuse_arguments("autocast", others)
    return own_autocast(enabled, recipe, amax_reduction_group=amax_reduction_group)


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Recipe | None = None, fp8_group: Any = None,
    _graph: bool = False,
) -> own_autocast:  # fmt: skip
    """TransformerEngine's old name of :func:`autocast`, with its old names of arguments."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)

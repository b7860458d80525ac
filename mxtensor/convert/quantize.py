"""``quantize_``: convert the layers of a whole model, in place, for inference or for training."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeVar

from torch import nn

from ..numerics.formats import Orientation
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor, quantize_as
from ..training.state_dict import register_state_dict_hooks
from ..training.training_weight import values_of
from .configs import Config, recipe_of
from .weights import FilterFn, Kind, weights_to_quantize

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def quantize_(model: ModuleT, config: Config, filter_fn: FilterFn | None = None) -> ModuleT:
    """Quantize the linear and attention layers of ``model``, in place, for inference or for training.

    The modules keep torch's own classes, and a shared weight stays shared. ``config`` for inference: the name of any
    format (weights, and activations on the fly in the same format), ``"NAME-weight-only"``, a LinearRecipe or one of
    torchao's configs; weights become frozen MXTensor parameters. For training: MXLinearConfig or a recipe; weights stay
    high-precision parameters, unchanged for optimizers and state dicts, and their three products run quantized.

    ``filter_fn(module, fqn) -> bool`` is called for every nn.Linear, nn.MultiheadAttention and nn.Embedding, and for
    transformers' Conv1D and modules of stacked experts. The default skips embeddings, layers that share a weight with
    one, ``lm_head`` and routers. Embeddings and experts are not trained quantized. Returns ``model``.

    Raises ValueError or TypeError for an unknown config, and ValueError for a weight that is not a parameter (as under
    weight_norm), both before anything is changed. Warns if no layer matches. Make the optimizer for training after this
    call: parameters are new objects over the same memory.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"quantize_ takes a module, not a {type(model).__name__}; for a tensor use mx.quantize(x, format)"
        )
    recipe = recipe_of(config)
    found = [f for f in weights_to_quantize(model, filter_fn) if f[2].trains or not recipe.trains]
    if not found:
        done = any(isinstance(parameter, MXTensor) for parameter in model.parameters())
        why = (
            "its weights are quantized already, and frozen; quantize the model anew from its high-precision values"
            if done
            else f"no nn.Linear, nn.MultiheadAttention or nn.Embedding of {type(model).__name__} passed the filter"
        )
        warnings.warn(f"quantize_ changed nothing: {why}", UserWarning, stacklevel=2)
    originals: dict[int, nn.Parameter] = {}  # keeps them alive, so that no new parameter gets the same id
    shared: dict[int, nn.Parameter] = {}
    for module, name, kind in _progress(found, sum(getattr(m, n).numel() for m, n, _ in found)):
        weight = getattr(module, name)
        if id(weight) not in shared:
            originals[id(weight)] = weight
            shared[id(weight)] = _parameter(weight, module, kind, recipe)
        setattr(module, name, shared[id(weight)])
    changed = dict.fromkeys(module for module, _, _ in found)
    if recipe.trains:  # a module that the filter skipped, such as an embedding, can share a weight
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if id(parameter) in originals:
                    setattr(module, name, shared[id(parameter)])
                    changed[module] = None
    for module in changed:
        register_state_dict_hooks(module)
    return model


def _progress(items: list[Any], values: int) -> Iterable[Any]:
    """``items`` with a progress bar for large models, if tqdm is installed."""
    if values < 100_000_000:
        return items
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, desc="quantizing", unit="weight")  # type: ignore[no-any-return]


def _parameter(weight: nn.Parameter, module: nn.Module, kind: Kind, recipe: LinearRecipe) -> nn.Parameter:
    """The parameter that replaces ``weight``."""
    if recipe.trains:
        if kind.orientation is Orientation.COLUMNWISE:  # FSDP2 shards the dimension that products contract
            recipe = replace(recipe, quantized_gather=False)
        # Imported for those who train: it brings torch's compiler, which takes longer to import than all of torch.
        training = import_module(".training", __package__)
        return training.training_parameter(weight, recipe)  # type: ignore[no-any-return]
    if isinstance(module, nn.Embedding):
        recipe = LinearRecipe.inference(recipe.stored, None, recipe.kernel_preference)
    return nn.Parameter(quantize_as(values_of(weight), recipe, kind.orientation), requires_grad=False)

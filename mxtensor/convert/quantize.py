"""``quantize_``: convert the layers of a whole model, in place, for inference or for training."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from torch import nn

from ..core.arguments import described
from ..core.progress import with_progress
from ..numerics.formats import Orientation
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.attributes import set_attributes, user_attributes
from ..tensor.huge_pages import use_huge_pages
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from ..training.state_dict import register_state_dict_hooks
from ..training.training_weight import TrainingWeight, values_of
from . import static_inputs
from .changes import Change, check_shards, checked_changes
from .choose import choose
from .configs import Config, NVFP4DynamicActivationNVFP4WeightConfig
from .heads import is_lookup, warn_of_no_head
from .instance_methods import count_codes, show_format
from .model_size import warn_of_unquantized_heads
from .qat import QATConfig, QATStep, prepare, prepared_changes, qat_config_of, restore
from .sharded import by_tensor_parallelism
from .static_inputs import static_config_of
from .weights import FilterFn, Weight, modules_of_autocast, unknown_experts

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def quantize_(
    model: ModuleT, config: Config | QATConfig, filter_fn: FilterFn | None = None, *, include_head: bool = False
) -> ModuleT:
    """Quantize the linear and attention layers of ``model``, in place, for inference or for training.

    The modules keep torch's own classes, and a shared weight stays shared. ``config`` for inference: the name of any
    format (weights, and activations on the fly in the same format), ``"NAME-weight-only"``,
    ``"NAME-weight-NAME-activation"``, a LinearRecipe or one of torchao's configs; weights become frozen MXTensor
    parameters. For training: MXLinearConfig or a recipe; weights stay high-precision parameters, unchanged for
    optimizers and state dicts, and their three products run quantized. An
    ``FqnToConfig`` or a ``Plan`` has a config for each name; it takes the place of the filter. A ``QATConfig`` prepares
    linear layers for quantization-aware training, or converts them after it; an
    ``NVFP4DynamicActivationNVFP4WeightConfig`` with a ``step`` does the same for static scales of inputs.

    ``filter_fn(module, fqn) -> bool`` is called for every nn.Linear, nn.MultiheadAttention, nn.Embedding and
    nn.EmbeddingBag, and for transformers' Conv1D and modules of stacked experts. The default skips embeddings, routers
    (``router``, and ``gate`` unless it is a branch of a gated MLP) and heads: ``lm_head``, layers that share a weight
    with an embedding, and what ``get_output_embeddings()`` of transformers returns. ``include_head=True`` adds heads; a
    shared weight is quantized once, for the product and for the lookup. If modules share a weight and the filter
    accepts one of them, the weight is quantized for all of them. Embeddings do not train quantized. Neither do modules
    whose class name says that they are experts, but whose parameters are not recognized: a warning names them. Modules
    of ``mx.nn`` are not changed, with a warning: ``autocast`` sets their recipe. Returns ``model``.

    If heads and embeddings that the default filter skips are more than a tenth of the values, the logger ``mxtensor``
    warns with their names and the bits per value of the whole model. ``mx.model_size(model)`` shows the details.

    Every weight is checked before the first one changes: if this raises ValueError or TypeError, for an unknown config
    or for a weight that cannot be quantized (not a parameter, as under weight_norm; not floating-point; sparse;
    sharded, unless by tensor parallelism and for inference; inside DistributedDataParallel; without values), the model
    is unchanged. After a later failure, such as an
    interrupt or too little memory, a model for training is restored. For inference each original is freed when its
    weight is quantized, so that the model needs at most the memory of one more weight than before; after a failure the
    model is usable, with some weights quantized and the others unchanged, and another call quantizes the rest.

    Warns if no layer matches, or if ``include_head`` finds no head. For training, parameters stay the same objects over
    the same memory, so that an optimizer that was made before goes on. torch cannot change a parameter that the graph
    of a result has saved, as that of ``y = model(x)`` before ``y.backward()``: then it becomes a new object, and
    ValueError says so if an optimizer has it. A later call with another recipe keeps the parameters in any case.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize_ takes a module, not {described(model)}; for a tensor use mx.quantize(x, format)")
    qat = qat_config_of(config)
    if qat is not None:
        return _qat(model, qat, filter_fn, include_head)
    static = static_config_of(config)
    if static is not None:
        return _static(model, static, filter_fn, include_head)
    chosen, general = choose(model, config, filter_fn, include_head, by_tensor_parallelism)
    weights = [(weight, recipe) for weight, recipe in chosen if weight.kind.trains or not recipe.trains]
    left_out = [
        weight for weight, recipe in chosen if recipe.trains and not weight.kind.trains and weight.kind.multiplies
    ]
    if general is not None and general.trains and filter_fn is None:
        left_out += unknown_experts(model)
    changes = checked_changes(model, weights)
    check_shards(changes)
    _check_replicas(model, changes)
    ours = modules_of_autocast(model) if general is not None and filter_fn is None else []
    if left_out or not (changes or ours):
        _warn(model, changes, left_out)
    if ours:
        begin = "quantize_" if changes else "quantize_ changed nothing"
        warnings.warn(
            f"{begin}: modules of mx.nn stay as they are ({len(ours)}, such as {ours[0]}): mx.autocast(recipe=...) "
            "runs them quantized, and mx.quantized_model_init(recipe=...) around their construction quantizes their "
            "weights",
            UserWarning,
            stacklevel=2,
        )
    if include_head:
        warn_of_no_head("quantize_", model, 2)
    convert(model, changes)
    for weight in left_out:
        _training("left_out").watch(weight.module, weight.name)
    if any(not change.recipe.trains for change in changes) and not include_head and filter_fn is None:
        warn_of_unquantized_heads(model)
    return model


def _check_replicas(model: nn.Module, changes: Sequence[Change]) -> None:
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


def _qat(model: ModuleT, config: QATConfig, filter_fn: FilterFn | None, include_head: bool) -> ModuleT:
    if include_head:
        raise ValueError("quantize_: a QATConfig leaves heads out; in place of include_head pass a filter_fn")
    if config.checked_step() is QATStep.PREPARE:
        prepare(model, config, filter_fn)
        return model
    convert(model, prepared_changes(model, config, filter_fn))
    if not restore(model, filter_fn):
        warnings.warn(
            "quantize_ changed nothing: no layer is prepared; call it with step='prepare' before training",
            UserWarning,
            stacklevel=3,
        )
    return model


def _static(
    model: ModuleT, config: NVFP4DynamicActivationNVFP4WeightConfig, filter_fn: FilterFn | None, include_head: bool
) -> ModuleT:
    if config.step == "prepare":
        count = static_inputs.prepare(model, config, filter_fn, include_head)
    else:
        convert(model, static_inputs.changes_of(model, config, filter_fn))
        count = static_inputs.finish(model, filter_fn)
    if not count:
        why = "no nn.Linear passed the filter" if config.step == "prepare" else "no layer is prepared"
        warnings.warn(f"quantize_ changed nothing: {why} (step={config.step!r})", UserWarning, stacklevel=3)
    return model


def _warn(model: nn.Module, changes: Sequence[Change], left_out: Sequence[Weight]) -> None:
    if left_out:
        begin = "quantize_" if changes else "quantize_ changed nothing"
        experts = _training("left_out").describe(left_out, model)
        warnings.warn(f"{begin}: {experts}, which do not train quantized", UserWarning, stacklevel=3)
        return
    warn_of_nothing_to_do("quantize_", model, 4)


def warn_of_nothing_to_do(caller: str, model: nn.Module, stacklevel: int = 3) -> None:
    """Warn that ``caller`` has changed nothing in a model, and say why."""
    done = any(isinstance(parameter, MXTensor) for parameter in model.parameters())
    why = (
        "its weights are quantized already, and frozen; to change the format, quantize the high-precision model"
        if done
        else f"no nn.Linear, nn.MultiheadAttention, nn.Embedding or nn.EmbeddingBag of {type(model).__name__} passed "
        "the filter"
    )
    warnings.warn(f"{caller} changed nothing: {why}", UserWarning, stacklevel=stacklevel)


# ---------------------------------------------------------------------------------------------- one weight by one


def convert(model: ModuleT, changes: Sequence[Change], made: Mapping[str, MXTensor] | None = None) -> ModuleT:
    """Replace weights one by one. ``made``: those that are quantized already, by their names.

    What is shared by two weights is their memory, or nothing: for training, all replaced parameters can wait for the
    end, in case of a failure; for inference, each is freed at once.
    """
    made = made or {}
    undo: list[Callable[[], None]] = []
    replaced: dict[str, nn.Parameter] = {}
    try:
        for change in _progress(changes, made):
            if change.recipe.trains:
                original = _replace(change, undo)
                if original is not None:
                    replaced[change.fqn] = original
            else:
                _replace_and_free(change, made.get(change.fqn))
        if replaced:
            _training("training").check_optimizers(replaced)
    except BaseException:
        _restore(undo)
        raise
    if any(not change.recipe.trains for change in changes):
        count_codes(model)
        use_huge_pages(model.parameters())
    return model


def _replace_and_free(change: Change, made: MXTensor | None) -> None:
    """Replace a weight in all its places, or in none; the original is free on return."""
    undo: list[Callable[[], None]] = []
    try:
        _replace(change, undo, made)
    except BaseException:
        _restore(undo)
        raise


def _restore(undo: Sequence[Callable[[], None]]) -> None:
    for one in reversed(undo):
        one()


def _replace(change: Change, undo: list[Callable[[], None]], made: MXTensor | None = None) -> nn.Parameter | None:
    """Replace a weight in all its places; ``undo`` gets what restores each one before it changes.

    A weight that trains stays the same parameter, for optimizers and all others that have it. If torch cannot change it
    in place, the result is the old parameter, which is no longer the model's.
    """
    module, name = change.places[0]
    original = getattr(module, name)
    in_place = change.recipe.trains and isinstance(original, TrainingWeight)
    if in_place:
        training = _training("training")
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
    if not _training("training").exchange(original, parameter):
        return original  # type: ignore[no-any-return]
    undo.append(partial(_training("training").exchange, original, parameter))
    for module, name in change.places:  # also a write that Dynamo sees: its guards of a parameter look for no more
        setattr(module, name, original)
    return None


def _progress(changes: Sequence[Change], made: Mapping[str, MXTensor]) -> Iterable[Change]:
    """``changes`` with a progress bar for large models."""
    if sum(change.values for change in changes if change.fqn not in made) < 100_000_000:
        return changes
    return with_progress(changes, "quantizing", "weight")


def _parameter(
    weight: nn.Parameter, modules: Sequence[nn.Module], orientation: Orientation, recipe: LinearRecipe,
    made: MXTensor | None,
) -> nn.Parameter:  # fmt: skip
    """The parameter that replaces ``weight`` of ``modules``, with its attributes."""
    if recipe.trains:
        recipe = _training_recipe(weight, orientation, recipe)
        parameter = _training("training").training_parameter(weight, recipe)
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


def _training(name: str) -> Any:
    """A module of this folder for those who train: it brings torch's compiler, which takes longer to import than all of
    torch."""
    return import_module(f".{name}", __package__)

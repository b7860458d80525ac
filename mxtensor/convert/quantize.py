"""``quantize_``: convert the layers of a whole model, in place, for inference or for training."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..core.arguments import described, warn
from ..core.peer_names import refuse_arguments
from ..tensor.mxtensor import MXTensor
from .changes import ModuleT, check_replicas, check_shards, checked_changes, convert
from .configs import Config, choose, config_and_step
from .model_size import warn_of_unquantized
from .steps import run_step
from .weights import FilterFn, by_tensor_parallelism, modules_of_autocast, unknown_experts, warn_of_no_head


def quantize_(
    model: ModuleT, config: Config | None, filter_fn: FilterFn | None = None, *, include_head: bool = False,
    step: str | None = None, **others: Any,
) -> ModuleT:  # fmt: skip
    """Quantize the linear and attention layers of ``model``, in place, for inference or for training.

    The modules keep torch's own classes, and a shared weight stays shared. ``config`` for inference: the name of any
    format (weights, and activations on the fly in the same format), ``"NAME-weight-only"``,
    ``"NAME-weight-NAME-activation"`` or a LinearRecipe; weights become frozen MXTensor parameters. For training: a
    recipe such as ``mx.recipe.MXFP8BlockScaling()``; weights stay high-precision parameters, unchanged for optimizers
    and state dicts, and their three products run quantized.

    A dict has a config for each name, and takes the place of the filter; so does a ``Plan``. Its keys are names of
    modules or parameters, ``"re:PATTERN"`` for those whose whole name matches, and ``"_default"`` for the layers that
    the default filter accepts; None leaves weights as they are:
    ``{"re:.*experts.*": "mxfp4", "lm_head": None, "_default": "mxfp8"}``. A weight takes the first of these keys that
    exists: the name of the parameter, that of its module, the first expression that matches the parameter, the first
    that matches the module, ``_default``.

    ``step``: the conversion has two steps.

    - ``"prepare"``, for quantization-aware training: linear layers compute with rounded values, and their parameters
      stay in high precision and train; gradients pass the rounding unchanged. ``"convert"`` quantizes their weights.
    - ``"observe"``, for static scales of NVFP4 inputs: linear layers watch the amax of their inputs. ``"convert"``
      quantizes weights and gives each layer a scale for that amax.
    - ``"convert"`` with None as the config gives plain layers back, with the weights as they are.

    ``filter_fn(module, fqn) -> bool`` is called for every nn.Linear, nn.MultiheadAttention, nn.Embedding and
    nn.EmbeddingBag, and for transformers' Conv1D and modules of stacked experts. The default skips embeddings, routers
    (``router``, and ``gate`` unless it is a branch of a gated MLP) and heads: ``lm_head``, layers that share a weight
    with an embedding, and what ``get_output_embeddings()`` of transformers returns. ``include_head=True`` adds heads; a
    shared weight is quantized once, for the product and for the lookup. If modules share a weight and the filter
    accepts one of them, the weight is quantized for all of them. Embeddings do not train quantized. Neither do modules
    whose class name says that they are experts, but whose parameters are not recognized: a warning names them. Modules
    of ``mxtensor.te`` are not changed, with a warning: ``autocast`` sets their recipe. Returns ``model``.

    If more than a tenth of the values stays in high precision (heads and embeddings that the default filter skips,
    convolutions, modules of other kinds), the logger ``mxtensor`` warns with their kinds, their shares and the bits per
    value of the whole model, unless a ``filter_fn`` has chosen so. ``mx.model_size(model)`` shows the details.

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
    refuse_arguments("quantize_", others)
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize_ takes a module, not {described(model)}; for a tensor use mx.quantize(x, format)")
    config, own_step = config_and_step(config)
    if own_step is not None and step is not None:
        raise ValueError(f"quantize_: the config has the step {own_step!r}; leave step={step!r} out")
    if own_step is not None or step is not None:
        run_step(model, config, filter_fn, include_head, step if own_step is None else own_step)
        return model
    chosen, general = choose(model, config, filter_fn, include_head, by_tensor_parallelism)
    weights = [(weight, recipe) for weight, recipe in chosen if weight.kind.trains or not recipe.trains]
    left_out = [
        weight for weight, recipe in chosen if recipe.trains and not weight.kind.trains and weight.kind.multiplies
    ]
    if general is not None and general.trains and filter_fn is None:
        left_out += unknown_experts(model)
    changes = checked_changes(model, weights)
    check_shards(changes)
    check_replicas(model, changes)
    ours = modules_of_autocast(model) if general is not None and filter_fn is None else []
    if left_out:
        from .training import describe

        begin = "quantize_" if changes else "quantize_ changed nothing"
        warn(f"{begin}: {describe(left_out, model)}, which do not train quantized")
    elif not (changes or ours):
        warn_of_nothing_to_do("quantize_", model)
    if ours:
        begin = "quantize_" if changes else "quantize_ changed nothing"
        warn(
            f"{begin}: modules of mxtensor.te stay as they are ({len(ours)}, such as {ours[0]}): mx.autocast"
            "(recipe=...) runs them quantized, and te.quantized_model_init(recipe=...) around their construction "
            "quantizes their weights"
        )
    if include_head:
        warn_of_no_head("quantize_", model)
    convert(model, changes)
    if left_out:
        from .training import watch

        for weight in left_out:
            watch(weight.module, weight.name)
    if changes and filter_fn is None and general is not None:
        said = {id(weight.value) for weight in left_out}
        warn_of_unquantized(model, trains=general.trains, include_head=include_head, said=said)
    return model


def warn_of_nothing_to_do(caller: str, model: nn.Module) -> None:
    """Warn that ``caller`` has changed nothing in a model, and say why."""
    done = any(isinstance(parameter, MXTensor) for parameter in model.parameters())
    why = (
        "its weights are quantized already, and frozen; to change the format, quantize the high-precision model"
        if done
        else f"no nn.Linear, nn.MultiheadAttention, nn.Embedding or nn.EmbeddingBag of {type(model).__name__} passed "
        "the filter"
    )
    warn(f"{caller} changed nothing: {why}")

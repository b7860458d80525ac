"""``calibrate``: quantize a model for inference with the help of inputs, one block of it after another."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from ..convert.changes import Change, checked_changes
from ..convert.choose import choose
from ..convert.configs import Config
from ..convert.quantize import convert, warn_of_nothing_to_do
from ..convert.weights import FilterFn
from ..core.arguments import MODULE, check
from ..core.progress import with_progress
from ..tensor.attributes import set_attributes, user_attributes
from ..tensor.mxtensor import MXTensor
from ..training.training_weight import values_of
from .blocks import Stream, warn_of_layers_without_input
from .edits import Edit, in_place, restore
from .in_use import batches_of
from .layers import calibrated
from .methods import Step, Steps, steps_of
from .one_block import check_values, placed, quantized_block, weight_of
from .state import State

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_log = logging.getLogger("mxtensor")


def calibrate(
    model: ModuleT,
    data: Iterable[Any],
    format: Config = "nvfp4-weight-only",
    method: str | Step | Sequence[str | Step] = "gptq",
    filter_fn: FilterFn | None = None,
    *,
    include_head: bool = False,
    state: str | Path | None = None,
) -> ModuleT:
    """Quantize the linear layers of ``model`` in place, for inference, so that their outputs for ``data`` change least.

    ``data``: batches, each the argument of the model (such as ``input_ids``, (sequences, tokens)), a tuple of
    arguments, or a dict of them by name. A hundred sequences of a few hundred tokens, like those that the model will
    read, are usually enough. ``format``, ``filter_fn`` and ``include_head``: as in ``quantize_``. ``method``: the name
    of a method, an object with other settings, or a list: first methods that scale channels, "smooth" and "awq"
    (``SmoothQuant``, ``AWQ``), then at most one that rounds, "gptq" or "mse" (``GPTQ``, ``BestScales``; without one,
    weights are rounded to nearest), then "bias" (``BiasCorrection``).

    The model runs block by block: memory holds the inputs of one block for all data, and the moments of one block's
    layers. Layers outside the blocks, such as a head, are calibrated after the blocks, without scaling of channels.
    Embeddings and stacked experts are rounded to nearest, as ``quantize_`` does; an embedding that shares the weight of
    a head shares its codes. Compiled modules run eagerly meanwhile. The logger ``mxtensor`` warns about layers that got
    no input. All weights are replaced at the end; if the call raises or is interrupted, the model is unchanged. With
    ``state``, a folder, each finished block is saved there, and the same call resumes after the last one.

    Raises what ``quantize_`` raises; ValueError for a recipe that trains, an unknown method, empty data, weights or
    inputs that are not finite, or a state of another calibration. Returns ``model``.
    """
    check("calibrate", "model", model, MODULE)
    steps = steps_of(method)
    chosen, _ = choose(model, format, filter_fn, include_head)
    for weight, recipe in chosen:
        if recipe.trains:
            raise ValueError(f"calibrate quantizes for inference, and {recipe} trains ({weight.fqn}); use quantize_")
    changes = checked_changes(model, chosen)
    layers: dict[nn.Module, Change] = {layer: change for change in changes if (layer := calibrated(change)) is not None}
    check_values("calibrate", changes)
    for change in layers.values():
        if not values_of(weight_of(change)).isfinite().all():
            raise ValueError(f"calibrate: {change.fqn} has values that are not finite; quantize_ can store them")
    batches = batches_of("calibrate", data)
    if not changes:
        warn_of_nothing_to_do("calibrate", model)
        return model
    stream = Stream(model, batches, layers)
    fqns = [layers[layer].fqn for layer in stream.without_input]
    warn_of_layers_without_input("calibrate", fqns, len(layers), "are rounded by their values alone")
    saved = None if state is None else State(Path(state), model, batches, changes, steps)
    done = _all_blocks(model, stream, layers, steps, saved)
    made = {name: weight for name, weight in done.items() if isinstance(weight, MXTensor)}
    if len(made) < len(changes):
        _log.info("calibrate: %d of %d weights were rounded to nearest", len(changes) - len(made), len(changes))
    originals = [Edit(module, name, getattr(module, name)) for change in changes for module, name in change.places]
    try:
        for module, name, value in _edits(model, done):
            original = getattr(module, name)
            originals.append(Edit(module, name, original))
            if original is not None:
                value = set_attributes(value, user_attributes(original)).requires_grad_(original.requires_grad)
            setattr(module, name, value)
        return convert(model, changes, made)
    except BaseException:
        restore(originals)
        raise


def _all_blocks(
    model: nn.Module, stream: Stream, layers: dict[nn.Module, Change], steps: Steps, saved: State | None
) -> dict[str, Tensor]:
    """The new parameters of all blocks by name: MXTensors, and tensors in high precision: transformed ones, biases.

    After the blocks come the layers that are in none of them, such as a head, as one more block.
    """
    names = {module: name for name, module in model.named_modules()}
    every: dict[str, Tensor] = {}
    states, before = list(stream.states), list(stream.states)
    inside = [{m: layers[m] for m in stream.block(i).modules() if m in layers} for i in range(len(stream))]
    outside = {m: change for m, change in layers.items() if not any(m in block for block in inside)}
    if outside and len(stream) > 1:
        inside.append(outside)
    for index in with_progress(range(len(inside)), "calibrating", "block"):
        done = None if saved is None else saved.load(index)
        if done is None:
            done = {}
            with ExitStack() as edited:
                for transform in steps.transforms if index < len(stream) else ():
                    edits = transform.edits(stream, index, states, inside[index])
                    edited.enter_context(in_place(edits))
                    done |= {f"{names[module]}.{name}": value.detach() for module, name, value in edits}
                done |= quantized_block(stream, index, states, before, inside[index], steps)
            if saved is not None:
                saved.save(index, done)
        every |= done
        if index + 1 < len(inside):
            if any(steps.before(change.recipe.activation) for change in layers.values()):
                before = [stream.run(index, batch, x) for batch, x in enumerate(before)]
            with in_place([*placed(inside[index].values(), done), *_edits(model, done)]):
                states = [stream.run(index, batch, x) for batch, x in enumerate(states)]
    return every


def _edits(model: nn.Module, done: Mapping[str, Tensor]) -> list[Edit]:
    """The parameters in high precision among the new ones, in their places."""
    edits = []
    for fqn, value in done.items():
        if not isinstance(value, MXTensor):
            module, _, name = fqn.rpartition(".")
            edits.append(Edit(model.get_submodule(module), name, nn.Parameter(value, requires_grad=False)))
    return edits

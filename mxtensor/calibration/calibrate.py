"""``calibrate``: quantize a model for inference with the help of inputs, one block of it after another.

In a block, layers are quantized in the order in which they run, each on the outputs of those before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..convert.changes import Change, checked_changes, convert, inference_recipe
from ..convert.configs import Config, choose
from ..convert.quantize import warn_of_nothing_to_do
from ..convert.weights import FilterFn
from ..core.arguments import MODULE, check
from ..core.peer_names import refuse_arguments
from ..core.progress import with_progress
from ..kernels.quantize.choose_cast import dequantize_operand
from ..tensor.attributes import set_attributes, user_attributes
from ..tensor.mxtensor import MXTensor
from ..training.training_weight import values_of
from .blocks import Stream, batches_of, warn_of_layers_without_input
from .layers import Edit, calibrated, check_values, edits_of, in_place, oriented, restore, stored_as, weight_of
from .methods import Step, Steps, steps_of
from .moments import Moments, groups_of, inputs_of
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
    **others: Any,
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
    refuse_arguments("calibrate", others)
    steps = steps_of(method)
    chosen, _ = choose(model, format, filter_fn, include_head)
    for weight, recipe in chosen:
        if recipe.trains:
            raise ValueError(f"calibrate quantizes for inference, and {recipe} trains ({weight.fqn}); use quantize_")
    changes = checked_changes(model, chosen)
    layers = calibrated(changes)
    check_values("calibrate", changes)
    for change in layers.values():
        if not values_of(weight_of(change)).isfinite().all():
            raise ValueError(f"calibrate: {change.fqn} has values that are not finite; quantize_ can store them")
    batches = batches_of("calibrate", data)
    if not changes:
        warn_of_nothing_to_do("calibrate", model)
        return model
    stream = Stream(model, batches, layers)
    unseen = [layers[layer].fqn for layer in stream.without_input]
    warn_of_layers_without_input("calibrate", unseen, len(layers), "are rounded by their values alone")
    saved = None if state is None else State(Path(state), model, batches, changes, steps)
    done = _all_blocks(model, stream, layers, steps, saved)
    made = {name: weight for name, weight in done.items() if isinstance(weight, MXTensor)}
    if len(made) < len(changes):
        _log.info("calibrate: %d of %d weights were rounded to nearest", len(changes) - len(made), len(changes))
    originals = [Edit(module, name, getattr(module, name)) for change in changes for module, name in change.places]
    try:
        for module, name, value in edits_of(model, {name: w for name, w in done.items() if name not in made}):
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
    compared = any(steps.before(change.recipe.activation) for change in layers.values())
    blocks, outside = stream.by_block(layers)
    if outside and len(blocks) > 1:
        blocks.append(outside)
    every: dict[str, Tensor] = {}
    states, before = list(stream.states), list(stream.states)
    for index in with_progress(range(len(blocks)), "calibrating", "block"):
        inside = {layer: layers[layer] for layer in blocks[index]}
        done = None if saved is None else saved.load(index, inside.values())
        if done is None:
            done = {}
            with ExitStack() as edited:
                for transform in steps.transforms if index < len(stream.blocks) else ():
                    edits = transform.edits(stream, index, states, inside)
                    edited.enter_context(in_place(edits))
                    done |= {f"{names[module]}.{name}": value.detach() for module, name, value in edits}
                done |= _quantized_block(stream, index, states, before, inside, steps)
            if saved is not None:
                saved.save(index, done)
        every |= done
        if index + 1 < len(blocks):
            if compared:
                before = [stream.run(index, batch, x) for batch, x in enumerate(before)]
            with in_place(edits_of(model, done, inside.values())):
                states = [stream.run(index, batch, x) for batch, x in enumerate(states)]
    return every


def _quantized_block(
    stream: Stream, index: int, states: Sequence[Any], before: Sequence[Any], layers: dict[nn.Module, Change],
    steps: Steps,
) -> dict[str, Tensor]:  # fmt: skip
    """The quantized weights of ``layers`` of a block and their new biases, by name.

    ``states``: the inputs of the block after the quantized blocks, one for each batch; ``before``: those in the model
    before quantization. The block after the last one is what is outside of the blocks.
    """
    made: dict[str, Tensor] = {}
    originals = [Edit(*place, weight_of(change)) for change in layers.values() for place in change.places]
    originals += [Edit(layer, "bias", layer.bias) for layer in layers]  # type: ignore[arg-type]

    def run(batch: int, state: Any) -> Any:
        if index < len(stream.blocks):
            return stream.run(index, batch, state)
        return stream.finish(batch, state, gradient=False)

    with ExitStack() as quantized:
        for group, once in groups_of(layers, partial(run, 0, states[0])):
            # layers with the same cast of their input share its moments
            firsts = {layers[layer].recipe.activation: layer for layer in reversed(group)}
            moments = {}
            for cast, layer in firsts.items():
                w = oriented(weight_of(layers[layer]), layers[layer].orientation)
                moments[cast] = Moments(
                    w.shape[1], w.device, cast, steps.rounding.compensates(cast),
                    second=steps.rounding.needs_moments, means=steps.bias is not None,
                )  # fmt: skip
            compared = any(map(steps.before, firsts)) and (index or made)
            for batch, state in enumerate(states if steps.rounding.needs_moments or steps.bias else ()):
                now = earlier = inputs_of(firsts.values(), partial(run, batch, state), once)[0]
                if compared:
                    with in_place(originals):
                        earlier = inputs_of(firsts.values(), partial(run, batch, before[batch]), once)[0]
                for cast, layer in firsts.items():
                    moments[cast].add(now[layer], earlier[layer])
            for layer in group:
                change = layers[layer]
                done = _quantized(change, steps, moments[change.recipe.activation])
                quantized.enter_context(in_place(edits_of(stream.model, done, [change])))
                made |= done
    return made


def _quantized(change: Change, steps: Steps, moments: Moments) -> dict[str, Tensor]:
    """The quantized weight, with the recipe that ``quantize_`` would give it, and the corrected bias, by name."""
    weight = oriented(values_of(weight_of(change)).detach(), change.orientation).contiguous()
    recipe = inference_recipe([module for module, _ in change.places], change.recipe)
    try:
        operand = steps.rounding.operand(weight.to(torch.float32), recipe.stored, moments)
        done: dict[str, Tensor] = {change.fqn: stored_as(operand, change.orientation, recipe, weight.dtype)}
        bias: Any = getattr(change.places[0][0], "bias", None)
        # a weight in several places would need several biases
        if steps.bias is not None and len(change.places) == 1 and (bias is not None or steps.bias.make):
            mean = moments.mean_error(weight, dequantize_operand(operand, torch.float32))
            if mean is not None:
                corrected = mean if bias is None else bias.detach().float() + mean
                done[f"{change.fqn.removesuffix('weight')}bias"] = corrected.to(weight.dtype)
    except ValueError as error:
        raise ValueError(f"calibrate: {change.fqn}: {error}") from error
    return done

"""One block of a model: its layers are quantized in the order in which they run, each on the outputs of those before.

Layers that get the same input, such as the projections to queries, keys and values, are one group and share moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..convert.changes import Change
from ..convert.quantize import inference_recipe
from ..kernels.quantize.select import dequantize_operand
from ..numerics.cast import Cast
from ..training.training_weight import values_of
from .bias import Means
from .blocks import Stream
from .edits import Edit, in_place
from .layers import oriented, stored_as
from .methods import Steps, correction
from .moments import Group, Inputs, Moments, groups_of, inputs_of


def weight_of(change: Change) -> nn.Parameter:
    """The weight that a change replaces."""
    module, name = change.places[0]
    return getattr(module, name)  # type: ignore[no-any-return]


def check_values(caller: str, changes: Iterable[Change]) -> None:
    """Raise ValueError for a weight without values."""
    for change in changes:
        if weight_of(change).is_meta:
            raise ValueError(
                f"{caller}: {change.fqn} is on the device meta and has no values; load the model, without offload"
            )


def placed(changes: Iterable[Change], weights: Mapping[str, Tensor]) -> list[Edit]:
    """Weights by name in all places of their changes, as frozen parameters. Names without a weight are left out."""
    edits = []
    for change in changes:
        if change.fqn in weights:
            weight = weights[change.fqn]
            parameter = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
            edits += [Edit(module, name, parameter) for module, name in change.places]
    return edits


def quantized_block(
    stream: Stream, index: int, states: Sequence[Any], before: Sequence[Any], layers: dict[nn.Module, Change],
    steps: Steps,
) -> dict[str, Tensor]:  # fmt: skip
    """The quantized weights of ``layers`` of a block and their new biases, by name.

    ``states``: the inputs of the block after the quantized blocks, one for each batch; ``before``: those in the model
    before quantization. The block with the index ``len(stream)`` is what is outside of the blocks.
    """
    made: dict[str, Tensor] = {}
    originals = _originals(layers)

    def run(batch: int, state: Any) -> Any:
        return stream.run(index, batch, state) if index < len(stream) else stream.finish(batch, state, gradient=False)

    def measured(group: Group) -> dict[nn.Module, _Measured]:
        found, firsts = _measures({layer: layers[layer] for layer in group.layers}, steps)
        needs_inputs = steps.rounding.needs_moments or steps.bias is not None
        from_model = {layer for layer in firsts if steps.before(layers[layer].recipe.activation)}

        def inputs(batch: int, state: Any) -> Inputs:
            return inputs_of(firsts, lambda: run(batch, state), group.once)[0]

        for batch, state in enumerate(states if needs_inputs else ()):
            now = before_now = inputs(batch, state)
            if from_model and (index or made):
                with in_place(originals):
                    before_now = inputs(batch, before[batch])
            for layer in firsts:
                if steps.rounding.needs_moments:
                    correct = correction(steps.rounding.correct, layers[layer].recipe.activation)
                    earlier = before_now[layer] if correct == "model" else now[layer]
                    found[layer].moments.add_calls(now[layer], earlier)
                if steps.bias is not None:
                    found[layer].means.add_calls(now[layer], before_now[layer])
        return found

    with ExitStack() as quantized:
        for group in groups_of(layers, lambda: run(0, states[0])):
            found = measured(group)
            for layer in group.layers:
                done = _quantized(layers[layer], steps, found[layer])
                made |= done
                quantized.enter_context(in_place([*placed([layers[layer]], done), *_bias_edits(layers[layer], done)]))
    return made


def _originals(layers: Mapping[nn.Module, Change]) -> list[Edit]:
    """The weights and biases that the layers have now."""
    found = placed(layers.values(), {change.fqn: weight_of(change) for change in layers.values()})
    return found + [Edit(m, "bias", m.bias) for m in layers]  # type: ignore[arg-type]


class _Measured(NamedTuple):
    """What is known of the inputs of a layer."""

    moments: Moments
    means: Means


def _measures(group: dict[nn.Module, Change], steps: Steps) -> tuple[dict[nn.Module, _Measured], list[nn.Module]]:
    """The measures of each layer of a group, shared by those with the same cast of the input; the first of each."""
    shared: dict[Cast | None, _Measured] = {}
    firsts = []
    for layer, change in group.items():
        cast = change.recipe.activation
        if cast not in shared:
            w = oriented(weight_of(change), change.orientation)
            correct = correction(steps.rounding.correct, cast) != "none"
            moments = Moments(w.shape[1], w.device, cast, correct)
            shared[cast] = _Measured(moments, Means(w.shape[1], w.device, cast))
            firsts.append(layer)
    return {layer: shared[change.recipe.activation] for layer, change in group.items()}, firsts


def _quantized(change: Change, steps: Steps, found: _Measured) -> dict[str, Tensor]:
    """The quantized weight, with the recipe that ``quantize_`` would give it, and the corrected bias, by name."""
    weight = oriented(values_of(weight_of(change)).detach(), change.orientation).contiguous()
    recipe = inference_recipe([module for module, _ in change.places], change.recipe)
    try:
        operand = steps.rounding.operand(weight.to(torch.float32), recipe.stored, found.moments)
        done: dict[str, Tensor] = {change.fqn: stored_as(operand, change.orientation, recipe, weight.dtype)}
        if _corrects_bias(change, steps) and found.means.known:
            bias: Any = change.places[0][0].bias
            rounded = dequantize_operand(operand, torch.float32)
            done[_bias_name(change)] = found.means.corrected(bias, weight, rounded)
    except ValueError as error:
        raise ValueError(f"calibrate: {change.fqn}: {error}") from error
    return done


def _bias_name(change: Change) -> str:
    return f"{change.fqn.removesuffix('weight')}bias"


def _corrects_bias(change: Change, steps: Steps) -> bool:
    """Whether there is a bias to correct. A weight in several places would need several biases."""
    return (
        steps.bias is not None and len(change.places) == 1 and (change.places[0][0].bias is not None or steps.bias.make)
    )


def _bias_edits(change: Change, done: Mapping[str, Tensor]) -> list[Edit]:
    value = done.get(_bias_name(change))
    return [] if value is None else [Edit(change.places[0][0], "bias", nn.Parameter(value, requires_grad=False))]

"""One block of a model: its layers are quantized in the order in which they run, each on the outputs of those before.

Layers that get the same input, such as the projections to queries, keys and values, are one group and share moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..convert.plan import Change
from ..convert.quantize import inference_recipe
from ..numerics.cast import Cast
from ..tensor.mxtensor import MXTensor
from ..training.training_weight import values_of
from .blocks import Stream
from .edits import Edit, in_place
from .methods import Method, correction
from .moments import Group, Inputs, Moments, groups_of, inputs_of


def weight_of(change: Change) -> nn.Parameter:
    """The weight that a change replaces."""
    module, name = change.places[0]
    return getattr(module, name)  # type: ignore[no-any-return]


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
    how: Method,
) -> dict[str, MXTensor]:  # fmt: skip
    """The quantized weights of ``layers`` of a block, by name.

    ``states``: the inputs of the block after the quantized blocks, one for each batch; ``before``: those in the model
    before quantization.
    """
    made: dict[str, MXTensor] = {}
    originals = {change.fqn: weight_of(change) for change in layers.values()}

    def moments_of(group: Group) -> dict[nn.Module, Moments]:
        moments, firsts = _moments({layer: layers[layer] for layer in group.layers}, how)

        from_model = {layer for layer in firsts if correction(how.correct, layers[layer].recipe.activation) == "model"}

        def inputs(batch: int, state: Any) -> Inputs:
            return inputs_of(firsts, lambda: stream.run(index, batch, state), group.once)[0]

        for batch, state in enumerate(states if how.looks else ()):
            now = before_now = inputs(batch, state)
            if from_model and (index or made):
                with in_place(placed(layers.values(), originals)):
                    before_now = inputs(batch, before[batch])
            for layer in firsts:
                moments[layer].add_calls(now[layer], (before_now if layer in from_model else now)[layer])
        return moments

    with ExitStack() as quantized:
        for group in groups_of(layers, lambda: stream.run(index, 0, states[0])):
            moments = moments_of(group)
            done = {layers[layer].fqn: _rounded(layers[layer], how, moments[layer]) for layer in group.layers}
            made |= done
            quantized.enter_context(in_place(placed(layers.values(), done)))
    return made


def _moments(group: dict[nn.Module, Change], how: Method) -> tuple[dict[nn.Module, Moments], list[nn.Module]]:
    """The moments of each layer of a group, shared by those with the same cast of the input, and the first of each."""
    shared: dict[Cast | None, Moments] = {}
    firsts = []
    for layer, change in group.items():
        cast = change.recipe.activation
        if cast not in shared:
            w = weight_of(change)
            shared[cast] = Moments(w.shape[1], w.device, cast, correction(how.correct, cast) != "none")
            firsts.append(layer)
    return {layer: shared[change.recipe.activation] for layer, change in group.items()}, firsts


def _rounded(change: Change, how: Method, moments: Moments) -> MXTensor:
    """The quantized weight, with the recipe that ``quantize_`` would give it."""
    weight = values_of(weight_of(change)).detach()
    recipe = inference_recipe([module for module, _ in change.places], change.recipe)
    try:
        operand = how.operand(weight.to(torch.float32), recipe.stored, moments)
    except ValueError as error:
        raise ValueError(f"calibrate: {change.fqn}: {error}") from error
    return MXTensor(operand, None, recipe, weight.dtype)

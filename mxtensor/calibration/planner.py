"""``plan``: measure what each format of each weight costs the model, and choose under a budget of bits."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..convert.changes import Change, checked_changes, inference_recipe
from ..convert.configs import choose, recipe_of
from ..convert.format_plan import MEASURES, Plan, PlannedWeight, check_budget, planned_for
from ..convert.weights import FilterFn
from ..core.arguments import INTEGER, MODULE, POSITIVE, TEXT, check, described
from ..core.compat import tree_map_only
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from ..training.training_weight import values_of
from .blocks import Stream, batches_of, patterns, warn_of_layers_without_input
from .layers import calibrated, check_values, oriented, weight_of
from .sensitivity import Candidate, errors_of_layers, errors_of_model, frozen

_log = logging.getLogger("mxtensor")

FORMATS = ("mxfp4-weight-only", "nvfp4-weight-only", "mxfp6_e2m3-weight-only", "mxfp8-weight-only")
"""The formats that ``plan`` chooses from by default: 4.25, 4.5, 6.25 and 8.25 bits per value."""


def plan(
    model: nn.Module,
    data: Iterable[Any],
    bits: float = 5.0,
    formats: Sequence[str] = FORMATS,
    measure: str = "kl",
    filter_fn: FilterFn | None = None,
    *,
    include_head: bool = False,
    seed: int = 0,
) -> Plan:
    """Choose a format for each weight, so that the model changes least with at most ``bits`` bits per value.

    ``bits`` counts codes and scales over all weights that ``quantize_`` would convert with this ``filter_fn`` and
    ``include_head``. ``data``: as in ``calibrate``; ten thousand tokens are enough. ``formats``: names that
    ``quantize_`` takes, with or without activations. ``measure``: ``"kl"``, the KL divergence of the predictions, for a
    model that returns logits (a tensor, or an object with ``logits``); ``"squared"``, the relative squared error of the
    model's output; ``"layer"``, that of each layer's own output, which needs no gradients. The first two are measured
    by gradients, for labels or directions that are drawn from ``seed``: the errors of layers then add up to about the
    error of the model. Weights are rounded to nearest.

    The model runs block by block. Memory holds the inputs of all blocks for all data (only of one for ``"layer"``), and
    one block's weights in every format. The errors of weights that do not belong to a linear layer, get no input after
    the first block begins, or get no gradient (before a step that rounds), are estimated from the errors of their
    values. The model is not changed.

    Source of the measure: Fisher information, as in Kim et al., "SqueezeLLM", 2023. Raises what ``quantize_`` raises;
    ValueError for a budget below that of the smallest format, for formats that train, for empty data, and for weights
    or inputs that are not finite.
    """
    check("plan", "model", model, MODULE)
    check("plan", "bits", bits, POSITIVE)
    check("plan", "measure", measure, TEXT)
    check("plan", "seed", seed, INTEGER)
    if measure not in MEASURES:
        raise ValueError(f"plan: measure is {measure!r}; choose one of {', '.join(map(repr, MEASURES))}")
    by_format = _changes(model, formats, filter_fn, include_head)
    changes = next(iter(by_format.values()))
    if not changes:
        raise ValueError(f"plan: no weight of {type(model).__name__} passed the filter; see filter_fn of quantize_")
    check_values("plan", changes.values())
    sizes = _sizes(by_format)
    check_budget(bits, {fqn: change.values for fqn, change in changes.items()}, sizes)  # before it measures
    batches = batches_of("plan", data)
    layers, own = calibrated(changes.values()), dict[str, dict[str, float]]()

    def candidates_of(layer: nn.Module) -> dict[str, Candidate]:
        return _candidates(layers[layer], by_format, own)

    with ExitStack() as mode:
        if measure != "layer":
            _allow_gradients(model, mode)
            batches = tree_map_only(
                Tensor, lambda t: t.clone() if t.is_inference() else t, batches
            )  # autograd saves it
        stream = Stream(model, batches, layers)
        unseen = [layers[layer].fqn for layer in stream.without_input]
        warn_of_layers_without_input("plan", unseen, len(layers), "have errors that are estimated from their values")
        if measure == "layer":
            found = errors_of_layers(stream, layers, candidates_of)
        else:
            generator = torch.Generator(weight_of(next(iter(changes.values()))).device).manual_seed(seed)
            found = errors_of_model(stream, layers, candidates_of, measure, generator)
            _warn_of_layers_without_gradient(
                [change.fqn for m, change in layers.items() if m not in {*found, *stream.without_input}], len(layers)
            )
    errors = {change.fqn: found[layer] for layer, change in layers.items() if layer in found}
    for fqn, change in changes.items():
        if fqn not in own:
            _candidates(change, by_format, own)
    weights = _weights(changes, sizes, errors, own, measure)
    return planned_for(weights, bits, measure)


def _candidates(
    change: Change, by_format: Mapping[str, Mapping[str, Change]], own: dict[str, dict[str, float]]
) -> dict[str, Candidate]:
    """A weight in all formats. The squared errors of its values, relative to the weight, are added to ``own``."""
    before = values_of(weight_of(change)).detach()
    weight, found, errors = before.float(), {}, own.setdefault(change.fqn, {})
    norm = float(weight.square().sum()) or 1.0
    for format, of_format in by_format.items():
        stored = _quantized(of_format[change.fqn], before)
        values = stored.dequantize(torch.float32)
        found[format] = Candidate(oriented(values, change.orientation), stored.recipe.activation)
        errors[format] = float((values - weight).square().sum()) / norm
    return found


def _allow_gradients(model: nn.Module, mode: ExitStack) -> None:
    """Gradients flow, also where the caller has switched them off, and none of a parameter is computed."""
    if any(t.is_inference() for t in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "plan: the model was made inside torch.inference_mode(), where no gradient can be computed; make it "
            "outside, or pass measure='layer'"
        )
    mode.enter_context(torch.inference_mode(False))
    mode.enter_context(torch.enable_grad())
    mode.enter_context(frozen(model))


def _warn_of_layers_without_gradient(fqns: Collection[str], total: int) -> None:
    if fqns:
        _log.warning(
            f"plan: no gradient of the output reaches {len(fqns)} of {total} layers, whose errors are estimated from "
            f"their values: {patterns(fqns)}; they run before the blocks, or inside torch.no_grad(), or before a step "
            "that rounds"
        )


def _changes(
    model: nn.Module, formats: Sequence[str], filter_fn: FilterFn | None, include_head: bool
) -> dict[str, dict[str, Change]]:
    """Format -> name of the weight -> what ``quantize_`` would do to it."""
    if isinstance(formats, str) or not all(isinstance(format, str) for format in formats) or not formats:
        raise TypeError(f"plan: formats is {described(formats)}; pass a list of names, such as {list(FORMATS)}")
    found = {}
    for format in formats:
        recipe = recipe_of(format)
        if recipe.trains:
            raise ValueError(f"plan: {format} trains, and stores no codes; pass a format such as 'mxfp8-weight-only'")
        chosen, _ = choose(model, recipe, filter_fn, include_head)
        found[format] = {change.fqn: change for change in checked_changes(model, chosen)}
    return found


def _quantized(change: Change, values: Tensor) -> MXTensor:
    recipe = inference_recipe([module for module, _ in change.places], change.recipe)
    return quantize_as(values, recipe, change.orientation)


def _sizes(by_format: Mapping[str, Mapping[str, Change]]) -> dict[str, dict[str, int]]:
    """Weight -> format -> bytes of codes and scales, which tensors without memory have too."""
    sizes: dict[str, dict[str, int]] = {}
    for format, of_format in by_format.items():
        for fqn, change in of_format.items():
            shape_only = torch.empty_like(values_of(weight_of(change)), device="meta", requires_grad=False)
            sizes.setdefault(fqn, {})[format] = _quantized(change, shape_only).nbytes
    return sizes


def _weights(
    changes: Mapping[str, Change], sizes: Mapping[str, Mapping[str, int]], errors: Mapping[str, Mapping[str, float]],
    own: Mapping[str, Mapping[str, float]], measure: str,
) -> dict[str, PlannedWeight]:  # fmt: skip
    """The rows of the plan. A weight without errors gets its ``own`` relative ones, times what those of others cost."""
    of_model = measure != "layer"  # errors of a model grow with the number of weights, those of a layer do not
    counts = {fqn: change.values if of_model else 1 for fqn, change in changes.items()}
    measured = sum(sum(row.values()) for row in errors.values())
    relative = sum(counts[fqn] * sum(own[fqn].values()) for fqn in errors)
    cost = measured / relative if relative else 1.0
    rows = {}
    for fqn, change in changes.items():
        of_weight = errors.get(fqn) or {format: error * cost * counts[fqn] for format, error in own[fqn].items()}
        if not all(map(math.isfinite, of_weight.values())):
            raise ValueError(
                f"plan: the errors of {fqn} are not finite; its values or its inputs are not: leave it out by "
                "filter_fn, or pass data that the model can read"
            )
        rows[fqn] = PlannedWeight(change.values, sizes[fqn], of_weight, fqn not in errors)
    return rows

"""``plan``: measure what each format of each weight costs the model, and choose under a budget of bits.

Every block runs in high precision, first to last. Then gradients go backward, last to first: a block runs once more
on the saved inputs, so that memory holds the inputs of all blocks, and graph and quantized weights of one.

The gradients are probes: their products with small changes of the output of a layer give the change of the output of
the model. For ``g`` the gradient of the log likelihood of labels that are sampled from the model's own predictions, and
``d`` a small change of the output of a layer, half the mean of ``(g d)^2`` is the KL divergence between the predictions
before and after: the Fisher information is its second derivative. For ``g`` the gradient of the product of the output
and standard normal values, the mean of ``(g d)^2`` is the squared change of the output.

Source: Amari, "Natural Gradient Works Efficiently in Learning", 1998.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..convert.changes import Change, checked_changes, inference_recipe
from ..convert.configs import choose, recipe_of
from ..convert.format_plan import MEASURES, Plan, PlannedWeight, check_budget, planned_for
from ..convert.weights import FilterFn
from ..core.arguments import INTEGER, MODULE, POSITIVE, TEXT, check, described
from ..core.compat import tree_map_only
from ..core.progress import with_progress
from ..core.shapes import as_matrix
from ..kernels.quantize.choose_cast import dequantize_operand, quantize_rows
from ..numerics.cast import Cast
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from ..training.training_weight import values_of
from .blocks import Call, Stream, batches_of, patterns, tensors_of, warn_of_layers_without_input
from .layers import calibrated, check_values, orientation_of, oriented, weight_of
from .moments import Saved, inputs_of

_log = logging.getLogger("mxtensor")

FORMATS = ("mxfp4-weight-only", "nvfp4-weight-only", "mxfp6_e2m3-weight-only", "mxfp8-weight-only")
"""The formats that ``plan`` chooses from by default: 4.25, 4.5, 6.25 and 8.25 bits per value."""
ROWS = 1024
"""Rows of a layer's output whose change is in memory at once."""


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
            mode.enter_context(_with_gradients(model))
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
            lost = [change.fqn for m, change in layers.items() if m not in {*found, *stream.without_input}]
            if lost:
                _log.warning(
                    f"plan: no gradient of the output reaches {len(lost)} of {len(layers)} layers, whose errors are "
                    f"estimated from their values: {patterns(lost)}; they run before the blocks, or inside "
                    "torch.no_grad(), or before a step that rounds"
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


@contextmanager
def _with_gradients(model: nn.Module) -> Iterator[None]:
    """Gradients flow, also where the caller has switched them off. No parameter requires one, so that graphs begin
    where a tensor does."""
    if any(t.is_inference() for t in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "plan: the model was made inside torch.inference_mode(), where no gradient can be computed; make it "
            "outside, or pass measure='layer'"
        )
    required = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.inference_mode(False), torch.enable_grad():
        try:
            for parameter in required:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in required:
                parameter.requires_grad_(True)


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


# ---------------------------------------------------------------------------------------------- errors of layers


class Candidate(NamedTuple):
    """A layer's weight in one format."""

    weight: Tensor
    """The quantized values, (out, in)."""
    activation: Cast | None
    """How the layer then casts its input."""

    def change(self, x: Tensor, weight: Tensor) -> Tensor:
        """The change of the output (rows, out) for an input (rows, in) and the weight before, (out, in)."""
        change = x @ (self.weight - weight).T
        if self.activation is None:
            return change
        cast = dequantize_operand(quantize_rows(x, self.activation), torch.float32)
        return change + (cast - x) @ self.weight.T


Tried = Mapping[nn.Module, Mapping[str, Candidate]]
"""The weights that are tried, by layer and format."""
CandidatesOf = Callable[[nn.Module], Mapping[str, Candidate]]
WatchedCall = tuple[nn.Module, Tensor, Tensor]
"""A layer, its input, its output."""


class Sums:
    """What was summed for each layer and format."""

    def __init__(self) -> None:
        self.errors: dict[nn.Module, dict[str, float]] = {}
        self._norms: dict[nn.Module, float] = {}

    def add(
        self, layer: nn.Module, x: Tensor, gradient: Tensor | None, candidates: Mapping[str, Candidate],
        share: float = 1.0,
    ) -> None:  # fmt: skip
        """An input (..., in) of a layer, and a probe with respect to its output (..., out).

        Without a probe, the squared change of the output counts, relative to the output without bias.
        """
        if not x.numel():  # without rows nothing is measured
            return
        matrix = oriented(layer.weight.detach(), orientation_of(layer))  # type: ignore[operator]
        x, weight = as_matrix(x.detach()).float(), matrix.float()
        g = None if gradient is None else as_matrix(gradient).float()
        sums = self.errors.setdefault(layer, dict.fromkeys(candidates, 0.0))
        for begin in range(0, len(x), ROWS):
            rows = slice(begin, begin + ROWS)
            if g is None:
                norm = float((x[rows] @ weight.T).square().sum())
                self._norms[layer] = self._norms.get(layer, 0.0) + norm
            for name, candidate in candidates.items():
                change = candidate.change(x[rows], weight)
                product = change if g is None else (change * g[rows]).sum(-1)
                sums[name] += float(product.square().sum()) / share

    def add_calls(
        self, calls: list[WatchedCall], tried: Tried, share: float,
        out: Tensor, gradient: Tensor | None = None, leaf: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Add all calls by the gradients of ``out``; returns the gradient of ``leaf``."""
        wanted = [y for _, _, y in calls]
        if leaf is not None and leaf.requires_grad:
            wanted.append(leaf)
        if not wanted or not out.requires_grad:
            return None
        found = torch.autograd.grad(out, wanted, gradient, allow_unused=True)
        for (layer, x, _), g in zip(calls, found, strict=False):
            if g is not None:
                self.add(layer, x, g, tried[layer], share)
        return found[-1] if len(found) > len(calls) else None

    def result(self, batches: int) -> dict[nn.Module, dict[str, float]]:
        """Layer -> format -> error: the mean over batches, or relative to the norm of the layer's output."""
        return {
            layer: {name: total / (self._norms.get(layer, batches) or 1.0) for name, total in sums.items()}
            for layer, sums in self.errors.items()
        }


@contextmanager
def _watched(layers: Collection[nn.Module]) -> Iterator[list[WatchedCall]]:
    """The calls of layers. Their outputs require gradients."""
    calls: list[WatchedCall] = []
    inputs = Saved(copies=True)  # what follows may write into inputs and outputs

    def keep(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        if not out.requires_grad:
            out = out.detach().requires_grad_()
        calls.append((layer, inputs.of(Call(args, kwargs).first).detach(), out))
        return out.clone()

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(keep, with_kwargs=True))
        yield calls


def output_of(out: Any) -> Tensor:
    """The floating-point tensor that a model returns: its ``logits``, its ``last_hidden_state``, or the first in it.

    A loss, which has no dimension, is passed over. Raises ValueError if there is none.
    """

    def named(name: str) -> Any:
        return out.get(name) if isinstance(out, Mapping) else getattr(out, name, None)

    for one in (named("logits"), named("last_hidden_state"), out):
        for tensor in tensors_of(one):
            if tensor.dim():
                return tensor
    raise ValueError(f"plan: the model returns {described(out)}, which has no gradient; pass measure='layer'")


def _probe(measure: str, out: Any, generator: torch.Generator) -> tuple[Tensor, float]:
    """The scalar whose gradient is a probe, and what the sum of squares over a batch is divided by.

    ``"kl"``: the log likelihood of one sampled label for each row of logits (..., classes). ``"squared"``: the product
    with standard normal values, relative to the squared norm of the output.
    """
    value = output_of(out).float()
    if measure == "kl":
        value = value.flatten(0, -2).log_softmax(-1)
        finite = ~value.isnan()  # a masked token has -inf
    else:
        finite = value.isfinite()
    if not finite.all():
        raise ValueError(
            "plan: the output of the model has NaN or Inf, whose errors cannot be measured; look for weights that are "
            "not finite, and for data that the model cannot read"
        )
    if measure == "kl":
        labels = torch.multinomial(value.detach().exp(), 1, generator=generator)
        return value.gather(1, labels).sum(), 2.0 * len(value)
    normal = torch.randn(value.shape, generator=generator, device=value.device)
    return (value * normal).sum(), float(value.detach().square().sum())


def errors_of_layers(
    stream: Stream, layers: Collection[nn.Module], candidates_of: CandidatesOf
) -> dict[nn.Module, dict[str, float]]:
    """Measure ``"layer"``: the squared error of a layer's output, relative to it. Layers in blocks only."""
    states, sums = list(stream.states), Sums()
    inside, _ = stream.by_block(layers)
    for index in with_progress(range(len(inside)), "measuring", "block"):
        tried = {layer: candidates_of(layer) for layer in inside[index]}
        for batch, state in enumerate(states):
            inputs, states[batch] = inputs_of(tried, partial(stream.run, index, batch, state))
            for layer in tried:
                for x in inputs[layer]:
                    sums.add(layer, x, None, tried[layer])
    return sums.result(len(states))


def errors_of_model(
    stream: Stream, layers: Collection[nn.Module], candidates_of: CandidatesOf, measure: str,
    generator: torch.Generator,
) -> dict[nn.Module, dict[str, float]]:  # fmt: skip
    """Measures ``"kl"`` and ``"squared"``: the error of the model's output. Layers before the blocks have none, and so
    have those that no gradient reaches."""
    sums = Sums()
    inside, outside = stream.by_block(layers)
    saved: list[list[Any]] = [list(stream.states)]
    if len(inside) == 1:  # the model itself
        tried = {layer: candidates_of(layer) for layer in inside[0]}
        for batch, state in with_progress(list(enumerate(saved[0])), "measuring", "batch"):
            with _watched(tried) as calls:
                value, share = _probe(measure, stream.run(0, batch, state, gradient=True), generator)
            sums.add_calls(calls, tried, share, value)
        return sums.result(len(saved[0]))
    for index in range(len(inside)):
        saved.append([stream.run(index, batch, state) for batch, state in enumerate(saved[-1])])
    tried = {layer: candidates_of(layer) for layer in outside}
    gradients, shares = [], []
    for batch, end in enumerate(saved.pop()):
        leaf = end.detach().requires_grad_()
        with _watched(tried) as calls:
            value, share = _probe(measure, stream.finish(batch, leaf), generator)
        gradients.append(sums.add_calls(calls, tried, share, value, leaf=leaf))
        shares.append(share)
    for index in with_progress(range(len(inside) - 1, -1, -1), "measuring", "block"):
        tried = {layer: candidates_of(layer) for layer in inside[index]}
        for batch, state in enumerate(saved.pop()):
            if gradients[batch] is None:  # what follows rounds to integers, or reads other outputs
                continue
            leaf = state.detach()
            if index and leaf.is_floating_point():
                leaf.requires_grad_()
            with _watched(tried) as calls:
                out = stream.run(index, batch, leaf, gradient=True)
            gradients[batch] = sums.add_calls(calls, tried, shares[batch], out, gradients[batch], leaf)
    return sums.result(len(shares))

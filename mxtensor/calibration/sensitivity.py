"""How much the output of a model changes when one of its layers is quantized, for several formats of each layer.

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

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.arguments import described
from ..core.progress import with_progress
from ..core.shapes import as_matrix
from ..kernels.quantize.choose_cast import dequantize_operand, quantize_rows
from ..numerics.cast import Cast
from .blocks import Call, Stream, tensors_of
from .layers import orientation_of, oriented
from .moments import Saved, inputs_of

ROWS = 1024
"""Rows of a layer's output whose change is in memory at once."""


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


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter requires a gradient, so that graphs begin where a tensor does."""
    required = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in required:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in required:
            parameter.requires_grad_(True)


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


def sampled_label(out: Any, generator: torch.Generator) -> tuple[Tensor, float]:
    """For ``"kl"``: the log likelihood of one sampled label for each row of logits (..., classes)."""
    logits = output_of(out).float().flatten(0, -2)
    log_p = logits.log_softmax(-1)
    _check_finite(~log_p.isnan())  # a masked token has -inf
    labels = torch.multinomial(log_p.detach().exp(), 1, generator=generator)
    return log_p.gather(1, labels).sum(), 2.0 * len(logits)


def _check_finite(fits: Tensor) -> None:
    if not fits.all():
        raise ValueError(
            "plan: the output of the model has NaN or Inf, whose errors cannot be measured; look for weights that are "
            "not finite, and for data that the model cannot read"
        )


def normal_product(out: Any, generator: torch.Generator) -> tuple[Tensor, float]:
    """For ``"squared"``: the product with standard normal values, relative to the squared norm of the output."""
    value = output_of(out).float()
    _check_finite(value.isfinite())
    normal = torch.randn(value.shape, generator=generator, device=value.device)
    return (value * normal).sum(), float(value.detach().square().sum())


PROBES: dict[str, Callable[[Any, torch.Generator], tuple[Tensor, float]]] = {
    "kl": sampled_label, "squared": normal_product,
}  # fmt: skip
"""Measure -> the scalar whose gradient is a probe, and what the sum of squares over a batch is divided by."""


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
    sums, probe_of = Sums(), PROBES[measure]
    inside, outside = stream.by_block(layers)
    saved: list[list[Any]] = [list(stream.states)]
    if len(inside) == 1:  # the model itself
        tried = {layer: candidates_of(layer) for layer in inside[0]}
        for batch, state in with_progress(list(enumerate(saved[0])), "measuring", "batch"):
            with _watched(tried) as calls:
                value, share = probe_of(stream.run(0, batch, state, gradient=True), generator)
            sums.add_calls(calls, tried, share, value)
        return sums.result(len(saved[0]))
    for index in range(len(inside)):
        saved.append([stream.run(index, batch, state) for batch, state in enumerate(saved[-1])])
    tried = {layer: candidates_of(layer) for layer in outside}
    gradients, shares = [], []
    for batch, end in enumerate(saved.pop()):
        leaf = end.detach().requires_grad_()
        with _watched(tried) as calls:
            value, share = probe_of(stream.finish(batch, leaf), generator)
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

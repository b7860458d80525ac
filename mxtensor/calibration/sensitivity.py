"""How much the output of a model changes when one of its layers is quantized, for several formats of each layer.

Every block runs in high precision, first to last. Then gradients go backward, last to first: a block runs once more
on the saved inputs, so that memory holds the inputs of all blocks, and graph and quantized weights of one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.progress import with_progress
from ..kernels.quantize.select import dequantize_operand, quantize_operand
from ..numerics.cast import Cast
from .blocks import Stream
from .in_use import first_of
from .layers import matrix_of
from .moments import Saved, inputs_of
from .probes import PROBES

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
        cast = dequantize_operand(quantize_operand(x, self.activation), torch.float32)
        return change + (cast - x) @ self.weight.T


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
        x, weight = x.detach().reshape(-1, x.shape[-1]).float(), matrix_of(layer).float()
        g = None if gradient is None else gradient.reshape(-1, gradient.shape[-1]).float()
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

    def result(self, batches: int) -> dict[nn.Module, dict[str, float]]:
        """Layer -> format -> error: the mean over batches, or relative to the norm of the layer's output."""
        return {
            layer: {name: total / (self._norms.get(layer, batches) or 1.0) for name, total in sums.items()}
            for layer, sums in self.errors.items()
        }


WatchedCall = tuple[nn.Module, Tensor, Tensor]
"""A layer, its input, its output."""


@contextmanager
def _watched(layers: Collection[nn.Module]) -> Iterator[list[WatchedCall]]:
    """The calls of layers. Their outputs require gradients."""
    calls: list[WatchedCall] = []
    inputs = Saved(copies=True)  # what follows may write into inputs and outputs

    def keep(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        if not out.requires_grad:
            out = out.detach().requires_grad_()
        calls.append((layer, inputs.of(first_of(args, kwargs)).detach(), out))
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


class Sensitivity:
    """The errors of layers of a model; ``candidates_of(layer)`` makes the weights that are tried, by format."""

    def __init__(
        self, stream: Stream, layers: Collection[nn.Module],
        candidates_of: Callable[[nn.Module], Mapping[str, Candidate]],
    ) -> None:  # fmt: skip
        self._stream, self._candidates_of, self._sums = stream, candidates_of, Sums()
        every = [set(stream.block(index).modules()) for index in range(len(stream))]
        self._inside = [[layer for layer in layers if layer in modules] for modules in every]
        self._outside = [layer for layer in layers if not any(layer in modules for modules in every)]

    def of_layers(self) -> dict[nn.Module, dict[str, float]]:
        """Measure ``"layer"``: the squared error of a layer's output, relative to it. Layers in blocks only."""
        states = list(self._stream.states)
        for index in with_progress(range(len(self._stream)), "measuring", "block"):
            tried = self._tried(self._inside[index])
            for batch, state in enumerate(states):
                inputs, states[batch] = inputs_of(tried, partial(self._stream.run, index, batch, state))
                for layer in tried:
                    for x in inputs[layer]:
                        self._sums.add(layer, x, None, tried[layer])
        return self._sums.result(len(states))

    def of_model(self, measure: str, generator: torch.Generator) -> dict[nn.Module, dict[str, float]]:
        """Measures ``"kl"`` and ``"squared"``: the error of the model's output. Layers before the blocks have none, and
        so have those that no gradient reaches."""
        stream, probe_of = self._stream, PROBES[measure]
        saved: list[list[Any]] = [list(stream.states)]
        if len(stream) == 1:  # the model itself
            tried = self._tried(self._inside[0])
            for batch, state in with_progress(list(enumerate(saved[0])), "measuring", "batch"):
                with _watched(tried) as calls:
                    probe = probe_of(stream.run(0, batch, state, gradient=True), generator)
                self._add(probe.value, None, None, calls, tried, probe.share)
            return self._sums.result(len(saved[0]))
        for index in range(len(stream)):
            saved.append([stream.run(index, batch, state) for batch, state in enumerate(saved[-1])])
        tried = self._tried(self._outside)
        gradients, shares = [], []
        for batch, end in enumerate(saved.pop()):
            leaf = end.detach().requires_grad_()
            with _watched(tried) as calls:
                probe = probe_of(stream.finish(batch, leaf), generator)
            gradients.append(self._add(probe.value, None, leaf, calls, tried, probe.share))
            shares.append(probe.share)
        for index in with_progress(range(len(stream) - 1, -1, -1), "measuring", "block"):
            tried = self._tried(self._inside[index])
            for batch, state in enumerate(saved.pop()):
                if gradients[batch] is None:  # what follows rounds to integers, or reads other outputs
                    continue
                leaf = state.detach()
                if index and leaf.is_floating_point():
                    leaf.requires_grad_()
                with _watched(tried) as calls:
                    out = stream.run(index, batch, leaf, gradient=True)
                gradients[batch] = self._add(out, gradients[batch], leaf, calls, tried, shares[batch])
        return self._sums.result(len(shares))

    def _tried(self, layers: Sequence[nn.Module]) -> dict[nn.Module, Mapping[str, Candidate]]:
        return {layer: self._candidates_of(layer) for layer in layers}

    def _add(
        self, out: Tensor, gradient: Tensor | None, leaf: Tensor | None, calls: list[WatchedCall],
        tried: Mapping[nn.Module, Mapping[str, Candidate]], share: float,
    ) -> Tensor | None:  # fmt: skip
        """Add all calls of layers by the gradients of ``out``; returns the gradient of ``leaf``."""
        wanted = [y for _, _, y in calls]
        if leaf is not None and leaf.requires_grad:
            wanted.append(leaf)
        if not wanted or not out.requires_grad:
            return None
        found = torch.autograd.grad(out, wanted, gradient, allow_unused=True)
        for (layer, x, _), g in zip(calls, found, strict=False):
            if g is not None:
                self._sums.add(layer, x, g, tried[layer], share)
        return found[-1] if len(found) > len(calls) else None

"""Smoothing: channels with large inputs are made smaller, and the columns of the weights that read them larger.

The output stays: ``(x / s) (w s)^T = x w^T``. What a block of a format has to hold together, in the input and in the
weight, gets closer to one size. ``s`` is folded into the module before (see :mod:`.pairs`), so that the model has the
same layers as before and costs no more. Methods differ in the scales that they try.

Sources: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", 2022:
``s = amax_x^alpha / amax_w^(1 - alpha)``. Lin et al., "AWQ: Activation-aware Weight Quantization", 2023: each ``s`` is
the one of several with the least error of the quantized output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..convert.changes import Change
from ..core.arguments import COUNT, SHARE, check, described
from ..kernels.quantize.select import dequantize_operand, quantize_operand
from ..numerics.cast import Cast
from .blocks import Stream
from .edits import Edit, in_place
from .layers import orientation_of, oriented
from .moments import inputs_of
from .outputs import tensors_of
from .pairs import Pair, pairs_of

ALPHAS = (0.25, 0.5, 0.75, 1.0)
"""Values of alpha that are tried."""
ROWS = 2048
"""Rows of input that the amax of channels, and the error of the output, are taken from."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The largest relative change of a block's output that rounding of edited weights explains."""


class Scaling(ABC):
    """A method that moves scales of channels from inputs to weights; each pair takes the best of some scales."""

    @abstractmethod
    def scales(self, pair: Pair, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """The scales to try: tensors (channels of the producer,). ``x``: (rows, columns) of input, float32."""

    def edits(self, stream: Stream, index: int, states: Sequence[Any], layers: dict[nn.Module, Change]) -> list[Edit]:
        """The parameters of a block after smoothing. Raises ValueError if the block then computes something else."""
        pairs = pairs_of(stream.block(index), layers, lambda: stream.run(index, 0, states[0]))
        pairs = [pair for pair in pairs if not stream.is_shared(pair.producer, *pair.consumers)]
        consumers = [layer for pair in pairs for layer in pair.consumers]
        inputs = _rows(stream, index, states, consumers)
        edited: dict[tuple[nn.Module, str], Tensor] = {}
        for pair in pairs:
            x = inputs[pair.consumers[0]]
            if len(x) and x.isfinite().all():
                self._smooth(pair, x, layers, edited)
        found = [Edit(m, name, nn.Parameter(value, requires_grad=False)) for (m, name), value in edited.items()]
        if found:
            self._check(stream, index, states[0], found)
        return found

    def _smooth(
        self, pair: Pair, x: Tensor, layers: dict[nn.Module, Change], edited: dict[tuple[nn.Module, str], Tensor]
    ) -> None:
        """Add the edits of a pair. ``x``: (rows, columns) of its consumers' input."""
        layouts = [orientation_of(layer) for layer in pair.consumers]
        weights = [
            oriented(_current(layer, "weight", edited), layout)
            for layer, layout in zip(pair.consumers, layouts, strict=True)
        ]
        tries = [(s / s.log().mean().exp()).clamp(1e-3, 1e3) for s in self.scales(pair, x, weights)]
        casts = [layers[layer].recipe for layer in pair.consumers]
        best = tries[0]
        if len(tries) > 1:
            plain = [x @ w.float().T for w in weights]
            errors = []
            for s in tries:
                read = pair.as_read(s)
                errors.append(sum(
                    _error(x / read, w.float() * read, out, r.activation, r.stored)
                    for w, out, r in zip(weights, plain, casts, strict=True)
                ))  # fmt: skip
            best = tries[min(range(len(tries)), key=errors.__getitem__)]
        if (best == 1).all():
            return
        for layer, layout, w in zip(pair.consumers, layouts, weights, strict=True):
            scaled = (w.float() * pair.as_read(best)).to(w.dtype)
            edited[layer, "weight"] = oriented(scaled, layout).contiguous()
        for name in ("weight", "bias"):
            if getattr(pair.producer, name, None) is not None:
                value = _current(pair.producer, name, edited)
                divisor = best.view(-1, *[1] * (value.dim() - 1))
                edited[pair.producer, name] = (value.float() / divisor).to(value.dtype)

    def _check(self, stream: Stream, index: int, state: Any, edits: Sequence[Edit]) -> None:
        name, block = type(self).__name__, type(stream.block(index)).__name__
        out = stream.run(index, 0, state)
        before = tensors_of(out)
        if not before:
            raise ValueError(
                f"{name}: block {index} ({block}) returns {described(out)}, which has no floating-point tensor to "
                "compare; leave it out of method"
            )
        with in_place(edits):
            after = tensors_of(stream.run(index, 0, state))
        for old, new in zip(before, after, strict=True):
            changed = _change(old.float(), new.float())
            if not changed <= TOLERANCE.get(old.dtype, 5e-2):
                raise ValueError(
                    f"{name}: block {index} ({block}) computes something else when channels of its norms are scaled "
                    f"and the layers after them scale back (its output changes by {changed:.1%}); leave it out of "
                    "method"
                )


@dataclass(frozen=True)
class SmoothQuant(Scaling):
    """``"smooth"``: moves per-channel scales from inputs into weights, before another method rounds the weights.

    ``alpha``: how much of a channel's scale moves, 0 (nothing) to 1. None: each module and the layers that read it take
    the one of several values, or no scaling, that gives the smallest error of the outputs.
    """

    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.alpha is not None:
            check("SmoothQuant", "alpha", self.alpha, SHARE)

    def scales(self, pair: Pair, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`Scaling`."""
        amax_x = pair.as_made(x.abs().amax(0)).clamp(min=1e-5)
        amax_w = pair.as_made(torch.stack([w.float().abs().amax(0) for w in weights]).amax(0)).clamp(min=1e-5)
        none = [torch.ones_like(amax_x)] if self.alpha is None else []
        return none + [amax_x**a / amax_w ** (1 - a) for a in (ALPHAS if self.alpha is None else (self.alpha,))]


@dataclass(frozen=True)
class AWQ(Scaling):
    """``"awq"``: as SmoothQuant, with scales from the mean magnitude of inputs alone: ``s = mean(|x|)^alpha``.

    ``grid``: the number of values of alpha from 0 (no scaling) up to 1 that are tried. Each module and the layers that
    read it take the value with the smallest error of the outputs. ``"mse"`` after it clips weights, as in the paper.
    """

    grid: int = 20

    def __post_init__(self) -> None:
        check("AWQ", "grid", self.grid, COUNT)

    def scales(self, pair: Pair, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`Scaling`."""
        mean = pair.as_made(x.abs().mean(0)).clamp(min=1e-5)
        return [mean ** (step / self.grid) for step in range(self.grid)]


def _current(module: nn.Module, name: str, edited: dict[tuple[nn.Module, str], Tensor]) -> Tensor:
    value: Tensor = edited.get((module, name), getattr(module, name))
    return value.detach()


def _change(before: Tensor, after: Tensor) -> float:
    """The change of an output, relative to it. Infinite values, such as those of a mask, change if they move."""
    difference = torch.where(after == before, 0.0, after - before)
    return float(difference.norm() / before[before.isfinite()].norm().clamp(min=1e-30))


def _error(x: Tensor, w: Tensor, out: Tensor, activation: Cast | None, stored: Cast) -> float:
    """The squared error of the quantized output, relative to ``out``."""
    if activation is not None:
        x = dequantize_operand(quantize_operand(x, activation), torch.float32)
    w = dequantize_operand(quantize_operand(w, stored), torch.float32)
    return float((x @ w.T - out).square().sum() / out.square().sum().clamp(min=1e-30))


def _rows(stream: Stream, index: int, states: Sequence[Any], layers: Sequence[nn.Module]) -> dict[nn.Module, Tensor]:
    """Rows of the inputs of layers, float32, from the first batches."""
    found: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers}
    rows = 0
    for batch, state in enumerate(states):
        inputs, _ = inputs_of(layers, lambda batch=batch, state=state: stream.run(index, batch, state))  # type: ignore[misc]
        for layer, calls in inputs.items():
            found[layer] += [x.detach().reshape(-1, x.shape[-1]) for x in calls]
        rows = max((sum(map(len, calls)) for calls in found.values()), default=ROWS)
        if rows >= ROWS:
            break
    return {layer: torch.cat(calls)[:ROWS].float() if calls else torch.empty(0) for layer, calls in found.items()}

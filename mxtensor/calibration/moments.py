"""Moments: what GPTQ needs to know of the inputs of a layer, summed while a block runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.quantize.select import dequantize_operand, quantize_operand
from ..numerics.cast import Cast
from .gptq import inverse_cholesky
from .in_use import first_of

Inputs = dict[nn.Module, list[Tensor]]
"""Layer -> its inputs, one for each call."""


class _Enough(BaseException):
    """All inputs are known, and the rest of the block need not run."""


def inputs_of(layers: Collection[nn.Module], run: Callable[[], Any], stop: bool = False) -> tuple[Inputs, Any]:
    """The inputs that ``layers`` get while ``run`` runs, and its result.

    ``stop``: ``run`` ends when each layer has had one input; the result is None then. If something writes into an input
    after its layer, all runs once more, with copies.
    """
    found, out, written = _inputs_of(layers, run, stop, Saved())
    if written:
        found, out, _ = _inputs_of(layers, run, stop, Saved(copies=True))
    return found, out


class Saved:
    """Tensors as they are now: one object for each state of a tensor."""

    def __init__(self, copies: bool = False) -> None:
        self._copies = copies
        self._tensors: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def of(self, x: Tensor) -> Tensor:
        """``x``, or a copy of it."""
        key = id(x), version_of(x)
        if key not in self._tensors:
            self._tensors[key] = x, x.clone() if self._copies else x
        return self._tensors[key][1]

    @property
    def written(self) -> bool:
        """Whether something wrote into one of them since."""
        return any(version_of(x) != version for (_, version), (x, _) in self._tensors.items())


def version_of(x: Tensor) -> int:
    """The number of writes into a tensor. Tensors of ``torch.inference_mode`` do not count them."""
    return 0 if x.is_inference() else x._version


def _inputs_of(
    layers: Collection[nn.Module], run: Callable[[], Any], stop: bool, saved: Saved
) -> tuple[Inputs, Any, bool]:
    found: Inputs = {layer: [] for layer in layers}

    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[layer].append(saved.of(first_of(args, kwargs)))
        if stop and all(found.values()):
            raise _Enough

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(keep, with_kwargs=True))
        try:
            out = run()
        except _Enough:
            out = None
    return found, out, saved.written


class Group(NamedTuple):
    """Layers that get the same inputs."""

    layers: list[nn.Module]
    once: bool
    """Whether each was called once."""


def groups_of(layers: Collection[nn.Module], run: Callable[[], Any]) -> list[Group]:
    """``layers`` in groups that get the same tensors, in the order of their first calls while ``run`` runs.

    A layer that is not called is a group of its own, at the end.
    """
    order: list[nn.Module] = []
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(lambda layer, args: order.append(layer)))
        found, _ = inputs_of(layers, run)
    groups: dict[tuple[int, ...], list[nn.Module]] = {}
    for layer in dict.fromkeys((*order, *layers)):
        same: list[Any] = found[layer] or [layer]
        groups.setdefault(tuple(map(id, same)), []).append(layer)
    return [Group(group, len(found[group[0]]) == 1) for group in groups.values()]


def as_the_layer_sees(x: Tensor, activation: Cast | None) -> Tensor:
    """An input (..., cols) as float32 rows, rounded by the cast of a quantized layer."""
    x = x.detach().reshape(-1, x.shape[-1])
    if activation is not None and x.numel():
        x = dequantize_operand(quantize_operand(x, activation), torch.float32)
    return x.to(torch.float32)


class Moments:
    """Sums over the inputs of one layer, in float32, (cols, cols)."""

    def __init__(self, cols: int, device: torch.device, activation: Cast | None, correct: bool) -> None:
        """``activation``: how the quantized layer casts its input. ``correct``: whether ``cross`` is needed."""
        self._activation = activation
        self._rows = 0
        self._cholesky: dict[float, Tensor] = {}
        self._second = torch.zeros(cols, cols, device=device)
        self._cross = torch.zeros(cols, cols, device=device) if correct else None

    def add(self, x: Tensor, before: Tensor | None = None) -> None:
        """``x``: (..., cols), an input in the quantized model; ``before``: the same input in the model before."""
        plain = x.detach().reshape(-1, x.shape[-1])
        before = before.detach().reshape(plain.shape) if before is not None and before.numel() == x.numel() else plain
        x = as_the_layer_sees(plain, self._activation)
        self._rows += len(x)
        self._second.addmm_(x.T, x)
        if self._cross is not None:
            self._cross.addmm_(before.to(torch.float32).T, x)

    def add_calls(self, calls: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """``add`` for the inputs of several calls. ``before`` is left out if it has another number of calls."""
        same = len(calls) == len(before)
        for number, x in enumerate(calls):
            self.add(x, before[number] if same else None)

    @cached_property
    def second(self) -> Tensor:
        """The mean of (input) times (input) as the quantized layer sees it; zero if the layer had no input."""
        return self._second / max(self._rows, 1)

    @cached_property
    def cross(self) -> Tensor | None:
        """The mean of (input before) times (input in the quantized model); None if it is not needed."""
        return None if self._cross is None else self._cross / max(self._rows, 1)

    def inverse_cholesky(self, damping: float) -> Tensor:
        """``gptq.inverse_cholesky`` of ``second``, computed once for all layers of a group."""
        if damping not in self._cholesky:
            self._cholesky[damping] = inverse_cholesky(self.second, damping)
        return self._cholesky[damping]

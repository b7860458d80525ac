"""Moments: what GPTQ needs to know of the inputs of a layer, summed while a block runs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.quantize.select import dequantize_operand, quantize_operand
from ..numerics.cast import Cast

Inputs = dict[nn.Module, list[Tensor]]
"""Layer -> its inputs, one for each call."""


def inputs_of(layers: Collection[nn.Module], run: Callable[[], Any]) -> tuple[Inputs, Any]:
    """The inputs that ``layers`` get while ``run`` runs, and its result."""
    found: Inputs = {layer: [] for layer in layers}

    def keep(layer: nn.Module, args: tuple[Any, ...]) -> None:
        found[layer].append(args[0].detach())

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(keep))
        return found, run()


class Moments:
    """Sums over the inputs of one layer, in float32, (cols, cols)."""

    def __init__(self, cols: int, device: torch.device, activation: Cast | None, correct: bool) -> None:
        """``activation``: how the quantized layer casts its input. ``correct``: whether ``cross`` is needed."""
        self._activation = activation
        self._rows = 0
        self._second = torch.zeros(cols, cols, device=device)
        self._cross = torch.zeros(cols, cols, device=device) if correct else None

    def add(self, x: Tensor, before: Tensor | None = None) -> None:
        """``x``: (..., cols), an input in the quantized model; ``before``: the same input in the model before."""
        x = x.reshape(-1, x.shape[-1])
        before = before.reshape(x.shape) if before is not None and before.numel() == x.numel() else x
        if self._activation is not None and x.numel():
            x = dequantize_operand(quantize_operand(x, self._activation), torch.float32)
        x = x.to(torch.float32)
        self._rows += len(x)
        self._second += x.T @ x
        if self._cross is not None:
            self._cross += before.to(torch.float32).T @ x

    @property
    def second(self) -> Tensor:
        """The mean of (input) times (input) as the quantized layer sees it; zero if the layer had no input."""
        return self._second / max(self._rows, 1)

    @property
    def cross(self) -> Tensor | None:
        """The mean of (input before) times (input in the quantized model); None if it is not needed."""
        return None if self._cross is None else self._cross / max(self._rows, 1)

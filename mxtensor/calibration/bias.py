"""Bias correction: the mean error of each output of a quantized layer is taken out of it by its bias.

``W E[x] - Q(W) E[x']``, with ``x`` the input in the model before and ``x'`` the one that the quantized layer gets, is
added to the bias.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.arguments import FLAG, check
from ..numerics.cast import Cast
from .gptq import check_inputs
from .moments import as_the_layer_sees


@dataclass(frozen=True)
class BiasCorrection:
    """``"bias"``: after weights are rounded, corrects the bias of each layer by the mean error of its outputs.

    ``make``: layers without a bias get one. A saved model of transformers then loads only into layers with a bias:
    pass False to correct existing biases only.
    """

    make: bool = True

    def __post_init__(self) -> None:
        check("BiasCorrection", "make", self.make, FLAG)


class Means:
    """Sums over the inputs of one layer, float32 (cols,): in the model before, and as the quantized layer sees them."""

    def __init__(self, cols: int, device: torch.device, activation: Cast | None) -> None:
        self._activation, self._before, self._now = (
            activation,
            torch.zeros(cols, device=device),
            torch.zeros(cols, device=device),
        )
        self._rows = [0, 0]

    def add_calls(self, calls: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """Add the inputs of all calls: (..., cols) each."""
        for x in before:
            self._before += x.detach().reshape(-1, x.shape[-1]).float().sum(0)
            self._rows[0] += x.shape[:-1].numel()
        for x in calls:
            self._now += as_the_layer_sees(x, self._activation).sum(0)
            self._rows[1] += x.shape[:-1].numel()

    @property
    def known(self) -> bool:
        """Whether the layer had inputs, in the model before and in the quantized one."""
        return all(self._rows)

    def corrected(self, bias: Tensor | None, weight: Tensor, rounded: Tensor) -> Tensor:
        """The bias (rows,) in the dtype of ``weight`` (rows, cols), the weight before it was ``rounded`` (float32).

        Raises ValueError for inputs that are not finite.
        """
        before, now = (total / rows for total, rows in zip((self._before, self._now), self._rows, strict=True))
        check_inputs(before, now)
        error = weight.float() @ before - rounded @ now
        return (error if bias is None else bias.detach().float() + error).to(weight.dtype)

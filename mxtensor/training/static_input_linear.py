"""Linear layers whose NVFP4 inputs have a scale that was chosen before: no pass over the input looks for its amax.

``y = (x / g) w^T * g + b``: the input is cast without a scale of the whole tensor after it was divided by ``g``, which
is a power of two, so that both products with it are exact.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.nested import rows_of
from ..core.torch_autocast import autocast_dtype
from .called_linear import CalledLinear

LARGEST = 448.0 * 6.0
"""The largest value of NVFP4 with a global scale of 1."""


class ObservedLinear(CalledLinear):
    """An nn.Linear between ``prepare`` and ``convert``, which remembers the largest magnitude of its inputs.

    It is the same module object as before, with the same parameters.
    """

    input_amax: Tensor

    @staticmethod
    def from_linear(layer: nn.Linear) -> ObservedLinear:
        """Let ``layer`` watch its inputs."""
        layer.__class__ = ObservedLinear
        assert isinstance(layer, ObservedLinear)
        layer._must_be_called()
        amax = torch.zeros((), dtype=torch.float32, device=layer.weight.device)
        layer.register_buffer("input_amax", amax, persistent=False)
        return layer

    def to_linear(self) -> nn.Linear:
        """Make it an nn.Linear again, which watches nothing."""
        del self.input_amax
        return super().to_linear()

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        values = rows_of(input.detach()) if input.is_nested else input.detach()
        if values.numel():
            self.input_amax.copy_(torch.maximum(self.input_amax, values.abs().amax().float()))
        return super().forward(input)


class StaticInputLinear(nn.Linear):
    """An nn.Linear whose weight casts inputs to NVFP4 without a scale of the whole tensor.

    Magnitudes above 2688 times ``input_scale`` saturate.
    """

    input_scale: Tensor
    """A power of two, as ModelOpt's ``input_scale``: the amax of inputs is at most 2688 times it."""

    @staticmethod
    def from_observed(layer: ObservedLinear) -> StaticInputLinear:
        """Choose the scale by what ``layer`` has seen."""
        mantissa, exponent = torch.frexp(layer.input_amax / LARGEST)
        scale = torch.ldexp(torch.ones_like(mantissa), torch.where(mantissa == 0.5, exponent - 1, exponent))
        linear = layer.to_linear()
        linear.__class__ = StaticInputLinear
        assert isinstance(linear, StaticInputLinear)
        linear.register_buffer("input_scale", scale.to(linear.weight.dtype))
        return linear

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out), in the dtype of ``torch.autocast`` if that is active.

        Raises ValueError for float16, which may not hold the product before it is scaled.
        """
        dtype = autocast_dtype(input) or input.dtype
        if dtype is torch.float16:
            raise ValueError(
                "StaticInputLinear: products over a static scale may be too large for float16; use bfloat16, for the "
                "model or in torch.autocast"
            )
        out = F.linear(input / self.input_scale, self.weight) * self.input_scale.to(dtype)
        return out if self.bias is None else out + self.bias.to(dtype)

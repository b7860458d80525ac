"""MXFP8 in three names: one function, one layer, one config.

y = mx.MXFP8Linear(1024, 4096)(x)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.arguments import DENSE, SIZE, check, checked, described
from ..numerics.formats import get_mx_format
from ..recipe.base import BackwardOptions
from ..recipe.linear_recipe import LinearRecipe, TensorCasts
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize import quantize
from ..training.interception import Call, run


def to_mxfp8(x: Tensor, block_size: int = 32) -> MXTensor:
    """``x`` in MXFP8 E4M3: ``block_size`` (16, 32, 64 or 128) values of the last dimension share a power-of-two scale.

    ``.dequantize()`` gives the values in the dtype of ``x``. The size is 1 + 1 / block_size bytes per value. Raises
    ValueError for other block sizes, TypeError for a dtype that is not floating-point.
    """
    return quantize(x, get_mx_format("mxfp8_e4m3", block_size))


@dataclass(repr=False)
class MXFP8Config(BackwardOptions):
    """A recipe for MXFP8 with three fields, for MXFP8Linear, ``quantize_`` and ``autocast``.

    E4M3 has more precision (3 mantissa bits, maximum 448), E5M2 more range (2 mantissa bits, maximum 57344). Block
    scales give enough range: NVIDIA's pre-training paper found E4M3 best for gradients too (``e5m2_backward=False``).
    """

    block_size: int = 32
    """Values that share a scale: 16, 32 (OCP MX), 64 or 128."""
    e4m3_forward: bool = True
    """Whether inputs and weights are in E4M3; otherwise they are in E5M2."""
    e5m2_backward: bool = True
    """Whether gradients are in E5M2; otherwise they are in E4M3."""
    _kinds = frozenset({"mxfp8", "block_scaling"})
    _shown = (("block_size", "block_size"), ("e4m3_forward", "e4m3_forward"), ("e5m2_backward", "e5m2_backward"))

    def _linear_recipe(self) -> LinearRecipe:
        forward = TensorCasts.of(get_mx_format("mxfp8_e4m3" if self.e4m3_forward else "mxfp8_e5m2", self.block_size))
        grad = TensorCasts.of(get_mx_format("mxfp8_e5m2" if self.e5m2_backward else "mxfp8_e4m3", self.block_size))
        return self.with_options(forward, forward, grad)


class MXFP8Linear(nn.Linear):
    """nn.Linear whose three products run in MXFP8, inside ``autocast`` or not; the parameters stay in high precision.

    ``config``: an MXFP8Config instead of ``MXFP8Config(block_size)``; the next forward pass follows its edits. Input
    (..., in_features), any sizes; arguments, initial values and state dict are those of nn.Linear. Raises TypeError for
    another kind of config, ValueError if config and ``block_size`` contradict each other.
    """

    @checked(in_features=SIZE, out_features=SIZE)
    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, block_size: int = 32,
        config: MXFP8Config | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if config is not None and not isinstance(config, MXFP8Config):
            raise TypeError(
                f"MXFP8Linear: {described(config)} is not an MXFP8Config; for other recipes use te.Linear, or quantize_"
            )
        if config is not None and block_size not in (32, config.block_size):
            raise ValueError(
                f"MXFP8Linear: block_size is {block_size}, that of config {config.block_size}; pass only one of them"
            )
        config = MXFP8Config(block_size) if config is None else config
        super().__init__(in_features, out_features, bias, device, dtype)
        self.config = config

    def forward(self, input: Tensor) -> Tensor:
        check("MXFP8Linear", "input", input, DENSE)
        return run(Call(input, self.weight, self.bias), self.config.linear_recipe())

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.config!r}"

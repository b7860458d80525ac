"""How an optimizer stores numbers of a parameter in fewer bits: narrow moments with one scale, masters split in two.

float16 and uint8 states are codes times one float32 scale, amax / (half the largest float16) and amax / 448; uint8
means the codes of E4M3. bfloat16 states are rounded values. The facts are those of TransformerEngine's ``FusedAdam``
(``pytorch/optimizers/fused_adam.py`` and ``common/multi_tensor/adam.cu``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.local import local_of, sharded_like
from ..tensor.mxtensor import MXTensor
from .training_weight import values_of

RANGES = {torch.float16: torch.finfo(torch.float16).max / 2, torch.uint8: 448.0}
"""Dtype of a state -> the magnitude to which its amax is scaled. Other dtypes have no scale."""


def values_of_parameter(p: Tensor) -> Tensor:
    """The dequantized values of a parameter, in the dtype of a master weight."""
    dtype = torch.promote_types(p.dtype, torch.float32)
    local = local_of(p.detach())
    values = local.dequantize(dtype) if isinstance(local, MXTensor) else values_of(local).to(dtype)
    return sharded_like(p, values)


# ---------------------------------------------------------------------------------------------- scaled states


def scale_of(values: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The scale of float32 values in this dtype, float32 (1,); None for a dtype without one. 1 for zeros."""
    if dtype not in RANGES:
        return None
    amax = values.abs().amax() if values.numel() else values.new_zeros(())
    scale = (amax / RANGES[dtype]).reshape(1)
    return torch.where(scale > 0, scale, 1.0)


def encode_state(values: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """float32 values as a state of this dtype. NaN and infinity stay what they are, as far as the dtype has them."""
    if scale is None:
        return values.to(dtype)
    scaled = values * scale.reciprocal()
    if dtype is not torch.uint8:
        return scaled.to(dtype)
    largest = RANGES[dtype]  # torch before 2.13 does not saturate
    return scaled.clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_state(state: Tensor, scale: Tensor | None) -> Tensor:
    """The float32 values of a state; a float32 state itself."""
    values = (state.view(torch.float8_e4m3fn) if state.dtype is torch.uint8 else state).to(torch.float32)
    return values if scale is None else values * scale


# ---------------------------------------------------------------------------------------------- masters in two halves


def split_master(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 values as bfloat16 and the int16 that follow: ``join_master`` gives the same bits.

    The first half is rounded to nearest, halves up in magnitude. It is one more than the upper 16 bits if the lower 16
    bits are negative as an int16.
    """
    bits = values.contiguous().view(torch.int32)
    rest = bits.to(torch.int16)
    upper = (bits >> 16) + (rest < 0)
    return upper.to(torch.int16).view(torch.bfloat16), rest


def join_master(rounded: Tensor, rest: Tensor) -> Tensor:
    """The float32 values of the two halves."""
    upper = rounded.contiguous().view(torch.int16).to(torch.int32) - (rest < 0).to(torch.int32)
    return ((upper << 16) | (rest.to(torch.int32) & 0xFFFF)).view(torch.float32)

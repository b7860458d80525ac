"""Casts: the tuple of cast kernels, and the two ways through it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..codec import Operand, check_source
from ..dispatch import Kernel, Spec, choose, is_traced
from ..recipe import Cast
from . import cast_blocked, cast_codec

QUANTIZE: tuple[Kernel, ...] = (cast_blocked.QUANTIZE, cast_codec.QUANTIZE)
DEQUANTIZE: tuple[Kernel, ...] = (cast_blocked.DEQUANTIZE, cast_codec.DEQUANTIZE)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def quantize_operand(x: Tensor, cast: Cast) -> Operand:
    """``codec.encode`` by the fastest kernel that accepts. Same result, same errors."""
    check_source(x)
    spec = Spec("quantize", (tuple(x.shape),), (f"{_name(x.dtype)}->{cast.format}",), x.dtype, x.device, is_traced(x))
    return choose(QUANTIZE, spec, x, cast).run(x, cast)  # type: ignore[no-any-return]


def dequantize_operand(operand: Operand, dtype: torch.dtype) -> Tensor:
    """``codec.decode`` by the fastest kernel that accepts. Same result."""
    data = operand.data
    name = f"{operand.format}->{_name(dtype)}"
    spec = Spec("dequantize", (operand.shape,), (name,), dtype, data.device, is_traced(data))
    return choose(DEQUANTIZE, spec, operand).run(operand, dtype)  # type: ignore[no-any-return]

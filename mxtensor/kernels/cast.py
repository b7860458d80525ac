"""Casts: the tuple of cast kernels, and the two ways through it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..codec import Operand, check_source
from ..dispatch import Kernel, Spec, choose, is_traced
from ..recipe import Cast
from . import cast_blocked, cast_codec, native

QUANTIZE: tuple[Kernel, ...] = (native.QUANTIZE, cast_blocked.QUANTIZE, cast_codec.QUANTIZE)
DEQUANTIZE: tuple[Kernel, ...] = (native.DEQUANTIZE, cast_blocked.DEQUANTIZE, cast_codec.DEQUANTIZE)


def quantize_operand(x: Tensor, cast: Cast) -> Operand:
    """``codec.encode`` by the fastest kernel that accepts. Same result, same errors."""
    check_source(x)
    spec = Spec("quantize", (tuple(x.shape),), ((x.dtype, cast.format),), x.dtype, x.device, is_traced(x))
    return choose(QUANTIZE, spec, x, cast).run(x, cast)  # type: ignore[no-any-return]


def dequantize_operand(operand: Operand, dtype: torch.dtype) -> Tensor:
    """``codec.decode`` by the fastest kernel that accepts. Same result."""
    data = operand.data
    spec = Spec("dequantize", (operand.shape,), ((operand.format, dtype),), dtype, data.device, is_traced(data))
    return choose(DEQUANTIZE, spec, operand).run(operand, dtype)  # type: ignore[no-any-return]


RowsDecoder = Callable[[Operand, int, int, Tensor], Tensor]


def rows_decoder(operand: Operand, dtype: torch.dtype) -> RowsDecoder | None:
    """``decode_rows(operand, start, length, out)`` of the first kernel that can decode part of a matrix; or None."""
    spec = Spec("dequantize", (operand.shape,), (operand.format,), dtype, operand.data.device)
    for kernel, decode_rows in (
        (native.DEQUANTIZE, native.decode_rows),
        (cast_blocked.DEQUANTIZE, cast_blocked.decode_rows),
    ):
        if kernel.refuses(spec, operand) is None:
            return decode_rows
    return None

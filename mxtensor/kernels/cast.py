"""Casts: the tuples of cast kernels, and the one way through each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..codec import Operand, check_source
from ..dispatch import Kernel, Spec, is_traced, perform
from ..formats import Orientation
from ..roles import Cast
from . import cast_blocked, cast_codec, cast_op, native
from .gemm_spec import Uncast

QUANTIZE: tuple[Kernel, ...] = (cast_op.QUANTIZE, native.QUANTIZE, cast_blocked.QUANTIZE, cast_codec.QUANTIZE)
"""``run(x, cast)``: the operand of x."""
DEQUANTIZE: tuple[Kernel, ...] = (
    cast_op.DEQUANTIZE,
    native.DEQUANTIZE,
    cast_blocked.DEQUANTIZE,
    cast_codec.DEQUANTIZE,
)
"""``run(operand, dtype)``: the values."""


def _spec(op: str, x: Tensor, cast: Cast) -> Spec:
    return Spec(op, (tuple(x.shape),), ((x.dtype, cast.format),), x.dtype, x.device, is_traced(x))


def quantize_operand(x: Tensor, cast: Cast) -> Operand:
    """``codec.encode`` by the fastest kernel that accepts. Same result, same errors."""
    check_source(x)
    return perform(QUANTIZE, _spec("quantize", x, cast), x, cast)  # type: ignore[no-any-return]


def quantize_operands(x: Tensor, cast: Cast, orientation: Orientation) -> tuple[Operand | None, Operand | None]:
    """The operand of x, of its transpose, or both of one pass over x: (rowwise, columnwise), None where not wanted."""
    if orientation is Orientation.ROWWISE:
        return quantize_operand(x, cast), None
    if orientation is Orientation.COLUMNWISE:
        return None, quantize_operand(x.transpose(-1, -2), cast)
    check_source(x)
    return perform(QUANTIZE_BOTH, _spec("quantize both", x, cast), x, cast)  # type: ignore[no-any-return]


def operand_of(factor: Operand | Uncast) -> Operand:
    """A quantized factor of a product as an operand: cast now, if it is still to be."""
    return quantize_operand(factor.x, factor.cast) if isinstance(factor, Uncast) else factor


def dequantize_operand(operand: Operand, dtype: torch.dtype) -> Tensor:
    """``codec.decode`` by the fastest kernel that accepts. Same result."""
    data = operand.data
    spec = Spec("dequantize", (operand.shape,), ((operand.format, dtype),), dtype, data.device, is_traced(data))
    return perform(DEQUANTIZE, spec, operand, dtype)  # type: ignore[no-any-return]


def round_trip(x: Tensor, cast: Cast, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """``dequantize_operand(quantize_operand(x, cast), dtype)`` without a global scale, and that scale or None."""
    check_source(x)
    return perform(ROUND_TRIP, _spec("round trip", x, cast), x, cast, dtype)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- in two steps


def _accepts(spec: Spec, *operands: Any) -> None:
    return None


def _quantize_twice(x: Tensor, cast: Cast) -> tuple[Operand, Operand]:
    other = cast if cast.seed is None else replace(cast, seed=cast.seed + 1)  # a stream of its own
    return quantize_operand(x, cast), quantize_operand(x.transpose(-1, -2), other)


def _there_and_back(x: Tensor, cast: Cast, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    operand = quantize_operand(x, cast)
    last = operand.global_scale
    return dequantize_operand(operand if last is None else replace(operand, global_scale=None), dtype), last


QUANTIZE_BOTH: tuple[Kernel, ...] = (
    cast_op.QUANTIZE_BOTH,
    Kernel("two casts", _accepts, _quantize_twice),
)
"""``run(x, cast)``: the operand of x and that of its transpose."""
ROUND_TRIP: tuple[Kernel, ...] = (
    cast_op.ROUND_TRIP,
    Kernel("two casts", _accepts, _there_and_back),
)
"""``run(x, cast, dtype)``: the values that x has in the format, without the global scale, and that scale."""


RowsDecoder = Callable[[Operand, int, int, Tensor], Tensor]


def rows_decoder(operand: Operand, dtype: torch.dtype) -> RowsDecoder | None:
    """``decode_rows(operand, start, length, out)`` of the first kernel that can decode part of a matrix; or None."""
    spec = Spec("dequantize", (operand.shape,), (operand.format,), dtype, operand.data.device)
    for kernel, decode_rows in (
        (native.DEQUANTIZE, native.decode_rows),
        (cast_blocked.DEQUANTIZE, cast_blocked.decode_rows),
    ):
        if kernel.refuses(spec, operand, dtype) is None:
            return decode_rows
    return None

"""The codec as it stands, in two forms: traced into the caller's graph, or as one opaque op that runs eagerly.

Traced, it fuses into one loop and needs nothing but aten, which an exported program wants. Opaque it stays where that
loop would be slower or wrong: on CPU the C++ casts beat what inductor makes of it, and elsewhere inductor divides to 2
ulps and contracts multiply and add, which moves a rounding wherever a multiplier is no power of two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.compat import is_exporting
from ...core.kernel import Kernel, Spec
from ...core.tracing import is_traced
from ...numerics.cast import Cast
from ...numerics.formats import Rounding, get_format
from ...numerics.operand import Operand
from ...numerics.reference import decode, encode
from ..quantize import cpu


def _eager(x: Tensor, cast: Cast) -> Operand:
    spec = Spec("quantize", (tuple(x.shape),), (), x.dtype, x.device)
    return (cpu.QUANTIZE if cpu.QUANTIZE.refuses(spec, x, cast) is None else QUANTIZE).run(x, cast)  # type: ignore[no-any-return]


@torch.library.custom_op("mxtensor::encode", mutates_args=())
def encode_op(x: Tensor, format: str, scaling: str, rounding: str) -> tuple[Tensor, Tensor, Tensor]:
    """``codec.encode`` of x: (data, scale, global scale or an empty tensor)."""
    operand = _eager(x.contiguous(), Cast.of(format, scaling, rounding))
    global_scale = x.new_empty(0, dtype=torch.float32) if operand.global_scale is None else operand.global_scale
    return operand.data, operand.scale, global_scale


@encode_op.register_fake
def _(x, format, scaling, rounding):  # type: ignore[no-untyped-def]
    row = get_format(format)
    global_scale = x.new_empty(() if row.global_scale else (0,), dtype=torch.float32)
    data = x.new_empty(row.data_shape(tuple(x.shape)), dtype=row.element.dtype)
    return data, x.new_empty(row.scale_shape(tuple(x.shape)), dtype=row.scale.dtype), global_scale


def encode_under(x: Tensor, cast: Cast, amax: Tensor) -> Operand:
    """``codec.encode`` of x under the amax of other values (delayed scaling), for formats with one scale a tensor.

    What lies beyond the scale saturates. What is not finite has no place under any scale: it becomes the format's NaN
    by itself, as it makes a whole block NaN where the amax is its own, so that an overflow is never taken for a number.
    """
    return encode(torch.where(x.isfinite(), x, float("nan")), cast, amax)


def _wants_opaque(x: Tensor, cast: Cast) -> bool:
    if not is_traced(x) or x.is_meta:
        return False
    power_of_two = cast.format.scale.significant_bits == 1
    if x.device.type == "cpu":
        rows = power_of_two and cast.format.block[0] == 1 and cast.rounding is Rounding.NEAREST
        return rows and not is_exporting()
    return not power_of_two


def _quantize(x: Tensor, cast: Cast) -> Operand:
    if not _wants_opaque(x, cast):
        return encode(x, cast)
    data, scale, global_scale = encode_op(x, cast.format.name, cast.scaling.value, cast.rounding.value)
    return Operand(data, scale, global_scale if cast.format.global_scale else None, cast.format, tuple(x.shape))


def refuses(spec: Spec, *operands: Any) -> str | None:
    return None


QUANTIZE = Kernel("reference", refuses, _quantize)
DEQUANTIZE = Kernel("reference", refuses, decode)

"""The reference itself as a kernel, in two forms: traced into the caller's graph, or one opaque op that runs eagerly.

Traced, it fuses into one loop and needs only aten ops, as an exported program must. It is opaque if that loop would be
slower or wrong: on CPU the C++ casts are faster than inductor's code; on other devices inductor divides to 2 ulps and
contracts multiply and add, which changes a rounding if a multiplier is not a power of two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.compat import is_exporting
from ...core.kernel import Kernel, Spec
from ...core.tracing import is_traced
from ...numerics.cast import Cast
from ...numerics.formats import Rounding, get_format
from ...numerics.operand import Operand
from ...numerics.reference import SOURCE_DTYPES, check_source, decode, encode
from ...numerics.validate import check_tensor
from . import cpu, cpu_nvfp4


def _eager(x: Tensor, cast: Cast) -> Operand:
    spec = Spec("quantize", (tuple(x.shape),), (), x.dtype, x.device)
    kernels = (cpu.QUANTIZE, cpu_nvfp4.QUANTIZE, QUANTIZE)
    return next(kernel for kernel in kernels if kernel.refuses(spec, x, cast) is None).run(x, cast)  # type: ignore[no-any-return]


@custom_ops.define("mxtensor::encode")
def encode_op(
    x: Tensor, format: str, scaling: str, rounding: str, amax_epsilon: float, four_over_six: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``reference.encode`` of x: (data, scale, global scale or an empty tensor)."""
    check_source(x)
    check_tensor("mxtensor::encode: x", x, *SOURCE_DTYPES)
    operand = _eager(x.contiguous(), Cast.of(format, scaling, rounding, None, amax_epsilon, four_over_six))
    global_scale = x.new_empty(0, dtype=torch.float32) if operand.global_scale is None else operand.global_scale
    return operand.data, operand.scale, global_scale


@custom_ops.fake_of(encode_op)
def _(x, format, scaling, rounding, amax_epsilon, four_over_six=None):  # type: ignore[no-untyped-def]
    out = Operand.empty(get_format(format), x.shape, x.device)
    return out.data, out.scale, x.new_empty(0, dtype=torch.float32) if out.global_scale is None else out.global_scale


def encode_with_amax(x: Tensor, cast: Cast, amax: Tensor) -> Operand:
    """``reference.encode`` of x with the amax of other values (delayed scaling), for formats with one scale per tensor.

    Values too large for the scale saturate. A NaN or an infinity becomes the format's NaN, that value alone, so that an
    overflow is never taken for a number.
    """
    return encode(torch.where(x.isfinite(), x, float("nan")), cast, amax)


def _wants_opaque(x: Tensor, cast: Cast) -> bool:
    if not is_traced(x):
        return False
    power_of_two = cast.format.scale.significant_bits == 1
    if x.device.type == "cpu":
        rows = power_of_two and cast.format.block[0] == 1 and cast.rounding is Rounding.NEAREST
        return (rows or cast.four_over_six is not None) and not is_exporting()
    return not power_of_two


def _quantize(x: Tensor, cast: Cast) -> Operand:
    if x.is_meta:  # torch's shape functions would import Dynamo, which takes two seconds
        check_source(x)
        return Operand.empty(cast.format, x.shape, x.device)
    if not _wants_opaque(x, cast):
        return encode(x, cast)
    words = cast.format.name, cast.scaling.value, cast.rounding.value
    four = None if cast.four_over_six is None else cast.four_over_six.value
    data, scale, global_scale = encode_op(x, *words, float(cast.amax_epsilon), four)
    return Operand(data, scale, global_scale if cast.format.global_scale else None, cast.format, tuple(x.shape))


def refuses(spec: Spec, *operands: Any) -> str | None:
    return None


QUANTIZE = Kernel("reference", refuses, _quantize)
DEQUANTIZE = Kernel("reference", refuses, decode)

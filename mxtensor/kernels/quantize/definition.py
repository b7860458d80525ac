"""The definition as kernels: traced into the caller's graph, as one opaque op that runs eagerly, or in slices on a CPU.

Traced, it fuses into one loop and needs only aten ops, as an exported program must. It is opaque if that loop would be
slower or wrong: on CPU the C++ casts are faster than inductor's code; on other devices inductor divides to 2 ulps and
contracts multiply and add, which changes a rounding if a multiplier is not a power of two.

Eager casts on a CPU without a compiler take slices of rows that fit the cache, into outputs allocated once. One torch
op on the whole tensor moves every intermediate through memory and pays a page fault for each fresh page; an op on a
slice of 2 MiB does neither. Decoding goes through float16: every code of every element format is a shifted float16 bit
pattern, and the vector instructions that convert float16 handle subnormals.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.compat import is_exporting
from ...core.kernel import Kernel, Spec, elsewhere
from ...core.shapes import as_matrix
from ...core.tracing import is_traced
from ...numerics.cast import Cast
from ...numerics.elements import ElementFormat, unpack
from ...numerics.formats import FULL, Format, Rounding, get_format
from ...numerics.operand import Operand
from ...numerics.reference import SOURCE_DTYPES, check_source, decode, encode, scale_to_float, tensor_amax
from ...numerics.validate import check_tensor
from ..operands import by_matrix
from . import cpu_casts


@custom_ops.define("mxtensor::encode")
def encode_op(
    x: Tensor, format: str, scaling: str, rounding: str, amax_epsilon: float, four_over_six: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``reference.encode`` of x: (data, scale, global scale or an empty tensor)."""
    check_source(x)
    check_tensor("mxtensor::encode: x", x, *SOURCE_DTYPES)
    x, cast = x.contiguous(), Cast.of(format, scaling, rounding, None, amax_epsilon, four_over_six)
    spec = Spec("quantize", (tuple(x.shape),), (), x.dtype, x.device)
    kernels = (cpu_casts.QUANTIZE, cpu_casts.QUANTIZE_NVFP4, QUANTIZE)
    operand: Operand = next(kernel for kernel in kernels if kernel.refuses(spec, x, cast) is None).run(x, cast)
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


def _quantize(x: Tensor, cast: Cast) -> Operand:
    if x.is_meta:  # torch's shape functions would import Dynamo, which takes two seconds
        check_source(x)
        return Operand.empty(cast.format, x.shape, x.device)
    power_of_two, opaque = cast.format.scale.significant_bits == 1, False
    if is_traced(x) and x.device.type == "cpu":
        rows = power_of_two and cast.format.block[0] == 1 and cast.rounding is Rounding.NEAREST
        opaque = (rows or cast.four_over_six is not None) and not is_exporting()
    elif is_traced(x):
        opaque = not power_of_two
    if not opaque:
        return encode(x, cast)
    words = cast.format.name, cast.scaling.value, cast.rounding.value
    four = None if cast.four_over_six is None else cast.four_over_six.value
    data, scale, global_scale = encode_op(x, *words, float(cast.amax_epsilon), four)
    return Operand(data, scale, global_scale if cast.format.global_scale else None, cast.format, tuple(x.shape))


def refuses(spec: Spec, *operands: Any) -> str | None:
    return None


QUANTIZE = Kernel("reference", refuses, _quantize)
DEQUANTIZE = Kernel("reference", refuses, decode)


# ---------------------------------------------------------------------------------------------- slices on a CPU


ENCODE_SLICE = 1 << 19
"""Values in a slice that is quantized: 2 MiB of float32."""
DECODE_SLICE = 1 << 19
"""Values in a slice that is dequantized."""
MIN_VALUES = 1 << 16
"""A tensor of fewer values is not sliced."""


def _refuses_slices(spec: Spec, format: Format, contiguous: bool) -> str | None:
    if spec.device.type != "cpu":
        return elsewhere("cpu", spec.device.type)
    if spec.traced:
        return "being traced: the reference fuses better"
    shape = spec.shapes[0]
    if len(shape) < 2 or torch.Size(shape).numel() < MIN_VALUES:
        return "too small to slice"
    if format.rows_are_blocked and format.block[0] != FULL and len(shape) != 2:
        return "slices square blocks of matrices only"
    if not contiguous:
        return "not contiguous"
    return None


def _slices(rows: int, cols: int, values: int, multiple: int) -> Iterator[tuple[int, int]]:
    """(start, length) of slices of rows with about ``values`` values; every start is a multiple of ``multiple``."""
    step = max(multiple, values // max(cols, 1) // multiple * multiple)
    for start in range(0, rows, step):
        yield start, min(step, rows - start)


# ---------------------------------------------------------------------------------------------- quantize


def _refuses_sliced_quantize(spec: Spec, x: Tensor, cast: Cast) -> str | None:
    if cast.seed is not None:
        return "a seed numbers the values of the whole tensor"
    return _refuses_slices(spec, cast.format, x.is_contiguous())


@by_matrix
def _quantize_slices(x: Tensor, cast: Cast) -> Operand:
    format, shape = cast.format, tuple(x.shape)
    x = as_matrix(x.detach())
    amax = None
    if format.has_tensor_scale and not format.row_scaled:
        slices = _slices(x.shape[0], x.shape[1], ENCODE_SLICE, 1)
        amax = torch.stack([tensor_amax(x.narrow(0, start, length)) for start, length in slices]).amax()
    block_rows = 1 if format.block[0] == FULL else format.block[0]
    out = Operand.empty(format, tuple(x.shape), x.device)
    data, scale, global_scale = out.data, out.scale, out.global_scale
    for start, length in _slices(x.shape[0], x.shape[1], ENCODE_SLICE, block_rows):
        part = encode(x.narrow(0, start, length), cast, amax)
        data.narrow(0, start, length).copy_(part.data)
        if format.block[0] == FULL:
            scale.copy_(part.scale)
        else:
            scale.narrow(0, start // block_rows, part.scale.shape[0]).copy_(part.scale)
        if format.row_scaled:
            assert global_scale is not None and part.global_scale is not None
            global_scale.narrow(0, start, length).copy_(part.global_scale)
        else:
            global_scale = part.global_scale
    if global_scale is not None:
        global_scale = global_scale.view(format.global_scale_shape(shape))
    return Operand(
        data.view(format.data_shape(shape)), scale.view(format.scale_shape(shape)), global_scale, format, shape
    )


# ---------------------------------------------------------------------------------------------- dequantize


def _refuses_sliced_dequantize(spec: Spec, operand: Operand, dtype: torch.dtype) -> str | None:
    rows, cols = operand.format.block
    if operand.why_not_plain is not None:
        return operand.why_not_plain
    if operand.has_stack_scales:
        return "has one global scale, not one for each matrix of a stack"
    if cols != FULL and operand.shape[-1] % cols:
        return f"the last block of a row of {operand.shape[-1]} values is shorter than {cols}"
    if rows not in (1, FULL) and len(operand.shape) > 1 and operand.shape[-2] % rows:
        return f"the last block of {operand.shape[-2]} rows is shorter than {rows}"
    return _refuses_slices(spec, operand.format, operand.data.is_contiguous() and operand.scale.is_contiguous())


def half_from_codes(data: Tensor, element: ElementFormat) -> Tensor:
    """Codes as float16 values times 2^(bias - 15): a shift moves exponent and mantissa to their place in float16."""
    shift = 10 - element.mantissa_bits
    if element.packing == (2, 1):
        word = data.to(torch.int32).mul_(0x1001)  # low nibble to bits 0-3, high nibble to bits 16-19
        sign = (word & 0x00080008).bitwise_left_shift_(12)
        return word.bitwise_and_(0x00070007).bitwise_left_shift_(shift).bitwise_or_(sign).view(torch.float16)
    if element.packing == (4, 3):
        code = torch.stack([codes.to(torch.int16) for codes in unpack(data, element)], -1).flatten(-2)
        return ((code & 0x1F) << shift).bitwise_or_((code & 0x20) << 10).view(torch.float16)
    code = data.view(torch.int8).to(torch.int16)
    return code.bitwise_left_shift_(shift).bitwise_and_((0x7F << shift) - 0x8000).view(torch.float16)


def row_step(operand: Operand, values: int) -> int:
    """How many rows of a 2-D operand to decode at a time: about ``values`` values in whole blocks."""
    rows = max(operand.format.block[0], 1)
    return max(rows, values // max(operand.shape[-1], 1) // rows * rows)


def decode_rows(operand: Operand, start: int, length: int, out: Tensor) -> Tensor:
    """Decode rows ``start`` to ``start + length`` (whole blocks) of a 2-D operand into ``out``."""
    format, element, cols = operand.format, operand.format.element, operand.shape[-1]
    rows = format.block[0]
    data = operand.data.narrow(0, start, length)
    scale = operand.scale if rows == FULL else operand.scale.narrow(0, start // rows, -(-length // rows))
    # ``half_from_codes`` would decode the NaNs of E4M3 as 480.
    has_nan_code = element.nan_code == 0x7F and element.exponent_bits == 4
    if has_nan_code and bool((data.view(torch.int8).amax() == 0x7F) | (data.view(torch.uint8).amax() == 0xFF)):
        part = Operand(data, scale, operand.global_scale, format, (length, cols))
        return out.copy_(decode(part, out.dtype))
    value = out if out.dtype is torch.float32 else out.new_empty(length, cols, dtype=torch.float32)
    exponent = -element.mantissa_bits if element.is_integer else 15 - element.bias
    value.copy_(data if element.is_integer else half_from_codes(data, element))
    multiplier = scale_to_float(scale, format.scale)
    if bool(multiplier.amax() < 2.0**100 if exponent > 0 else multiplier.amin() > 2.0**-100):
        multiplier = multiplier * 2.0**exponent  # exact, and it saves a pass over the values
    else:
        value.mul_(2.0**exponent)
    if rows == FULL:
        value.mul_(multiplier)
    else:
        blocks = value.view(length // rows, rows, *multiplier.shape[1:], -1)
        blocks.mul_(multiplier[:, None, :, None])
    if operand.global_scale is not None:
        value.mul_(operand.global_scale)
    return out if out is value else out.copy_(value)


def _dequantize_slices(operand: Operand, dtype: torch.dtype) -> Tensor:
    rows = (torch.Size(operand.shape[:-1]).numel(), operand.shape[-1])
    format = operand.format
    data, scale = operand.data.view(format.data_shape(rows)), operand.scale.view(format.scale_shape(rows))
    flat = Operand(data, scale, operand.global_scale, format, rows)
    out = torch.empty(rows, dtype=dtype, device=operand.data.device)
    step = row_step(flat, DECODE_SLICE)
    for start in range(0, rows[0], step):
        length = min(step, rows[0] - start)
        decode_rows(flat, start, length, out.narrow(0, start, length))
    return out.view(operand.shape)


QUANTIZE_SLICES = Kernel("sliced", _refuses_sliced_quantize, _quantize_slices, "cpu")
DEQUANTIZE_SLICES = Kernel("sliced", _refuses_sliced_dequantize, _dequantize_slices, "cpu")

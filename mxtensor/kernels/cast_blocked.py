"""Eager casts on CPU: the codec over slices of rows that stay in the cache, into outputs allocated once.

A whole-tensor pass per torch op moves every intermediate through memory and pays a page fault for each fresh page;
a slice of about half a megabyte does neither. Decoding goes through float16, which holds every code of every element
format as a shifted bit pattern and converts to other floats in vector instructions that honour subnormals.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..codec import Operand, decode, encode, scale_to_float, tensor_amax
from ..dispatch import Kernel, Spec
from ..formats import FULL, ElementFormat, Format
from ..recipe import Cast

ENCODE_SLICE = 1 << 19
"""Values a slice of an encode: 2 MiB of float32."""
DECODE_SLICE = 1 << 19
MIN_VALUES = 1 << 16
"""Below this a slice is the whole tensor."""


def _refuses(spec: Spec, format: Format, contiguous: bool) -> str | None:
    if spec.device.type != "cpu":
        return f"runs on cpu, this tensor is on {spec.device.type}"
    if spec.traced:
        return "being traced: the codec itself fuses better"
    shape = spec.shapes[0]
    if len(shape) < 2 or torch.Size(shape).numel() < MIN_VALUES:
        return "too small to slice"
    if format.rows_are_blocked and format.block[0] != FULL and len(shape) != 2:
        return "tiles are sliced in two dimensions only"
    if not contiguous:
        return "not contiguous"
    return None


def _slices(rows: int, cols: int, values: int, multiple: int) -> Iterator[tuple[int, int]]:
    """(start, length) of slices of rows holding about ``values`` values, starts on multiples of ``multiple``."""
    step = max(multiple, values // max(cols, 1) // multiple * multiple)
    for start in range(0, rows, step):
        yield start, min(step, rows - start)


# ---------------------------------------------------------------------------------------------- quantize


def _refuses_quantize(spec: Spec, x: Tensor, cast: Cast) -> str | None:
    return _refuses(spec, cast.format, x.is_contiguous())


def _slice_amax(x: Tensor) -> Tensor:
    parts = [tensor_amax(x.narrow(0, i, n)) for i, n in _slices(*x.shape, ENCODE_SLICE, 1)]
    return torch.stack(parts).amax()


def _quantize(x: Tensor, cast: Cast) -> Operand:
    format, shape = cast.format, tuple(x.shape)
    x = x.detach().reshape(-1, shape[-1])
    whole = _slice_amax(x) if format.global_scale or format.block[0] == FULL else None
    block_rows = 1 if format.block[0] == FULL else format.block[0]
    data = torch.empty(format.data_shape(tuple(x.shape)), dtype=format.element.dtype)
    scale = torch.empty(format.scale_shape(tuple(x.shape)), dtype=format.scale.dtype)
    global_scale = None
    for start, length in _slices(*x.shape, ENCODE_SLICE, block_rows):
        part = encode(x.narrow(0, start, length), cast, whole)
        data.narrow(0, start, length).copy_(part.data)
        if format.block[0] == FULL:
            scale.copy_(part.scale)
        else:
            scale.narrow(0, start // block_rows, part.scale.shape[0]).copy_(part.scale)
        global_scale = part.global_scale
    return Operand(
        data.view(format.data_shape(shape)), scale.view(format.scale_shape(shape)), global_scale, format, shape
    )


# ---------------------------------------------------------------------------------------------- dequantize


def _refuses_dequantize(spec: Spec, operand: Operand) -> str | None:
    format = operand.format
    if not format.scale.power_of_two:
        return f"scales are {format.scale.name}, not powers of two"
    if format.rows_are_blocked:
        return "blocks are tiles"
    if operand.shape[-1] % format.block[1]:
        return f"the last block of {operand.shape[-1]} values is shorter than {format.block[1]}"
    return _refuses(spec, format, operand.data.is_contiguous() and operand.scale.is_contiguous())


def half_from_codes(data: Tensor, element: ElementFormat) -> Tensor:
    """Codes as float16 values times 2^(bias - 15): a shift puts exponent and mantissa where float16 has them."""
    shift = 10 - element.mantissa_bits
    if element.packing == (2, 1):
        word = data.to(torch.int32)
        magnitude = (word & 0x7) | ((word & 0x70) << 12)
        sign = ((word & 0x8) << 12) | ((word & 0x80) << 24)
        return magnitude.bitwise_left_shift_(shift).bitwise_or_(sign).view(torch.float16)
    if element.packing == (4, 3):
        b0, b1, b2 = data.unflatten(-1, (-1, 3)).to(torch.int16).unbind(-1)
        codes = [b0 & 0x3F, (b0 >> 6) | ((b1 & 0xF) << 2), (b1 >> 4) | ((b2 & 0x3) << 4), b2 >> 2]
        code = torch.stack(codes, -1).flatten(-2)
        return ((code & 0x1F) << shift).bitwise_or_((code & 0x20) << 10).view(torch.float16)
    code = data.view(torch.int8).to(torch.int16)
    return code.bitwise_left_shift_(shift).bitwise_and_((0x7F << shift) - 0x8000).view(torch.float16)


def _has_nan_code(data: Tensor, element: ElementFormat) -> bool:
    """Whether an e4m3 NaN, which float16 would read as 480, is among the codes."""
    return element.nan_code == 0x7F and element.exponent_bits == 4 and bool(
        (data.view(torch.int8).amax() == 0x7F) | (data.view(torch.uint8).amax() == 0xFF)
    )


def decode_rows(operand: Operand, start: int, length: int, out: Tensor) -> Tensor:
    """Decode rows ``start`` to ``start + length`` of a 2-D operand that this kernel accepts into ``out``."""
    format, element = operand.format, operand.format.element
    data, scale = operand.data.narrow(0, start, length), operand.scale.narrow(0, start, length)
    if _has_nan_code(data, element) or out.dtype not in (torch.float32, torch.bfloat16):
        part = Operand(data, scale, operand.global_scale, format, (length, operand.shape[-1]))
        return out.copy_(decode(part, out.dtype))
    blocks = out.view(length, -1, format.block[1])
    multiplier = scale_to_float(scale, format.scale).unsqueeze(-1)
    if element.is_integer:
        out.copy_(data)
        exponent = -element.mantissa_bits
    else:
        out.copy_(half_from_codes(data, element))
        exponent = 15 - element.bias
    # Exact twice: values have at most 7 significant bits, so no product with a power of two rounds but the last one.
    blocks.mul_(2.0**exponent)
    return blocks.mul_(multiplier.to(out.dtype)).view_as(out)


def _dequantize(operand: Operand, dtype: torch.dtype) -> Tensor:
    rows = Operand(
        operand.data.flatten(0, -2), operand.scale.flatten(0, -2), operand.global_scale, operand.format,
        (torch.Size(operand.shape[:-1]).numel(), operand.shape[-1]),
    )  # fmt: skip
    out = torch.empty(rows.shape, dtype=dtype)
    for start, length in _slices(*rows.shape, DECODE_SLICE, 1):
        decode_rows(rows, start, length, out.narrow(0, start, length))
    return out.view(operand.shape)


QUANTIZE = Kernel("blocked", _refuses_quantize, _quantize)
DEQUANTIZE = Kernel("blocked", _refuses_dequantize, _dequantize)

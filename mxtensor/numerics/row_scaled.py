"""Row-scaled E4M3: an operand whose scales are powers of two, as E4M3 codes with one power of two for each row.

A value is ``code * 2^s`` with one s for a block. Under the largest s of its row it is ``code * 2^(s - s_row)``, an E4M3
number again, and FP8 tensor cores multiply such rows (``kernels/gemm/fp8_rows.py``). This file is the definition; the
kernels are bitwise equal to it.

Codes are first multiplied by 2^up, so that the largest element is near E4M3's. Let d be the distance of a block from
the largest s of its row, over the blocks that are not zero:

| element | up | largest d within the bound | what changes within the bound |
|---|---|---|---|
| e2m1 | 6 | 14 | nothing |
| e2m3 | 5 | 11 | nothing |
| e3m2 | 4 | 9 | nothing |
| e4m3 | 0 | 12 | values below 2^-6 of the row scale, by at most 2^-10 of it |
| e5m2 | -7 | 12 | the same |

2^-10 of the row scale is at most 2^-5 of the largest value of the block, half of what rounding to three mantissa bits
has changed already: with d = 12 a block whose largest code is at least 2^(emax - 1), as every scale rule but a clamped
one makes it, has a largest value of 2^(7 - 12) of the row scale or more. A row that is beyond the bound is marked. Its
codes are those of the operand, under their own scales, and its row scale is NaN.

In training the distance between blocks has no limit (``any_distance``): each value changes by at most 2^-10 of the row
scale, which is 2^-17 of the largest value of its row or less. Gradients need that: those of the first token of a causal
model span 30 octaves.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .element_format import ElementFormat
from .elements import decode_elements, decode_packed
from .formats import E4M3, E8M0, FULL, Format
from .operand import Operand

LOSSY_OCTAVES = 12
"""The largest d of elements that E4M3 cannot move without loss."""
LOSS = 2.0**-10
"""Of the row scale: half of E4M3's smallest step, by which a value changes at most."""
MAX_EXPONENT = 63
"""Row scales are 2^-63 to 2^63, so that the product of two is a normal float32."""
NAN_CODE = E4M3.nan_code
"""The code of every NaN that is moved, whatever its sign was: 0x7F, which the instructions of GPUs give."""
LOWEST_STEP = E4M3.bias + E4M3.mantissa_bits - 1
"""E4M3's smallest subnormal is 2^-LOWEST_STEP."""


class RowScaled(NamedTuple):
    """A matrix as ``codes * scale``: codes (rows, K) E4M3 bytes, scale float32 (rows, 1), beyond uint8 (rows,)."""

    codes: Tensor
    scale: Tensor
    """NaN for a row beyond the bound, and for a row with a NaN scale, whose codes mean nothing."""
    beyond: Tensor
    """1 for a row beyond the bound: codes are those of the operand, one byte each; E5M2 in E5M2, others in E4M3."""


class Shift(NamedTuple):
    """How elements of one kind are moved into E4M3."""

    up: int
    octaves: int
    """the largest d within the bound"""


@cache
def shift_of(element: ElementFormat) -> Shift:
    """The table above, from the fields of the element."""
    up = E4M3.emax - element.emax
    if element.max * 2.0**up > E4M3.max:
        up -= 1
    step = 1 - element.bias - element.mantissa_bits  # the smallest element is 2^step
    octaves = LOWEST_STEP + step + up
    return Shift(up, octaves if octaves > 0 else LOSSY_OCTAVES)


def is_exact(element: ElementFormat) -> bool:
    """Whether no value of a row within the bound changes."""
    return element.bits < 8


def why_not(format: Format) -> str | None:
    """Why operands of a format cannot be re-expressed; None if they can."""
    if format.global_scale or format.scale.significant_bits != 1:
        return f"needs scales that are powers of two, {format} has {format.scale.name} scales"
    if format.element.is_integer or format.element.mantissa_bits > E4M3.mantissa_bits:
        return f"elements of {format.element.name} are not E4M3 numbers times a power of two"
    return None


def element_codes(operand: Operand) -> Tensor:
    """Codes of a matrix, one uint8 for each value: E5M2 in E5M2, the others in E4M3, which represents them exactly."""
    element = operand.format.element
    if not element.packed:
        return operand.data.view(torch.uint8)
    values = decode_packed(operand.data, element).narrow(-1, 0, operand.shape[-1])
    return values.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)


def _of_each_value(per_block: Tensor, operand: Operand) -> Tensor:
    """Something of each block as a matrix of values."""
    (rows, cols), (height, width) = operand.format.block, operand.shape
    out = per_block
    if width != out.shape[1]:
        out = out.expand(-1, width) if cols == FULL else out.repeat_interleave(cols, 1)[:, :width]
    if height != out.shape[0]:
        out = out.expand(height, -1) if rows == FULL else out.repeat_interleave(rows, 0)[:height]
    return out


def _exponents(operand: Operand) -> tuple[Tensor, Tensor, Tensor]:
    """(int32 e, whether NaN, whether no power of two) of the scale 2^(e - 127) of each block."""
    if operand.format.scale is E8M0:
        byte = operand.scale.to(torch.int32)
        return byte, byte == 255, byte < 0
    bits = operand.scale.view(torch.int32)
    nan = (bits & 0x7FFFFFFF) >= 0x7F800000
    power = ((bits & 0x007FFFFF) == 0) & (bits > 0)
    return (bits >> 23) & 0xFF, nan, ~(power | (bits == 0x00400000) | nan)


def row_scaled(operand: Operand, any_distance: bool = False) -> RowScaled:
    """A matrix of a format that ``why_not`` accepts, re-expressed. Plain torch on any device.

    ``any_distance``: no row is beyond the bound because of the distance between its blocks.
    """
    element, (up, octaves) = operand.format.element, shift_of(operand.format.element)
    codes = element_codes(operand)
    exponent, nan, odd = (_of_each_value(t, operand) for t in _exponents(operand))
    live = ((codes & 0x7F) > 0) & ~nan
    if element.bits == 8 and element.mantissa_bits == 2:
        odd = odd | ((codes & 0x7F) >= 0x7C)  # E4M3 has no infinity
    top = torch.where(live, exponent, -1).amax(1, keepdim=True)
    low = top if any_distance else torch.where(live, exponent, 1000).amin(1, keepdim=True)
    nan_row, zero = nan.any(1, keepdim=True), top < 0
    top = top.clamp(min=127 + up - MAX_EXPONENT)
    beyond = (top - low > octaves) | (top - 127 - up > MAX_EXPONENT) | (odd & live).any(1, keepdim=True)
    beyond &= ~nan_row & ~zero
    scale = torch.where(zero, 1.0, ((top - up).clamp(1, 254) << 23).view(torch.float32))
    scale = torch.where(nan_row | beyond, float("nan"), scale)
    power = (exponent - top + up).clamp(-126, 127)
    values = decode_elements(codes.view(element.dtype if element.bits == 8 else torch.float8_e4m3fn), E4M3)
    moved = (values * ((power + 127) << 23).view(torch.float32)).clamp(-E4M3.max, E4M3.max)
    moved = torch.where(moved.isnan(), NAN_CODE, moved.to(torch.float8_e4m3fn).view(torch.uint8))
    moved = torch.where(beyond, codes, moved)
    return RowScaled(moved, scale, beyond.squeeze(1).to(torch.uint8))


def row_values(rows: RowScaled, operand: Operand) -> Tensor:
    """The float32 values that a re-expressed matrix stands for; those of ``operand`` in rows beyond the bound."""
    from .reference import decode_local

    moved = rows.codes.view(torch.float8_e4m3fn).to(torch.float32) * rows.scale
    return torch.where(rows.beyond.bool().unsqueeze(1), decode_local(operand), moved)

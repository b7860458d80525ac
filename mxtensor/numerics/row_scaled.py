"""Row-scaled E4M3: an operand whose scales are powers of two, as E4M3 codes with one power of two for each row.

A value is ``code * 2^s`` with one exponent s for a block. Under the largest exponent of its row it is an E4M3 code
again, ``code * 2^(s - s_row)``, and FP8 tensor cores multiply such rows (``kernels/gemm/fp8_rows.py``). This file is
the definition; the kernels are bitwise equal to it.

Glossary of this file, of the kernels (``fp8_rows*``, ``row_scaled*``) and of docs/reference/numerics.md:

| term | meaning | symbol |
|---|---|---|
| block exponent | the exponent of the scale 2^s of a block. Code has it biased: s + 127 | s |
| nonzero block | a block with a finite scale and, in this row, a code that is not zero. Others do not count below | |
| row exponent | the largest exponent of the nonzero blocks of a row | s_row |
| distance | how far the exponent of a block is below the row exponent | d = s_row - s |
| exponent range | of a row: its largest distance | max d |
| offset | of an element: times 2^offset its largest value is near that of E4M3 | offset |
| shift | the exponent of the power of two by which the codes of a block are multiplied | offset - d |
| rescale | multiply a code by 2^shift and round it to E4M3. Small results underflow: to subnormals, then to zero | |
| row scale | what a rescaled code is multiplied by: 2^(s_row - offset) | S |
| exact | no value changes when it is rescaled | |
| in range | of a row: max d is at most ``max_range``, S is at most 2^63, codes are finite, scales powers of two | |
| out of range | of a row: not in range. Its codes are unchanged under the scales of their blocks, and S is NaN | |
| flag | a byte for each row: 1 if it is out of range; 0 if it has a NaN scale, with which it gives NaN anyway | |
| unlimited range | the rule of training: no row is out of range because of its exponent range | |

| element | offset | max_range | what changes in rows in range |
|---|---|---|---|
| e2m1 | 6 | 14 | nothing |
| e2m3 | 5 | 11 | nothing |
| e3m2 | 4 | 9 | nothing |
| e4m3 | 0 | 12 | values below 2^-6 S, by at most 2^-10 S |
| e5m2 | -7 | 12 | the same |

2^-10 S is at most 2^-5 of the largest value of the block, half of what rounding to three mantissa bits has changed
already: at the distance 12 a block whose largest code is at least 2^(emax - 1), as every scale rule but a clamped one
makes it, has a largest value of 2^(7 - 12) S or more.

With unlimited range each value changes by at most 2^-10 S, which is 2^-17 of the largest value of its row or less.
Gradients need that: the exponent range of those of the first token of a causal model is 30.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from .elements import ElementFormat, decode_elements, decode_packed
from .formats import E4M3, E8M0, FULL, Format
from .operand import Operand
from .reference import decode_local

LOSSY_RANGE = 12
"""``max_range`` of elements that E4M3 cannot represent exactly at all distances."""
MAX_ERROR = 2.0**-10
"""By how much a value changes at most, relative to the row scale: half of E4M3's smallest subnormal."""
MAX_SCALE_EXPONENT = 63
"""Row scales are 2^-63 to 2^63, so that the product of two is a normal float32."""
NAN_CODE = E4M3.nan_code
"""The code of every rescaled NaN, whatever its sign was: 0x7F, which the instructions of GPUs give."""
SMALLEST_EXPONENT = 1 - E4M3.bias - E4M3.mantissa_bits
"""E4M3's smallest subnormal is 2^SMALLEST_EXPONENT."""


class RowScaled(NamedTuple):
    """A matrix (rows, K) as ``codes * scale``; K codes to a row."""

    codes: Tensor
    """E4M3 bytes (rows, K); of a row that is out of range those of the operand, one byte each: E5M2 in E5M2, others in
    E4M3"""
    scale: Tensor
    """float32 (rows, 1): NaN for a row that is out of range, and for a row with a NaN scale, whose codes have no
    meaning"""
    out_of_range: Tensor
    """uint8 (rows,): the flags"""


class Rescaling(NamedTuple):
    """How the codes of an element are rescaled."""

    offset: int
    max_range: int
    """the largest exponent range of a row in range"""


@cache
def rescaling_of(element: ElementFormat) -> Rescaling:
    """The table above, from the fields of the element."""
    offset = E4M3.emax - element.emax
    if element.max * 2.0**offset > E4M3.max:
        offset -= 1
    smallest_exponent = 1 - element.bias - element.mantissa_bits
    exact_range = smallest_exponent + offset - SMALLEST_EXPONENT
    return Rescaling(offset, exact_range if exact_range > 0 else LOSSY_RANGE)


def is_exact(element: ElementFormat) -> bool:
    """Whether no value of a row in range changes."""
    return element.bits < 8


def why_not(format: Format) -> str | None:
    """Why operands of a format cannot be row-scaled; None if they can."""
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


def _for_each_value(per_block: Tensor, operand: Operand) -> Tensor:
    """Something of each block, repeated for its values: a matrix."""
    (rows, cols), (height, width) = operand.format.block, operand.shape
    out = per_block
    if width != out.shape[1]:
        out = out.expand(-1, width) if cols == FULL else out.repeat_interleave(cols, 1)[:, :width]
    if height != out.shape[0]:
        out = out.expand(height, -1) if rows == FULL else out.repeat_interleave(rows, 0)[:height]
    return out


def _exponents(operand: Operand) -> tuple[Tensor, Tensor, Tensor]:
    """(biased exponent int32, whether NaN, whether not a power of two) of the scale of each block."""
    if operand.format.scale is E8M0:
        byte = operand.scale.to(torch.int32)
        return byte, byte == 255, byte < 0
    bits = operand.scale.view(torch.int32)
    nan = (bits & 0x7FFFFFFF) >= 0x7F800000
    power = ((bits & 0x007FFFFF) == 0) & (bits > 0)
    return (bits >> 23) & 0xFF, nan, ~(power | (bits == 0x00400000) | nan)


def row_scaled(operand: Operand, unlimited_range: bool = False) -> RowScaled:
    """The row-scaled form of a matrix of a format that ``why_not`` accepts. Plain torch on any device.

    ``unlimited_range``: no row is out of range because of its exponent range.
    """
    element, (offset, max_range) = operand.format.element, rescaling_of(operand.format.element)
    codes = element_codes(operand)
    exponent, nan, unfit = (_for_each_value(t, operand) for t in _exponents(operand))
    nonzero = ((codes & 0x7F) > 0) & ~nan
    if element.bits == 8 and element.mantissa_bits == 2:
        unfit = unfit | ((codes & 0x7F) >= 0x7C)  # E4M3 has no infinity
    row_exponent = torch.where(nonzero, exponent, -1).amax(1, keepdim=True)
    lowest = row_exponent if unlimited_range else torch.where(nonzero, exponent, 1000).amin(1, keepdim=True)
    nan_row, zero_row = nan.any(1, keepdim=True), row_exponent < 0
    row_exponent = row_exponent.clamp(min=127 + offset - MAX_SCALE_EXPONENT)
    out_of_range = (row_exponent - lowest > max_range) | (row_exponent - 127 - offset > MAX_SCALE_EXPONENT)
    out_of_range |= (unfit & nonzero).any(1, keepdim=True)
    out_of_range &= ~nan_row & ~zero_row
    scale = torch.where(zero_row, 1.0, ((row_exponent - offset).clamp(1, 254) << 23).view(torch.float32))
    scale = torch.where(nan_row | out_of_range, float("nan"), scale)
    shift = (exponent - row_exponent + offset).clamp(-126, 127)
    values = decode_elements(codes.view(element.dtype if element.bits == 8 else torch.float8_e4m3fn), E4M3)
    rescaled = (values * ((shift + 127) << 23).view(torch.float32)).clamp(-E4M3.max, E4M3.max)
    rescaled = torch.where(rescaled.isnan(), NAN_CODE, rescaled.to(torch.float8_e4m3fn).view(torch.uint8))
    rescaled = torch.where(out_of_range, codes, rescaled)
    return RowScaled(rescaled, scale, out_of_range.squeeze(1).to(torch.uint8))


def row_values(rows: RowScaled, operand: Operand) -> Tensor:
    """The float32 values that a row-scaled matrix stands for; those of ``operand`` in rows that are out of range."""
    from .reference import decode_local

    rescaled = rows.codes.view(torch.float8_e4m3fn).to(torch.float32) * rows.scale
    return torch.where(rows.out_of_range.bool().unsqueeze(1), decode_local(operand), rescaled)


# -------------------------------------------------------------------------------- how far a product may be from exact

# How far a product of row-scaled E4M3 may be from the product of its operands: the contract of ``fp8_rows``.
#
# Three errors add up: the rounding of values that are rescaled to E4M3 (``row_scaled.py``), the sums of the
# tensor cores, and the one rounding of the result.
#
# Hopper's FP8 instructions add 32 products to a sum with 13 bits behind the leading one: each of the 33 addends loses
# less than 2^-13 of the largest ("FP22", e8m13: DeepSeek-V3 technical report, section 3.5.2). Without fast accumulation
# the sum goes to a float32 after four instructions, 128 columns (CUTLASS, ``mma_promotion_interval``; cuBLAS says that
# it does the same, and not how often). So 4 * 33 addends lose less than 2^-13 of sum |a||b| each: ``HOPPER_SUMS``. That
# is reached where one product is 2^13 times each of the other 127. Random values stay below 2^-11 of sum |a||b|.

HOPPER_SUMS = 4 * 33 * 2.0**-13
"""What sums on Hopper lose at most, of sum |a||b|."""
FLOAT32_SUMS = 2.0**-18
"""The same for float32 sums of up to 16 thousand products by pairs, or of tensor cores for 16 bits."""


def _rescaling_error(operand: Operand) -> Tensor:
    """How much each value of a row may change when it is rescaled, float64 (rows, 1)."""
    rows = row_scaled(operand)
    no_error = rows.out_of_range.bool().unsqueeze(1) | rows.scale.isnan()
    return torch.where(no_error, 0.0, (0.0 if is_exact(operand.format.element) else MAX_ERROR) * rows.scale.double())


def product_bound(a: Operand, b: Operand, out_dtype: torch.dtype, sums: float, bias: Tensor | None = None) -> Tensor:
    """The largest error of each value of ``a @ b^T + bias``: float64 (M, N); NaN where the product is not a number.

    a (M, K), b (N, K). The product itself is ``exact_product``. ``sums``: what the sums lose, such as HOPPER_SUMS. A
    result below the normal numbers of ``out_dtype``, or of float32, may be zero.
    """
    left, right = decode_local(a).double().abs(), decode_local(b).double().abs()
    errors = _rescaling_error(a), _rescaling_error(b)
    from_rescaling = errors[0] * right.sum(1) + left.sum(1, keepdim=True) * errors[1].t()
    from_rescaling = from_rescaling + a.shape[1] * errors[0] * errors[1].t()
    before = from_rescaling + sums * (left @ right.t() + from_rescaling)
    limits = torch.finfo(out_dtype)
    return before + limits.eps / 2 * (exact_product(a, b, bias).abs() + before) + 2 * limits.smallest_normal


def exact_product(a: Operand, b: Operand, bias: Tensor | None = None) -> Tensor:
    """``a @ b^T + bias`` of the values of the operands in float64: (M, N)."""
    out = decode_local(a).double() @ decode_local(b).double().t()
    return out if bias is None else out + bias.double()

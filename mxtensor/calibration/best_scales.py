"""The scale of each block with the least squared error, among those that the format's rule gives for several amax.

The rule that casts use maps the amax of a block to the largest element. A smaller amax clips the largest values and
gives the others finer steps; a larger one can put them on better steps, such as 4 instead of 6 as the largest element
of NVFP4 ("four over six"). Every candidate is a scale that the format can store.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..numerics.cast import Cast
from ..numerics.elements import ElementFormat, ScaleFormat, decode_elements, encode_elements, pack
from ..numerics.formats import E8M0, FP32_POW2, FULL, Format
from ..numerics.operand import Operand
from ..numerics.reference import (
    SCALE_RULES,
    crop,
    join_blocks,
    least_error,
    scale_to_float,
    split_blocks,
    spread,
    tensor_amax,
)

OF_POWERS = (1.0, 0.5, 2.0)
"""What the amax is multiplied by, where scales are powers of two."""
OF_FRACTIONS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 1.1, 1.2, 1.3, 1.5)
"""The same where scales have a mantissa. 1.5 is four over six."""


def multiples_of(scale: ScaleFormat) -> tuple[float, ...]:
    """The candidates for a scale format, as multiples of the amax. The first is the scale that a cast would choose."""
    return OF_POWERS if scale in (E8M0, FP32_POW2) else OF_FRACTIONS


@dataclass(frozen=True)
class ElementTable:
    """The finite values of an element in ascending order: one search finds the nearest elements of many values.

    That takes fewer ops for a column than the definition. The definition makes the table, so that ties and the largest
    value are as in ``encode_elements``.
    """

    values: Tensor
    """float32 (elements,)."""
    codes: Tensor
    """uint8 (elements,)."""
    bounds: Tensor
    """float32 (elements - 1,): the largest value that rounds to each element but the last."""

    def index(self, y: Tensor) -> Tensor:
        """The index of the element nearest to each value, ties to even, saturating: int32 of the shape of ``y``."""
        return torch.bucketize(y.contiguous(), self.bounds, out_int32=True)


@lru_cache(maxsize=64)
def element_table(element: ElementFormat, device: torch.device) -> ElementTable:
    """The table of an element on a device. It has one zero."""
    codes = torch.arange(2**element.bits, dtype=torch.uint8)
    every = decode_elements(codes.view(element.dtype), element)
    made = encode_elements(every.clone(), element).view(torch.uint8) == codes  # int8 has a code that is never made
    made &= every.isfinite() & ~((every == 0) & every.signbit())
    values, order = every[made].sort()
    middle = (values[1:] + values[:-1]) / 2
    to_upper = decode_elements(encode_elements(middle.clone(), element), element) == values[1:]
    bounds = torch.where(to_upper, torch.nextafter(middle, torch.full_like(middle, -math.inf)), middle)
    return ElementTable(values.to(device), codes[made][order].to(device), bounds.to(device))


@dataclass(frozen=True)
class Scales:
    """The scales of a matrix (rows, cols) or of a piece of one."""

    stored: Tensor
    """One entry a block, as the operand stores it."""
    multiplier: Tensor
    """float32 (rows, cols): what a value is multiplied by before it is rounded to an element."""
    value: Tensor
    """float32 (rows, cols): what an element is multiplied by, the global scale included."""
    global_scale: Tensor | None


def best_scales(
    w: Tensor, cast: Cast, whole_amax: Tensor, importance: Tensor | None = None, multiples: Sequence[float] = (1.0,)
) -> Scales:
    """The scales of ``w`` (rows, cols; float32, finite), each with the least weighted squared error of its block.

    ``whole_amax``: the amax of the whole matrix, if ``w`` is a piece of it. ``importance``: the weight of each column's
    error, (cols,). ``multiples``: the candidates, as multiples of the amax of a block; of equals the first is chosen.
    """
    format = cast.format
    blocks, dims = split_blocks(w, format)
    magnitudes = blocks.abs()
    amax = magnitudes.amax(dims, keepdim=True) if format.block[0] == FULL else magnitudes.amax(dims)
    weights = None if importance is None else split_blocks(importance.expand_as(w), format)[0]
    element = element_table(format.element, w.device)
    global_scale = None

    def candidate(multiple: float) -> tuple[Tensor, ...]:
        nonlocal global_scale
        stored, multiplier, global_scale = SCALE_RULES[format.scale](amax * multiple, cast, whole_amax)
        value = scale_to_float(stored, format.scale)
        value = value if global_scale is None else value * global_scale
        difference = element.values[element.index(blocks * spread(multiplier, dims))].mul_(spread(value, dims))
        error = difference.sub_(blocks).square_()
        error = (error if weights is None else error.mul_(weights)).sum(dims).reshape(amax.shape)
        return error, stored, multiplier, value

    _, stored, multiplier, value = least_error(map(candidate, multiples))
    rows, cols = w.shape

    def of_values(scale: Tensor) -> Tensor:
        return join_blocks(spread(scale, dims).expand_as(blocks), dims)[..., :rows, :cols]

    return Scales(stored, of_values(multiplier), of_values(value), global_scale)


def nearest(w: Tensor, cast: Cast, multiples: Sequence[float], importance: Tensor | None = None) -> Operand:
    """``w`` (rows, cols; float32), each value rounded to nearest with the best scale of its block."""
    scales = best_scales(w, cast, tensor_amax(w), importance, multiples)
    y = w * scales.multiplier
    if not cast.format.signed_zero:
        y = torch.where(y == 0, 0.0, y)
    codes = encode_elements(y, cast.format.element).view(torch.uint8)
    return operand_of(codes, scales.stored, scales.global_scale, cast.format)


def operand_of(codes: Tensor, stored: Tensor, global_scale: Tensor | None, format: Format) -> Operand:
    """The operand with these codes, one uint8 a value, and these scales."""
    element, cols = format.element, codes.shape[-1]
    data = crop(pack(F.pad(codes, (0, -cols % element.packing[0])), element), None, element.data_cols(cols))
    shape = tuple(codes.shape)
    return Operand(data.view(element.dtype), stored.reshape(format.scale_shape(shape)), global_scale, format, shape)

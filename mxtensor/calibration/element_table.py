"""A sorted table of an element, in which one search finds the nearest elements of many values: fewer ops for a column
than the definition takes.

The table is made by the definition, so that ties and the largest value are as in ``encode_elements``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..numerics.element_format import ElementFormat
from ..numerics.elements import decode_elements, encode_elements


@dataclass(frozen=True)
class ElementTable:
    """The finite values of an element in ascending order."""

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

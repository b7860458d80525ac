"""Operand: the one container of codes and scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .elements import pack, unpack
from .formats import Format


@dataclass(frozen=True)
class Operand:
    """Values blocked along their last dimension: what a product kernel consumes.

    ``data``: codes, shape ``format.data_shape(shape)``; ``scale``: shape ``format.scale_shape(shape)``;
    ``global_scale``: a float32 scalar or None; ``shape``: the logical shape, tails not padded.
    """

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None
    format: Format
    shape: tuple[int, ...]

    @property
    def scale_view(self) -> Tensor:
        """``scale`` in its own dtype: float8_e8m0fnu (MX), float8_e4m3fn (NVFP4) or float32. Shares memory."""
        return self.scale.view(self.format.scale.view_dtype)

    @property
    def offset(self) -> int:
        """Values that its codes' memory has room for before the first of them."""
        values, size = self.format.element.packing
        return self.data.storage_offset() * values // size

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        parts = (self.data, self.scale, self.global_scale)
        return tuple(t for t in parts if t is not None)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.dtype.itemsize for t in self.tensors)


class Rotated(NamedTuple):
    """A columnwise copy for wgrad alone: rotated along the contraction, it stands for other values than the tensor."""

    operand: Operand
    signs: int


def transposed(operand: Operand) -> Operand:
    """A square-block operand of the transposed values: the same codes and scales turned, nothing rounded again."""
    element, shape = operand.format.element, operand.shape
    turned = (*shape[:-2], shape[-1], shape[-2])
    if not element.packed:
        data = operand.data.transpose(-1, -2)
    else:
        codes = torch.stack(unpack(operand.data, element), -1).flatten(-2).narrow(-1, 0, shape[-1]).transpose(-1, -2)
        group = element.packing[0]
        data = pack(F.pad(codes, (0, -shape[-2] % group)), element)
    return Operand(data, operand.scale.transpose(-1, -2), operand.global_scale, operand.format, turned)

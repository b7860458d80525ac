"""Operand: the one container of codes and scales. Every kernel takes and returns these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .elements import pack, unpack
from .formats import Format


@dataclass(frozen=True)
class Operand:
    """Values blocked along their last dimension: what a product kernel consumes.

    ``data``: codes, shape ``format.data_shape(shape)``, dtype ``format.element.dtype``; ``scale``: shape
    ``format.scale_shape(shape)``, uint8 or float32; ``global_scale``: a float32 scalar, or None; ``shape``: the logical
    shape, tails not padded. Nothing is checked here: ``validate.check_components`` checks tensors from outside.
    """

    data: Tensor
    scale: Tensor
    global_scale: Tensor | None
    format: Format
    shape: tuple[int, ...]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], format: Format, shape: Sequence[int]) -> Operand:
        """The inverse of ``tensors``: codes, scales and, where the format has one, the global scale."""
        data, scale, *rest = tensors
        return cls(data, scale, rest[0] if rest else None, format, tuple(shape))

    @classmethod
    def empty(cls, format: Format, shape: Sequence[int], device: torch.device | str | None = None) -> Operand:
        """Memory for an operand of this logical shape; nothing is written to it."""
        shape = tuple(shape)
        data = torch.empty(format.data_shape(shape), dtype=format.element.dtype, device=device)
        scale = torch.empty(format.scale_shape(shape), dtype=format.scale.dtype, device=device)
        global_scale = torch.empty((), dtype=torch.float32, device=device) if format.global_scale else None
        return cls(data, scale, global_scale, format, shape)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Codes, scales and, where there is one, the global scale."""
        every = (self.data, self.scale, self.global_scale)
        return tuple(t for t in every if t is not None)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Operand:
        """The operand with ``fn`` of each of its tensors in their place; format and logical shape stay."""
        global_scale = None if self.global_scale is None else fn(self.global_scale)
        return replace(self, data=fn(self.data), scale=fn(self.scale), global_scale=global_scale)

    @property
    def scale_view(self) -> Tensor:
        """``scale`` in its own dtype: float8_e8m0fnu (MX), float8_e4m3fn (NVFP4) or float32. Shares memory."""
        return self.scale.view(self.format.scale.view_dtype)

    @property
    def offset(self) -> int:
        """The number of values before the first one in the memory of the codes."""
        values, size = self.format.element.packing
        return self.data.storage_offset() * values // size

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(t.numel() * t.dtype.itemsize for t in self.tensors)


class Rotated(NamedTuple):
    """A columnwise copy for wgrad alone: rotated along the contraction, it stands for other values than the tensor."""

    operand: Operand
    signs: int


def transposed(operand: Operand) -> Operand:
    """A square-block operand of the transposed values: the same codes and scales turned, nothing rounded again."""
    element, shape = operand.format.element, operand.shape
    size = (*shape[:-2], shape[-1], shape[-2])
    if not element.packed:
        data = operand.data.transpose(-1, -2)
    else:
        codes = torch.stack(unpack(operand.data, element), -1).flatten(-2).narrow(-1, 0, shape[-1]).transpose(-1, -2)
        group = element.packing[0]
        data = pack(F.pad(codes, (0, -shape[-2] % group)), element)
    return Operand(data, operand.scale.transpose(-1, -2), operand.global_scale, operand.format, size)

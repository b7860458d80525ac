"""Operand: the one container of codes and scales. Kernels take operands and return operands or plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.devices import request_huge_pages
from ..core.shapes import layout
from .elements import pack, unpack
from .formats import Format


@dataclass(frozen=True)
class Operand:
    """Values blocked along their last dimension: one operand of a product.

    ``data``: codes, shape ``format.data_shape(shape)``, dtype ``format.element.dtype``; ``scale``: shape
    ``format.scale_shape(shape)``, uint8 or float32; ``global_scale``: float32 of ``format.global_scale_shape(shape)``,
    a scalar unless the format is row-scaled or this is a stack of matrices, or None (activations of more than two
    dimensions may have one scalar, too); ``shape``: the logical shape, without padding. Nothing is checked
    here: ``validate.check_components`` checks tensors from outside.
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
        """Uninitialized memory for an operand of this logical shape."""
        shape = tuple(shape)
        data = torch.empty(format.data_shape(shape), dtype=format.element.dtype, device=device)
        request_huge_pages(data)
        scale = torch.empty(format.scale_shape(shape), dtype=format.scale.dtype, device=device)
        whole = format.global_scale_shape(shape)
        global_scale = torch.empty(whole, dtype=torch.float32, device=device) if format.global_scale else None
        return cls(data, scale, global_scale, format, shape)

    @cached_property
    def layouts(self) -> tuple[Hashable, Hashable]:
        """``layout`` of codes and scales; asked once, in each eager call of a layer."""
        return layout(self.data), layout(self.scale)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Codes, scales and, where there is one, the global scale."""
        global_scale = self.global_scale
        return (self.data, self.scale) if global_scale is None else (self.data, self.scale, global_scale)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Operand:
        """The operand with ``fn`` applied to each of its tensors; format and logical shape stay."""
        global_scale = None if self.global_scale is None else fn(self.global_scale)
        return Operand(fn(self.data), fn(self.scale), global_scale, self.format, self.shape)

    def with_blocks(self, data: Tensor, scale: Tensor, shape: Sequence[int]) -> Operand:
        """An operand of other codes and scales with this logical shape; format and global scale stay.

        For matrices that are the same as before: see ``moved`` and ``with_scales``.
        """
        return Operand(data, scale, self.global_scale, self.format, tuple(shape))

    def map_blocks(self, fn: Callable[[Tensor], Tensor], shape: Sequence[int]) -> Operand:
        """``with_blocks`` of ``fn`` applied to codes and scales."""
        return self.with_blocks(fn(self.data), fn(self.scale), shape)

    def with_scales(self, data: Tensor, scale: Tensor, global_scale: Tensor | None, shape: Sequence[int]) -> Operand:
        """An operand of other codes, scales and global scales, which get the dimensions that ``shape`` asks for."""
        shape, format = tuple(shape), self.format
        if global_scale is not None and format.scales_matrices:
            wanted = format.global_scale_shape(shape)
            if global_scale.dim() == 0 and wanted:
                global_scale = global_scale.expand(wanted).contiguous()
            elif not wanted:
                global_scale = global_scale.reshape(())
        return Operand(data, scale, global_scale, format, shape)

    def moved(
        self, data: Tensor, scale: Tensor, shape: Sequence[int], view: Callable[[Tensor], Tensor]
    ) -> Operand | None:
        """An operand of views of codes and scales; None if a matrix of the result would have several global scales.

        ``view`` makes the view, of this logical shape, of a tensor of the present logical shape.
        """
        shape, one = tuple(shape), self.global_scale
        if one is None or not self.format.scales_matrices or (one.dim() == 0 and len(shape) <= 2):
            return self.with_blocks(data, scale, shape)
        wanted = self.format.global_scale_shape(shape)
        if 0 in shape:
            return Operand(data, scale, one.new_ones(wanted), self.format, shape)
        try:
            of_values = view(one.expand(self.shape))
        except RuntimeError:  # torch would have to copy
            return None
        for dim in range(max(0, len(shape) - 2), len(shape)):
            if shape[dim] != 1 and of_values.stride(dim) != 0:
                return None
            of_values = of_values.narrow(dim, 0, 1)
        return Operand(data, scale, of_values if wanted else of_values.reshape(()), self.format, shape)

    @property
    def has_stack_scales(self) -> bool:
        """Whether matrices of this stack have global scales of their own."""
        return self.global_scale is not None and self.global_scale.dim() > 0 and not self.format.row_scaled

    def matrices(self) -> list[Operand]:
        """The matrices of a stack (..., rows, cols), each with its global scale; views."""
        shape, flat = self.shape[-2:], [t.flatten(0, -3) for t in self.tensors]
        rest = flat[2].reshape(-1) if len(flat) > 2 else [None] * flat[0].shape[0]
        return [Operand(*one, self.format, shape) for one in zip(flat[0], flat[1], rest, strict=True)]

    def new_zeros(self, shape: Sequence[int]) -> Operand:
        """Zeros of this logical shape, in the format and on the device of this operand.

        Codes are zero; a scale is 1 in float32, else the byte 0; a global scale is 1.
        """
        shape, format = tuple(shape), self.format
        data = self.data.new_zeros(format.data_shape(shape), dtype=torch.uint8).view(format.element.dtype)
        scale = self.scale.new_full(format.scale_shape(shape), 1 if format.scale.dtype is torch.float32 else 0)
        return Operand(
            data, scale, None if self.global_scale is None else torch.ones_like(self.global_scale), format, shape
        )

    @property
    def scale_view(self) -> Tensor:
        """A view of ``scale`` in the dtype of its values: float8_e8m0fnu (MX), float8_e4m3fn (NVFP4) or float32."""
        return self.scale.view(self.format.scale.view_dtype)

    @property
    def why_not_plain(self) -> str | None:
        """Why a kernel refuses that has one global scale for a matrix; None if that is all that decoding takes."""
        one = self.global_scale is None or not self.format.row_scaled
        return None if one else "has one global scale, not one for each row"

    @property
    def offset(self) -> int:
        """The storage offset of the codes, counted in values."""
        values, size = self.format.element.packing
        return self.data.storage_offset() * values // size

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(t.numel() * t.dtype.itemsize for t in self.tensors)


class Rotated(NamedTuple):
    """A columnwise copy for wgrad only, rotated along the contraction: its values are not those of the tensor."""

    operand: Operand
    signs: int


def transposed(operand: Operand) -> Operand:
    """The transpose of an operand with square blocks: the same codes and scales, transposed and not rounded again."""
    element, shape = operand.format.element, operand.shape
    size = (*shape[:-2], shape[-1], shape[-2])
    if not element.packed:
        data = operand.data.transpose(-1, -2)
    else:
        codes = torch.stack(unpack(operand.data, element), -1).flatten(-2).narrow(-1, 0, shape[-1]).transpose(-1, -2)
        group = element.packing[0]
        data = pack(F.pad(codes, (0, -shape[-2] % group)), element)
    return Operand(data, operand.scale.transpose(-1, -2), operand.global_scale, operand.format, size)


def clear_padding(operand: Operand) -> Tensor:
    """The codes, with zeros after the last value of each row that is not a whole group of packed codes.

    Codes from elsewhere may have any bits there.
    """
    element, data = operand.format.element, operand.data
    values, size = element.packing
    rest = operand.shape[-1] % values
    if rest == 0:
        return data
    used = ((1 << rest * element.bits) - 1).to_bytes(size, "little")
    bits = [255] * (data.shape[-1] - size) + [*used]
    return (data.view(torch.uint8) & torch.tensor(bits, dtype=torch.uint8, device=data.device)).view(data.dtype)

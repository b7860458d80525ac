"""``as_strided``: a view told by numbers, as torch makes anew what a compiled graph hands out of its inputs.

What such a graph returns knows where its codes begin, not of which tensor; its ``storage_offset()`` counts the values
before them, and with sizes and strides that says which slices of the tensor it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..codec import Operand
from ..dispatch import implements
from ..shapes import contiguous_stride
from ..tensor import MXTensor
from ..tracing import settled
from .layout import Dims, finish, relabel, sides
from .slice import sliced
from .view import reshaped

aten = torch.ops.aten


class Target(NamedTuple):
    """The view wanted."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | None
    """Values before its first, in the memory of the codes; None: it begins where the tensor does."""


@implements(aten.as_strided.default)
def as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """The whole tensor as it is or in row-major order under another shape, or slices of it that cut no block."""
    w, size, stride, offset = (*args, None)[:4]
    begin, offset = w.storage_offset(), None if offset is None else settled(offset)
    target = Target(tuple(map(settled, size)), tuple(map(settled, stride)), None if offset == begin else offset)
    out = _whole(w, target)
    if out is None:
        out = _part(w, target)
    if out is None and not _can_be_read(w, target):
        raise NotImplementedError(
            f"{func}: no blocks of this MXTensor of shape {tuple(w.shape)} are the view of size {target.size} with "
            f"strides {target.stride} and storage offset {offset}; use indexing, slices and views instead, or "
            "dequantize() first"
        )
    offset = begin if offset is None else offset
    what = f"size {target.size} with strides {target.stride}"
    return finish(func, (w, target.size, target.stride, offset - begin), kwargs, out, what, offset)


def _can_be_read(w: MXTensor, target: Target) -> bool:
    """Whether a target that is no view of whole blocks can but count the values of the tensor that ``w`` stands for."""
    if 1 + sum((n - 1) * step for n, step in zip(w.shape, w.stride(), strict=True)) != w.numel():
        return False  # a copy of its values would lie closer together
    if target.offset is None or (w._rowwise is not None and w._rowwise.offset == w.storage_offset()):
        return True
    return any(n > 1 and step not in w.stride() for n, step in zip(target.size, target.stride, strict=True))


def _whole(w: MXTensor, target: Target) -> MXTensor | None:
    size, stride, offset = target
    if offset is not None:
        return None
    if size == tuple(w.shape) and stride == w.stride():
        return w.map_parts(aten.alias.default)
    rows = w.is_contiguous() and stride == contiguous_stride(size) and torch.Size(size).numel() == w.numel()
    return reshaped(w, size, stride) if rows else None


def _part(w: MXTensor, target: Target) -> MXTensor | None:
    """Slices of ``w``, some of one index that is left out; or rows of it in another shape."""
    for operand, dims in sides(w):
        begin = operand.offset if target.offset is None else target.offset
        starts = _starts(operand, dims, begin)
        if starts is None:
            continue
        out = _slices(w, starts, target)
        if out is None and dims == sorted(dims):
            out = _rows(w, starts, target)
        if out is not None and out.held[0].offset == begin:
            return out
    return None


def _starts(operand: Operand, dims: list[int], offset: int) -> list[int] | None:
    """For each dimension of the facade, where in ``operand`` the value is that has ``offset`` values before it."""
    (values, size), data = operand.format.element.packing, operand.data
    rest = (offset * size + values - 1) // values - data.storage_offset()
    starts = [0] * len(dims)
    steps = data.stride()
    for place in sorted((d for d in range(data.dim()) if data.shape[d] > 1), key=lambda d: steps[d], reverse=True):
        step = steps[place]
        if step:
            starts[dims[place]], rest = rest // step, rest % step  # divmod knows no symbols
    starts[dims[-1]] = starts[dims[-1]] // size * values
    return None if rest or min(starts) < 0 else starts


def _slices(w: MXTensor, starts: list[int], target: Target) -> MXTensor | None:
    lengths, new = [1] * w.dim(), Dims()
    for n, step in zip(target.size, target.stride, strict=True):
        fits = (d for d in range(w.dim()) if d not in new and w.stride(d) == step and starts[d] + n <= w.shape[d])
        dim = next(fits, None)
        if dim is None and n != 1:
            return None
        new.append(dim)
        if dim is not None:
            lengths[dim] = n
    part: MXTensor | None = w
    for dim, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        if part is not None and n != w.shape[dim]:
            part = sliced(part, dim, start, start + n, 1, w.stride())
    return None if part is None else relabel(part, new, target.size, target.stride)


def _rows(w: MXTensor, starts: list[int], target: Target) -> MXTensor | None:
    total, cols = torch.Size(target.size).numel(), w.shape[-1]
    if not w.is_contiguous() or target.stride != contiguous_stride(target.size) or starts[-1] or not cols:
        return None
    first = sum(start * step for start, step in zip(starts, w.stride(), strict=True)) // cols
    matrix = reshaped(w, (w.numel() // cols, cols), (cols, 1))
    if matrix is None or total % cols or first + total // cols > matrix.shape[0]:
        return None
    part = sliced(matrix, 0, first, first + total // cols, 1, matrix.stride())
    return None if part is None else reshaped(part, target.size, target.stride)

"""``as_strided``: a view told by numbers, as torch makes anew what a compiled graph hands out of its inputs.

What such a graph returns knows where its codes begin, not of which tensor; its ``storage_offset()`` counts the values
before them, and with sizes and strides that says which slices of the tensor it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..core.dispatch import implements
from ..core.shapes import contiguous_stride
from ..core.tracing import guard_int
from ..numerics.operand import Operand
from ..tensor.mxtensor import MXTensor
from .layout import Dims, finish, relabel, sides
from .slice import sliced
from .view import reshaped

aten = torch.ops.aten


class Target(NamedTuple):
    """The view wanted."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | None
    """Values before its first; None: it begins where the tensor does."""


@implements(aten.as_strided.default)
def as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """The whole tensor as it is or in row-major order under another shape, or slices of it that cut no block."""
    w, size, stride, offset = (*args, None)[:4]
    begin, offset = w.storage_offset(), None if offset is None else guard_int(offset)
    target = Target(tuple(map(guard_int, size)), tuple(map(guard_int, stride)), None if offset == begin else offset)
    whole = _whole(w, target)
    found = [whole] if whole is not None else _components(w, target)
    if len(found) > 1 or (not found and not _can_be_read(w, target)):
        which = "more than one view" if found else "no view"
        raise NotImplementedError(
            f"{func}: {which} of whole blocks of this MXTensor of shape {tuple(w.shape)} has size {target.size}, "
            f"strides {target.stride} and storage offset {offset}; use indexing, slices and views instead, or "
            "dequantize() first"
        )
    what, out = f"size {target.size} with strides {target.stride}", found[0] if found else None
    after = 0 if offset is None else offset - begin
    return finish(func, (w, target.size, target.stride, after), kwargs, out, what, after)


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
        return w.map_components(aten.alias.default)
    rows = w.is_contiguous() and stride == contiguous_stride(size) and torch.Size(size).numel() == w.numel()
    return reshaped(w, size, stride) if rows else None


# ---------------------------------------------------------------------------------------------- parts


def _components(w: MXTensor, target: Target) -> list[MXTensor]:
    """The views of parts of ``w`` that a target can mean.

    Its offset counts the values of the tensor that ``w`` stands for, as those of slices do, or the codes of what a
    graph has returned: mostly the same, but not with codes that lie transposed, behind others, or with tails.
    """
    readings: list[tuple[list[int], Operand | None]] = [([0] * w.dim(), None)]
    if target.offset is not None:
        before: Any = target.offset - w.storage_offset()
        readings = [(_starts(w.shape, w.stride(), list(range(w.dim())), before), None)]
        for operand, dims in sides(w):
            (values, size), data = operand.format.element.packing, operand.data
            codes: Any = (target.offset * size + values - 1) // values - data.storage_offset()
            starts = _starts(data.shape, data.stride(), dims, codes)
            starts[dims[-1]] = starts[dims[-1]] // size * values
            readings.append((starts, operand))
    found: list[tuple[list[int], MXTensor]] = []  # by where it starts, which may be symbols: they have no hash
    for starts, operands in readings:
        for part, make in (_slices(w, starts, target), _rows(w, starts, target)):
            # what holds codes of rows is returned with their place
            if part is not None and (operands is None or (operands is w._rowwise) == (part._rowwise is not None)):
                out = make(part)
                if out is not None and all(starts != other for other, _ in found):
                    found.append((starts, out))
    return [out for _, out in found]


def _starts(shape: Sequence[int], strides: Sequence[int], dims: list[int], offset: int) -> list[int]:
    """For each dimension (``dims``: their order) where the value with ``offset`` before it is; -1 where none has."""
    starts = [0] * len(dims)
    order = sorted((d for d in range(len(dims)) if shape[d] > 1), key=lambda d: strides[d], reverse=True)
    for place in order:
        if strides[place]:
            starts[dims[place]], offset = offset // strides[place], offset % strides[place]  # divmod knows no symbols
    return [-1] * len(dims) if offset else starts


Made = tuple[MXTensor | None, Callable[[MXTensor], MXTensor | None]]
"""A part, and what makes the view of it."""


def _slices(w: MXTensor, starts: list[int], target: Target) -> Made:
    """A slice of each dimension; those that the view has not are of one index."""
    lengths, new = [1] * w.dim(), Dims()
    for n, step in zip(target.size, target.stride, strict=True):
        fits = (d for d in range(w.dim()) if d not in new and w.stride(d) == step and starts[d] + n <= w.shape[d])
        dim = next(fits, None)
        new.append(dim)
        if dim is not None:
            lengths[dim] = n
    fresh = all(dim is not None or n == 1 for dim, n in zip(new, target.size, strict=True))
    part = w if fresh and all(0 <= start < max(n, 1) for start, n in zip(starts, w.shape, strict=True)) else None
    for dim, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        if part is not None and n != w.shape[dim]:
            part = sliced(part, dim, start, start + n, 1, w.stride())
    return part, lambda part: relabel(part, new, target.size, target.stride)


def _rows(w: MXTensor, starts: list[int], target: Target) -> Made:
    """Whole rows, one after the other, in another shape."""
    part, total, cols = None, torch.Size(target.size).numel(), w.shape[-1]
    if w.is_contiguous() and target.stride == contiguous_stride(target.size) and starts[-1] == 0 and cols:
        first = sum(start * step for start, step in zip(starts, w.stride(), strict=True)) // cols
        matrix = reshaped(w, (w.numel() // cols, cols), (cols, 1))
        if matrix is not None and total % cols == 0 and first + total // cols <= matrix.shape[0]:
            part = sliced(matrix, 0, first, first + total // cols, 1, matrix.stride())
    return part, lambda part: reshaped(part, target.size, target.stride)

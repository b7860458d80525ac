"""``as_strided``: a view given by numbers. torch replays so the views of its inputs that a compiled graph returns.

Such a view knows the offset of its codes, and not which tensor they belong to. Its ``storage_offset()`` counts the
values before them; with sizes and strides that says which slices of the tensor it is.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Values before its first one; None: the offset of the tensor itself."""


@implements(aten.as_strided.default)
def as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """The whole tensor, also in row-major order with another shape, or slices of it that cut no block."""
    w, size, stride, offset = (*args, None)[:4]
    begin, offset = w.storage_offset(), None if offset is None else guard_int(offset)
    target = Target(tuple(map(guard_int, size)), tuple(map(guard_int, stride)), None if offset == begin else offset)
    whole = _whole(w, target)
    found = [whole] if whole is not None else _views(w, target)
    dense = None if found else _of_values(w, target)
    if len(found) > 1 or (not found and dense is None):
        which = "more than one view" if found else "no view"
        raise NotImplementedError(
            f"{func}: {which} of whole blocks of this MXTensor of shape {tuple(w.shape)} has size {target.size}, "
            f"strides {target.stride} and storage offset {offset}; use indexing, slices and views instead, or "
            "dequantize() first"
        )
    what, out = f"size {target.size} with strides {target.stride}", found[0] if found else None
    if dense is not None:
        return finish(func, (w, target.size, dense.stride, dense.offset), kwargs, None, what)
    after = 0 if offset is None else offset - begin
    return finish(func, (w, target.size, target.stride, after), kwargs, out, what, after)


def _of_values(w: MXTensor, target: Target) -> Target | None:
    """The same view of ``w.dequantize()``: with the strides and the offset of that dense tensor.

    None if the view ends outside of ``w``, or if its offset may count codes instead of values of the outer tensor.
    """
    ambiguous = target.offset is not None and (w._rowwise is None or w._rowwise.offset != w.storage_offset())
    if ambiguous and all(n == 1 or step in w.stride() for n, step in zip(target.size, target.stride, strict=True)):
        return None
    order, shape, strides = list(range(w.dim())), w.shape, w.stride()
    begin: Any = 0 if target.offset is None else target.offset - w.storage_offset()
    if 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) == w.numel():
        return Target(target.size, target.stride, begin)  # no holes: a step may pass the end of a row
    first = _starts(shape, strides, order, begin)
    steps = [_starts(shape, strides, order, step) for step in target.stride]
    ends = [sum((n - 1) * step[d] for n, step in zip(target.size, steps, strict=True)) for d in order]
    if any(not 0 <= start < n - end for start, end, n in zip(first, ends, shape, strict=True)):
        return None
    if any(n < 0 for step in steps for n in step):
        return None
    dense = torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()

    def distance(places: list[int]) -> int:
        return sum(n * step for n, step in zip(places, dense, strict=True))

    return Target(target.size, tuple(map(distance, steps)), distance(first))


def _whole(w: MXTensor, target: Target) -> MXTensor | None:
    size, stride, offset = target
    if offset is not None:
        return None
    if size == tuple(w.shape) and stride == w.stride():
        return w.map_components(aten.alias.default)
    rows = w.is_contiguous() and stride == contiguous_stride(size) and torch.Size(size).numel() == w.numel()
    return reshaped(w, size, stride) if rows else None


# ---------------------------------------------------------------------------------------------- slices


def _views(w: MXTensor, target: Target) -> list[MXTensor]:
    """The views of ``w`` that a target can mean.

    Its offset counts the values of the outer tensor, like the offset of a slice, or the codes that a graph has
    returned. The two are mostly equal; they differ if codes are stored transposed, after others, or with padding.
    """
    # (start in each dimension, the operand whose codes the offset counts; None: it counts values)
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
    found: list[tuple[list[int], MXTensor]] = []  # with its starts, which may be symbols: they have no hash
    for starts, read in readings:
        for piece, out in (_slices(w, starts, target), _rows(w, starts, target)):
            if piece is None or (read is not None and (read is w._rowwise) != (piece._rowwise is not None)):
                continue  # codes of an operand are read for views that have this operand
            if out is not None and all(starts != other for other, _ in found):
                found.append((starts, out))
    return [out for _, out in found]


def _starts(shape: Sequence[int], strides: Sequence[int], dims: list[int], offset: int) -> list[int]:
    """The index, in each dimension, of the value that ``offset`` values precede; -1 everywhere if there is none.

    ``dims`` says which dimension of the result each entry of ``shape`` and ``strides`` is.
    """
    starts = [0] * len(dims)
    order = sorted((d for d in range(len(dims)) if shape[d] > 1), key=lambda d: strides[d], reverse=True)
    for place in order:
        if strides[place]:
            starts[dims[place]], offset = offset // strides[place], offset % strides[place]  # divmod knows no symbols
    return [-1] * len(dims) if offset else starts


Made = tuple[MXTensor | None, MXTensor | None]
"""A slice, and the view of it."""


def _slices(w: MXTensor, starts: list[int], target: Target) -> Made:
    """The view as a slice of each dimension of ``w``; of a dimension that the view lacks, it has one index."""
    lengths, new = [1] * w.dim(), Dims()
    for n, step in zip(target.size, target.stride, strict=True):
        fits = (d for d in range(w.dim()) if d not in new and w.stride(d) == step and starts[d] + n <= w.shape[d])
        dim = next(fits, None)
        new.append(dim)
        if dim is not None:
            lengths[dim] = n
    found = all(dim is not None or n == 1 for dim, n in zip(new, target.size, strict=True))
    piece = w if found and all(0 <= start < max(n, 1) for start, n in zip(starts, w.shape, strict=True)) else None
    for dim, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        if piece is not None and n != w.shape[dim]:
            piece = sliced(piece, dim, start, start + n, 1, w.stride())
    return piece, None if piece is None else relabel(piece, new, target.size, target.stride)


def _rows(w: MXTensor, starts: list[int], target: Target) -> Made:
    """The view as whole rows of ``w``, one after the other, in another shape."""
    piece, total, cols = None, torch.Size(target.size).numel(), w.shape[-1]
    if w.is_contiguous() and target.stride == contiguous_stride(target.size) and starts[-1] == 0 and cols:
        first = sum(start * step for start, step in zip(starts, w.stride(), strict=True)) // cols
        matrix = reshaped(w, (w.numel() // cols, cols), (cols, 1))
        if matrix is None and w.dim() > 2 and w.shape[-2]:
            matrix, first = _matrix_of(w, first)
        if matrix is not None and total % cols == 0 and first + total // cols <= matrix.shape[0]:
            piece = sliced(matrix, 0, first, first + total // cols, 1, matrix.stride())
    return piece, None if piece is None else reshaped(piece, target.size, target.stride)


def _matrix_of(w: MXTensor, row: int) -> tuple[MXTensor | None, int]:
    """The matrix of a contiguous stack that has this row of all its rows, and which of its rows that is."""
    rows, cols = w.shape[-2:]
    stack = reshaped(w, (w.numel() // (rows * cols), rows, cols), (rows * cols, cols, 1))
    place = row // rows
    one = None if stack is None else sliced(stack, 0, place, place + 1, 1, stack.stride())
    return None if one is None else reshaped(one, (rows, cols), (cols, 1)), row - place * rows

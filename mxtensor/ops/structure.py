"""Joining, picking and repeating: ops that move whole blocks move codes and scales, and round nothing.

If every value of the result has the code that it had, the result is quantized; otherwise it is dequantized, which
``explain()`` logs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.dispatch import implements
from ..core.shapes import contiguous_stride
from ..core.tracing import is_traced
from ..numerics.formats import FULL
from ..numerics.operand import Operand, clear_padding
from ..tensor.mxtensor import MXTensor
from .fallback import read
from .layout import assemble, is_columnwise, on_bytes, outer, sides, with_operands

aten = torch.ops.aten

CUTS = "the result would not be made of whole blocks"


def _alike(tensors: Sequence[Any], whole: bool) -> bool:
    """Whether the codes of these can be joined: one cast, one dtype, the same copies, equal global scales. ``whole``:
    matrices stay whole, and each keeps its global scale."""
    first = tensors[0]
    if not all(isinstance(t, MXTensor) and t.recipe.stored == first.recipe.stored for t in tensors):
        return False
    if any((t._rowwise is None) != (first._rowwise is None) or t.dtype != first.dtype for t in tensors):
        return False
    if any((t._columnwise is None) != (first._columnwise is None) or t.dim() != first.dim() for t in tensors):
        return False
    if first.format.block[0] == FULL:
        return False
    if not first.format.global_scale or whole:
        return True
    scales = [o.global_scale for t in tensors for o in t.operands]
    return all(s is scales[0] or (not is_traced(s) and s.equal(scales[0])) for s in scales)


def _joined(operands: list[Operand], place: int, shape: tuple[int, ...]) -> Operand | None:
    """Operands joined along dimension ``place`` (negative); None if one before the last ends inside a block."""
    first = operands[0]
    block = first.format.block[place + 2] if place >= -2 else 1
    if block == FULL or first.format.why_not_split(place, *(o.shape[place] for o in operands[:-1])):
        return None
    data = torch.cat([o.data.view(torch.uint8) for o in operands], place).view(first.data.dtype)
    scale, global_scale = torch.cat([o.scale for o in operands], place), first.global_scale
    if place < -2 and global_scale is not None:
        scales = [(o.global_scale, o.format.global_scale_shape(o.shape)) for o in operands]
        global_scale = torch.cat([scale.expand(of_stack) for scale, of_stack in scales if scale is not None], place)
    return first.with_scales(data, scale, global_scale, shape)


def _global_scale(operand: Operand, move: Callable[[Tensor], Tensor]) -> Tensor | None:
    """The global scale of an operand, moved if each matrix of a stack has its own."""
    if not operand.has_stack_scales:
        return operand.global_scale
    assert operand.global_scale is not None
    return move(operand.global_scale)


def _place(dims: list[int], dim: int) -> int:
    return dims.index(dim) - len(dims)


def _or_values(result: MXTensor | None, func: Any, args: Any, kwargs: Any) -> Tensor:
    """``result``; the op on the dequantized values if it is None, because it would not be made of whole blocks."""
    return read(func, args, kwargs, CUTS) if result is None else result


@implements(aten.cat.default)
def cat(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Equal formats join if every tensor but the last ends on a block boundary."""
    tensors, dim = (*args, 0)[:2] if "dim" not in kwargs else (args[0], kwargs["dim"])
    tensors = [t for t in tensors if t.dim() != 1 or t.shape[0]]  # torch skips the legacy empty tensor
    first = tensors[0] if tensors else None
    whole = isinstance(first, MXTensor) and dim % first.dim() < first.dim() - 2
    if len(tensors) == 0 or not _alike(tensors, whole):
        return read(func, args, kwargs, "not one format throughout")  # type: ignore[no-any-return]
    out = torch.cat([torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors], dim)
    dim = dim % tensors[0].dim()
    found: dict[bool, Operand] = {}
    for i, (_, dims) in enumerate(sides(tensors[0])):
        operand = _joined([sides(t)[i][0] for t in tensors], _place(dims, dim), tuple(out.shape[d] for d in dims))
        if operand is not None:
            found[is_columnwise(dims)] = operand
    result = assemble(tensors[0], found.get(False), found.get(True), tuple(out.shape), out.stride())
    return _or_values(result, func, args, kwargs)


@implements(aten.stack.default)
def stack(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A new dimension for each, then ``cat``."""
    tensors, dim = (*args, 0)[:2] if "dim" not in kwargs else (args[0], kwargs["dim"])
    if not all(isinstance(t, MXTensor) for t in tensors):
        return read(func, args, kwargs, "not one format throughout")  # type: ignore[no-any-return]
    return torch.cat([t.unsqueeze(dim) for t in tensors], dim)


def _move(
    func: Any, args: Any, kwargs: Any, touched: Sequence[int], fn: Callable[[Tensor, list[int]], Tensor]
) -> Tensor:
    """Apply ``fn(component, places of touched)`` to data and scale of operands not blocked along ``touched``."""
    w = args[0]
    out = outer(func, w, [a.to("meta") if isinstance(a, Tensor) and a is not w else a for a in args], kwargs)
    size = tuple(out.shape)

    def moved(operand: Operand, dims: list[int]) -> Operand | None:
        places = [_place(dims, d % w.dim()) for d in touched]
        if operand.format.block[0] == FULL or any(p >= -2 and operand.format.block[p + 2] != 1 for p in places):
            return None

        def move(t: Tensor) -> Tensor:
            return on_bytes(t, lambda raw: fn(raw, [p + t.dim() for p in places]))

        leading = any(p < -2 for p in places)
        global_scale = _global_scale(operand, move) if leading else operand.global_scale
        shape = tuple(size[d] for d in dims)
        return operand.with_scales(move(operand.data), move(operand.scale), global_scale, shape)

    return _or_values(with_operands(w, moved, size, out.stride()), func, args, kwargs)


@implements(aten.index_select.default)
def index_select(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Rows by number, along a dimension that is not blocked."""
    w, dim, index = args
    if not isinstance(w, MXTensor):
        return read(func, args, kwargs)  # type: ignore[no-any-return]
    return _move(func, args, kwargs, [dim], lambda t, p: t.index_select(p[0], index))


@implements(aten.flip.default)
def flip(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Reverse dimensions that are not blocked."""
    return _move(func, args, kwargs, args[1], lambda t, p: t.flip(p))


@implements(aten.roll.default)
def roll(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Roll dimensions that are not blocked."""
    _w, shifts, dims = (*args, kwargs.get("dims", []))[:3]
    if not dims:
        return read(func, args, kwargs, CUTS)  # type: ignore[no-any-return]
    return _move(func, args, kwargs, dims, lambda t, p: t.roll(shifts, p))


@implements(aten.repeat.default)
def repeat(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Copies along dimensions that are not blocked, or along blocked ones of whole blocks."""
    w, repeats = args
    out = outer(func, w, args, kwargs)
    size, fresh = tuple(out.shape), out.dim() - w.dim()

    def repeated(operand: Operand, dims: list[int]) -> Operand | None:
        rows, cols = operand.format.block
        counts = [repeats[d] for d in dims]
        whole = all(
            counts[place] == 1 or (block != FULL and operand.shape[place] % block == 0)
            for place, block in ((-1, cols), (-2, rows))
            if len(dims) >= -place
        )
        if rows == FULL or not whole or not operand.format.data_shape(operand.shape)[-1]:
            return None
        shape = tuple(size[d] for d in dims)
        global_scale = _global_scale(operand, lambda t: t.repeat([*counts[:-2], 1, 1]))
        return operand.with_scales(operand.data.repeat(counts), operand.scale.repeat(counts), global_scale, shape)

    w = w.expand(*([1] * fresh), *w.shape)
    return _or_values(with_operands(w, repeated, size, out.stride()), func, args, kwargs)


def _matrices(t: Tensor, index: Tensor) -> Tensor:
    """``t[index]``, eight bytes at a time where a matrix has a multiple of them."""
    flat = t.flatten(1)
    aligned = t.storage_offset() % 8 == 0 and (is_traced(t) or t.data_ptr() % 8 == 0)
    wide = t.is_contiguous() and flat.numel() > 0 and flat.shape[1] % 8 == 0 and aligned
    found: Tensor = aten.index.Tensor(flat.view(torch.int64) if wide else flat, [index])
    return found.view(t.dtype).view(index.shape[0], *t.shape[1:])


def _picked(w: MXTensor, index: Tensor) -> MXTensor | None:
    """Matrices of a stack, such as those of the experts of each token; None if all share one scale."""
    size = (index.shape[0], *w.shape[1:])

    def picked(operand: Operand, dims: list[int]) -> Operand | None:
        if operand.format.block[0] == FULL:
            return None
        shape = tuple(size[d] for d in dims)
        data, scale = (on_bytes(t, lambda raw: _matrices(raw, index)) for t in (operand.data, operand.scale))
        global_scale = _global_scale(operand, lambda t: _matrices(t, index))
        return operand.with_scales(data, scale, global_scale, shape)

    return with_operands(w, picked, size, contiguous_stride(size))


@implements(aten.index.Tensor)
def index(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Advanced indices into leading dimensions pick whole rows of blocks."""
    w, indices = args
    if not isinstance(w, MXTensor):
        return read(func, args, kwargs)  # type: ignore[no-any-return]
    first = indices[0] if len(indices) == 1 else None
    if w.dim() == 3 and first is not None and first.dim() == 1 and first.dtype in (torch.int64, torch.int32):
        return _or_values(_picked(w, first), func, args, kwargs)
    operand = w._rowwise
    used = sum(i.dim() if i is not None and i.dtype in (torch.bool, torch.uint8) else 1 for i in indices)
    stacked = operand is not None and operand.has_stack_scales
    trailing = 1 if w.format.block[0] == 1 and not stacked else 2
    if operand is None or w.format.block[0] == FULL or used > w.dim() - trailing:
        return read(func, args, kwargs, CUTS)  # type: ignore[no-any-return]

    def pick(t: Tensor) -> Tensor:
        return on_bytes(t, lambda raw: aten.index.Tensor(raw, indices).contiguous())

    data = pick(operand.data)
    size = (*data.shape[:-1], w.shape[-1])
    picked = operand.with_scales(data, pick(operand.scale), _global_scale(operand, pick), size)
    return w.replace(picked, None, size)


@implements(aten.constant_pad_nd.default)
def constant_pad_nd(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Zero codes for zeros after the end of any dimension, or on both sides of one that is not blocked.

    Without any values to add, a copy, as in torch.
    """
    w, pad, value = (*args, kwargs.get("value", 0))[:3]
    out = outer(func, w, args, kwargs)
    if not any(pad):
        return w.clone()  # type: ignore[no-any-return]
    if value != 0 or min(pad) < 0:
        return read(func, args, kwargs, CUTS)  # type: ignore[no-any-return]
    zero_scale = 1.0 if w.format.scale.dtype is torch.float32 else 0
    ends = {w.dim() - 1 - i // 2: (pad[i], pad[i + 1]) for i in range(0, len(pad), 2)}

    def padded(operand: Operand, dims: list[int]) -> Operand | None:
        blocks = {len(dims) - 1: operand.format.block[1], len(dims) - 2: operand.format.block[0]}
        before = [ends.get(d, (0, 0))[0] for d in dims]
        if FULL in operand.format.block or any(n for i, n in enumerate(before) if blocks.get(i, 1) != 1):
            return None
        shape = tuple(out.shape[d] for d in dims)

        def grow(t: Tensor, target: tuple[int, ...], fill: float) -> Tensor:
            first = [0 if t.shape[i] == target[i] else n for i, n in enumerate(before)]
            spans = [n for i in reversed(range(t.dim())) for n in (first[i], target[i] - t.shape[i] - first[i])]
            return on_bytes(t, lambda raw: F.pad(raw, spans, value=fill))

        data = operand.data if shape[-1] == operand.shape[-1] else clear_padding(operand)
        data = grow(data, operand.format.data_shape(shape), 0)
        global_scale = _global_scale(operand, lambda t: grow(t, operand.format.global_scale_shape(shape), 1.0))
        scale = grow(operand.scale, operand.format.scale_shape(shape), zero_scale)
        return operand.with_scales(data, scale, global_scale, shape)

    return _or_values(with_operands(w, padded, tuple(out.shape), out.stride()), func, args, kwargs)

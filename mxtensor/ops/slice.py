"""Slices of a tensor along a dimension: whole blocks stay quantized and share memory."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..core.dispatch import implements
from ..core.tracing import guard_int
from ..numerics.formats import FULL
from ..numerics.operand import Operand
from ..tensor.mxtensor import MXTensor
from .fallback import read
from .layout import finish, outer, relabel, why_cut, with_operands

aten = torch.ops.aten


def _count(start: int, end: int, step: int) -> int:
    """How many indices a slice has. With step 1 no comparison is made, so that a symbolic start is not guarded on."""
    return end - start if step == 1 else len(range(start, end, step))


def _slice_operand(operand: Operand, place: int, start: int, end: int, step: int) -> Operand | None:
    """``operand[start:end:step]`` along its own dimension ``place`` (negative); None if that cuts a block."""
    length = operand.shape[place]
    block = operand.format.block[place + 2] if place >= -2 else 1
    shape = list(operand.shape)
    shape[place] = _count(start, end, step)

    def take(t: Tensor, start: int, end: int, step: int = 1) -> Tensor:
        return aten.slice.Tensor(t, t.dim() + place, start, end, step)  # type: ignore[no-any-return]

    cut = partial(operand.format.why_not_split, place)
    if block == 1:
        data, scale = take(operand.data, start, end, step), operand.scale
        if operand.format.block[0] != FULL:
            scale = take(scale, start, end, step)
    elif block == FULL and not operand.format.element.packed:
        data, scale = take(operand.data, start, end, step), operand.scale
    elif step == 1 and cut(start) is None and (cut(end) is None or end == length):
        place_of_codes = operand.format.element.data_cols if place == -1 else int  # the last dimension may be packed
        data = take(operand.data, place_of_codes(start), place_of_codes(end))
        scale = take(operand.scale, start // block, -(-end // block))
    else:
        return None
    if FULL in operand.format.block and shape[place] == 0:
        scale = take(scale, 0, 0)  # no values, no scale
    return operand.moved(data, scale, shape, lambda values: take(values, start, end, step))


def sliced(w: MXTensor, dim: int, start: int, end: int, step: int, stride: tuple[int, ...]) -> MXTensor | None:
    """The slice of every operand that can give it."""

    def piece(operand: Operand, dims: list[int]) -> Operand | None:
        return _slice_operand(operand, dims.index(dim) - w.dim(), start, end, step)

    size = list(w.shape)
    size[dim] = _count(start, end, step)
    return with_operands(w, piece, tuple(size), stride)


@implements(aten.slice.Tensor)
def slice_(func: Any, args: Any, kwargs: Any) -> Any:
    """Any slice across blocks; along them, one that starts and ends on block boundaries."""
    defaults = 0, None, None, 1  # of dim, start, end and step
    given: tuple[Any, ...] = (*args, *defaults[len(args) - 1 :])
    w, dim, start, end, step = given
    dim = dim % w.dim()
    start, end, _ = slice(start, end, step).indices(w.shape[dim])
    out = outer(func, w, args, kwargs)
    result = sliced(w, dim, start, max(start, end), step, out.stride())
    return finish(func, args, kwargs, result, f"[{start}:{end}:{step}] along dimension {dim}", out.storage_offset())


@implements(aten.select.int)
def select(func: Any, args: Any, kwargs: Any) -> Any:
    """One index of a dimension that is not blocked."""
    w, dim, index = args
    args = w, dim, index = w, dim, guard_int(index)
    out = outer(func, w, args, kwargs)
    dim = dim % w.dim()
    args = w, dim, index
    index = index + w.shape[dim] if index < 0 else index
    one = sliced(w, dim, index, index + 1, 1, w.stride())
    result = None
    if one is not None:
        result = relabel(one, [d for d in range(w.dim()) if d != dim], tuple(out.shape), out.stride())
    return finish(func, args, kwargs, result, f"index {index} of dimension {dim}", out.storage_offset())


@implements(aten.split.Tensor, aten.split_with_sizes.default)
def split(func: Any, args: Any, kwargs: Any) -> Any:
    """Slices of equal length, the last one shorter, or of the lengths given.

    All are quantized, or none, because ranks that get one each must store the same.
    """
    w, lengths, dim = (*args, 0)[:3] if "dim" not in kwargs else (*args[:2], kwargs["dim"])
    outer(func, w, args, kwargs)  # torch's errors
    if func is aten.split.Tensor:
        total = w.shape[dim]
        lengths = [min(lengths, total - i) for i in range(0, total, lengths)] or [0]  # of no values, one empty slice
    ends = list(accumulate(lengths))
    spans = list(zip([0, *ends], ends, strict=False))
    for start, end in spans:
        if sliced(w, dim % w.dim(), start, end, 1, w.stride()) is None:
            return read(func, args, kwargs, why_cut(w, f"[{start}:{end}:1] along dimension {dim}"))
    return [aten.slice.Tensor(w, dim, start, end) for start, end in spans]


@implements(aten.unbind.int)
def unbind(func: Any, args: Any, kwargs: Any) -> Any:
    """Every index of a dimension."""
    w, dim = (*args, 0)[:2] if "dim" not in kwargs else (args[0], kwargs["dim"])
    out: list[Tensor] = []
    for i in range(w.shape[dim]):
        out.append(aten.select.int(w, dim, i))
        if not isinstance(out[-1], MXTensor):
            return read(func, args, kwargs, why_cut(w, f"an index of dimension {dim}"))
    return out

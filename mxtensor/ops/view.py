"""Views: whatever keeps blocks whole moves no data; the two orientations trade places in a transpose."""

from __future__ import annotations

from typing import Any

import torch

from ..core.compat import return_and_correct_aliasing
from ..core.dispatch import implements
from ..core.shapes import contiguous_stride, inferred_shape, wrapped_dim
from ..numerics.formats import FULL
from ..numerics.operand import Operand
from ..tensor.fsdp import flat_values
from ..tensor.mxtensor import MXTensor
from .layout import Dims, assemble, finish, order, outer, relabel, relabel_operand, sides

aten = torch.ops.aten


@implements(aten.detach.default, aten.alias.default)
def alias(func: Any, args: Any, kwargs: Any) -> Any:
    """The same operands under a new facade."""
    return finish(func, args, kwargs, args[0].map_components(func), "an alias")


def _permuted(func: Any, args: Any, kwargs: Any, dims: list[int]) -> Any:
    w = args[0]
    size, stride = tuple(w.shape[d] for d in dims), tuple(w.stride(d) for d in dims)
    return finish(func, args, kwargs, relabel(w, [*dims], size, stride), f"the permutation {tuple(dims)}")


@implements(aten.t.default)
def t(func: Any, args: Any, kwargs: Any) -> Any:
    """Blocks cannot turn, but the two copies can trade places."""
    return _permuted(func, args, kwargs, list(reversed(range(args[0].dim()))))


@implements(aten.transpose.int)
def transpose(func: Any, args: Any, kwargs: Any) -> Any:
    """As ``t``; leading dimensions may trade places too."""
    w, first, second = args
    dims = list(range(w.dim()))
    first, second = wrapped_dim(first, w.dim()), wrapped_dim(second, w.dim())
    dims[first], dims[second] = dims[second], dims[first]
    return _permuted(func, args, kwargs, dims)


@implements(aten.permute.default)
def permute(func: Any, args: Any, kwargs: Any) -> Any:
    """Any order that leaves a blocked dimension in one of the last two places."""
    w, dims = args
    return _permuted(func, args, kwargs, [wrapped_dim(dim, w.dim()) for dim in dims])


@implements(aten.unsqueeze.default)
def unsqueeze(func: Any, args: Any, kwargs: Any) -> Any:
    """A fresh dimension of size 1."""
    w, dim = args
    dim = dim + w.dim() + 1 if dim < 0 else dim
    out = outer(func, w, args, kwargs)
    new: Dims = [*range(dim), None, *range(dim, w.dim())]
    return finish(func, args, kwargs, relabel(w, new, tuple(out.shape), out.stride()), f"a dimension at {dim}")


@implements(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(func: Any, args: Any, kwargs: Any) -> Any:
    """Dimensions of size 1 leave."""
    w = args[0]
    wanted = range(w.dim()) if len(args) < 2 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = {d % w.dim() for d in wanted if w.shape[d] == 1}
    out = outer(func, w, args, kwargs)
    new: Dims = [d for d in range(w.dim()) if d not in gone]
    return finish(func, args, kwargs, relabel(w, new, tuple(out.shape), out.stride()), f"squeezing {sorted(gone)}")


@implements(aten.expand.default)
def expand(func: Any, args: Any, kwargs: Any) -> Any:
    """Dimensions that are not blocked repeat without being copied."""
    w = args[0]
    out = outer(func, w, args, kwargs)
    size, fresh = tuple(out.shape), out.dim() - w.dim()
    new: Dims = [*([None] * fresh), *range(w.dim())]
    before = (*([1] * fresh), *w.shape)
    placed: dict[bool, Operand] = {}
    for operand, old in sides(w):
        moved = relabel_operand(operand, old, new, before)
        if moved is None:
            continue
        columnwise, start = moved
        target = order(len(size), columnwise)
        grown = [i for i, d in enumerate(target) if size[d] != before[d]]
        tiled = operand.format.block[0] not in (1, FULL)
        if len(target) - 1 in grown or (tiled and len(target) - 2 in grown):
            continue
        shape = tuple(size[d] for d in target)
        shared = {1: 1, FULL: len(target)}.get(operand.format.block[0], min(2, len(target)))  # dims one scale spans
        data = start.data.expand(*shape[:-1], -1)
        scale = start.scale.expand(*shape[: len(target) - shared], *([-1] * shared))
        placed[columnwise] = start.with_blocks(data, scale, shape)
    result = assemble(w, placed.get(False), placed.get(True), size, out.stride())
    return finish(func, args, kwargs, result, f"expanding to {size}")


# ---------------------------------------------------------------------------------------------- reshapes


def _reshape_rowwise(operand: Operand, size: tuple[int, ...]) -> Operand | None:
    """Row-major values keep their blocks if the last dimension stays, or was and becomes whole blocks."""
    rows, cols = operand.format.block
    old, shape = operand.shape, tuple(size)
    if not shape:
        return None
    whole_columns = cols != FULL and old[-1] % cols == 0 and shape[-1] % cols == 0
    if rows == FULL:
        pass
    elif old[-1] != shape[-1] and (rows != 1 or not whole_columns):
        return None
    elif rows != 1:
        before, after = (s[-2] if len(s) > 1 else 1 for s in (old, shape))
        if before != after and (before % rows or after % rows):
            return None
    return _reshape_components(operand, shape)


def _reshape_columnwise(operand: Operand, size: tuple[int, ...]) -> Operand | None:
    """Stored transposed, it follows only where the last two dimensions stay."""
    shape = (*size[:-2], *reversed(size[-2:]))
    if len(size) < 2 or shape[-2:] != operand.shape[-2:]:
        return None
    return _reshape_components(operand, shape)


def _reshape_components(operand: Operand, shape: tuple[int, ...]) -> Operand:
    data = operand.data.reshape(operand.format.data_shape(shape))
    scale = operand.scale.reshape(operand.format.scale_shape(shape))
    return operand.with_blocks(data, scale, shape)


def reshaped(w: MXTensor, size: tuple[int, ...], stride: tuple[int, ...]) -> MXTensor | None:
    """``w`` as ``size``; None if that would cut a block."""
    rowwise = None if w._rowwise is None else _reshape_rowwise(w._rowwise, size)
    columnwise = None if w._columnwise is None else _reshape_columnwise(w._columnwise, size)
    return assemble(w, rowwise, columnwise, size, stride)


@implements(aten.view.default, aten._unsafe_view.default)
def view(func: Any, args: Any, kwargs: Any) -> Any:
    """Dimensions merge and split at block boundaries."""
    w = args[0]
    if w.is_contiguous() and w.numel():
        size = inferred_shape(args[1], w.numel()) if -1 in args[1] else tuple(args[1])
        stride = contiguous_stride(size)
        if torch.Size(size).numel() != w.numel():
            raise ValueError(f"{func}: shape {size} does not hold the {w.numel()} values of {tuple(w.shape)}")
    else:
        out = outer(func, w, args, kwargs)
        size, stride = tuple(out.shape), out.stride()
    result = reshaped(w, tuple(size), stride)
    if result is None and w._shard is not None and len(size) == 1:
        return flat_values(w)
    return finish(func, args, kwargs, result, f"the shape {tuple(size)}")


@implements(aten._reshape_alias.default)
def reshape_alias(func: Any, args: Any, kwargs: Any) -> Any:
    """``view`` with the strides spelled out."""
    w, size, stride = args
    return finish(func, args, kwargs, reshaped(w, tuple(size), tuple(stride)), f"the shape {tuple(size)}")


# ---------------------------------------------------------------------------------------------- in place


@implements(
    aten.t_.default, aten.transpose_.default, aten.unsqueeze_.default, aten.as_strided_.default,
    aten.squeeze_.default, aten.squeeze_.dim, aten.squeeze_.dims,
)  # fmt: skip
def view_(func: Any, args: Any, kwargs: Any) -> Any:
    """The view's operands and facade become the tensor's own, where blocks stay whole; refused where they do not."""
    w = args[0]
    views = getattr(aten, func._schema.name.removeprefix("aten::").removesuffix("_"))
    view = getattr(views, func._overloadname, None) or views.int  # transpose_ has no overload name, transpose has
    out = view(w, *args[1:], **kwargs)
    if not isinstance(out, MXTensor):
        raise NotImplementedError(
            f"{func} of an MXTensor of shape {tuple(w.shape)} is refused: it would cut blocks of {w.format} held "
            f"{w.orientation.label}; use the op without the underscore, whose result is dequantized"
        )
    w._rowwise, w._columnwise = out._rowwise, out._columnwise
    return return_and_correct_aliasing(func, args, kwargs, out)

"""Views: those of whole blocks move no data; a transpose swaps the rowwise and columnwise operands."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ..core.compat import forget_graphs, return_and_correct_aliasing
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
    """The same operands in a new outer tensor."""
    return finish(func, args, kwargs, args[0].map_components(func), "an alias")


def _permuted(func: Any, args: Any, kwargs: Any, dims: list[int]) -> Any:
    w = args[0]
    size, stride = tuple(w.shape[d] for d in dims), tuple(w.stride(d) for d in dims)
    return finish(func, args, kwargs, relabel(w, [*dims], size, stride), f"the permutation {tuple(dims)}")


@implements(aten.t.default)
def t(func: Any, args: Any, kwargs: Any) -> Any:
    """Swap the rowwise and columnwise operands; no data moves."""
    return _permuted(func, args, kwargs, list(reversed(range(args[0].dim()))))


@implements(aten.transpose.int)
def transpose(func: Any, args: Any, kwargs: Any) -> Any:
    """Like ``t``; leading dimensions may be swapped too."""
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
    """A new dimension of size 1."""
    w, dim = args
    dim = dim + w.dim() + 1 if dim < 0 else dim
    out = outer(func, w, args, kwargs)
    new: Dims = [*range(dim), None, *range(dim, w.dim())]
    return finish(func, args, kwargs, relabel(w, new, tuple(out.shape), out.stride()), f"a dimension at {dim}")


@implements(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def squeeze(func: Any, args: Any, kwargs: Any) -> Any:
    """Remove dimensions of size 1."""
    w = args[0]
    wanted = range(w.dim()) if len(args) < 2 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = {d % w.dim() for d in wanted if w.shape[d] == 1}
    out = outer(func, w, args, kwargs)
    new: Dims = [d for d in range(w.dim()) if d not in gone]
    return finish(func, args, kwargs, relabel(w, new, tuple(out.shape), out.stride()), f"squeezing {sorted(gone)}")


@implements(aten.expand.default)
def expand(func: Any, args: Any, kwargs: Any) -> Any:
    """Repeat dimensions that are not blocked, without a copy."""
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
    """Reshape values in row-major order: blocks stay whole if the last dimension stays, or is whole blocks before and
    after."""
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
    return _view_components(operand, shape)


def _reshape_columnwise(operand: Operand, size: tuple[int, ...]) -> Operand | None:
    """Stored transposed: blocks stay whole only if the last two dimensions stay."""
    shape = (*size[:-2], *reversed(size[-2:]))
    if len(size) < 2 or shape[-2:] != operand.shape[-2:]:
        return None
    return _view_components(operand, shape)


def _view_components(operand: Operand, shape: tuple[int, ...]) -> Operand | None:
    """Views of codes and scales; None if torch would have to copy them, because a write to a copy is lost."""
    try:
        data = operand.data.view(operand.format.data_shape(shape))
        scale = operand.scale.view(operand.format.scale_shape(shape))
    except RuntimeError:
        return None
    return operand.with_blocks(data, scale, shape)


def reshaped(w: MXTensor, size: tuple[int, ...], stride: tuple[int, ...]) -> MXTensor | None:
    """``w`` as ``size``; None if that would cut a block or copy codes."""
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
        if prod(size) != w.numel():
            raise ValueError(f"{func}: shape {size} cannot take the {w.numel()} values of {tuple(w.shape)}")
    else:
        out = outer(func, w, args, kwargs)
        size, stride = tuple(out.shape), out.stride()
    result = reshaped(w, tuple(size), stride)
    if result is None and w._shard is not None and len(size) == 1:
        return flat_values(w)
    return finish(func, args, kwargs, result, f"the shape {tuple(size)}")


@implements(aten._reshape_alias.default)
def reshape_alias(func: Any, args: Any, kwargs: Any) -> Any:
    """``view`` with explicit strides."""
    w, size, stride = args
    return finish(func, args, kwargs, reshaped(w, tuple(size), tuple(stride)), f"the shape {tuple(size)}")


# ---------------------------------------------------------------------------------------------- in place


@implements(
    aten.t_.default, aten.transpose_.default, aten.unsqueeze_.default, aten.as_strided_.default,
    aten.squeeze_.default, aten.squeeze_.dim, aten.squeeze_.dims,
)  # fmt: skip
def view_(func: Any, args: Any, kwargs: Any) -> Any:
    """The tensor gets the operands, shape and strides of the view. Raises NotImplementedError if that cuts blocks."""
    w = args[0]
    views = getattr(aten, func._schema.name.removeprefix("aten::").removesuffix("_"))
    view = getattr(views, func._overloadname, None) or views.int  # transpose_ has no overload name, transpose has
    out = view(w, *args[1:], **kwargs)
    if not isinstance(out, MXTensor):
        raise NotImplementedError(
            f"{func} of an MXTensor of shape {tuple(w.shape)} is refused: it would cut blocks of {w.format} stored "
            f"{w.orientation.label}; use the op without the underscore, whose result is dequantized"
        )
    w._rowwise, w._columnwise, w._link, w._rotated = out._rowwise, out._columnwise, out._link, out._rotated
    w._dtype = out._dtype
    forget_graphs()
    return return_and_correct_aliasing(func, args, kwargs, out)

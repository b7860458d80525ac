"""Views: those of whole blocks move no data; a transpose swaps the rowwise and columnwise operands."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..core.autograd import count_writes, has_no_memory, mode_of_views
from ..core.compat import forget_graphs, return_and_correct_aliasing, tree_flatten, tree_leaves, tree_unflatten
from ..core.dispatch import VIEW_FALLBACK, arguments_of, implements, names_written
from ..core.explain import measure
from ..core.shapes import contiguous_stride, inferred_shape, wrapped_dim
from ..numerics.formats import FULL
from ..numerics.operand import Operand
from ..tensor.dequantized_view import Decoded, DequantizedView
from ..tensor.fsdp import flat_values
from ..tensor.mxtensor import MXTensor
from .fallback import home_of, is_view, keeps_size, viewed
from .inplace import note, write_back
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
        grown_operand = start.moved(data, scale, shape, partial(Tensor.expand, size=shape))
        if grown_operand is not None:
            placed[columnwise] = grown_operand
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


def _view_components(operand: Operand, shape: tuple[int, ...]) -> Operand | None:
    """Views of codes and scales; None if torch would have to copy them, because a write to a copy is lost."""
    try:
        data = operand.data.view(operand.format.data_shape(shape))
        scale = operand.scale.view(operand.format.scale_shape(shape))
    except RuntimeError:
        return None
    return operand.moved(data, scale, shape, lambda values: values.view(shape))


def reshaped(w: MXTensor, size: tuple[int, ...], stride: tuple[int, ...]) -> MXTensor | None:
    """``w`` as ``size``; None if that would cut a block or copy codes."""
    rowwise = None if w._rowwise is None else _reshape_rowwise(w._rowwise, size)
    columnwise, shape = w._columnwise, (*size[:-2], *reversed(size[-2:]))
    if columnwise is not None:  # stored transposed: blocks stay whole only if the last two dimensions stay
        stay = len(size) >= 2 and shape[-2:] == columnwise.shape[-2:]
        columnwise = _view_components(columnwise, shape) if stay else None
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


# ---------------------------------------------------------------------------------------------- view writes

# Ops of a view that cuts the blocks of an MXTensor: reads are plain, views stay views, writes quantize it again.

_CHANGE_SHAPE = (aten.set_, aten.resize_, aten.resize_as_, aten._resize_output_)
SENDING = ("send", "barrier")
"""The collectives that only read their first argument; others write to it, which their schemas do not declare."""


def _targets(func: Any, args: Any, kwargs: Any) -> list[DequantizedView]:
    """The views that ``func`` writes."""
    named = arguments_of(func, args, kwargs)
    names = names_written(func)
    if func.namespace == "c10d" and func._schema.name.removeprefix("c10d::") not in SENDING:
        names = frozenset((func._schema.arguments[0].name,))
    return [t for name in names for t in tree_leaves(named.get(name)) if isinstance(t, DequantizedView)]


def _check_writable(func: Any, view: DequantizedView) -> Decoded | None:
    """The decoded values of which ``view`` is a view; None if it has a memory of its own.

    Raises NotImplementedError where a write would not reach the MXTensor.
    """
    if view._has_own_memory:
        return None
    if func.namespace == "c10d" or torch.Tag.inplace_view in func.tags or func._overloadpacket in _CHANGE_SHAPE:
        raise NotImplementedError(
            f"{func} of a view {tuple(view.shape)} that cuts the blocks of an MXTensor is refused: its values have a "
            "memory and a shape of their own; use clone() and write the result back with copy_()"
        )
    if view._decoded is None:
        raise NotImplementedError(
            f"{func} cannot write to this view {tuple(view.shape)} that cuts the blocks of an MXTensor: torch.compile "
            "or a lazy minus sign has separated it from the tensor; write to a view that is made here, or "
            "w[index] = values"
        )
    return view._decoded


def _values(t: Any) -> Any:
    """The plain tensor of a view, up to date with its MXTensor; any other argument itself."""
    if not isinstance(t, DequantizedView):
        return t
    if t._decoded is not None:
        t._decoded.values()
    return t._plain


def view_fallback(func: Any, args: Any, kwargs: Any) -> Any:
    """The rule for every op of a ``DequantizedView``.

    Raises NotImplementedError for a write that cannot reach the MXTensor.
    """
    if func._can_decompose():
        return func.decompose(*args, **kwargs)  # inference mode does not decompose composite ops
    if keeps_size(func, args):
        return args[0]
    targets = _targets(func, args, kwargs)
    flat, spec = tree_flatten((args, kwargs))
    if targets:
        return _write(func, flat, spec, targets)
    first = flat[0]
    args, kwargs = tree_unflatten([_values(t) for t in flat], spec)
    if is_view(func) and isinstance(first, DequantizedView):
        with mode_of_views(func, first):
            return viewed(func, args, kwargs, first._decoded, first._view)
    return func(*args, **kwargs)


def _write(func: Any, flat: list[Any], spec: Any, targets: list[DequantizedView]) -> Any:
    found = [(t, t.shape, _check_writable(func, t)) for t in targets]
    bases = [decoded.base for _, _, decoded in found if decoded is not None]
    reason = "writes a view that cuts blocks"
    entry = note(str(func), home_of(func), bases, "requantized", reason) if bases else None
    with measure(entry):
        plain = [_values(t) for t in flat]
        for _, _, decoded in found:
            if decoded is not None:
                decoded.begin_write()
        args, kwargs = tree_unflatten(plain, spec)
        out = func(*args, **kwargs)
        for target, shape, decoded in found:
            if decoded is None:
                continue
            if target._plain.shape != shape:
                raise ValueError(
                    f"{func}: the result has shape {tuple(target._plain.shape)}, and out= is a view {tuple(shape)} of "
                    "an MXTensor, which cannot be resized"
                )
            # Other arguments may have been written that are the same MXTensor or views of it.
            write_back(decoded.base, decoded.with_written(target))
            if has_no_memory(target._plain):
                decoded.values()  # now, because a graph that returns the view may not compute them later
        count_writes(func, targets)
        given = {id(p): t for p, t in zip(plain, flat, strict=True) if isinstance(t, DequantizedView)}
        results, structure = tree_flatten(out)
        return tree_unflatten([given.get(id(r), r) for r in results], structure)


VIEW_FALLBACK[:] = [view_fallback]

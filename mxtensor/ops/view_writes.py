"""Ops of a view that cuts the blocks of an MXTensor: reads are plain, views stay views, writes quantize it again."""

from __future__ import annotations

from typing import Any

import torch

from ..core.autograd import mode_of_views
from ..core.compat import tree_flatten, tree_leaves, tree_unflatten
from ..core.dispatch import VIEW_FALLBACK, arguments_of, names_written
from ..core.explain import measure
from ..core.writes import count_writes, has_no_memory
from ..tensor.dequantized_view import Decoded, DequantizedView
from .fallback import is_view, keeps_size, note, viewed
from .inplace import write_back

aten = torch.ops.aten
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
    entry = note(func, bases, "requantized", "writes a view that cuts blocks") if bases else None
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

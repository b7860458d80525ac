"""How the dimensions of the outer tensor map to those of its operands.

An operand has the dimensions of the outer tensor with the blocked one last. Every structural rule asks three questions:
where is the blocked dimension now, can this operand follow, and what happens to data and scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.compat import return_and_correct_aliasing
from ..numerics.formats import FULL
from ..numerics.operand import Operand
from ..tensor.dequantized_view import Link
from ..tensor.mxtensor import MXTensor
from .fallback import read
from .inplace import lacks_values

Dims = list[int | None]


def order(ndim: int, columnwise: bool) -> list[int]:
    """The outer dimensions in the order in which an operand stores them."""
    dims = list(range(ndim))
    if columnwise:
        dims[-2:] = reversed(dims[-2:])
    return dims


def sides(w: MXTensor) -> list[tuple[Operand, list[int]]]:
    """Each operand of ``w``, with its dimension order."""
    out = []
    if w._rowwise is not None:
        out.append((w._rowwise, order(w.dim(), False)))
    if w._columnwise is not None:
        out.append((w._columnwise, order(w.dim(), True)))
    return out


def is_columnwise(dims: list[int]) -> bool:
    """Whether an operand that stores the outer dimensions in this order is the columnwise one."""
    return dims != sorted(dims)


def on_bytes(t: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """``fn`` of codes or scales, one-byte dtypes as uint8: what moves values need not know float8."""
    return fn(t.view(torch.uint8)).view(t.dtype) if t.dtype.itemsize == 1 else fn(t)


def relabel_operand(operand: Operand, old: list[int], new: Dims, size: tuple[int, ...]) -> tuple[bool, Operand] | None:
    """Move an operand stored as ``old`` to an outer tensor with dimensions ``new`` (old indices, None for a new one).

    Returns (columnwise?, operand), or None where the blocked dimension does not end up in one of the last two places
    or a tile would be split. Old dimensions missing from ``new`` have size 1.
    """
    ndim = len(new)
    if old[-1] not in new:
        return None
    place = new.index(old[-1]) - ndim
    if place not in (-1, -2):
        return None
    target = order(ndim, place == -2)
    dims = [new[d] for d in target]
    if operand.format.block[0] not in (1, FULL) and len(old) > 1 and (ndim < 2 or dims[-2] != old[-2]):
        return None
    gone = [i for i, d in enumerate(old) if d not in new]
    remaining = [old.index(d) for d in dims if d is not None]

    def move(t: Tensor) -> Tensor:
        t = t.permute(*gone, *remaining)
        for _ in gone:
            t = t.squeeze(0)
        for i, d in enumerate(dims):
            if d is None:
                t = t.unsqueeze(i)
        return t

    found = operand.moved(move(operand.data), move(operand.scale), tuple(size[d] for d in target), move)
    return None if found is None else (place == -2, found)


def relabel(w: MXTensor, new: Dims, size: tuple[int, ...], stride: tuple[int, ...]) -> MXTensor | None:
    """``w`` with its dimensions permuted, inserted or (size 1) removed; None if no operand can follow."""
    placed: dict[bool, Operand] = {}
    for operand, old in sides(w):
        moved = relabel_operand(operand, old, new, size)
        if moved is not None:
            placed[moved[0]] = moved[1]
    return assemble(w, placed.get(False), placed.get(True), size, stride)


def assemble(
    w: MXTensor, rowwise: Operand | None, columnwise: Operand | None, size: tuple[int, ...], stride: tuple[int, ...]
) -> MXTensor | None:
    """``w.replace``, or None if no operand is left."""
    if rowwise is None and columnwise is None:
        return None
    return w.replace(rowwise, columnwise, size, stride)


def with_operands(
    w: MXTensor, make: Callable[[Operand, list[int]], Operand | None], size: tuple[int, ...], stride: tuple[int, ...]
) -> MXTensor | None:
    """``w`` with each operand replaced by ``make(operand, its dimension order)``, without those for which it is
    None; None if no operand is left."""
    found = {is_columnwise(dims): make(operand, dims) for operand, dims in sides(w)}
    return assemble(w, found.get(False), found.get(True), size, stride)


def outer(func: Any, w: MXTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """``func`` of a meta tensor with the shape of ``w``: its result has the size and stride that torch gives."""
    shadow = torch.empty_strided(tuple(w.shape), w.stride(), dtype=w.dtype, device="meta")
    return func(shadow, *args[1:], **kwargs)  # type: ignore[no-any-return]


def finish(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: MXTensor | None, what: str,
    offset: int | torch.SymInt = 0,
) -> Any:  # fmt: skip
    """Return a view, marked as an alias of its base; if ``out`` is None, a view that cuts blocks: dequantized values.

    ``offset``: number of values of the base before the first one of the view. ``what``: the reason, for the log.
    """
    base = args[0]
    if out is None:
        return read(func, args, kwargs, why_cut(base, what))
    out = _as_view_of(base, out, base.storage_offset() + offset)
    if _same_places(out, base) and not lacks_values(out, base):
        out._link = base._link
    elif base._link is not None or len(base.operands) > 1 or lacks_values(out, base):  # what it is computed from, too
        out._link = Link(base.same(), lambda dense: func(dense, *args[1:], **kwargs))
    return return_and_correct_aliasing(func, args, kwargs, out)


def _same_places(out: MXTensor, base: MXTensor) -> bool:
    """Whether a view has the shape and strides of its base."""
    # the number of dimensions first: tuples compare values before lengths, a guard for a batch size in a traced graph
    return out.dim() == base.dim() and out.shape == base.shape and out.stride() == base.stride()


def why_cut(w: MXTensor, what: str) -> str:
    """The reason why a view is dequantized, for the log."""
    block = "x".join("all" if b == FULL else str(b) for b in w.format.block)
    return f"{what} cuts {block} blocks of {w.orientation.label}"


def _as_view_of(base: MXTensor, out: MXTensor, offset: int) -> MXTensor:
    """torch accepts a view of a base only if both are inference tensors or neither is, in any mode."""
    inference = base.is_inference()
    if out.is_inference() == inference and out.storage_offset() == offset:
        return out
    with torch.inference_mode(inference):
        view = out.replace(out._rowwise, out._columnwise, tuple(out.shape), out.stride(), offset=offset)
    view._rotated = out._rotated
    return view

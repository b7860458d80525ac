"""Writes: the values are quantized again into the existing buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.autograd import count_writes, has_no_memory, note_write
from ..core.compat import forget_graphs
from ..core.dispatch import implements, implements_function, is_strict
from ..core.explain import Entry, measure, record
from ..core.kernel import Spec
from ..core.tracing import is_traced
from ..kernels.quantize.choose_cast import quantize_operand
from ..kernels.quantize.hadamard import quantize_rotated
from ..numerics.derived import forget
from ..numerics.formats import FULL
from ..numerics.operand import Operand
from ..numerics.reference import SOURCE_DTYPES
from ..numerics.validate import is_non_overlapping
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from ..tensor.rotated import RotatedTensor

aten = torch.ops.aten


WAYS_OUT = {
    "dequantized": "call .dequantize() first",
    "high precision": "call .dequantize() first",
    "requantized": "compute the new values of .dequantize(), and write them by copy_()",
}
"""How an op runs that dequantizes -> what to do about it inside ``strict()``."""


def note(
    op: str, home: str, tensors: Sequence[MXTensor], what: str, reason: str, way_out: str | None = None
) -> Entry | None:
    """Log that MXTensors are dequantized, for ``measure``; raise NotImplementedError inside ``mx.strict()``.

    ``home``: the file of a rule for ``op``. ``what``: how the op runs, a key of ``WAYS_OUT``. ``way_out``: a better one
    than that of ``WAYS_OUT``.
    """
    if is_strict():
        raise NotImplementedError(
            f"{op} would dequantize ({reason}), which mx.strict() forbids; {way_out or WAYS_OUT[what]} "
            f"(a rule for it would go to mxtensor/ops/{home})"
        )
    first = tensors[0]
    shapes, names = tuple(tuple(t.shape) for t in tensors[:3]), tuple(str(t.format) for t in tensors[:3])
    spec = Spec(op, shapes, names, first.dtype, first.device, is_traced(*first.components))
    return record(spec, what, {"quantized": reason})


def _write(target: Operand, source: Operand) -> None:
    if is_traced(target.data):  # a graph writes its inputs only, and a view in another dtype is none
        target.data.copy_(source.data)
    else:
        target.data.view(torch.uint8).copy_(source.data.view(torch.uint8))
    target.scale.copy_(source.scale)
    if target.global_scale is not None and source.global_scale is not None:
        target.global_scale.copy_(source.global_scale)
    note_write(target.data)
    if not has_no_memory(target.scale):
        forget(target.scale)


def lacks_values(view: MXTensor, base: MXTensor) -> bool:
    """Whether ``view`` lacks a copy that ``base`` has, or shares a scale with values outside it: one that belongs to
    other values of ``base`` too, or is stored once for several matrices."""
    if len(base.operands) > len(view.operands) or (base._rotated is not None and view._rotated is None):
        return True
    if FULL in base.format.block:
        return view.numel() != base.numel()
    if not base.format.global_scale:
        return False
    of_view, of_base = (t.operands[0].global_scale if t.operands else None for t in (view, base))
    if of_view is None or of_base is None or (view.numel() == base.numel() and of_view.shape == of_base.shape):
        return view.numel() != base.numel()
    whole = base.dim() > 2 and view.dim() > 1 and view.shape[-2:] == base.shape[-2:]
    return not whole or not is_non_overlapping(of_view.shape, of_view.stride())


def _writes_all(w: MXTensor) -> bool:
    """Whether a write to the operands of ``w`` changes every copy of these values, those of its bases too."""
    if w._link is None:
        return True
    base: MXTensor | None = w._link.base
    return base is not None and not lacks_values(w, base) and _writes_all(base)


def write_back(w: MXTensor, values: Tensor) -> MXTensor:
    """Quantize ``values`` (any dtype, broadcastable to ``w``) into every operand of ``w``, and of what it is a view of.

    Raises NotImplementedError for a view that has only a part of its base, which torch.compile does not pass on.
    """
    dtype = values.dtype if values.dtype in SOURCE_DTYPES or values.is_complex() else w.dtype
    values = values.to(w.device, dtype).expand(w.shape)
    if w._link is not None and not _writes_all(w):
        base, view = w._link
        if base is None:
            raise NotImplementedError(
                f"a view {tuple(w.shape)} of an MXTensor in {w.format} cannot be written in a graph that has only the "
                "view: it shares scales or copies with the whole; pass the whole tensor to the graph and write a view "
                "of it there"
            )
        dense = base.values_to_write()
        assert view is not None
        view(dense).copy_(values)
        write_back(base, dense)
        return w
    if w._rowwise is not None:
        _write(w._rowwise, quantize_operand(values, w.recipe.stored))
    if w._columnwise is not None:
        _write(w._columnwise, quantize_operand(values.transpose(-1, -2), w.recipe.stored))
    if w._rotated is not None:
        _write(w._rotated.operand, quantize_rotated(values, w.recipe.stored, w._rotated.signs).operand)
    return w


def _same_operands(a: MXTensor, b: MXTensor) -> bool:
    """Whether the bytes of ``b`` can be copied to ``a``: equal casts and the same copies."""
    pairs = ((a._rowwise, b._rowwise), (a._columnwise, b._columnwise))
    alike = a.recipe.stored == b.recipe.stored and a.shape == b.shape and a._signs == b._signs
    return alike and all((p is None) == (q is None) for p, q in pairs)


def _copies(w: MXTensor) -> list[Operand]:
    """Every stored operand, the rotated one too."""
    return [o for o in (w._rowwise, w._columnwise, w._rotated and w._rotated.operand) if o is not None]


@implements(aten.copy_.default)
def copy_(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Into a plain tensor: values in its dtype. From an equal MXTensor: bytes. Otherwise values, quantized again."""
    target, source = args[:2]
    if not isinstance(target, MXTensor):
        return target.copy_(source.dequantize(target.dtype))  # type: ignore[no-any-return]
    if isinstance(source, MXTensor):
        if _same_operands(target, source) and _writes_all(target):
            for mine, theirs in zip(_copies(target), _copies(source), strict=True):
                _write(mine, theirs)
            return target
        source = source.dequantize(torch.float32)
    if _writes_all(target):
        return write_back(target, source)
    assert target._link is not None
    whole = target if target._link.base is None else target._link.base
    reason = "writes a view that shares scales or copies with the whole"
    with measure(note(str(func), "inplace.py", [whole], "requantized", reason)):
        return write_back(target, source)


@implements(aten._foreach_copy_.default)
def foreach_copy_(func: Any, args: Any, kwargs: Any) -> None:
    """``copy_`` of each pair."""
    for target, source in zip(*args[:2], strict=True):
        target.copy_(source)
    count_writes(func, args[0])


@implements_function(Tensor.__setitem__)
def setitem(target: Tensor, index: Any, value: Any) -> None:
    """``w[index] = value``: a view of whole blocks is written in place; other indices quantize all of ``w`` again."""
    if not isinstance(target, MXTensor):
        target[index] = value.dequantize(target.dtype)
        return
    with torch.no_grad():
        view = target[index]
    if isinstance(view, MXTensor) and view._is_view():
        view.copy_(value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=target.dtype))
        return
    reason = "writes values at indices that are not a view"
    with measure(note("Tensor.__setitem__", "inplace.py", [target], "requantized", reason)):
        values = target.values_to_write()
        values[index] = value.dequantize() if isinstance(value, MXTensor) else value
        target.copy_(values)


@implements_function(Tensor.data.__set__)  # type: ignore[attr-defined]
def set_data(target: Tensor, value: Tensor) -> None:
    """``w.data = value``: ``w`` gets the operands of an MXTensor, or new ones for plain values, and their shape.

    As in torch, memory is shared with ``value`` if that is an MXTensor, and what shared memory with ``w`` before keeps
    its values. torch asks the target alone, so no rule sees ``plain.data = w``, which leaves a tensor without memory.
    """
    assert isinstance(target, MXTensor)
    new = value
    if isinstance(target, RotatedTensor) and not isinstance(value, RotatedTensor):
        new = target.quantized(value)
    elif isinstance(value, RotatedTensor) and not isinstance(target, RotatedTensor):
        raise TypeError(
            f"{value!r} has a rotated copy only, which cannot become the data of {target!r}; use copy_() to write its "
            "values"
        )
    elif not isinstance(value, MXTensor):
        new = quantize_as(value, target.recipe, target.copies)
        new._shard = target._shard if new.shape == target.shape else None
    assert isinstance(new, MXTensor)
    before = _layout(target)
    with torch.no_grad():
        target.data = new  # shape, strides, dtype and device of the outer tensor
    if new.recipe.stored != target.recipe.stored:  # otherwise the layer keeps the cast of its input
        target.recipe = new.recipe
    target._rowwise, target._columnwise, target._dtype = new._rowwise, new._columnwise, new._dtype
    target._link, target._shard, target._rotated = new._link, new._shard, new._rotated
    if _layout(target) != before:
        forget_graphs()


def _layout(w: MXTensor) -> Any:
    """What a compiled graph takes to be the same in every call."""
    return w.__tensor_flatten__(), w.shape, w.stride(), w.device, [(t.shape, t.stride()) for t in w.components]

"""``w.float()``, ``w.half()``, ``w.to(dtype)``: plain values. Those of a module (``model.half()``) stay quantized.

A copy in another dtype is what code computes with in that dtype, such as the master weights of an optimizer: with codes
and scales, it would lose every update that is smaller than their rounding. TransformerEngine's tensors do the same.
These are rules of torch functions, not of aten ops: ``aten._to_copy``, by which torch.autocast converts an operand of a
product, keeps codes and changes the outer dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.compat_hooks import distributed_caller, filler
from ..core.dispatch import implements, implements_function
from ..kernels.quantize.choose_cast import dequantize_operand
from ..numerics.reference import SOURCE_DTYPES
from ..tensor.assigned import for_module
from ..tensor.mxtensor import MXTensor
from .layout import outer


def _plain(before: Any, w: Any) -> Tensor:
    """``before``, whose dtype was converted to that of ``w``, as plain values; for a module ``w``."""
    if not isinstance(w, MXTensor):
        return w  # type: ignore[no-any-return]
    name = filler()
    return w.dequantize() if name is None else for_module(before, w) if name == "_apply" else w


def _moved(before: Any, w: Any) -> Tensor:
    """``before`` on another device, or there already."""
    return for_module(before, w) if isinstance(w, MXTensor) and filler() == "_apply" else w


@implements_function(Tensor.to)
def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """With a dtype plain values, with a device alone the same codes there."""
    # another tensor gives its dtype
    names_dtype = any(isinstance(value, (torch.dtype, Tensor)) for value in (*args, *kwargs.values()))
    return (_plain if names_dtype else _moved)(self, self.to(*args, **kwargs))


@implements_function(Tensor.cpu)
def to_cpu(self: Tensor, **kwargs: Any) -> Tensor:
    """The same codes in the memory of the CPU."""
    return _moved(self, self.cpu(**kwargs))


@implements_function(Tensor.cuda)
def to_cuda(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The same codes on a GPU."""
    return _moved(self, self.cuda(*args, **kwargs))


@implements_function(Tensor.float)
def to_float32(self: Tensor, **kwargs: Any) -> Tensor:
    """Plain values in float32."""
    return _plain(self, self.float(**kwargs))


@implements_function(Tensor.half)
def to_float16(self: Tensor, **kwargs: Any) -> Tensor:
    """Plain values in float16."""
    return _plain(self, self.half(**kwargs))


@implements_function(Tensor.bfloat16)
def to_bfloat16(self: Tensor, **kwargs: Any) -> Tensor:
    """Plain values in bfloat16."""
    return _plain(self, self.bfloat16(**kwargs))


@implements_function(Tensor.double)
def to_float64(self: Tensor, **kwargs: Any) -> Tensor:
    """Plain values in float64."""
    return _plain(self, self.double(**kwargs))


@implements_function(Tensor.type)
def to_type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Plain values of a dtype or a type of tensors, such as ``torch.FloatTensor``; without one, its name."""
    out = self.type(*args, **kwargs)
    return _plain(self, out) if isinstance(out, Tensor) else out


@implements_function(Tensor.type_as)
def type_as(self: Tensor, other: Tensor) -> Tensor:
    """Plain values in the dtype of ``other``, on its device."""
    return _plain(self, self.type_as(other))


# ---------------------------------------------------------------------------------------------- convert

# Copies and conversions, and the few rules that return plain values.

aten = torch.ops.aten
MAKE_SHARDS = ("fsdp._fully_shard._fsdp_param", "tensor._collective_utils")
"""The modules of ``torch.distributed`` that make a shard, which may be empty, by ``new_zeros``."""


@implements(aten.dequantize.self)
def dequantize(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The values in the outer dtype, with the strides that a copy of the outer tensor has."""
    w = args[0]
    if w._rowwise is not None:
        out = dequantize_operand(w._rowwise, w.dtype)
    else:
        out = dequantize_operand(w._columnwise, w.dtype).transpose(-1, -2)
    stride = _copied(w, {})[0]
    if out.stride() == stride:
        return out
    return torch.empty_strided(tuple(w.shape), stride, dtype=out.dtype, device=out.device).copy_(out)


def _copied(w: MXTensor, options: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, torch.memory_format]]:
    """The strides of a copy of ``w`` with the ``memory_format`` of ``options``, and what its codes are copied with.

    A dense tensor keeps its strides; an expanded or sliced tensor becomes dense. Codes of a contiguous copy are
    contiguous, so that its views are views of them.
    """
    given = {"memory_format": options["memory_format"]} if options.get("memory_format") is not None else {}
    copy = outer(aten.clone.default, w, (w,), given)
    return copy.stride(), {"memory_format": torch.contiguous_format} if copy.is_contiguous() else {}


@implements(aten.clone.default)
def clone(func: Any, args: Any, kwargs: Any) -> MXTensor:
    """Copies of codes and scales; ``memory_format`` decides the outer strides, as it does for a dense tensor."""
    w, (stride, layout) = args[0], _copied(args[0], kwargs)
    return w.map_components(lambda t: torch.clone(t, **layout), stride=stride)  # type: ignore[no-any-return]


@implements(aten._to_copy.default)
def to_copy(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Another float dtype changes the outer dtype only; another device moves the bytes; integers are plain values.

    ``Tensor.to(dtype)`` has a rule of its own (``conversions.py``), which autocast and a DTensor do not ask.
    """
    w, dtype = args[0], kwargs.get("dtype") or args[0].dtype
    if dtype not in SOURCE_DTYPES:
        return aten._to_copy.default(w.dequantize(torch.float32), **kwargs)  # type: ignore[no-any-return]
    where = {k: kwargs[k] for k in ("device", "non_blocking", "pin_memory") if kwargs.get(k) is not None}
    stride, layout = _copied(w, kwargs)
    return w.map_components(lambda t: aten._to_copy.default(t, **where, **layout), dtype=dtype, stride=stride)  # type: ignore


@implements(aten.empty_like.default)
def empty_like(func: Any, args: Any, kwargs: Any) -> Tensor:
    """An uninitialized MXTensor if a device is named (``to_empty``); else a plain buffer to compute in.

    torch's composites compute in such a buffer: ``1 - w`` is ``empty_like(w).fill_(1).sub_(w)``, which must not round.
    """
    w = args[0]
    if kwargs.get("device") is None:
        return fresh_like(func, args, kwargs)  # type: ignore[no-any-return]
    where = {k: kwargs[k] for k in ("device", "pin_memory") if kwargs.get(k) is not None}
    dtype = kwargs.get("dtype") or w.dtype
    stride, layout = _copied(w, kwargs)
    return w.map_components(lambda t: torch.empty_like(t, **where, **layout), dtype=dtype, stride=stride)  # type: ignore


@implements(
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype,
    aten.new_empty.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty_strided.default,
)  # fmt: skip
def fresh_like(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A plain tensor: the state of an optimizer must not be rounded to the format of its parameter."""
    w = args[0]
    shape = torch.empty_strided(tuple(w.shape), w.stride(), dtype=w.dtype, device=w.device)
    return func(shape, *args[1:], **kwargs)  # type: ignore[no-any-return]


@implements(aten.new_zeros.default)
def new_zeros(func: Any, args: Any, kwargs: Any) -> Tensor:
    """A plain tensor. For ``torch.distributed``, which makes shards so, an MXTensor of rows with the same columns."""
    w, size = args
    rows_of_it = w.dim() == len(size) > 1 and tuple(size[1:]) == tuple(w.shape[1:]) and w.is_contiguous()
    if not rows_of_it or distributed_caller(*MAKE_SHARDS) is None:
        return fresh_like(func, args, kwargs)  # type: ignore[no-any-return]
    return w.zeros_of_rows(size[0])  # type: ignore[no-any-return]


@implements(aten.equal.default)
def equal(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether all values are equal, in any two formats."""
    a, b = (t.dequantize() if isinstance(t, MXTensor) else t for t in args[:2])
    return torch.equal(a, b)


@implements(aten.is_pinned.default)
def is_pinned(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether every code and scale is in page-locked memory."""
    return all(part.is_pinned() for part in args[0].components)


@implements(aten._pin_memory.default)
def pin_memory(func: Any, args: Any, kwargs: Any) -> MXTensor:
    """Copies of codes and scales in page-locked memory."""
    return args[0].map_components(torch.Tensor.pin_memory)  # type: ignore[no-any-return]

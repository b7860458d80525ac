"""What a view that cuts blocks is: dequantized values that know the MXTensor they belong to.

A view of whole blocks is an MXTensor over the same codes. Other views have values of their own, so a write to them must
be quantized into the MXTensor (``ops/view.py``), and their values must follow its writes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.autograd import has_no_memory, state_of
from ..core.compat import is_fake, make_wrapper_subclass, no_torch_function
from ..core.compat_compile import run_uncompiled
from ..core.dispatch import VIEW_FALLBACK
from ..core.names import dtype_name

View = Callable[[Tensor], Tensor]
"""The same view of another dense tensor."""


class Link(NamedTuple):
    """The MXTensor that a view of whole blocks is written through: it has values or copies that the view lacks."""

    base: Any
    """None if torch.compile passed the view without it."""
    view: View | None


class Decoded:
    """The values of an MXTensor, decoded again after it was written. Views that cut its blocks are views of them."""

    def __init__(self, base: Any) -> None:
        self.base = base
        values: Tensor = torch.ops.aten.dequantize.self(base)
        self._values = values.clone() if has_no_memory(values) else values  # a traced cast may end in a view
        self._state: tuple[int, ...] | None = state_of(base.components)

    def values(self) -> Tensor:
        """The values as they are now, always in the same memory."""
        if self.stale:
            self._fill(torch.ops.aten.dequantize.self(self.base))
            self._state = state_of(self.base.components)
        return self._values

    @property
    def stale(self) -> bool:
        return self._state != state_of(self.base.components)

    def begin_write(self) -> None:
        """Fill the memory with the values that a write starts from; afterwards it is filled again before it is read."""
        if self._state is None or self.base._link is not None:
            self._fill(self.base.values_to_write())
        else:
            self.values()
        self._state = None

    def _fill(self, values: Tensor) -> None:
        with torch.inference_mode(self._values.is_inference()), torch.no_grad():
            self._values.copy_(values)

    def with_written(self, view: DequantizedView) -> Tensor:
        """The values as they are now, with those of ``view``, which was written, in their place."""
        values: Tensor = self.base.values_to_write()
        view._view(values).copy_(view._plain)
        return values


class DequantizedView(Tensor):
    """A view of an MXTensor that cuts its blocks: plain values that follow writes to it, and that write through.

    Results of ops are plain tensors, those of views are views of the same MXTensor. A write quantizes all of the
    MXTensor again. Pickles and deep copies are plain tensors.
    """

    __torch_function__ = no_torch_function  # type: ignore[assignment]
    _plain: Tensor
    _decoded: Decoded | None
    """None for a view that cannot be written, because the MXTensor is not known."""
    _view: View
    _has_own_memory = False
    """Whether ``.data = values`` has made it an independent tensor."""

    @staticmethod
    def __new__(cls, values: Tensor, decoded: Decoded | None, view: View) -> DequantizedView:
        self: DequantizedView
        if not has_no_memory(values):
            self = values.as_subclass(cls)
        else:
            self = make_wrapper_subclass(
                cls, values.shape, strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
                device=values.device,
            )  # fmt: skip
        self._plain, self._decoded, self._view = values, decoded, view
        return self

    @property
    def _current(self) -> Tensor:
        """The values as they are now, for ``__tensor_flatten__``."""
        decoded = self._decoded
        if decoded is not None and not has_no_memory(self._plain):
            decoded.values()
        elif decoded is not None and decoded.stale and not is_fake(self._plain):  # a result of AOTAutograd's graph
            raise NotImplementedError(
                f"a graph cannot return a view {tuple(self.shape)} that cuts the blocks of an MXTensor and was made "
                "before a write in the graph; make the view after the write, or return a clone() of it"
            )
        return self._plain

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """A plain copy of the values."""
        return self.to(dtype) if dtype not in (None, self.dtype) else self.clone()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return VIEW_FALLBACK[0](func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_current"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> DequantizedView:
        return DequantizedView(inner["_current"], None, _alias)

    def _set_data(self, value: Tensor) -> None:
        """As in torch, the tensor becomes the same as ``value``, and what it was a view of stays as it is."""
        if isinstance(value, DequantizedView):
            self._plain, self._decoded, self._view = value._plain, value._decoded, value._view
        else:
            value = value.detach()
            value = value if type(value) is Tensor else value.dequantize()
            self._plain, self._decoded, self._has_own_memory = value, None, True
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    data = property(Tensor.data.__get__, _set_data)  # type: ignore[attr-defined]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if has_no_memory(self._plain):
            return f"DequantizedView(shape={tuple(self.shape)}, dtype={dtype_name(self.dtype)})"
        return str(super().__repr__(tensor_contents=tensor_contents))  # type: ignore[call-arg]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            values = self.detach().clone()
            parameter = isinstance(self, torch.nn.Parameter)
            memo[id(self)] = torch.nn.Parameter(values, self.requires_grad) if parameter else values
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        """As torch formats a plain tensor: a single value is formatted as a number."""
        if self.dim() or self.is_meta or has_no_memory(self._plain):
            return object.__format__(self, spec)
        return format(self.item(), spec)

    def numpy(self, *, force: bool = False) -> Any:
        """A copy of the values as an array."""
        return self.clone().numpy(force=force)

    def tolist(self) -> Any:
        return self.clone().tolist()

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        return self.clone().__array__(*arguments, **options)


# Dynamo compiles what eager code calls after a graph break, and has no model of this class.
run_uncompiled(DequantizedView.__new__, DequantizedView.__torch_dispatch__, Decoded.__init__, Decoded.values)


def _alias(values: Tensor) -> Tensor:
    return values

"""MXTensor: a torch.Tensor that stands for high-precision values and stores block-scaled operands.

The outer tensor is the wrapper: it has the shape, strides, dtype and device of the dense tensor it stands for. The
``rowwise`` operand is blocked along the last dimension of the outer tensor and has its shape. The ``columnwise``
operand is blocked along the dimension before it and is stored transposed, so every operand is blocked along its own
last dimension. ``makers``, ``pickles``, ``attributes`` and ``fsdp`` have parts of the class.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import check, described
from ..core.autograd import dequantize_with_gradient
from ..core.compat import disable_subclass_torch_function, make_wrapper_subclass
from ..core.compat_compile import hook_cache_keys, hook_guards, hook_unwrapping
from ..core.dispatch import FALLBACK, FUNCTION_TABLE, OP_TABLE
from ..core.fingerprint import compilation_state
from ..core.names import dtype_name
from ..core.shapes import contiguous_stride, readable_size, swapped
from ..core.tracing import constants_of, is_traced, refuse_jit_trace
from ..core.when_imported import PENDING, after_import, install_pending, when_imported
from ..numerics.formats import Format, Orientation
from ..numerics.operand import Operand, Rotated, transposed
from ..numerics.validate import check_outer, known_size
from ..recipe.linear_recipe import LinearRecipe, recipe_to_row
from .attributes import KeepsAttributes, TorchAOAttributes, parameter_of, refuse_attributes
from .dequantized_view import Link
from .fsdp import GatheredByFSDP2
from .graph_attributes import readers_of, tell_dynamo
from .makers import DTYPE, Makers
from .pickles import KINDS, Pickled
from .stored import check_rotated, operand_of, rotated_shape

_TENSORS = ("data", "scale", "global_scale")
"""The tensors of an operand, in the order of ``Operand.tensors``."""
ROTATED = tuple(f"_inner_rotated_{name}" for name in _TENSORS)


def _inner(side: str, name: str) -> property:
    """One tensor of one operand under a name of its own, which ``__tensor_flatten__`` lists."""
    return property(attrgetter(f"{side}.{name}"))


_NAMES = {
    (row, column, has_global_scale): tuple(
        f"_inner{side}_{name}"
        for side, exists in (("_rowwise", row), ("_columnwise", column))
        for name in _TENSORS[: exists * (2 + has_global_scale)]
    )
    for row, column, has_global_scale in itertools.product((False, True), repeat=3)
}
"""(has a rowwise copy, a columnwise copy, a global scale) -> names of its tensors, in the order of ``components``."""


class MXTensor(Makers, Pickled, KeepsAttributes, GatheredByFSDP2, TorchAOAttributes):
    """A tensor in a block-scaled format that torch code uses like any other.

    Make one with :func:`mxtensor.quantize`, :meth:`to_mx` or :meth:`from_components`. ``dtype``, ``shape``,
    ``stride()`` and ``device`` are those of the dense tensor it stands for. Products run on the operands. An op without
    a rule runs on the dequantized values; inside :func:`mxtensor.strict` it raises NotImplementedError.
    """

    _rowwise: Operand | None
    _columnwise: Operand | None
    recipe: LinearRecipe
    _dtype: torch.dtype
    """``dtype``, which torch takes 1.5 us to read from a subclass: compiled graphs ask each weight in every call."""
    _link: Link | None = None
    """Set on a view that has only some of the copies of its base, or only some of the values that share a scale."""
    _rotated: Rotated | None = None
    """The columnwise copy of a quantizer with a random Hadamard transform. Copies by ``deepcopy`` and pickles have it,
    other results of torch ops do not, except those of a ``RotatedTensor``, which has no other copy."""
    _inner_rowwise_data = _inner("_rowwise", "data")
    _inner_rowwise_scale = _inner("_rowwise", "scale")
    _inner_rowwise_global_scale = _inner("_rowwise", "global_scale")
    _inner_columnwise_data = _inner("_columnwise", "data")
    _inner_columnwise_scale = _inner("_columnwise", "scale")
    _inner_columnwise_global_scale = _inner("_columnwise", "global_scale")
    _inner_rotated_data = _inner("_rotated", "operand.data")
    _inner_rotated_scale = _inner("_rotated", "operand.scale")
    _inner_rotated_global_scale = _inner("_rotated", "operand.global_scale")

    @staticmethod
    def __new__(
        cls,
        rowwise: Operand | Tensor | None,
        columnwise: Operand | None = None,
        recipe: LinearRecipe | None = None,
        dtype: torch.dtype | None = None,
        size: tuple[int, ...] | None = None,
        stride: tuple[int, ...] | None = None,
        requires_grad: bool = False,
        offset: int = 0,
        checked: bool = False,
        rotated: Rotated | None = None,
        **attributes: Any,
    ) -> MXTensor:
        """``checked``: the caller guarantees that the operands fit each other; otherwise they are checked and aliased.

        ``rotated``: the rotated columnwise copy that a quantizer made, which only products of two such copies use.

        Raises TypeError or ValueError that names the argument that does not fit.
        """
        if isinstance(rowwise, MXTensor):
            return parameter_of(rowwise, requires_grad, attributes)
        if attributes:
            refuse_attributes("MXTensor", attributes)
        refuse_jit_trace("an MXTensor")
        if not checked:
            if rowwise is not None and not isinstance(rowwise, Operand):
                raise TypeError(
                    f"an MXTensor is made of operands, and {described(rowwise)} has no format: make one with "
                    "mx.quantize(x, format), or from codes and scales with mx.MXTensor.from_components "
                    "(accelerate has plain values on the disk and of a checkpoint: use its cpu_offload, and call "
                    "quantize_ after load_checkpoint_in_model)"
                )
            if not isinstance(recipe, LinearRecipe):
                raise TypeError(
                    f"MXTensor needs a LinearRecipe, not {described(recipe)}; make one with mx.quantize(x, format) or "
                    "MXTensor.from_components(data, scale, format)"
                )
            rowwise, columnwise, size, stride = check_outer(
                rowwise, columnwise, recipe.stored.format, dtype, size, stride, offset
            )
        stored = rowwise or columnwise or (None if rotated is None else rotated.operand)
        assert isinstance(stored, Operand) and recipe is not None and dtype is not None
        if size is None:
            size = stored.shape if rowwise is not None else swapped(stored.shape)
        self: MXTensor = make_wrapper_subclass(
            cls,
            size,
            strides=contiguous_stride(size) if stride is None else stride,
            storage_offset=offset,
            dtype=dtype,
            device=stored.data.device,
            requires_grad=requires_grad,
        )
        self._rowwise, self._columnwise, self.recipe = rowwise, columnwise, recipe  # type: ignore[assignment]
        self._dtype = dtype
        if rotated is not None:
            self._rotated = Rotated(rotated.operand, constants_of(rotated.signs))  # type: ignore[arg-type]
        return self

    # ------------------------------------------------------------------------------------------ another one

    def replace(
        self,
        rowwise: Operand | None,
        columnwise: Operand | None,
        size: tuple[int, ...] | None = None,
        stride: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
        recipe: LinearRecipe | None = None,
        offset: int = 0,
    ) -> MXTensor:
        """An MXTensor with other operands; arguments that are not given are those of this tensor."""
        recipe, dtype = recipe or self.recipe, dtype or self.dtype
        out = MXTensor(rowwise, columnwise, recipe, dtype, size, stride, offset=offset, checked=True)
        out._shard = self._shard
        return out

    def map_components(self, fn: Callable[[Tensor], Tensor], **changes: Any) -> MXTensor:
        """Apply ``fn`` to every tensor of codes and scales (``Operand.map``); ``changes`` as in :meth:`replace`."""
        rowwise, columnwise = (None if o is None else o.map(fn) for o in (self._rowwise, self._columnwise))
        out = self.replace(rowwise, columnwise, **{"size": tuple(self.shape), "stride": self.stride()} | changes)
        if self._rotated is not None:
            out._rotated = Rotated(self._rotated.operand.map(fn), self._rotated.signs)
        return out

    def same(self) -> MXTensor:
        """Another MXTensor over the same operands. It keeps them if this one is assigned others (``.data =``)."""
        out = self.replace(self._rowwise, self._columnwise, tuple(self.shape), self.stride())
        out._link, out._rotated = self._link, self._rotated
        return out

    # ------------------------------------------------------------------------------------------ looking at one

    @property
    def format(self) -> Format:
        """The format of the operands."""
        return self.recipe.stored.format

    @property
    def orientation(self) -> Orientation:
        """Which operands products can use; with square blocks one copy serves both."""
        return Orientation.BOTH if self.format.square and self.dim() > 1 else self.copies

    @property
    def copies(self) -> Orientation:
        """Which operands are stored."""
        return Orientation((self._rowwise is not None) + 2 * (self._columnwise is not None))

    @property
    def rowwise(self) -> Operand | None:
        """The operand blocked along the last dimension, of shape ``self.shape``; None if it is not stored."""
        return self._rowwise if self._rowwise is not None else _transposed(self._columnwise)

    @property
    def columnwise(self) -> Operand | None:
        """The operand blocked along the dimension before the last, stored transposed; None if it is not stored."""
        return self._columnwise if self._columnwise is not None else _transposed(self._rowwise)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The stored operands: rowwise, columnwise or both; for formats with square blocks one that serves both."""
        return tuple(o for o in (self._rowwise, self._columnwise) if o is not None)

    @property
    def components(self) -> tuple[Tensor, ...]:
        """Every tensor of codes, scales and global scales, operand by operand."""
        row, column, rotated = self._rowwise, self._columnwise, self._rotated
        if rotated is not None:
            return tuple(t for o in (row, column, rotated.operand) if o is not None for t in o.tensors)
        if column is not None:
            return column.tensors if row is None else row.tensors + column.tensors
        assert row is not None
        return (row.data, row.scale) if row.global_scale is None else row.tensors

    @property
    def _signs(self) -> int | None:
        return None if self._rotated is None else self._rotated.signs

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all stored codes and scales."""
        return sum(t.numel() * t.dtype.itemsize for t in self.components)

    @property
    def bits_per_value(self) -> float:
        """Stored bits per value, including both copies, scales and padding."""
        return 8 * self.nbytes / max(self.numel(), 1)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        fields = [f"shape={tuple(self.shape)}", f"format={self.format}", f"orientation={self.orientation.label}"]
        fields += [f"dtype={dtype_name(self.dtype)}", *([f"device={self.device}"] if self.device.type != "cpu" else [])]
        if type(self.bits_per_value) is float:  # not a symbol of a traced graph
            fields.append(f"size={readable_size(self.nbytes)} ({self.bits_per_value:.4g} bits/value)")
        if self.recipe.activation is not None:
            fields.append(f"activation={self.recipe.activation.format}")
        fields += ["requires_grad=True"] if self.requires_grad else []
        return f"MXTensor({', '.join(fields)})"

    # ------------------------------------------------------------------------------------------ back to plain

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain values in ``dtype`` (default: ``self.dtype``), with the shape and strides of a clone."""
        if dtype is not None:
            check("dequantize", "dtype", dtype, DTYPE)
        outer = self if dtype is None else self.with_dtype(dtype)
        return dequantize_with_gradient(outer) if isinstance(outer, MXTensor) else outer

    def values_to_write(self) -> Tensor:
        """The current values in new memory, which a write modifies; for a view, read from its base.

        The two copies of a tensor differ in the last bits, and a view may read another copy than its base does.
        """
        if self._link is None or self._link.view is None:
            values: Tensor = torch.ops.aten.dequantize.self(self)
            return values.clone() if is_traced(values) else values  # a traced cast may end in a view
        return self._link.view(self._link.base.values_to_write()).clone()

    def to_dtype(self, dtype: torch.dtype) -> Tensor:
        """torchao's name for ``dequantize``."""
        return self.dequantize(dtype)

    # ------------------------------------------------------------------------------------------ torch's contract

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if PENDING:
            install_pending()
        row, column = self._rowwise, self._columnwise
        key = row is not None, column is not None, (row or column).global_scale is not None  # type: ignore[union-attr]
        names, context = [*_NAMES[key]], (self.recipe, self._dtype, self._link is not None)
        if self._rotated is None:
            return names, context
        return [*names, *ROTATED[: 2 + key[2]]], (*context, self._rotated.signs)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: tuple[int, ...], outer_stride: tuple[int, ...]
    ) -> MXTensor:
        recipe, dtype, is_linked, *signs = context
        size, stride = known_size(inner, outer_size), tuple(outer_stride)

        def operand(side: str, shape: tuple[int, ...]) -> Operand | None:
            tensors = [inner[key] for key in (f"_inner{side}_{name}" for name in _TENSORS) if key in inner]
            return operand_of(tensors, recipe.stored.format, shape) if tensors else None

        row, column = operand("_rowwise", size), operand("_columnwise", swapped(size)) if len(size) > 1 else None
        beside = operand("_rotated", rotated_shape(size)) if signs else None
        rotated = None if beside is None else Rotated(beside, signs[0])
        if not is_traced() and all(type(t) is Tensor for t in inner.values()):  # a graph's own are of many kinds
            outer = recipe.stored.format, dtype, size, stride
            rotated = None if rotated is None else check_rotated(rotated)
            row, column, size, stride = check_outer(row, column, *outer, any_stride=True, rotated=rotated)
        offset = (row or column).offset  # type: ignore[union-attr]  # torch does not pass the offset of a view
        out = MXTensor(row, column, recipe, dtype, size, stride, offset=offset, checked=True, rotated=rotated)
        out._link = Link(None, None) if is_linked else None
        return out

    def _stable_hash_for_caching(self) -> str:
        names, (recipe, dtype, *rest) = self.__tensor_flatten__()
        components = [(n, p.dtype, tuple(p.shape), p.stride()) for n in names for p in (getattr(self, n),)]
        outer = (dtype, tuple(self.shape), self.stride(), str(self.device), self.requires_grad, *rest)
        key = (*compilation_state(), recipe_to_row(recipe), outer, components)
        return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = FUNCTION_TABLE.get(func)  # few have one; the others become aten ops, and reach __torch_dispatch__
        if func is not torch.nn.functional.linear:  # whose rule checks it where that takes no time
            refuse_jit_trace("an MXTensor")
        with disable_subclass_torch_function():
            return (rule or func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        rule = OP_TABLE.get(func)  # ``ops/``: one function for each aten op
        if rule is None and func._can_decompose():
            return func.decompose(*args, **(kwargs or {}))  # inference mode does not decompose composite ops
        return (rule or FALLBACK[0])(func, args, kwargs or {})  # the fallback of ``ops/fallback.py`` dequantizes

    def share_memory_(self) -> MXTensor:
        """Move codes and scales to shared memory (torch's own method needs a storage, which a wrapper lacks)."""
        self.map_components(Tensor.share_memory_)
        return self

    def is_shared(self) -> bool:
        return all(t.is_shared() for t in self.components)


def _transposed(operand: Operand | None) -> Operand | None:
    """The other orientation of an operand with square blocks; None for other blocks."""
    if operand is None or not operand.format.square or len(operand.shape) < 2:
        return None
    return transposed(operand)


KINDS["MXTensor"] = MXTensor
tell_dynamo(MXTensor, readers_of(MXTensor))
when_imported("torch._functorch._aot_autograd.runtime_wrappers", lambda: hook_unwrapping(MXTensor))
when_imported("torch._dynamo.guards", lambda: hook_guards(MXTensor))
after_import("torch._functorch._aot_autograd.autograd_cache", lambda: hook_cache_keys(compilation_state))

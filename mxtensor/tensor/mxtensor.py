"""MXTensor: a torch.Tensor that stands for high-precision values and stores block-scaled operands.

The outer tensor is the wrapper: it has the shape, strides, dtype and device of the dense tensor it stands for. The
``rowwise`` operand is blocked along the last dimension of the outer tensor and has its shape. The ``columnwise``
operand is blocked along the dimension before it and is stored transposed, so every operand is blocked along its own
last dimension. This file is longer than others because torch looks for its whole contract in one class.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import TENSOR, check, described, instance
from ..core.autograd import dequantize_with_gradient
from ..core.compat import disable_subclass_torch_function, make_wrapper_subclass
from ..core.compat_hooks import hook_guards, hook_unwrapping
from ..core.dispatch import FALLBACK, FUNCTION_TABLE, OP_TABLE
from ..core.fingerprint import COMPILATION, fingerprint
from ..core.select import forced_kernel
from ..core.shapes import contiguous_stride, readable_size, swapped
from ..core.tracing import is_traced, refuse_recording
from ..core.when_imported import PENDING, install_pending, when_imported
from ..kernels.quantize.select_pair import quantize_operands
from ..numerics.cast import Cast
from ..numerics.formats import Format, Orientation, ScaleCalculationMode, get_format, get_mx_format
from ..numerics.operand import Operand, transposed
from ..numerics.validate import check_components, check_outer, check_outer_dtype, fits_outside, known_size
from ..recipe.linear_recipe import LinearRecipe
from ..recipe.rows import recipe_to_row
from .attributes import KeepsAttributes, set_attributes, user_attributes
from .dequantized_view import DequantizedView, Link
from .fsdp import GatheredByFSDP2
from .graph_attributes import hook_graph_attributes_of
from .stored import in_a_file, operand_of, stored_arguments
from .te_attributes import TransformerEngineAttributes

DTYPE = instance(torch.dtype, "a torch.dtype")
_TENSORS = ("data", "scale", "global_scale")
"""The tensors of an operand, in the order of ``Operand.tensors``."""


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


class MXTensor(KeepsAttributes, GatheredByFSDP2, TransformerEngineAttributes):
    """A tensor in a block-scaled format that torch code uses like any other.

    Make one with :func:`mxtensor.quantize`, :meth:`to_mx` or :meth:`from_components`. ``dtype``, ``shape``,
    ``stride()`` and ``device`` are those of the tensor it stands for. Products run on the operands. An op that has no
    rule raises NotImplementedError with its name.
    """

    _rowwise: Operand | None
    _columnwise: Operand | None
    recipe: LinearRecipe
    _link: Link | None = None
    """Set on a view that has only some of the copies of its base, or only some of the values that share a scale."""
    _inner_rowwise_data = _inner("_rowwise", "data")
    _inner_rowwise_scale = _inner("_rowwise", "scale")
    _inner_rowwise_global_scale = _inner("_rowwise", "global_scale")
    _inner_columnwise_data = _inner("_columnwise", "data")
    _inner_columnwise_scale = _inner("_columnwise", "scale")
    _inner_columnwise_global_scale = _inner("_columnwise", "global_scale")

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
    ) -> MXTensor:
        """``checked``: for callers in the package, whose operands fit each other; others are checked and aliased.

        Raises TypeError or ValueError that says which argument does not fit.
        """
        if isinstance(rowwise, MXTensor):  # accelerate calls the class of a parameter that it has moved
            return torch.nn.Parameter(rowwise.detach(), requires_grad)  # type: ignore[return-value]
        refuse_recording("an MXTensor")
        if not checked:
            if rowwise is not None and not isinstance(rowwise, Operand):
                raise TypeError(
                    f"an MXTensor is made of operands, and {described(rowwise)} has no format: make one with "
                    "mx.quantize(x, format), or from codes and scales with mx.MXTensor.from_components "
                    "(accelerate's disk_offload stores plain values only: use its cpu_offload)"
                )
            if not isinstance(recipe, LinearRecipe):
                raise TypeError(
                    f"MXTensor needs a LinearRecipe, not {described(recipe)}; make one with mx.quantize(x, format) or "
                    "MXTensor.from_components(data, scale, format)"
                )
            rowwise, columnwise, size, stride = check_outer(
                rowwise, columnwise, recipe.stored.format, dtype, size, stride, offset
            )
        operands = rowwise if rowwise is not None else columnwise
        assert isinstance(operands, Operand) and recipe is not None and dtype is not None
        if size is None:
            size = operands.shape if rowwise is not None else swapped(operands.shape)
        self: MXTensor = make_wrapper_subclass(
            cls,
            size,
            strides=contiguous_stride(size) if stride is None else stride,
            storage_offset=offset,
            dtype=dtype,
            device=operands.data.device,
            requires_grad=requires_grad,
        )
        self._rowwise, self._columnwise, self.recipe = rowwise, columnwise, recipe  # type: ignore[assignment]
        return self

    # ------------------------------------------------------------------------------------------ making one

    @classmethod
    def to_mx(
        cls,
        data_hp: Tensor,
        elem_dtype: Format | str | torch.dtype = torch.float8_e4m3fn,
        block_size: int = 32,
        scaling_mode: ScaleCalculationMode | str = ScaleCalculationMode.FLOOR,
    ) -> MXTensor:
        """Quantize along the last dimension, with torchao's argument names and defaults.

        Scales are FLOOR unless ``scaling_mode`` says otherwise; those of :func:`mxtensor.quantize` are RCEIL.
        ``block_size`` applies to MX formats only.
        """
        check("to_mx", "data_hp", data_hp, TENSOR)
        cast = Cast.of(get_mx_format(elem_dtype, block_size), scaling_mode)
        return quantize_as(data_hp, LinearRecipe.inference(cast))

    @classmethod
    def from_components(
        cls,
        data: Tensor,
        scale: Tensor,
        format: Format | str | torch.dtype,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        global_scale: Tensor | None = None,
    ) -> MXTensor:
        """A rowwise MXTensor around codes and scales that exist already; nothing is copied.

        ``data``: codes, in the element's dtype or uint8; ``scale``: uint8 (or its e8m0/e4m3 view) or float32;
        ``shape``: the logical shape, needed only if the last dimension of packed data does not determine it. Raises
        ValueError or TypeError that names what was expected.
        """
        fmt = get_format(format)
        operand = check_components(data, scale, fmt, shape, global_scale)
        check_outer_dtype(dtype)
        return cls(operand, None, LinearRecipe.inference(Cast(fmt)), dtype, checked=True)

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
        return self.replace(rowwise, columnwise, **{"size": tuple(self.shape), "stride": self.stride()} | changes)

    def same(self) -> MXTensor:
        """Another MXTensor over the same operands: it keeps them if this one gets others (``.data =``)."""
        out = self.replace(self._rowwise, self._columnwise, tuple(self.shape), self.stride())
        out._link = self._link
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
        """The operand blocked along the dimension before the last, transposed; None if it is not stored."""
        return self._columnwise if self._columnwise is not None else _transposed(self._rowwise)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The stored operands: rowwise, columnwise or both; for formats with square blocks one that serves both."""
        return tuple(o for o in (self._rowwise, self._columnwise) if o is not None)

    @property
    def components(self) -> tuple[Tensor, ...]:
        """Every tensor of codes, scales and global scales, operand by operand."""
        row, column = self._rowwise, self._columnwise
        if row is None or column is None:
            return (row or column).tensors  # type: ignore[union-attr]
        return row.tensors + column.tensors

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all stored codes and scales."""
        return sum(o.nbytes for o in self.operands)

    @property
    def bits_per_value(self) -> float:
        """Bits stored for one value, with both copies, scales and padding."""
        return 8 * self.nbytes / max(self.numel(), 1)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        fields = [f"shape={tuple(self.shape)}", f"format={self.format}", f"orientation={self.orientation.label}"]
        fields.append(f"dtype={str(self.dtype).removeprefix('torch.')}")
        fields += [f"device={self.device}"] if self.device.type != "cpu" else []
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
        outer = self if dtype is None or dtype is self.dtype else self.to(dtype)
        return dequantize_with_gradient(outer) if isinstance(outer, MXTensor) else outer

    def values_to_write(self) -> Tensor:
        """New memory with the values that a write starts from; for a part of another MXTensor those of that one.

        The two copies of a tensor differ in the last bits, and a view may read another copy than its base.
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
        return [*_NAMES[key]], (self.recipe, self.dtype, self._link is not None)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: tuple[int, ...], outer_stride: tuple[int, ...]
    ) -> MXTensor:
        recipe, dtype, is_linked = context
        size, stride = known_size(inner, outer_size), tuple(outer_stride)

        def operand(side: str, shape: tuple[int, ...]) -> Operand | None:
            tensors = [inner[key] for key in (f"_inner{side}_{name}" for name in _TENSORS) if key in inner]
            return operand_of(tensors, recipe.stored.format, shape) if tensors else None

        row, column = operand("_rowwise", size), operand("_columnwise", swapped(size)) if len(size) > 1 else None
        if not is_traced() and all(type(t) is Tensor for t in inner.values()):  # a graph's own are of many kinds
            outer = recipe.stored.format, dtype, size, stride
            row, column, size, stride = check_outer(row, column, *outer, any_stride=True)
        offset = (row or column).offset  # type: ignore[union-attr]  # torch does not pass the offset of a view
        out = MXTensor(row, column, recipe, dtype, size, stride, offset=offset, checked=True)
        out._link = Link(None, None) if is_linked else None
        return out

    def _stable_hash_for_caching(self) -> str:
        names, (recipe, dtype, is_linked) = self.__tensor_flatten__()
        components = [(n, p.dtype, tuple(p.shape), p.stride()) for n in names for p in (getattr(self, n),)]
        outer = (dtype, tuple(self.shape), self.stride(), str(self.device), self.requires_grad, is_linked)
        key = (fingerprint(), sorted(COMPILATION.items()), forced_kernel(), recipe_to_row(recipe), outer, components)
        return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = FUNCTION_TABLE.get(func)
        if func is not torch.nn.functional.linear:  # whose rule checks it where that takes no time
            refuse_recording("an MXTensor")
        with disable_subclass_torch_function():
            return (rule or func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        rule = OP_TABLE.get(func)
        if rule is None and func._can_decompose():
            return func.decompose(*args, **(kwargs or {}))  # inference mode does not decompose composite ops
        return (rule or FALLBACK[0])(func, args, kwargs or {})

    def share_memory_(self) -> MXTensor:
        """Move codes and scales to shared memory (torch's own method needs a storage, which a wrapper lacks)."""
        self.map_components(Tensor.share_memory_)
        return self

    def is_shared(self) -> bool:
        return all(t.is_shared() for t in self.components)

    def __deepcopy__(self, memo: dict[int, Any]) -> MXTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        out: MXTensor = self.detach().map_components(torch.clone).requires_grad_(self.requires_grad)  # type: ignore
        if isinstance(self, torch.nn.Parameter):
            memo[id(self)] = torch.nn.Parameter(out, out.requires_grad)
        else:
            memo[id(self)] = out
            set_attributes(out, copy.deepcopy(user_attributes(self), memo))
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        operands = (("_rowwise", self._rowwise), ("_columnwise", self._columnwise))
        components = {side: o.map(in_a_file).tensors for side, o in operands if o is not None}
        size, stride = tuple(self.shape), self.stride()
        if not fits_outside(size, stride, *self.operands):  # an expanded tensor, or the copy of a slice
            stride = torch.empty_strided(size, stride, device="meta").clone().stride()
        outer = (str(self.dtype).removeprefix("torch."), size, stride, self.requires_grad)
        arguments = (components, recipe_to_row(self.recipe), outer, isinstance(self, torch.nn.Parameter))
        attributes = user_attributes(self)
        return (rebuild_with_attributes, (arguments, attributes)) if attributes else (rebuild, arguments)


def rebuild(
    components: dict[str, Any], row: dict[str, str | None], outer: tuple[Any, ...], is_parameter: bool
) -> MXTensor:
    """What unpickling an MXTensor calls. Its arguments are uint8 and float32 tensors and strings, so that
    ``torch.load(weights_only=True)`` accepts them.

    A file may hold anything, so every argument is checked. The result has aliases of the tensors, because a pickle can
    go on to change a tensor that it has named. Raises ValueError that says what does not fit.
    """
    try:
        row_, column, recipe, dtype, size, stride = stored_arguments(components, row, outer, is_parameter)
    except (TypeError, ValueError) as error:
        raise ValueError(f"this file or pickle holds no valid MXTensor: {error}") from error
    out = MXTensor(row_, column, recipe, dtype, size, stride, checked=True)
    return torch.nn.Parameter(out, outer[3]) if is_parameter else out.requires_grad_(outer[3])  # type: ignore


def rebuild_with_attributes(arguments: tuple[Any, ...], attributes: dict[str, Any]) -> MXTensor:
    """``rebuild`` of a tensor on which the user has set attributes."""
    return set_attributes(rebuild(*arguments), attributes)  # type: ignore[no-any-return]


def _transposed(operand: Operand | None) -> Operand | None:
    """The other orientation of an operand with square blocks; None for other blocks."""
    if operand is None or not operand.format.square or len(operand.shape) < 2:
        return None
    return transposed(operand)


def quantize_as(x: Tensor, recipe: LinearRecipe, orientation: Orientation = Orientation.ROWWISE) -> MXTensor:
    """Quantize ``x`` by the weight cast of ``recipe`` to an MXTensor that carries it; see :func:`mxtensor.quantize`."""
    if isinstance(x, MXTensor | DequantizedView):
        x = x.dequantize()
    x = x.detach()
    if x.dim() < 2 and orientation is not Orientation.ROWWISE:
        raise ValueError(f"orientation {orientation.label!r} needs two dimensions, this tensor has {x.dim()}")
    if recipe.stored.format.square and x.dim() > 1:
        orientation = Orientation.ROWWISE  # one copy serves both
    operands = quantize_operands(x, recipe.stored, orientation)
    return MXTensor(*operands, recipe, x.dtype, tuple(x.shape), checked=True)


hook_graph_attributes_of(MXTensor)
when_imported("torch._functorch._aot_autograd.runtime_wrappers", lambda: hook_unwrapping(MXTensor))
when_imported("torch._dynamo.guards", lambda: hook_guards(MXTensor))

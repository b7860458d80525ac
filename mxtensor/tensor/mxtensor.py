"""MXTensor: a torch.Tensor that stands for high-precision values and holds block-scaled operands.

Rank of everything here: the wrapper has the shape, strides, dtype and device of the dense tensor it stands for (the
facade); ``rowwise`` is blocked along the facade's last dimension and has its shape; ``columnwise`` is blocked along
the dimension before it and is stored transposed, so that every operand is blocked along its own last dimension.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.autograd import dequantize_with_gradient
from ..core.compat import disable_subclass_torch_function, make_wrapper_subclass
from ..core.devices import cached
from ..core.dispatch import FALLBACK, FUNCTION_TABLE, OP_TABLE
from ..core.fingerprint import fingerprint
from ..core.select import forced_kernel
from ..core.shapes import contiguous_stride, readable_size, swapped
from ..kernels.quantize.select import quantize_operands
from ..numerics.cast import Cast
from ..numerics.formats import Format, Orientation, Rounding, ScaleCalculationMode, get_format, get_mx_format
from ..numerics.operand import Operand, Rotated, transposed
from ..numerics.validate import check_components, known_size
from ..recipe.linear_recipe import LinearRecipe, recipe_from_row, recipe_to_row

_COMPONENTS = tuple((side, part) for side in ("_rowwise", "_columnwise") for part in ("data", "scale", "global_scale"))


class MXTensor(Tensor):
    """A tensor in a block-scaled format that torch code uses like any other.

    Make one with :func:`mxtensor.quantize`, :meth:`to_mx` or :meth:`from_parts`. ``dtype``, ``shape``, ``stride()`` and
    ``device`` are those of the tensor it stands for. Products run on the operands; what has no rule is refused with a
    NotImplementedError that names it.
    """

    _rowwise: Operand | None
    _columnwise: Operand | None
    recipe: LinearRecipe
    _rotated: Rotated | None = None
    """In the place of ``_columnwise``; torch ops leave it behind."""
    _shard: Any = None
    """The place of a part that FSDP2 has made (``sharded.py``)."""

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
    ) -> MXTensor:
        if isinstance(rowwise, MXTensor):  # accelerate makes a parameter that it has moved as torch's own are made
            return torch.nn.Parameter(rowwise.detach(), requires_grad)  # type: ignore[return-value]
        if isinstance(rowwise, Tensor):
            raise TypeError(
                "values alone say no format: mx.quantize(x, format) makes an MXTensor of them (of accelerate, offloads "
                "to the CPU keep codes, those to disk values)"
            )
        operands = rowwise if rowwise is not None else columnwise
        assert operands is not None and recipe is not None and dtype is not None
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
        self._rowwise, self._columnwise, self.recipe = rowwise, columnwise, recipe
        return self

    # ------------------------------------------------------------------------------------------ making one

    @classmethod
    def to_mx(
        cls,
        data_hp: Tensor,
        elem_dtype: Format | str | torch.dtype = torch.float8_e4m3fn,
        block_size: int = 32,
        scaling_mode: ScaleCalculationMode | str = ScaleCalculationMode.RCEIL,
    ) -> MXTensor:
        """Quantize along the last dimension, with torchao's argument names; ``block_size`` is for MX formats.

        See :func:`mxtensor.quantize`.
        """
        return quantize(data_hp, get_mx_format(elem_dtype, block_size), scaling=scaling_mode)

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
        ``shape``: the logical shape, needed only where packed data leaves the last dimension open. Raises ValueError or
        TypeError naming what was expected.
        """
        fmt = get_format(format)
        operand = check_components(data, scale, fmt, shape, global_scale)
        return cls(operand, None, LinearRecipe.inference(Cast(fmt)), dtype)

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
        """The same kind of tensor around other operands."""
        out = MXTensor(rowwise, columnwise, recipe or self.recipe, dtype or self.dtype, size, stride, offset=offset)
        out._shard = self._shard
        return out

    def map_components(self, fn: Callable[[Tensor], Tensor], **changes: Any) -> MXTensor:
        """Apply ``fn`` to every tensor held; ``changes`` as in :meth:`replace`."""

        def apply(operand: Operand | None) -> Operand | None:
            if operand is None:
                return None
            global_scale = None if operand.global_scale is None else fn(operand.global_scale)
            return Operand(fn(operand.data), fn(operand.scale), global_scale, operand.format, operand.shape)

        changes = {"size": tuple(self.shape), "stride": self.stride()} | changes
        return self.replace(apply(self._rowwise), apply(self._columnwise), **changes)

    # ------------------------------------------------------------------------------------------ looking at one

    @property
    def format(self) -> Format:
        """The format of the operands."""
        return self.recipe.stored.format

    @property
    def orientation(self) -> Orientation:
        """Which operands products can use; a square block serves both with one copy."""
        return Orientation.BOTH if self.format.square and self.dim() > 1 else self.copies

    @property
    def copies(self) -> Orientation:
        """Which operands are in memory."""
        return Orientation((self._rowwise is not None) + 2 * (self._columnwise is not None))

    @property
    def rowwise(self) -> Operand | None:
        """The operand blocked along the last dimension, shape ``self.shape``; None if it is not held."""
        return self._rowwise if self._rowwise is not None else _transposed(self._columnwise)

    @property
    def columnwise(self) -> Operand | None:
        """The operand blocked along the dimension before the last, stored transposed; None if it is not held."""
        return self._columnwise if self._columnwise is not None else _transposed(self._rowwise)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The operands in memory (one for a square block)."""
        return tuple(o for o in (self._rowwise, self._columnwise) if o is not None)

    @property
    def components(self) -> tuple[Tensor, ...]:
        """Every tensor of codes and scales."""
        return tuple(t for operand in self.operands for t in operand.tensors)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of all codes and scales held."""
        return sum(o.nbytes for o in self.operands)

    @property
    def bits_per_value(self) -> float:
        """Bits actually held for one value: both copies, scales and tails counted."""
        return 8 * self.nbytes / max(self.numel(), 1)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        fields = [f"shape={tuple(self.shape)}", f"format={self.format}", f"orientation={self.orientation.label}"]
        fields.append(f"dtype={str(self.dtype).removeprefix('torch.')}")
        fields += [f"device={self.device}"] if self.device.type != "cpu" else []
        if type(self.bits_per_value) is float:  # and not a symbol
            fields.append(f"size={readable_size(self.nbytes)} ({self.bits_per_value:.4g} bits/value)")
        if self.recipe.activation is not None:
            fields.append(f"activation={self.recipe.activation.format}")
        fields += ["requires_grad=True"] if self.requires_grad else []
        return f"MXTensor({', '.join(fields)})"

    # ------------------------------------------------------------------------------------------ back to plain

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The plain values in ``dtype`` (default: ``self.dtype``), shaped and strided as a copy of ``self``."""
        outer = self if dtype is None or dtype is self.dtype else self.to(dtype)
        return dequantize_with_gradient(outer) if isinstance(outer, MXTensor) else outer

    def to_dtype(self, dtype: torch.dtype) -> Tensor:
        """``dequantize`` as torchao names it."""
        return self.dequantize(dtype)

    # ------------------------------------------------------------------------------------------ torch's contract

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = []
        for side, part in _COMPONENTS:
            operand = getattr(self, side)
            if operand is not None and getattr(operand, part) is not None:
                names.append(f"_inner{side}_{part}")
        return names, (self.recipe, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: tuple[int, ...], outer_stride: tuple[int, ...]
    ) -> MXTensor:
        recipe, dtype = context
        size = known_size(inner, outer_size)

        def operand(side: str, shape: tuple[int, ...]) -> Operand | None:
            if f"_inner{side}_data" not in inner:
                return None
            data, scale, global_scale = (
                inner.get(f"_inner{side}_{part}") for part in ("data", "scale", "global_scale")
            )
            return Operand(data, scale, global_scale, recipe.stored.format, shape)  # type: ignore[arg-type]

        row, column = operand("_rowwise", size), operand("_columnwise", swapped(size)) if len(size) > 1 else None
        begin = (row or column).offset  # type: ignore[union-attr]  # a view says so by nothing else
        return MXTensor(row, column, recipe, dtype, size, tuple(outer_stride), offset=begin)

    def _stable_hash_for_caching(self) -> str:
        names, (recipe, dtype) = self.__tensor_flatten__()
        components = [(n, p.dtype, tuple(p.shape), p.stride()) for n in names for p in (getattr(self, n),)]
        outer = (dtype, tuple(self.shape), self.stride(), str(self.device), self.requires_grad)
        key = (fingerprint(), forced_kernel(), recipe_to_row(recipe), outer, components)
        return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = FUNCTION_TABLE.get(func)
        with disable_subclass_torch_function():
            return (rule or func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        rule = OP_TABLE.get(func)
        if rule is None and func._can_decompose():
            return func.decompose(*args, **(kwargs or {}))  # inference mode hands composite ops over whole
        return (rule or FALLBACK[0])(func, args, kwargs or {})

    def share_memory_(self) -> MXTensor:
        """Move codes and scales to shared memory (torch's own looks for a storage, and a wrapper has none)."""
        self.map_components(Tensor.share_memory_)
        return self

    def is_shared(self) -> bool:
        return all(t.is_shared() for operand in self.operands for t in operand.tensors)

    def __deepcopy__(self, memo: dict[int, Any]) -> MXTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        out: MXTensor = self.detach().map_components(torch.clone).requires_grad_(self.requires_grad)  # type: ignore
        memo[id(self)] = torch.nn.Parameter(out, out.requires_grad) if isinstance(self, torch.nn.Parameter) else out
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        operands = ((side, getattr(self, side)) for side in ("_rowwise", "_columnwise"))
        components = {
            side: (o.data.view(torch.uint8), o.scale, o.global_scale) for side, o in operands if o is not None
        }
        outer = (str(self.dtype).removeprefix("torch."), tuple(self.shape), self.stride(), self.requires_grad)
        return rebuild, (components, recipe_to_row(self.recipe), outer, isinstance(self, torch.nn.Parameter))


def rebuild(
    components: dict[str, Any], row: dict[str, str | None], outer: tuple[Any, ...], is_parameter: bool
) -> MXTensor:
    """What a pickled MXTensor calls: uint8 and float32 tensors and words only, so that ``weights_only`` loads it."""
    dtype, size, stride, requires_grad = outer
    recipe = recipe_from_row(row)
    format = recipe.stored.format

    def operand(side: str, shape: tuple[int, ...]) -> Operand | None:
        if side not in components:
            return None
        data, scale, global_scale = components[side]
        return Operand(data.view(format.element.dtype), scale, global_scale, format, shape)

    size = tuple(size)
    columnwise = operand("_columnwise", swapped(size)) if len(size) > 1 else None
    out = MXTensor(operand("_rowwise", size), columnwise, recipe, getattr(torch, dtype), size, tuple(stride))
    return torch.nn.Parameter(out, requires_grad) if is_parameter else out.requires_grad_(requires_grad)  # type: ignore


def _part(side: str, part: str) -> property:
    return property(lambda self: getattr(getattr(self, side), part))


for _side, _name in _COMPONENTS:
    setattr(MXTensor, f"_inner{_side}_{_name}", _part(_side, _name))


def _transposed(operand: Operand | None) -> Operand | None:
    """The other orientation of a square-block operand: the same values turned, never rounded again."""
    if operand is None or not operand.format.square or len(operand.shape) < 2:
        return None
    return transposed(operand)


def quantize(
    x: Tensor,
    format: Format | str | torch.dtype,
    scaling: ScaleCalculationMode | str = "rceil",
    orientation: Orientation | str = "rowwise",
    rounding: Rounding | str = "nearest",
    seed: int | None = None,
) -> MXTensor:
    """Quantize ``x`` (float32, bfloat16, float16 or float64; 1-D or more; any strides) to an MXTensor of its shape.

    ``format``: a name of FORMATS, a Format or a torch dtype. ``scaling``: rceil, floor, ceil or even, for power-of-two
    scales. ``orientation``: rowwise blocks the last dimension, columnwise the one before it, both holds a copy of each,
    made from the same values. ``rounding``: nearest or stochastic, now and whenever the tensor is written; ``seed``
    makes stochastic rounding the same on every device, else torch's generator decides. The result carries no gradient.
    Raises TypeError for other dtypes, ValueError for an unknown name or a tensor with too few dimensions.
    """
    return quantize_as(x, _recipe(format, scaling, rounding, seed), Orientation.of(orientation))


@cached
def _recipe(format: Any, scaling: Any, rounding: Any, seed: int | None) -> LinearRecipe:
    return LinearRecipe.inference(Cast.of(format, scaling, rounding, seed))


def quantize_as(x: Tensor, recipe: LinearRecipe, orientation: Orientation = Orientation.ROWWISE) -> MXTensor:
    """``quantize`` for a tensor that carries a whole recipe."""
    if isinstance(x, MXTensor):
        x = x.dequantize()
    x = x.detach()
    if x.dim() < 2 and orientation is not Orientation.ROWWISE:
        raise ValueError(f"orientation {orientation.label!r} needs two dimensions, this tensor has {x.dim()}")
    if recipe.stored.format.square and x.dim() > 1:
        orientation = Orientation.ROWWISE  # one copy serves both
    return MXTensor(*quantize_operands(x, recipe.stored, orientation), recipe, x.dtype, tuple(x.shape))

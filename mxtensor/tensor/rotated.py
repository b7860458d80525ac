"""RotatedTensor: the MXTensor of a quantizer with a random Hadamard transform that makes the columnwise copy alone.

Its one operand has rotated values, which only products of two rotated copies can use. Every other op reads the values
rotated back, and a write quantizes and rotates all of them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.compat import disable_subclass_torch_function
from ..core.dispatch import FALLBACK, FUNCTION_TABLE, OP_TABLE
from ..core.tracing import is_traced, refuse_jit_trace
from ..core.when_imported import PENDING, install_pending
from ..kernels.quantize.choose_cast import dequantize_operand
from ..kernels.quantize.hadamard import quantize_rotated, rotated_back
from ..numerics.formats import Orientation
from ..numerics.operand import Operand, Rotated
from ..recipe.linear_recipe import LinearRecipe
from .dequantized_view import DequantizedView
from .graph_attributes import readers_of, tell_dynamo
from .mxtensor import ROTATED, MXTensor
from .pickles import KINDS
from .stored import check_rotated, operand_of, rotated_shape

aten = torch.ops.aten
_RULES = frozenset({
    aten.alias.default, aten.clone.default, aten.copy_.default, aten.detach.default, aten.empty_like.default,
    aten.equal.default, aten.full_like.default, aten.is_pinned.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.new_full.default, aten.new_ones.default, aten.ones_like.default,
    aten._pin_memory.default, aten.rand_like.default, aten.randint_like.default, aten.randint_like.low_dtype,
    aten.randn_like.default, aten._to_copy.default, aten.zeros_like.default,
    aten.as_strided_.default, aten.squeeze_.default, aten.squeeze_.dim, aten.squeeze_.dims, aten.t_.default,
    aten.transpose_.default, aten.unsqueeze_.default,
})  # fmt: skip
"""Ops whose rules for MXTensors read neither a rowwise nor a columnwise operand."""
_FUNCTIONS_WITH_OPERANDS = (torch.nn.functional.linear, torch.einsum)
"""Functions whose rules do read one: here torch's own function runs, on the values rotated back."""


class RotatedTensor(MXTensor):
    """An MXTensor that stores a rotated columnwise copy and no other: for ``general_gemm(..., layout="NT")``."""

    @staticmethod
    def __new__(
        cls, rotated: Rotated, recipe: LinearRecipe, dtype: torch.dtype, size: tuple[int, ...],
        stride: tuple[int, ...] | None = None,
    ) -> RotatedTensor:  # fmt: skip
        """``rotated``: an operand (..., cols, rows rounded up to a multiple of 16) for a tensor (..., rows, cols)."""
        return MXTensor.__new__(cls, None, None, recipe, dtype, size, stride, checked=True, rotated=rotated)  # type: ignore[return-value]

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (self._stored.operand,)

    @property
    def copies(self) -> Orientation:
        return Orientation.COLUMNWISE

    @property
    def _stored(self) -> Rotated:
        assert self._rotated is not None
        return self._rotated

    def map_components(self, fn: Callable[[Tensor], Tensor], **changes: Any) -> RotatedTensor:
        """A tensor of the results of ``fn``; ``changes``: another stride or dtype."""
        operand, signs = self._stored
        stride, dtype = changes.get("stride", self.stride()), changes.get("dtype", self.dtype)
        return RotatedTensor(Rotated(operand.map(fn), signs), self.recipe, dtype, tuple(self.shape), stride)

    def replace(self, rowwise: Operand | None, columnwise: Operand | None, *args: Any, **kwargs: Any) -> MXTensor:
        """Without operands, the same tensor: a view of all of it."""
        if rowwise is None and columnwise is None:
            return self.same()
        return super().replace(rowwise, columnwise, *args, **kwargs)

    def same(self) -> RotatedTensor:
        """A new tensor over the same memory."""
        return self.map_components(lambda t: t)

    def quantized(self, x: Tensor) -> RotatedTensor:
        """Other values, of any shape with two dimensions, as this tensor stores its own."""
        x = (x.dequantize() if isinstance(x, MXTensor | DequantizedView) else x).detach()
        if x.dim() < 2:
            raise ValueError(f"a columnwise operand needs two dimensions, got shape {tuple(x.shape)}")
        rotated = quantize_rotated(x, self.recipe.stored, self._stored.signs)
        return RotatedTensor(rotated, self.recipe, x.dtype, tuple(x.shape))

    def _values(self) -> Tensor:
        """The values, rotated back in float32, with the strides of a copy."""
        operand, signs = self._stored
        values = rotated_back(dequantize_operand(operand, torch.float32), signs).narrow(-1, 0, self.shape[-2])
        copy = torch.empty_strided(tuple(self.shape), self.stride(), dtype=self.dtype, device="meta").clone()
        out = torch.empty_strided(tuple(self.shape), copy.stride(), dtype=self.dtype, device=values.device)
        return out.copy_(values.transpose(-1, -2))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{super().__repr__()[:-1]}, rotated)"

    # ------------------------------------------------------------------------------------------ torch's contract

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if PENDING:
            install_pending()
        return [*ROTATED[: len(self.components)]], (self.recipe, self.dtype, self._stored.signs)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: tuple[int, ...], outer_stride: tuple[int, ...]
    ) -> RotatedTensor:
        recipe, dtype, signs = context
        tensors = [inner[name] for name in ROTATED if name in inner]
        rotated = Rotated(operand_of(tensors, recipe.stored.format, rotated_shape(tuple(outer_size))), signs)
        if not is_traced() and all(type(t) is Tensor for t in tensors):
            rotated = check_rotated(rotated)
        return RotatedTensor(rotated, recipe, dtype, tuple(outer_size), tuple(outer_stride))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = None if func in _FUNCTIONS_WITH_OPERANDS else FUNCTION_TABLE.get(func)
        refuse_jit_trace("an MXTensor")
        with disable_subclass_torch_function():
            return (rule or func)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is aten.dequantize.self:
            return args[0]._values()
        rule = OP_TABLE[func] if func in _RULES else None
        if rule is None and func._can_decompose():
            return func.decompose(*args, **(kwargs or {}))
        return (rule or FALLBACK[0])(func, args, kwargs or {})


KINDS["RotatedTensor"] = RotatedTensor
tell_dynamo(RotatedTensor, readers_of(RotatedTensor))

"""Casts of one tensor: the tuples of cast kernels, fastest first, and the one function that goes through each.

``choose_pair`` has the casts of a tensor and of its transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...core.kernel import Kernel, Spec
from ...core.select import perform
from ...core.shapes import as_matrix
from ...core.tracing import is_traced
from ...numerics.cast import Cast
from ...numerics.operand import Operand, transposed
from ...numerics.reference import check_source
from ..operands import FakeQuantized, Unquantized
from . import cpu_casts, definition, triton_ops


def cast_spec(op: str, x: Tensor, cast: Cast, *more: Tensor | None) -> Spec:
    """The spec of a cast of ``x``; ``more`` are the other tensors that can be traced."""
    name = cast.format if cast.four_over_six is None else cast.label
    return Spec(op, (tuple(x.shape),), ((x.dtype, name),), x.dtype, x.device, is_traced(x, *more))


def quantize_operand(x: Tensor, cast: Cast) -> Operand:
    """``reference.encode`` by the first kernel that accepts: the same bits and the same errors."""
    check_source(x)
    x = x.resolve_neg()  # kernels read memory, and know no lazy minus sign
    return perform(QUANTIZE, cast_spec("quantize", x, cast), x, cast)  # type: ignore[no-any-return]


def quantize_rows(x: Tensor, cast: Cast) -> Operand:
    """``quantize_operand`` of activations (..., rows, K): a global scale belongs to all rows, not to each matrix."""
    if not _is_one_matrix(x, cast):
        return quantize_operand(x, cast)
    rows, format, shape = quantize_operand(as_matrix(x), cast), cast.format, tuple(x.shape)
    data, scale = rows.data.view(format.data_shape(shape)), rows.scale.view(format.scale_shape(shape))
    return Operand(data, scale, rows.global_scale, format, shape)


def _is_one_matrix(x: Tensor, cast: Cast) -> bool:
    """Whether the rows of a tensor with more dimensions are cast as those of one matrix."""
    return x.dim() > 2 and cast.format.scales_matrices and cast.format.block[0] == 1


def operand_of(quantized: Operand | Unquantized) -> Operand:
    """A side of a product as an operand: an ``Unquantized`` is cast now."""
    return quantize_rows(quantized.x, quantized.cast) if isinstance(quantized, Unquantized) else quantized


def dequantize_operand(operand: Operand, dtype: torch.dtype) -> Tensor:
    """``reference.decode`` by the first kernel that accepts: the same bits.

    If the codes of square blocks have a transposed layout, so has the result: kernels read rows, and products take
    either layout.
    """
    data, whole = operand.data, not operand.format.element.packed
    spec = Spec("dequantize", (operand.shape,), ((operand.format, dtype),), dtype, data.device, is_traced(data))
    strided = whole and data.dim() > 1 and not data.is_contiguous()
    if operand.format.square and not spec.traced and strided and data.transpose(-1, -2).is_contiguous():
        return perform(DEQUANTIZE, spec, transposed(operand), dtype).transpose(-1, -2)  # type: ignore[no-any-return]
    return perform(DEQUANTIZE, spec, operand, dtype)  # type: ignore[no-any-return]


def fake_quantize(x: Tensor, cast: Cast, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The values of x in the format, in ``dtype``, without the global scale; and the global scale or None."""
    check_source(x)
    x = x.resolve_neg()
    return perform(FAKE_QUANTIZE, cast_spec("fake quantize", x, cast), x, cast, dtype)  # type: ignore[no-any-return]


def fake_quantize_rows(x: Tensor, cast: Cast, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """``fake_quantize`` of activations (..., rows, K): see ``quantize_rows``."""
    if not _is_one_matrix(x, cast):
        return fake_quantize(x, cast, dtype)
    values, global_scale = fake_quantize(as_matrix(x), cast, dtype)
    return values.view(x.shape), global_scale


def fake_quantized(operand: Operand, dtype: torch.dtype) -> FakeQuantized:
    """The values of an operand in ``dtype``, without its global scale; and the global scale."""
    values = dequantize_operand(replace(operand, global_scale=None), dtype)
    return FakeQuantized(values, operand.global_scale, operand.format)


def _quantize_then_dequantize(x: Tensor, cast: Cast, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    result = fake_quantized(quantize_operand(x, cast), dtype)
    return result.values, result.global_scale


QUANTIZE: tuple[Kernel, ...] = (
    triton_ops.QUANTIZE, cpu_casts.QUANTIZE, cpu_casts.QUANTIZE_NVFP4, definition.QUANTIZE_SLICES, definition.QUANTIZE,
)  # fmt: skip
"""``run(x, cast)``: the operand of x."""
DEQUANTIZE: tuple[Kernel, ...] = (
    triton_ops.DEQUANTIZE, cpu_casts.DEQUANTIZE, definition.DEQUANTIZE_SLICES, definition.DEQUANTIZE,
)  # fmt: skip
"""``run(operand, dtype)``: the values."""
FAKE_QUANTIZE: tuple[Kernel, ...] = (
    triton_ops.FAKE_QUANTIZE, Kernel("two casts", definition.refuses, _quantize_then_dequantize),
)  # fmt: skip
"""``run(x, cast, dtype)``: the values of x in the format, without the global scale, and the global scale or None."""

RowsDecoder = Callable[[Operand, int, int, Tensor], Tensor]


def rows_decoder(operand: Operand, dtype: torch.dtype) -> RowsDecoder | None:
    """``decode_rows(operand, start, length, out)`` of the first kernel that can decode rows of a matrix; or None."""
    if operand.has_stack_scales:
        return None
    spec = Spec("dequantize", (operand.shape,), (operand.format,), dtype, operand.data.device)
    decoders = ((cpu_casts.DEQUANTIZE, cpu_casts.decode_rows), (definition.DEQUANTIZE_SLICES, definition.decode_rows))
    return next((decode for kernel, decode in decoders if kernel.refuses(spec, operand, dtype) is None), None)

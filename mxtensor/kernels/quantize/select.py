"""Casts of one tensor: the tuples of cast kernels, fastest first, and the one function that goes through each.

``select_pair`` has the casts of a tensor and of its transpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...core.kernel import Kernel, Spec
from ...core.select import perform
from ...core.tracing import is_traced
from ...numerics.cast import Cast
from ...numerics.operand import Operand, transposed
from ...numerics.reference import check_source
from ..gemm.spec import FakeQuantized, Unquantized
from . import cpu, cpu_nvfp4, reference, sliced, triton_ops


def cast_spec(op: str, x: Tensor, cast: Cast, *more: Tensor | None) -> Spec:
    """The spec of a cast of ``x``; ``more`` are the other tensors that can be traced."""
    name = cast.format if cast.four_over_six is None else cast.label
    return Spec(op, (tuple(x.shape),), ((x.dtype, name),), x.dtype, x.device, is_traced(x, *more))


def quantize_operand(x: Tensor, cast: Cast) -> Operand:
    """``reference.encode`` by the first kernel that accepts: the same bits and the same errors."""
    check_source(x)
    x = x.resolve_neg()  # kernels read memory, and know no lazy minus sign
    return perform(QUANTIZE, cast_spec("quantize", x, cast), x, cast)  # type: ignore[no-any-return]


def operand_of(quantized: Operand | Unquantized) -> Operand:
    """A side of a product as an operand: an ``Unquantized`` is cast now."""
    return quantize_operand(quantized.x, quantized.cast) if isinstance(quantized, Unquantized) else quantized


def dequantize_operand(operand: Operand, dtype: torch.dtype) -> Tensor:
    """``reference.decode`` by the first kernel that accepts: the same bits.

    If the codes of square blocks have a transposed layout, so has the result: kernels read rows, and products take
    either layout.
    """
    data = operand.data
    spec = Spec("dequantize", (operand.shape,), ((operand.format, dtype),), dtype, data.device, is_traced(data))
    if operand.format.square and not spec.traced and _has_transposed_layout(operand):
        return perform(DEQUANTIZE, spec, transposed(operand), dtype).transpose(-1, -2)  # type: ignore[no-any-return]
    return perform(DEQUANTIZE, spec, operand, dtype)  # type: ignore[no-any-return]


def _has_transposed_layout(operand: Operand) -> bool:
    """Whether the codes, one byte each, are the transpose of a contiguous tensor and not contiguous themselves."""
    data, whole = operand.data, not operand.format.element.packed
    return whole and data.dim() > 1 and not data.is_contiguous() and data.transpose(-1, -2).is_contiguous()


def fake_quantize(x: Tensor, cast: Cast, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The values of x in the format, in ``dtype``, without the global scale; and the global scale or None."""
    check_source(x)
    x = x.resolve_neg()
    return perform(FAKE_QUANTIZE, cast_spec("fake quantize", x, cast), x, cast, dtype)  # type: ignore[no-any-return]


def fake_quantized(operand: Operand, dtype: torch.dtype) -> FakeQuantized:
    """The values of an operand in ``dtype``, without its global scale; and the global scale."""
    values = dequantize_operand(replace(operand, global_scale=None), dtype)
    return FakeQuantized(values, operand.global_scale, operand.format)


def _quantize_then_dequantize(x: Tensor, cast: Cast, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    result = fake_quantized(quantize_operand(x, cast), dtype)
    return result.values, result.global_scale


QUANTIZE: tuple[Kernel, ...] = (
    triton_ops.QUANTIZE, cpu.QUANTIZE, cpu_nvfp4.QUANTIZE, sliced.QUANTIZE, reference.QUANTIZE,
)  # fmt: skip
"""``run(x, cast)``: the operand of x."""
DEQUANTIZE: tuple[Kernel, ...] = (
    triton_ops.DEQUANTIZE, cpu.DEQUANTIZE, sliced.DEQUANTIZE, reference.DEQUANTIZE,
)  # fmt: skip
"""``run(operand, dtype)``: the values."""
FAKE_QUANTIZE: tuple[Kernel, ...] = (
    triton_ops.FAKE_QUANTIZE, Kernel("two casts", reference.refuses, _quantize_then_dequantize),
)  # fmt: skip
"""``run(x, cast, dtype)``: the values of x in the format, without the global scale, and the global scale or None."""

RowsDecoder = Callable[[Operand, int, int, Tensor], Tensor]


def rows_decoder(operand: Operand, dtype: torch.dtype) -> RowsDecoder | None:
    """``decode_rows(operand, start, length, out)`` of the first kernel that can decode rows of a matrix; or None."""
    spec = Spec("dequantize", (operand.shape,), (operand.format,), dtype, operand.data.device)
    decoders = ((cpu.DEQUANTIZE, cpu.decode_rows), (sliced.DEQUANTIZE, sliced.decode_rows))
    return next((decode for kernel, decode in decoders if kernel.refuses(spec, operand, dtype) is None), None)

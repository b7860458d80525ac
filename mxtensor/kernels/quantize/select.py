"""Casts: the tuples of cast kernels, and the one way through each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.kernel import Kernel, Spec
from ...core.select import perform
from ...core.tracing import is_traced
from ...numerics.cast import Cast
from ...numerics.formats import FULL, Orientation
from ...numerics.operand import Operand, transposed
from ...numerics.reference import check_source, tensor_amax
from ..gemm.spec import FakeQuantized, GemmOperand, Unquantized
from ..gemm.spec import Form as Form
from ..quantize import blocked, cpu, custom_ops, reference

QUANTIZE: tuple[Kernel, ...] = (custom_ops.QUANTIZE, cpu.QUANTIZE, blocked.QUANTIZE, reference.QUANTIZE)
"""``run(x, cast)``: the operand of x."""
DEQUANTIZE: tuple[Kernel, ...] = (
    custom_ops.DEQUANTIZE,
    cpu.DEQUANTIZE,
    blocked.DEQUANTIZE,
    reference.DEQUANTIZE,
)
"""``run(operand, dtype)``: the values."""


def _spec(op: str, x: Tensor, cast: Cast, *more: Tensor | None) -> Spec:
    return Spec(op, (tuple(x.shape),), ((x.dtype, cast.format),), x.dtype, x.device, is_traced(x, *more))


def quantize_operand(x: Tensor, cast: Cast) -> Operand:
    """``codec.encode`` by the fastest kernel that accepts. Same result, same errors."""
    check_source(x)
    return perform(QUANTIZE, _spec("quantize", x, cast), x, cast)  # type: ignore[no-any-return]


def quantize_operands(x: Tensor, cast: Cast, orientation: Orientation) -> tuple[Operand | None, Operand | None]:
    """The operand of x, of its transpose, or both of one pass over x: (rowwise, columnwise), None where not wanted."""
    if orientation is Orientation.ROWWISE:
        return quantize_operand(x, cast), None
    if orientation is Orientation.COLUMNWISE:
        return None, quantize_operand(x.transpose(-1, -2), cast)
    check_source(x)
    return perform(QUANTIZE_BOTH, _spec("quantize both", x, cast), x, cast)  # type: ignore[no-any-return]


def operand_of(gemm_operand: Operand | Unquantized) -> Operand:
    """A quantized factor of a product as an operand: cast now, if it is still to be."""
    return (
        quantize_operand(gemm_operand.x, gemm_operand.cast) if isinstance(gemm_operand, Unquantized) else gemm_operand
    )


def dequantize_operand(operand: Operand, dtype: torch.dtype) -> Tensor:
    """``codec.decode`` by the fastest kernel that accepts. Same result.

    Where the codes of square blocks lie transposed, so do the values: kernels read rows, and products take either.
    """
    data = operand.data
    spec = Spec("dequantize", (operand.shape,), ((operand.format, dtype),), dtype, data.device, is_traced(data))
    if operand.format.square and not spec.traced and _has_transposed_layout(operand):
        return perform(DEQUANTIZE, spec, transposed(operand), dtype).transpose(-1, -2)  # type: ignore[no-any-return]
    return perform(DEQUANTIZE, spec, operand, dtype)  # type: ignore[no-any-return]


def _has_transposed_layout(operand: Operand) -> bool:
    """Whether the codes, one byte each, are the transpose of something contiguous, and not contiguous themselves."""
    data, whole = operand.data, not operand.format.element.packed
    return whole and data.dim() > 1 and not data.is_contiguous() and data.transpose(-1, -2).is_contiguous()


def fake_quantize(x: Tensor, cast: Cast, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """``dequantize_operand(quantize_operand(x, cast), dtype)`` without a global scale, and that scale or None."""
    check_source(x)
    return perform(FAKE_QUANTIZE, _spec("fake quantize", x, cast), x, cast, dtype)  # type: ignore[no-any-return]


def cast_pair(
    x: Tensor,
    cast: Cast,
    rowwise: Form | None,
    columnwise: Form | None,
    dtype: torch.dtype,
    amax: Tensor | None = None,
    record: Tensor | None = None,
) -> tuple[GemmOperand | None, GemmOperand | None]:
    """Factors of x (..., rows, cols) and of its transpose, each in its form, None where not wanted.

    Rowwise: ``quantize_operand`` (CODES) or ``fake_quantize`` in ``dtype`` (VALUES) of x. Columnwise: of x transposed,
    with a stream of random numbers of its own (``seed + 1``); its values may lie as x does, seen transposed. A square
    block is rounded once and turned.

    For formats with one scale a tensor, delayed scaling: ``amax``, a float32 scalar, makes the scale in place of the
    amax of x (``reference_quantize.encode_under``), and into ``record``, another one, goes the larger of what it holds and the
    amax of x, NaN above all. Raises ValueError for them with another format, and for x of fewer than two dimensions.
    """
    check_source(x)
    if x.dim() < 2:
        raise ValueError(f"a pair of factors is cast from a matrix or a stack of them, not from {tuple(x.shape)}")
    for name, value in (("amax", amax), ("record", record)):
        if value is None:
            continue
        if cast.format.block[0] != FULL:
            raise ValueError(f"{cast.format} has a scale for each block: {name} is for formats with one scale a tensor")
        if value.dtype is not torch.float32 or value.numel() != 1:
            kind = str(value.dtype).removeprefix("torch.")
            raise TypeError(f"{name} must be one float32, got {kind} {tuple(value.shape)}")
        if value.device != x.device:
            raise ValueError(f"{name} is on {value.device}, the values on {x.device}")
    operands = (x, cast, rowwise, columnwise, dtype, amax, record)
    return perform(PAIR, _spec("cast pair", x, cast, amax, record), *operands)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- in two steps


def _accepts(spec: Spec, *operands: Any) -> None:
    return None


def _of_columns(cast: Cast) -> Cast:
    """The cast with a stream of random numbers of its own for the columnwise copy."""
    return cast if cast.seed is None else replace(cast, seed=cast.seed + 1)


def _quantize_twice(x: Tensor, cast: Cast) -> tuple[Operand, Operand]:
    return quantize_operand(x, cast), quantize_operand(x.transpose(-1, -2), _of_columns(cast))


def _there_and_back(x: Tensor, cast: Cast, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    rounded = _fake_quantized(quantize_operand(x, cast), dtype)
    return rounded.values, rounded.global_scale


def _fake_quantized(operand: Operand, dtype: torch.dtype) -> FakeQuantized:
    global_scale = operand.global_scale
    local = operand if global_scale is None else replace(operand, global_scale=None)
    return FakeQuantized(dequantize_operand(local, dtype), global_scale, operand.format)


def _in_form(x: Tensor, cast: Cast, form: Form | None, dtype: torch.dtype) -> GemmOperand | None:
    if form is Form.VALUES:
        return FakeQuantized(*fake_quantize(x, cast, dtype), cast.format)
    return quantize_operand(x, cast) if form is Form.CODES else None


def _transposed(gemm_operand: GemmOperand | None) -> GemmOperand | None:
    """The factor of the transpose in square blocks: codes in memory of their own, as products want them."""
    if isinstance(gemm_operand, FakeQuantized):
        return replace(gemm_operand, values=gemm_operand.values.transpose(-1, -2))
    if isinstance(gemm_operand, Operand):
        gemm_operand = transposed(gemm_operand)
        data, scale = (t.clone(memory_format=torch.contiguous_format) for t in (gemm_operand.data, gemm_operand.scale))
        return replace(gemm_operand, data=data, scale=scale)
    return None


def _pair_in_two(
    x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, dtype: torch.dtype,
    amax: Tensor | None, record: Tensor | None,
) -> tuple[GemmOperand | None, GemmOperand | None]:  # fmt: skip
    if not cast.format.square:
        left = _in_form(x, cast, rowwise, dtype)
        return left, _in_form(x.transpose(-1, -2), _of_columns(cast), columnwise, dtype)
    forms = (rowwise, columnwise)
    operands: dict[Form | None, GemmOperand | None] = {None: None}
    if amax is not None or Form.CODES in forms:
        operands[Form.CODES] = operand = (
            quantize_operand(x, cast) if amax is None else reference.encode_under(x, cast, amax.reshape(()))
        )
        operands[Form.VALUES] = _fake_quantized(operand, dtype) if Form.VALUES in forms else None
    elif Form.VALUES in forms:
        operands[Form.VALUES] = _in_form(x, cast, Form.VALUES, dtype)
    if record is not None:
        record.copy_(torch.maximum(record, tensor_amax(x).reshape(record.shape)))
    return operands[rowwise], _transposed(operands[columnwise])


QUANTIZE_BOTH: tuple[Kernel, ...] = (
    custom_ops.QUANTIZE_BOTH,
    Kernel("two casts", _accepts, _quantize_twice),
)
"""``run(x, cast)``: the operand of x and that of its transpose."""
FAKE_QUANTIZE: tuple[Kernel, ...] = (
    custom_ops.FAKE_QUANTIZE,
    Kernel("two casts", _accepts, _there_and_back),
)
"""``run(x, cast, dtype)``: the values that x has in the format, without the global scale, and that scale."""
PAIR: tuple[Kernel, ...] = (
    custom_ops.PAIR,
    Kernel("two casts", _accepts, _pair_in_two),
)
"""``run(x, cast, rowwise, columnwise, dtype, amax, record)``: the factors that ``cast_pair`` gives."""

RowsDecoder = Callable[[Operand, int, int, Tensor], Tensor]


def rows_decoder(operand: Operand, dtype: torch.dtype) -> RowsDecoder | None:
    """``decode_rows(operand, start, length, out)`` of the first kernel that can decode part of a matrix; or None."""
    spec = Spec("dequantize", (operand.shape,), (operand.format,), dtype, operand.data.device)
    for kernel, decode_rows in (
        (cpu.DEQUANTIZE, cpu.decode_rows),
        (blocked.DEQUANTIZE, blocked.decode_rows),
    ):
        if kernel.refuses(spec, operand, dtype) is None:
            return decode_rows
    return None

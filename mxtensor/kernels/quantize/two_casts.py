"""Both copies of a tensor by two casts: what runs if no kernel makes both in one pass."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...core.kernel import Kernel, Spec
from ...numerics.cast import Cast
from ...numerics.operand import Operand, transposed
from ...numerics.reference import tensor_amax
from ..gemm.spec import FakeQuantized, Form, GemmOperand
from . import reference
from .select import fake_quantize, fake_quantized, quantize_operand


def columnwise_cast(cast: Cast) -> Cast:
    """The same cast with random numbers of its own for the columnwise copy."""
    return cast if cast.seed is None else replace(cast, seed=cast.seed + 1)


def _quantize_both(x: Tensor, cast: Cast) -> tuple[Operand, Operand]:
    return quantize_operand(x, cast), quantize_operand(x.transpose(-1, -2), columnwise_cast(cast))


def _refuses_pair(spec: Spec, x: Tensor, cast: Cast, *forms: object) -> str | None:
    return "casts to codes and to values" if Form.ROWS in forms[:2] else None


def _in_form(x: Tensor, cast: Cast, form: Form | None, dtype: torch.dtype) -> GemmOperand | None:
    if form is Form.VALUES:
        return FakeQuantized(*fake_quantize(x, cast, dtype), cast.format)
    return quantize_operand(x, cast) if form is Form.CODES else None


def _transpose(rowwise: GemmOperand | None) -> GemmOperand | None:
    """The transpose in square blocks; codes and scales are copied, because products read rows."""
    if isinstance(rowwise, FakeQuantized):
        return replace(rowwise, values=rowwise.values.transpose(-1, -2))
    if isinstance(rowwise, Operand):
        operand = transposed(rowwise)
        data, scale = (t.clone(memory_format=torch.contiguous_format) for t in (operand.data, operand.scale))
        return replace(operand, data=data, scale=scale)
    return None


def _pair(
    x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, dtype: torch.dtype,
    amax: Tensor | None, record: Tensor | None,
) -> tuple[GemmOperand | None, GemmOperand | None]:  # fmt: skip
    if not cast.format.square:
        transpose = x.transpose(-1, -2)
        return _in_form(x, cast, rowwise, dtype), _in_form(transpose, columnwise_cast(cast), columnwise, dtype)
    forms = (rowwise, columnwise)
    results: dict[Form | None, GemmOperand | None] = {None: None}
    if amax is not None or Form.CODES in forms:
        operand = quantize_operand(x, cast) if amax is None else reference.encode_with_amax(x, cast, amax.reshape(()))
        results[Form.CODES] = operand
        results[Form.VALUES] = fake_quantized(operand, dtype) if Form.VALUES in forms else None
    elif Form.VALUES in forms:
        results[Form.VALUES] = _in_form(x, cast, Form.VALUES, dtype)
    if record is not None:
        record.copy_(torch.maximum(record, tensor_amax(x).reshape(record.shape)))
    return results[rowwise], _transpose(results[columnwise])


QUANTIZE_BOTH = Kernel("two casts", reference.refuses, _quantize_both)
PAIR = Kernel("two casts", _refuses_pair, _pair)

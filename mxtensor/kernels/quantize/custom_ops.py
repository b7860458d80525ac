"""The Triton casts as custom ops for traced code, and the kernels that are a call or such an op.

A custom op is opaque to torch.compile, so that the bits stay those of the kernel: inductor's own code would divide to
2 ulps and contract products with sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.dispatch import Kernel
from ...numerics.cast import Cast
from ...numerics.formats import Format, get_format
from ...numerics.operand import Operand
from ..gemm.spec import Factor, Form, Rounded
from ..quantize import triton_pair, triton_rows
from .triton_common import runs_down_columns


def _words(cast: Cast) -> tuple[str, str, str, int | None]:
    return cast.format.name, cast.scaling.value, cast.rounding.value, cast.seed


def _tensors(operands: tuple[Operand, ...]) -> list[Tensor]:
    """Codes and scales of each operand, and at the end the global scale that they share, if there is one."""
    parts = [t for o in operands for t in (o.data, o.scale)]
    last = operands[0].global_scale
    return parts if last is None else [*parts, last]


def _fake(x: Tensor, format: Format, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    parts = []
    for shape in shapes:
        parts.append(x.new_empty(format.data_shape(shape), dtype=format.element.dtype))
        parts.append(x.new_empty(format.scale_shape(shape), dtype=format.scale.dtype))
    return [*parts, x.new_empty((), dtype=torch.float32)] if format.global_scale else parts


@torch.library.custom_op("mxtensor::quantize", mutates_args=())
def quantize_op(x: Tensor, format: str, scaling: str, rounding: str, seed: int | None) -> list[Tensor]:
    """``cast_triton.quantize`` of x: codes, scales, and the global scale where the format has one."""
    return _tensors((triton_rows.quantize(x, Cast.of(format, scaling, rounding, seed)),))


@quantize_op.register_fake
def _(x, format, scaling, rounding, seed):  # type: ignore[no-untyped-def]
    return _fake(x, get_format(format), [tuple(x.shape)])


@torch.library.custom_op("mxtensor::quantize_both", mutates_args=())
def quantize_both_op(x: Tensor, format: str, scaling: str, rounding: str, seed: int | None) -> list[Tensor]:
    """``cast_triton.quantize_both`` of a matrix: codes and scales of x, those of its transpose, the global scale."""
    return _tensors(triton_rows.quantize_both(x, Cast.of(format, scaling, rounding, seed)))


@quantize_both_op.register_fake
def _(x, format, scaling, rounding, seed):  # type: ignore[no-untyped-def]
    return _fake(x, get_format(format), [tuple(x.shape), (x.shape[1], x.shape[0])])


@torch.library.custom_op("mxtensor::round_trip", mutates_args=())
def round_trip_op(
    x: Tensor, format: str, scaling: str, rounding: str, seed: int | None, dtype: torch.dtype
) -> list[Tensor]:
    """``cast_triton.round_trip`` of x: the values, and the global scale where the format has one."""
    out, last = triton_rows.round_trip(x, Cast.of(format, scaling, rounding, seed), dtype)
    return [out] if last is None else [out, last]


@round_trip_op.register_fake
def _(x, format, scaling, rounding, seed, dtype):  # type: ignore[no-untyped-def]
    out = [x.new_empty(x.shape, dtype=dtype)]
    return [*out, x.new_empty((), dtype=torch.float32)] if get_format(format).global_scale else out


@torch.library.custom_op("mxtensor::cast_pair", mutates_args=())
def cast_pair_op(
    x: Tensor,
    format: str,
    scaling: str,
    rounding: str,
    seed: int | None,
    rowwise: str | None,
    columnwise: str | None,
    dtype: torch.dtype,
    amax: Tensor | None,
    recorded: bool,
) -> list[Tensor]:
    """``cast_pair_triton.pair`` of a matrix: codes and scales or values, of rows, of columns, then the global scale.

    Values of columns lie as those of x. Forms are named by ``Form``. With ``recorded``, last comes the amax of x.
    """
    record = x.new_zeros((), dtype=torch.float32) if recorded else None
    row, column = (None if form is None else Form(form) for form in (rowwise, columnwise))
    cast = Cast.of(format, scaling, rounding, seed)
    parts, last = [], None
    for factor in triton_pair.pair(x, cast, row, column, dtype, amax, record):
        if factor is not None:
            assert isinstance(factor, (Operand, Rounded))
            parts += [factor.values] if isinstance(factor, Rounded) else [factor.data, factor.scale]
            last = factor.global_scale
    if columnwise == Form.VALUES.value:
        parts[-1] = parts[-1].t()
    return [*parts, *(t for t in (last, record) if t is not None)]


@cast_pair_op.register_fake
def _(x, format, scaling, rounding, seed, rowwise, columnwise, dtype, amax, recorded):  # type: ignore[no-untyped-def]
    row, parts = get_format(format), []
    for form, shape in ((rowwise, tuple(x.shape)), (columnwise, (x.shape[1], x.shape[0]))):
        if form == Form.VALUES.value:
            parts.append(x.new_empty(x.shape, dtype=dtype))
        elif form is not None:
            parts += _fake(x, replace(row, global_scale=False), [shape])
    return [*parts, *(x.new_empty((), dtype=torch.float32) for there in (row.global_scale, recorded) if there)]


@torch.library.custom_op("mxtensor::dequantize", mutates_args=())
def dequantize_op(
    data: Tensor, scale: Tensor, last: Tensor | None, format: str, shape: list[int], dtype: torch.dtype
) -> Tensor:
    """``cast_triton.dequantize`` of an operand's tensors; ``shape``: the logical one."""
    return triton_rows.dequantize(Operand(data, scale, last, get_format(format), tuple(shape)), dtype)


@dequantize_op.register_fake
def _(data, scale, last, format, shape, dtype):  # type: ignore[no-untyped-def]
    return data.new_empty(shape, dtype=dtype)


# ---------------------------------------------------------------------------------------------- kernels


def _quantize(x: Tensor, cast: Cast) -> Operand:
    data, scale, *last = quantize_op(x.detach(), *_words(cast))
    return Operand(data, scale, last[0] if last else None, cast.format, tuple(x.shape))


def _quantize_both(x: Tensor, cast: Cast) -> tuple[Operand, Operand]:
    data, scale, turned_data, turned_scale, *rest = quantize_both_op(x.detach(), *_words(cast))
    last, shape = rest[0] if rest else None, tuple(x.shape)
    rowwise = Operand(data, scale, last, cast.format, shape)
    return rowwise, Operand(turned_data, turned_scale, last, cast.format, shape[::-1])


def _round_trip(x: Tensor, cast: Cast, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    if runs_down_columns(x, cast.format):  # said by a name, for a graph may lay its tensors out anew
        out, *last = cast_pair_op(x.detach().t(), *_words(cast), None, Form.VALUES.value, dtype, None, False)
        return out.t(), last[0] if last else None
    out, *last = round_trip_op(x.detach(), *_words(cast), dtype)
    return out, last[0] if last else None


def _pair(
    x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, dtype: torch.dtype,
    amax: Tensor | None, record: Tensor | None,
) -> tuple[Factor | None, Factor | None]:  # fmt: skip
    row, column = (None if form is None else form.value for form in (rowwise, columnwise))
    parts = cast_pair_op(x.detach(), *_words(cast), row, column, dtype, amax, record is not None)
    if record is not None:
        record.copy_(torch.maximum(record, parts[-1].reshape(record.shape)))
    rest = int(record is not None)
    last = parts[-1 - rest] if cast.format.global_scale else None
    taken, held = TENSORS[rowwise], TENSORS[columnwise]
    factor = _factor(parts[:taken], last, cast.format, tuple(x.shape))
    turned = _factor(parts[taken : taken + held], last, cast.format, (x.shape[1], x.shape[0]))
    return factor, replace(turned, values=turned.values.t()) if isinstance(turned, Rounded) else turned


TENSORS = {None: 0, Form.VALUES: 1, Form.CODES: 2}
"""Of how many tensors a factor in each form consists, the global scale left aside."""


def _factor(parts: list[Tensor], last: Tensor | None, format: Format, shape: tuple[int, ...]) -> Factor | None:
    """Values, or codes and scales, or nothing, as a factor."""
    if len(parts) == 1:
        return Rounded(parts[0], last, format)
    return Operand(parts[0], parts[1], last, format, shape) if parts else None


def _dequantize(operand: Operand, dtype: torch.dtype) -> Any:
    parts = (operand.data, operand.scale, operand.global_scale)
    return dequantize_op(*parts, operand.format.name, list(operand.shape), dtype)


QUANTIZE = Kernel("triton", triton_rows.refuses_quantize, triton_rows.quantize, "cuda", _quantize)
QUANTIZE_BOTH = Kernel("triton", triton_rows.refuses_both, triton_rows.quantize_both, "cuda", _quantize_both)
ROUND_TRIP = Kernel("triton", triton_rows.refuses_round_trip, triton_rows.round_trip, "cuda", _round_trip)
PAIR = Kernel("triton", triton_pair.refuses_pair, triton_pair.pair, "cuda", _pair)
DEQUANTIZE = Kernel("triton", triton_rows.refuses_dequantize, triton_rows.dequantize, "cuda", _dequantize)

"""The Triton casts as custom ops for traced code, and the kernels that are a call or such an op.

A custom op is opaque to torch.compile, so that the bits stay those of the kernel: inductor's own code would divide to
2 ulps and contract products with sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.kernel import Kernel
from ...numerics.cast import Cast
from ...numerics.formats import Format, get_format
from ...numerics.operand import Operand
from ..gemm.spec import FakeQuantized, Form, GemmOperand
from ..quantize import triton_pair, triton_rows
from .triton_common import runs_down_columns


def _words(cast: Cast) -> tuple[str, str, str, int | None]:
    return cast.format.name, cast.scaling.value, cast.rounding.value, cast.seed


def _tensors(operands: tuple[Operand, ...]) -> list[Tensor]:
    """Codes and scales of each operand, and at the end the global scale that they share, if there is one."""
    components = [t for o in operands for t in (o.data, o.scale)]
    global_scale = operands[0].global_scale
    return components if global_scale is None else [*components, global_scale]


def _fake(x: Tensor, format: Format, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    components = []
    for shape in shapes:
        components.append(x.new_empty(format.data_shape(shape), dtype=format.element.dtype))
        components.append(x.new_empty(format.scale_shape(shape), dtype=format.scale.dtype))
    return [*components, x.new_empty((), dtype=torch.float32)] if format.global_scale else components


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


@torch.library.custom_op("mxtensor::fake_quantize", mutates_args=())
def fake_quantize_op(
    x: Tensor, format: str, scaling: str, rounding: str, seed: int | None, dtype: torch.dtype
) -> list[Tensor]:
    """``cast_triton.fake_quantize`` of x: the values, and the global scale where the format has one."""
    out, global_scale = triton_rows.fake_quantize(x, Cast.of(format, scaling, rounding, seed), dtype)
    return [out] if global_scale is None else [out, global_scale]


@fake_quantize_op.register_fake
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
    components, global_scale = [], None
    for gemm_operand in triton_pair.pair(x, cast, row, column, dtype, amax, record):
        if gemm_operand is not None:
            assert isinstance(gemm_operand, (Operand, FakeQuantized))
            components += (
                [gemm_operand.values]
                if isinstance(gemm_operand, FakeQuantized)
                else [gemm_operand.data, gemm_operand.scale]
            )
            global_scale = gemm_operand.global_scale
    if columnwise == Form.VALUES.value:
        components[-1] = components[-1].t()
    return [*components, *(t for t in (global_scale, record) if t is not None)]


@cast_pair_op.register_fake
def _(x, format, scaling, rounding, seed, rowwise, columnwise, dtype, amax, recorded):  # type: ignore[no-untyped-def]
    row, components = get_format(format), []
    for form, shape in ((rowwise, tuple(x.shape)), (columnwise, (x.shape[1], x.shape[0]))):
        if form == Form.VALUES.value:
            components.append(x.new_empty(x.shape, dtype=dtype))
        elif form is not None:
            components += _fake(x, replace(row, global_scale=False), [shape])
    return [*components, *(x.new_empty((), dtype=torch.float32) for there in (row.global_scale, recorded) if there)]


@torch.library.custom_op("mxtensor::dequantize", mutates_args=())
def dequantize_op(
    data: Tensor, scale: Tensor, global_scale: Tensor | None, format: str, shape: list[int], dtype: torch.dtype
) -> Tensor:
    """``cast_triton.dequantize`` of an operand's tensors; ``shape``: the logical one."""
    return triton_rows.dequantize(Operand(data, scale, global_scale, get_format(format), tuple(shape)), dtype)


@dequantize_op.register_fake
def _(data, scale, global_scale, format, shape, dtype):  # type: ignore[no-untyped-def]
    return data.new_empty(shape, dtype=dtype)


# ---------------------------------------------------------------------------------------------- kernels


def _quantize(x: Tensor, cast: Cast) -> Operand:
    data, scale, *global_scale = quantize_op(x.detach(), *_words(cast))
    return Operand(data, scale, global_scale[0] if global_scale else None, cast.format, tuple(x.shape))


def _quantize_both(x: Tensor, cast: Cast) -> tuple[Operand, Operand]:
    data, scale, transposed_data, transposed_scale, *rest = quantize_both_op(x.detach(), *_words(cast))
    global_scale, shape = rest[0] if rest else None, tuple(x.shape)
    rowwise = Operand(data, scale, global_scale, cast.format, shape)
    return rowwise, Operand(transposed_data, transposed_scale, global_scale, cast.format, shape[::-1])


def _round_trip(x: Tensor, cast: Cast, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    if runs_down_columns(x, cast.format):  # said by a name, for a graph may lay its tensors out anew
        out, *global_scale = cast_pair_op(x.detach().t(), *_words(cast), None, Form.VALUES.value, dtype, None, False)
        return out.t(), global_scale[0] if global_scale else None
    out, *global_scale = fake_quantize_op(x.detach(), *_words(cast), dtype)
    return out, global_scale[0] if global_scale else None


def _pair(
    x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, dtype: torch.dtype,
    amax: Tensor | None, record: Tensor | None,
) -> tuple[GemmOperand | None, GemmOperand | None]:  # fmt: skip
    row, column = (None if form is None else form.value for form in (rowwise, columnwise))
    components = cast_pair_op(x.detach(), *_words(cast), row, column, dtype, amax, record is not None)
    if record is not None:
        record.copy_(torch.maximum(record, components[-1].reshape(record.shape)))
    rest = int(record is not None)
    global_scale = components[-1 - rest] if cast.format.global_scale else None
    taken, operands = TENSORS[rowwise], TENSORS[columnwise]
    gemm_operand = _gemm_operand(components[:taken], global_scale, cast.format, tuple(x.shape))
    transposed = _gemm_operand(
        components[taken : taken + operands], global_scale, cast.format, (x.shape[1], x.shape[0])
    )
    return gemm_operand, replace(transposed, values=transposed.values.t()) if isinstance(
        transposed, FakeQuantized
    ) else transposed


TENSORS = {None: 0, Form.VALUES: 1, Form.CODES: 2}
"""Of how many tensors a factor in each form consists, the global scale left aside."""


def _gemm_operand(
    components: list[Tensor], global_scale: Tensor | None, format: Format, shape: tuple[int, ...]
) -> GemmOperand | None:
    """Values, or codes and scales, or nothing, as a factor."""
    if len(components) == 1:
        return FakeQuantized(components[0], global_scale, format)
    return Operand(components[0], components[1], global_scale, format, shape) if components else None


def _dequantize(operand: Operand, dtype: torch.dtype) -> Any:
    components = (operand.data, operand.scale, operand.global_scale)
    return dequantize_op(*components, operand.format.name, list(operand.shape), dtype)


QUANTIZE = Kernel("triton", triton_rows.refuses_quantize, triton_rows.quantize, "cuda", _quantize)
QUANTIZE_BOTH = Kernel("triton", triton_rows.refuses_both, triton_rows.quantize_both, "cuda", _quantize_both)
FAKE_QUANTIZE = Kernel("triton", triton_rows.refuses_round_trip, triton_rows.fake_quantize, "cuda", _round_trip)
PAIR = Kernel("triton", triton_pair.refuses_pair, triton_pair.pair, "cuda", _pair)
DEQUANTIZE = Kernel("triton", triton_rows.refuses_dequantize, triton_rows.dequantize, "cuda", _dequantize)

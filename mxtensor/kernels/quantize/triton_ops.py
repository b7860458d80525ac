"""The Triton casts as kernels: a direct call in eager code, a custom op in traced code.

A custom op is opaque to torch.compile, so that the result is bitwise that of the kernel: inductor's own code would
divide to 2 ulps and contract multiply and add.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.kernel import Kernel
from ...core.repeated import recorded
from ...numerics.cast import Cast
from ...numerics.formats import FULL, Format, get_format
from ...numerics.operand import Operand
from ..operands import FakeQuantized, Form, GemmOperand
from ..runtime.custom_op import check_argument, check_codes, check_device, check_scalars
from . import triton_columns, triton_rows
from .triton_common import SOURCES, is_transposed_matrix


def cast_arguments(cast: Cast) -> tuple[str, str, str, int | None, float]:
    """The cast as arguments that a custom op can take; ``Cast.of`` is the inverse."""
    return cast.format.name, cast.scaling.value, cast.rounding.value, cast.seed, float(cast.amax_epsilon)


def tensors_of(operands: tuple[Operand, ...]) -> list[Tensor]:
    """Codes and scales of each operand, then the global scale that they share, if there is one."""
    components = [t for o in operands for t in (o.data, o.scale)]
    global_scale = operands[0].global_scale
    return components if global_scale is None else [*components, global_scale]


def both_operands(tensors: list[Tensor], cast: Cast, shape: tuple[int, ...]) -> tuple[Operand, Operand]:
    """The operands of a matrix of this shape and of its transpose, from ``tensors_of`` both."""
    rows, columns, global_scale = tensors[:2], tensors[2:4], tensors[4:]
    rowwise = Operand.from_tensors([*rows, *global_scale], cast.format, shape)
    return rowwise, Operand.from_tensors([*columns, *global_scale], cast.format, shape[::-1])


def fake_operands(x: Tensor, format: Format, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """The tensors of operands of these shapes, on the device of x, for fake tensors."""
    return tensors_of(tuple(Operand.empty(format, shape, x.device) for shape in shapes))


def _check(op: str, x: Tensor, dims: int, dtype: torch.dtype = torch.float32) -> None:
    """Raise TypeError or ValueError unless the kernels can read ``x`` and write values in ``dtype``."""
    if dtype not in SOURCES:
        raise TypeError(f"{op}: the result must be bfloat16, float16 or float32, not {dtype}")
    check_argument(op, "x", x, SOURCES, (None,) * max(dims, 1), x.device)
    check_device(op, x)


def _check_rows(op: str, format: Format, columnwise: bool = True) -> None:
    if format.block[0] != 1 or format.block[1] == FULL or not columnwise:
        raise ValueError(
            f"{op} casts the columns of blocks along rows, or codes with one scale per tensor, not {format}"
        )


@custom_ops.define("mxtensor::quantize")
@recorded
def quantize_op(
    x: Tensor, format: str, scaling: str, rounding: str, seed: int | None, amax_epsilon: float
) -> list[Tensor]:
    """``triton_rows.quantize`` of x: codes, scales, and the global scale where the format has one."""
    _check("mxtensor::quantize", x, x.dim())
    return list(triton_rows.quantize(x, Cast.of(format, scaling, rounding, seed, amax_epsilon)).tensors)


@custom_ops.fake_of(quantize_op)
def _(x, format, scaling, rounding, seed, amax_epsilon):  # type: ignore[no-untyped-def]
    return list(Operand.empty(get_format(format), x.shape, x.device).tensors)


@custom_ops.define("mxtensor::quantize_both")
@recorded
def quantize_both_op(
    x: Tensor, format: str, scaling: str, rounding: str, seed: int | None, amax_epsilon: float
) -> list[Tensor]:
    """``triton_columns.pair`` of a matrix: codes and scales of x, those of its transpose, the global scale."""
    cast = Cast.of(format, scaling, rounding, seed, amax_epsilon)
    _check_rows("mxtensor::quantize_both", cast.format)
    _check("mxtensor::quantize_both", x, 2)
    return tensors_of(triton_columns.pair(x, cast))  # type: ignore[arg-type]


@custom_ops.fake_of(quantize_both_op)
def _(x, format, scaling, rounding, seed, amax_epsilon):  # type: ignore[no-untyped-def]
    return fake_operands(x, get_format(format), [tuple(x.shape), (x.shape[1], x.shape[0])])


@custom_ops.define("mxtensor::fake_quantize")
@recorded
def fake_quantize_op(
    x: Tensor, format: str, scaling: str, rounding: str, seed: int | None, amax_epsilon: float, dtype: torch.dtype
) -> list[Tensor]:
    """``triton_rows.fake_quantize`` of x: the values, and the global scale where the format has one."""
    _check("mxtensor::fake_quantize", x, x.dim(), dtype)
    out, global_scale = triton_rows.fake_quantize(x, Cast.of(format, scaling, rounding, seed, amax_epsilon), dtype)
    return [out] if global_scale is None else [out, global_scale]


@custom_ops.fake_of(fake_quantize_op)
def _(x, format, scaling, rounding, seed, amax_epsilon, dtype):  # type: ignore[no-untyped-def]
    out, row = [x.new_empty(x.shape, dtype=dtype)], get_format(format)
    return [*out, x.new_empty(row.global_scale_shape(x.shape), dtype=torch.float32)] if row.global_scale else out


@custom_ops.define("mxtensor::cast_pair")
@recorded
def cast_pair_op(
    x: Tensor,
    format: str,
    scaling: str,
    rounding: str,
    seed: int | None,
    amax_epsilon: float,
    rowwise: str | None,
    columnwise: str | None,
    dtype: torch.dtype,
    amax: Tensor | None,
    recorded: bool,
) -> list[Tensor]:
    """``triton_columns.pair`` of a matrix: codes and scales or values of rows, then of columns, then the global scale.

    Columnwise values have the layout of x. ``rowwise`` and ``columnwise`` are values of ``Form``. If ``recorded``, the
    amax of x comes after everything else.
    """
    _check("mxtensor::cast_pair", x, 2, dtype)
    record = x.new_zeros((), dtype=torch.float32) if recorded else None
    row, column = (None if form is None else Form(form) for form in (rowwise, columnwise))
    cast = Cast.of(format, scaling, rounding, seed, amax_epsilon)
    if cast.format.block[0] != FULL or Form.VALUES in (row, column) or column is None is row:
        _check_rows("mxtensor::cast_pair", cast.format, column is not None)
    check_scalars("mxtensor::cast_pair", "amax", [amax], x.device)
    components, global_scale = [], None
    for copy in triton_columns.pair(x, cast, row, column, dtype, amax, record):
        if copy is not None:
            assert isinstance(copy, (Operand, FakeQuantized))
            components += [copy.values] if isinstance(copy, FakeQuantized) else [copy.data, copy.scale]
            global_scale = copy.global_scale
    if columnwise == Form.VALUES.value:
        components[-1] = components[-1].t()
    return [*components, *(t for t in (global_scale, record) if t is not None)]


@custom_ops.fake_of(cast_pair_op)
def _(x, format, scaling, rounding, seed, amax_epsilon, rowwise, columnwise, dtype, amax, recorded):  # type: ignore[no-untyped-def]
    row = get_format(format)
    components: list[Tensor] = []
    for form, shape in ((rowwise, tuple(x.shape)), (columnwise, (x.shape[1], x.shape[0]))):
        if form == Form.VALUES.value:
            components.append(x.new_empty(x.shape, dtype=dtype))
        elif form is not None:
            components += fake_operands(x, replace(row, global_scale=False), [shape])
    return [*components, *(x.new_empty((), dtype=torch.float32) for there in (row.global_scale, recorded) if there)]


@custom_ops.define("mxtensor::dequantize")
@recorded
def dequantize_op(
    data: Tensor, scale: Tensor, global_scale: Tensor | None, format: str, shape: list[int], dtype: torch.dtype
) -> Tensor:
    """``triton_rows.dequantize`` of an operand's tensors; ``shape`` is the logical shape."""
    op, row = "mxtensor::dequantize", get_format(format)
    if dtype not in SOURCES:
        raise TypeError(f"{op}: dtype must be bfloat16, float16 or float32, not {dtype}")
    operand = check_codes(op, data, scale, global_scale, row, shape)
    if 0 in operand.shape:
        raise ValueError(f"{op}: an operand of shape {operand.shape} has no values; the result is torch.empty of it")
    check_device(op, data)
    return triton_rows.dequantize(operand, dtype)


@custom_ops.fake_of(dequantize_op)
def _(data, scale, global_scale, format, shape, dtype):  # type: ignore[no-untyped-def]
    return data.new_empty(shape, dtype=dtype)


# ---------------------------------------------------------------------------------------------- kernels


def _quantize(x: Tensor, cast: Cast) -> Operand:
    return Operand.from_tensors(quantize_op(x.detach(), *cast_arguments(cast)), cast.format, x.shape)


def _quantize_both(x: Tensor, cast: Cast) -> tuple[Operand, Operand]:
    return both_operands(quantize_both_op(x.detach(), *cast_arguments(cast)), cast, x.shape)


def _fake_quantize(x: Tensor, cast: Cast, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    if is_transposed_matrix(x, cast.format):  # stated by the op: a graph may change the layout of its tensors
        out, *global_scale = cast_pair_op(
            x.detach().t(), *cast_arguments(cast), None, Form.VALUES.value, dtype, None, False
        )
        return out.t(), global_scale[0] if global_scale else None
    out, *global_scale = fake_quantize_op(x.detach(), *cast_arguments(cast), dtype)
    return out, global_scale[0] if global_scale else None


def _pair(
    x: Tensor, cast: Cast, rowwise: Form | None, columnwise: Form | None, dtype: torch.dtype,
    amax: Tensor | None, record: Tensor | None,
) -> tuple[GemmOperand | None, GemmOperand | None]:  # fmt: skip
    forms = (None if form is None else form.value for form in (rowwise, columnwise))
    components = cast_pair_op(x.detach(), *cast_arguments(cast), *forms, dtype, amax, record is not None)
    if record is not None:
        record.copy_(torch.maximum(record, components[-1].reshape(record.shape)))
    global_scale = components[-2 if record is not None else -1] if cast.format.global_scale else None
    sides: list[GemmOperand | None] = []
    at = 0
    for form, shape in ((rowwise, tuple(x.shape)), (columnwise, (x.shape[1], x.shape[0]))):
        if form is None:
            sides.append(None)
        elif form is Form.VALUES:
            values = components[at].t() if sides else components[at]
            sides.append(FakeQuantized(values, global_scale, cast.format))
            at += 1
        else:
            sides.append(Operand(components[at], components[at + 1], global_scale, cast.format, shape))
            at += 2
    return sides[0], sides[1]


def _dequantize(operand: Operand, dtype: torch.dtype) -> Any:
    tensors = (operand.data, operand.scale, operand.global_scale)
    return dequantize_op(*tensors, operand.format.name, list(operand.shape), dtype)


QUANTIZE = Kernel("triton", triton_rows.refuses_quantize, triton_rows.quantize, "cuda", _quantize)
QUANTIZE_BOTH = Kernel("triton", triton_columns.refuses_both, triton_columns.pair, "cuda", _quantize_both)
FAKE_QUANTIZE = Kernel("triton", triton_rows.refuses_quantize, triton_rows.fake_quantize, "cuda", _fake_quantize)
PAIR = Kernel("triton", triton_columns.refuses_pair, triton_columns.pair, "cuda", _pair)
DEQUANTIZE = Kernel("triton", triton_rows.refuses_dequantize, triton_rows.dequantize, "cuda", _dequantize)

"""MX operands on FP8 tensor cores without block-scaled instructions: row-scaled E4M3 through ``torch._scaled_mm``.

Both operands are rescaled to E4M3 codes with one power of two a row and multiplied with float32 scales for rows.
``numerics/row_scaled.py`` defines that form, with a glossary, and bounds the error.
Activations are cast straight to that form. Rows that are out of range are multiplied again from their own codes and
scales: the device finds them, the host does not wait (``triton_device/row_scaled_products.py``).
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.devices import multiprocessors
from ...core.explain import LOGS, record
from ...core.kernel import Kernel, Spec
from ...core.names import dtype_name
from ...core.repeated import recorded
from ...core.shapes import as_matrix
from ...core.tracing import is_captured
from ...numerics.formats import FULL, Format, get_format
from ...numerics.operand import Operand
from ...numerics.row_scaled import why_not
from ...numerics.validate import check_sizes
from .. import expected_time
from ..operands import INNER, FakeQuantized, GemmOperand, RowOperand, Unquantized, data_of
from ..quantize.choose_cast import quantize_operand
from ..quantize.to_row_scaled import ROWS, matrix_of, rows_of_operand, rows_of_values, why_not_in_one
from ..quantize.to_row_scaled_both import cast_to_rows, operand_to_rows
from ..quantize.triton_common import ceil_div, format_code
from ..quantize.triton_ops import cast_arguments
from ..runtime import triton_launch
from ..runtime.custom_op import check_argument, check_codes, check_device, exported
from ..runtime.triton_launch import device_code, launch, on
from . import fp8_rows_cache
from .cublas import recorded_product
from .scaled_mm_contract import SCALINGS, USE_FAST_ACCUM, plan_here
from .spec import FRESH, GemmArgs, is_cast_for_training, needs_codes, not_rows_by_matrix

OLDEST = (8, 9)
"""The first compute capability with FP8 tensor cores."""
MIN_ROWS = 128
MIN_VALUES = 3 << 19
"""Values of the result below which other kernels are as fast on an H200: for GPUs without expected times."""
HALVES = (torch.bfloat16, torch.float16)
EXACT_TILE = (64, 64, 64, 8)
"""(rows, columns, K, warps) of the product of rows out of range."""
COUNT_CHUNK, FIND_STEP = 8192, 512
"""Flags that a program of the exact product counts at a time, and among which it finds the rows of a tile."""


# ---------------------------------------------------------------------------------------------- refusals


def _row_scaling(device: torch.device, out_dtype: torch.dtype) -> str | None:
    """Why torch multiplies no E4M3 rows on this device to this dtype."""
    row = get_format("float8_e4m3_row")
    scaling = plan_here(SCALINGS, row, row, device)
    if isinstance(scaling, str):
        return scaling
    if out_dtype not in HALVES or out_dtype not in scaling.outputs:
        return f"writes bfloat16 or float16, not {dtype_name(out_dtype)}"
    return None


def _refuses_args(spec: Spec, args: GemmArgs) -> str | None:
    if args.alpha != 1:
        return f"multiplies the result by nothing, alpha is {args.alpha}"
    if args.bias is None or args.beta == 0:
        return None
    if args.beta != 1 or tuple(args.bias.shape) != spec.shapes[1][-2:-1] or args.bias.dtype is not args.out_dtype:
        return "adds a bias of one value a column in the dtype of the result"
    return None


def refuses(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> str | None:
    reason = triton_launch.missing(spec) or exported(spec)
    if reason is not None:
        return reason
    for format in spec.formats:
        if not isinstance(format, Format):
            return f"needs both operands quantized, one is {str(format).removeprefix('torch.')}"
        reason = why_not(format)
        if reason is not None:
            return reason
    reason = needs_codes(a, b, or_rows=True) or not_rows_by_matrix(spec, a) or _row_scaling(spec.device, args.out_dtype)
    if reason is not None:
        return reason
    rows, width = math.prod(spec.shapes[0][:-1]), spec.shapes[1][0]
    measured = expected_time.figures_of(spec.capability) is not None
    if rows < MIN_ROWS or (not measured and rows * width < MIN_VALUES):
        least = "" if measured else f" and {MIN_VALUES} values of the result"
        return f"for at least {MIN_ROWS} rows{least}, this product has {rows} rows of {width} values"
    if width % ROWS or spec.shapes[0][-1] % INNER:
        return f"needs K and N in multiples of {INNER}, got {spec.shapes[0][-1]} and {width}"
    return _refuses_args(spec, args)


def expected_us(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> float | None:
    """The time of the product, and of what makes its operands in this call."""
    figures = expected_time.figures_of(spec.capability)
    if figures is None:
        return None
    rows, (width, cols) = math.prod(spec.shapes[0][:-1]), spec.shapes[1]
    if is_cast_for_training(spec, a, b):
        return expected_time.in_training(figures, "fp8_rows", rows, width, cols)
    left, right = spec.formats
    assert isinstance(left, Format) and isinstance(right, Format)
    if spec.op in FRESH:
        cached = False
    elif spec.traced:
        cached = rows < fp8_rows_cache.ON_THE_FLY
    else:
        cached = not is_captured(data_of(b)) or (isinstance(b, Operand) and fp8_rows_cache.is_known(b))
    return expected_time.fp8_rows(figures, rows, width, cols, left, right, isinstance(a, Unquantized), cached)


# ---------------------------------------------------------------------------------------------- the product


def exact_rows(a: RowOperand, b: RowOperand, bias: Tensor | None, out: Tensor) -> None:
    """Write the product of rows out of range over their part of ``out``."""
    (rows, cols), width = a.shape, b.shape[0]
    high, wide, deep, warps = EXACT_TILE
    device = out.device
    capability = triton_launch.instructions_of(device)
    tiles = ceil_div(rows, high) * ceil_div(width, wide)
    sides, blocks = [], []
    for side in (a, b):
        code = format_code(side.format, capability, False)
        sides.append(code)
        blocks += [0 if n == FULL else n for n in side.format.block]
    with on(device):
        launch(
            device_code("row_scaled_products.exact_rows"),
            min(tiles, multiprocessors(device)),
            (
                a.codes.view(torch.uint8), a.row_scale, a.out_of_range, a.scale, b.codes.view(torch.uint8), b.row_scale,
                b.out_of_range, b.scale, bias, out, rows, width, cols, a.codes.shape[1], a.scale.stride(0),
                b.codes.shape[1], b.scale.stride(0), out.stride(0),
            ),
            (*sides, *blocks, high, wide, deep, COUNT_CHUNK, FIND_STEP, not triton_launch.interpreted()),
            warps,
        )  # fmt: skip


def multiply(a: RowOperand, b: RowOperand, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``a @ b^T + bias``: (rows of a, rows of b), rounded once."""
    left, right = (side.codes.view(torch.float8_e4m3fn) for side in (a, b))
    out = recorded_product(left, right, a.row_scale, b.row_scale, bias, out_dtype, USE_FAST_ACCUM)
    if out is None:
        out = torch._scaled_mm(
            left, right.t(), a.row_scale, b.row_scale.t(), bias, out_dtype=out_dtype, use_fast_accum=USE_FAST_ACCUM
        )
    exact_rows(a, b, bias, out)
    return out


# ---------------------------------------------------------------------------------------------- ops for traced graphs


def _check_side(op: str, tensors: list[Tensor], format: Format, cols: int) -> RowOperand:
    codes, row_scale, out_of_range, scale = tensors
    device = codes.device
    check_argument(op, "codes", codes, (torch.uint8,), (None, -(-cols // INNER) * INNER), device)
    rows = codes.shape[0]
    check_argument(op, "row scales", row_scale, (torch.float32,), (rows, 1), device)
    check_argument(op, "flags", out_of_range, (torch.uint8,), (rows,), device)
    check_argument(op, "scales", scale, (format.scale.dtype,), format.scale_shape((rows, cols)), device)
    if not all(t.is_contiguous() for t in tensors[:3]) or scale.stride(1) != 1:
        raise ValueError(f"{op}: codes, row scales, flags and rows of scales must be contiguous; use contiguous()")
    return RowOperand(codes, row_scale, out_of_range, scale, format, (rows, cols))


def _check_result(op: str, codes: Tensor, bias: Tensor | None, width: int, out_dtype: torch.dtype) -> None:
    if bias is not None:
        check_argument(op, "bias", bias, (out_dtype,), (width,), codes.device)
    check_device(op, codes)
    if out_dtype not in HALVES or width % ROWS:
        raise ValueError(f"{op} writes bfloat16 or float16 rows of a multiple of {ROWS} values; not {out_dtype}")


@custom_ops.define("mxtensor::fp8_rows_mm")
@recorded
def fp8_rows_mm(
    a: list[Tensor], b: list[Tensor], a_format: str, b_format: str, cols: int, bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``multiply`` of checked arguments. a, b: codes, row scales, flags, scales of blocks."""
    op = "mxtensor::fp8_rows_mm"
    left, right = _check_side(op, a, get_format(a_format), cols), _check_side(op, b, get_format(b_format), cols)
    _check_result(op, left.codes, bias, right.shape[0], out_dtype)
    return multiply(left, right, None if bias is None else bias.contiguous(), out_dtype)


@custom_ops.fake_of(fp8_rows_mm)
def _(a, b, a_format, b_format, cols, bias, out_dtype):  # type: ignore[no-untyped-def]
    return a[0].new_empty(a[0].shape[0], b[0].shape[0], dtype=out_dtype)


@custom_ops.define("mxtensor::fp8_rows_stored_mm")
@recorded
def fp8_rows_stored_mm(
    a: list[Tensor], data: Tensor, scale: Tensor, a_format: str, b_format: str, shape: list[int], bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``multiply`` by a stored weight of ``shape`` (..., K), whose row-scaled form is cached.

    a: codes, row scales, flags, scales of blocks.
    """
    op, weight = "mxtensor::fp8_rows_stored_mm", get_format(b_format)
    operand = check_codes(op, data, scale, None, weight, tuple(shape))
    left = _check_side(op, a, get_format(a_format), shape[-1])
    matrix = matrix_of(operand)
    _check_result(op, left.codes, bias, matrix.shape[0], out_dtype)
    codes, row_scale, out_of_range = fp8_rows_cache.weight_rows(operand, matrix)
    right = RowOperand(codes, row_scale, out_of_range, matrix.scale, weight, (matrix.shape[0], matrix.shape[1]))
    return multiply(left, right, None if bias is None else bias.contiguous(), out_dtype)


@custom_ops.fake_of(fp8_rows_stored_mm)
def _(a, data, scale, a_format, b_format, shape, bias, out_dtype):  # type: ignore[no-untyped-def]
    return a[0].new_empty(a[0].shape[0], math.prod(shape[:-1]), dtype=out_dtype)


# ---------------------------------------------------------------------------------------------- the kernel


def row_operand(side: Operand | Unquantized | RowOperand, traced: bool, weight: bool) -> RowOperand:
    """One side of the product; ``weight``: it may be cached."""
    if isinstance(side, RowOperand):
        return side
    if isinstance(side, Unquantized):
        x = as_matrix(side.x)
        if why_not_in_one(x, side.cast) is None:
            tensors = (
                cast_to_rows(x.detach(), *cast_arguments(side.cast), False) if traced else rows_of_values(x, side.cast)
            )
            codes, row_scale, out_of_range, scale = tensors
            return RowOperand(codes, row_scale, out_of_range, scale, side.format, (x.shape[0], x.shape[1]))
        side = quantize_operand(x, side.cast)
    elif not traced:
        check_sizes(side)
    matrix = matrix_of(side)
    if traced:
        made = operand_to_rows(matrix.data, matrix.scale, matrix.format.name, matrix.shape[1], False)
    elif weight:
        made = fp8_rows_cache.weight_rows(side, matrix)
    else:
        made = rows_of_operand(matrix, 1)
    codes, row_scale, out_of_range = made
    return RowOperand(codes, row_scale, out_of_range, matrix.scale, matrix.format, (matrix.shape[0], matrix.shape[1]))


def _tell(a: RowOperand, b: RowOperand, spec: Spec) -> None:
    """Log how many rows took the exact path; an open ``explain()`` waits for the device."""
    if spec.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    counts = [int(side.out_of_range.sum()) for side in (a, b)]
    if any(counts):
        shapes = tuple((n, side.shape[1]) for n, side in zip(counts, (a, b), strict=True))
        reason = f"{counts[0]} rows of the left operand and {counts[1]} of the right one are out of range"
        record(spec._replace(op="rows out of range", shapes=shapes), "fp8_rows exact", {"fp8_rows": reason})


def run(a: GemmOperand, b: GemmOperand, args: GemmArgs, traced: bool = False) -> Tensor:
    assert not isinstance(a, (Tensor, FakeQuantized)) and not isinstance(b, (Tensor, FakeQuantized))
    shape = (*a.shape[:-1], b.shape[-2])
    rows = math.prod(a.shape[:-1])
    left = row_operand(a, traced, False)
    bias = None if args.bias is None or args.beta == 0 else args.bias
    if traced and isinstance(a, Unquantized) and isinstance(b, Operand) and rows < fp8_rows_cache.ON_THE_FLY:
        side, names = [left.codes, left.row_scale, left.out_of_range, left.scale], (left.format.name, b.format.name)
        out = fp8_rows_stored_mm(side, b.data, b.scale, *names, list(b.shape), bias, args.out_dtype)
        return out if len(shape) == 2 else out.view(shape)  # type: ignore[no-any-return]
    right = row_operand(b, traced, True)
    if traced:
        sides = [[side.codes, side.row_scale, side.out_of_range, side.scale] for side in (left, right)]
        names = left.format.name, right.format.name
        out = fp8_rows_mm(*sides, *names, left.shape[1], bias, args.out_dtype)
    else:
        out = multiply(left, right, None if bias is None else bias.contiguous(), args.out_dtype)
        if LOGS.latest() is not None and LOGS.get() is not None:
            spec = Spec("", (), (left.format, right.format), args.out_dtype, out.device)
            _tell(left, right, spec)
    return out if len(shape) == 2 else out.view(shape)  # type: ignore[no-any-return]


KERNEL = Kernel("fp8_rows", refuses, run, "cuda", partial(run, traced=True), expected_us=expected_us)

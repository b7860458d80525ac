"""Dequantize to bfloat16, which is exact, and multiply with the backend's bfloat16 product.

If element times block scale has at most 8 significant bits, bfloat16 represents it exactly, and a bfloat16 product
accumulated in float32 equals the definition except for floating-point summation order. A global scale multiplies the
accumulator.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.compat import cpu_multiplies_bfloat16
from ...core.kernel import Kernel, Spec
from ...core.names import dtype_name
from ...core.shapes import as_matrix
from ...core.tracing import is_traced
from ...numerics.formats import Format, get_format
from ...numerics.groups import Groups
from ...numerics.operand import Operand
from .. import expected_time
from ..operands import (
    INNER,
    MAX_GROUPS,
    FakeQuantized,
    GemmOperand,
    RowOperand,
    Unquantized,
    data_of,
    format_of,
    has_group_scales,
)
from ..quantize import definition
from ..quantize.choose_cast import dequantize_operand, fake_quantize_rows, rows_decoder
from ..runtime import triton_launch
from ..runtime.custom_op import check_argument, check_codes, check_scalars, exported
from . import cublas, emulated, fp8_rows_grouped, global_scales
from .emulated import values
from .spec import GemmArgs, finish, is_cast_for_training, not_row_scaled, zero_after

SLICE = 1 << 21
"""Weight values decoded at a time on CPU: one buffer of 4 MiB of bfloat16 instead of a copy of the whole weight."""
WHOLE = 1 << 18
"""A weight of fewer codes than this is decoded at once."""


def _has_global_scale(*sides: GemmOperand) -> bool:
    return any(not isinstance(side, Tensor) and side.format.global_scale for side in sides)


_CPU_ACCUMULATES_IN_FLOAT32 = cpu_multiplies_bfloat16()
"""Whether oneDNN computes bfloat16 products on this CPU."""


def refuses(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> str | None:
    if args.out_dtype is not torch.bfloat16 and (args.out_dtype is not torch.float32 or spec.device.type != "cuda"):
        return f"computes in bfloat16, the result is {dtype_name(args.out_dtype)}"
    reason = not_row_scaled(a, b)
    if reason is not None:
        return reason
    if has_group_scales(a) or has_group_scales(b):
        return "groups, or matrices of a stack, have global scales of their own"
    for side in (a, b):
        format = format_of(side)
        if isinstance(side, FakeQuantized) and side.values.dtype is not torch.bfloat16:
            return f"the fake-quantized values of an operand are {dtype_name(side.values.dtype)}"
        if isinstance(format, Format):
            if not format.exact_in_bfloat16:
                return f"{format} has {format.scale.name} scales: its values are not exact in bfloat16"
        elif format is not torch.bfloat16:
            return f"an operand is {str(format).removeprefix('torch.')}"
    if spec.device.type == "cpu" and not _CPU_ACCUMULATES_IN_FLOAT32:
        return "this CPU has no bfloat16 product that accumulates in float32"
    if args.out_dtype is torch.float32:
        if len(spec.shapes[1]) > 2 and (len(spec.shapes[0]) != 3 or spec.shapes[0][0] != spec.shapes[1][0]):
            return "torch returns float32 only if the right operand is a matrix or a batch of the left operand's size"
    elif len(spec.shapes[0]) > 3 and args.bias is not None:
        return "adds a bias to two- and three-dimensional products only"
    if _has_global_scale(a, b) and not _can_slice(spec, b):
        if spec.device.type != "cuda":
            return "applies a global scale on CPU only if the right operand is one matrix that can be decoded in slices"
        return cublas.refuses(spec, args)
    return None


def expected_us(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> float | None:
    """The time of a product with one quantized weight, or with operands that are cast for training."""
    figures, right = expected_time.figures_of(spec.capability), format_of(b)
    if figures is None or not isinstance(right, Format) or len(spec.shapes[1]) != 2:
        return None
    rows, (width, cols) = math.prod(spec.shapes[0][:-1]), spec.shapes[1]
    if is_cast_for_training(spec, a, b):
        return expected_time.in_training(figures, "dequant", rows, width, cols)
    return expected_time.dequant(figures, rows, width, cols, right)


def values_dtype(args: GemmArgs) -> torch.dtype:
    """The dtype in which the product is computed."""
    return torch.bfloat16


def _can_slice(spec: Spec, b: GemmOperand) -> bool:
    """Whether the weight can be decoded some rows at a time: a matrix of whole blocks on CPU."""
    if not isinstance(b, Operand) or len(spec.shapes[0]) != 2 or spec.shapes[0][0] == 0 or spec.device.type != "cpu":
        return False
    return rows_decoder(b, torch.bfloat16) is not None


def eager_sliced_mm(
    a: Tensor, b: Operand, global_scales: list[Tensor], bias: Tensor | None, alpha: float, beta: float
) -> Tensor:
    """``alpha * a @ dequantize(b)^T + beta * bias``: decode some rows, multiply, reuse the buffer.

    a (M, K) bfloat16; b an (N, K) operand whose global scale stands in ``global_scales``; result (M, N) bfloat16.
    """
    rows, cols = b.shape
    alpha = math.prod([s.item() for s in global_scales], start=alpha)
    out = a.new_empty(a.shape[0], rows)
    decode_rows = rows_decoder(b, torch.bfloat16)
    assert decode_rows is not None
    step = definition.row_step(b, SLICE)
    buffer = a.new_empty(min(step, rows), cols)
    for start in range(0, rows, step):
        length = min(step, rows - start)
        weight = decode_rows(b, start, length, buffer.narrow(0, 0, length)).t()
        target = out.narrow(1, start, length)
        if bias is not None:
            added = bias.expand(a.shape[0], rows).narrow(-1, start, length)
            torch.addmm(added, a, weight, alpha=alpha, beta=beta, out=target)
        elif alpha != 1:
            torch.addmm(target, a, weight, alpha=alpha, beta=0, out=target)
        else:
            torch.mm(a, weight, out=target)
    return out


@custom_ops.define("mxtensor::sliced_mm")
def sliced_mm(
    a: Tensor, data: Tensor, scale: Tensor, format: str, global_scales: list[Tensor], bias: Tensor | None,
    alpha: float, beta: float,
) -> Tensor:  # fmt: skip
    """``eager_sliced_mm`` as one opaque op for torch.compile, which would otherwise write out the decoded weight."""
    op = "mxtensor::sliced_mm"
    check_argument(op, "a", a, (torch.bfloat16,), (None, a.shape[-1] if a.dim() else 1), torch.device("cpu"))
    b = check_codes(op, data, scale, None, get_format(format), (*data.shape[:1], a.shape[1]))
    check_scalars(op, "global_scales", global_scales, a.device)
    if rows_decoder(b, torch.bfloat16) is None:
        raise ValueError(f"{op} decodes a contiguous {b.format} matrix on the CPU a few rows at a time; not {b.shape}")
    return eager_sliced_mm(a, b, global_scales, bias, alpha, beta)


@custom_ops.fake_of(sliced_mm)
def _(a, data, scale, format, global_scales, bias, alpha, beta):  # type: ignore[no-untyped-def]
    return a.new_empty(a.shape[0], data.shape[0])


def _whole(a: Tensor, b: Tensor, args: GemmArgs) -> Tensor:
    """``a @ b`` with the bias added before the rounding, as addmm and baddbmm do for bfloat16."""
    if args.bias is None and args.alpha == 1:
        return torch.matmul(a, b)
    add = torch.addmm if a.dim() == 2 else torch.baddbmm
    bias, beta = (a.new_zeros(()), 0.0) if args.bias is None else (args.bias, args.beta)
    return add(bias, a, b, alpha=args.alpha, beta=beta)


def _in_float32(a: Tensor, b: Tensor, args: GemmArgs) -> Tensor:
    """``a @ b`` with a float32 result (``out_dtype``, CUDA only), then the bias."""
    if b.dim() == 2:
        out = torch.mm(as_matrix(a), b, out_dtype=torch.float32)
        return finish(out.view(*a.shape[:-1], b.shape[1]), args)
    return finish(torch.bmm(a, b, out_dtype=torch.float32), args)


def _values(side: GemmOperand) -> tuple[Tensor, list[Tensor]]:
    """One side in bfloat16 without its global scale, and the global scale if there is one."""
    if isinstance(side, Unquantized):
        side = FakeQuantized(*fake_quantize_rows(side.x, side.cast, torch.bfloat16), side.format)
    if isinstance(side, FakeQuantized):
        return side.values, [] if side.global_scale is None else [side.global_scale]
    if isinstance(side, Operand) and side.global_scale is not None:
        return dequantize_operand(replace(side, global_scale=None), torch.bfloat16), [side.global_scale]
    return values(side, torch.bfloat16), []


def run(a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Tensor:
    left, scales = _values(a)
    large = isinstance(b, Operand) and (scales or b.global_scale is not None or b.data.numel() >= WHOLE)
    if large and _can_slice(Spec("mm", (tuple(a.shape), b.shape), (), torch.bfloat16, left.device), b):
        assert isinstance(b, Operand)
        scales += [] if b.global_scale is None else [b.global_scale]
        if is_traced(left, b.data):
            out: Tensor = sliced_mm(left, b.data, b.scale, b.format.name, scales, args.bias, args.alpha, args.beta)
            return out
        return eager_sliced_mm(left, replace(b, global_scale=None), scales, args.bias, args.alpha, args.beta)
    right, global_scale = _values(b)
    if scales or global_scale:
        return cublas.mm(left, right, scales + global_scale, args)
    multiply = _in_float32 if args.out_dtype is torch.float32 else _whole
    return multiply(left, right.transpose(-1, -2), args)


# ---------------------------------------------------------------------------------------------- grouped


def refuses_grouped(spec: Spec, a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> str | None:
    if spec.device.type == "cuda":
        if has_group_scales(a) and has_group_scales(b):
            return _refuses_group_scales(spec, spec.shapes[1][1:], spec.shapes[1][0], a, b, args)
        reason = _refuses_on_cuda(spec.shapes[1][1:], spec.shapes[1][0], a, b, args)
        if reason is not None:
            return reason
    elif spec.traced and emulated.why_not_traced(args) is not None:
        return emulated.why_not_traced(args)
    elif (isinstance(b, Unquantized) and b.format.global_scale) or _has_global_scale(a):
        return "multiplies one quantized matrix of the stack at a time, by rows without a global scale"
    if isinstance(b, RowOperand):
        return not_row_scaled(a, b)
    one = b if isinstance(b, Unquantized) else matrix(b, 0) if b.shape[0] else b
    return refuses(spec._replace(shapes=(spec.shapes[0], spec.shapes[1][1:])), a, one, args)


def _refuses_on_cuda(
    multiples: tuple[int, ...], groups: int, a: GemmOperand, b: GemmOperand, args: GemmArgs
) -> str | None:
    if groups > MAX_GROUPS:
        return f"torch._grouped_mm takes at most {MAX_GROUPS} groups, got {groups}"
    if args.out_dtype is torch.float32:
        return "torch._grouped_mm rounds to bfloat16, the result is float32"
    if _has_global_scale(a, b):
        return "torch._grouped_mm cannot apply a global scale to the accumulator"
    if any(n % 8 for n in multiples):
        return f"torch._grouped_mm needs K and N in multiples of 8, got {multiples[1]} and {multiples[0]}"
    return None


def _refuses_group_scales(
    spec: Spec, multiples: tuple[int, ...], groups: int, a: GemmOperand, b: GemmOperand, args: GemmArgs
) -> str | None:
    """Why Triton's product refuses operands whose groups have global scales of their own."""
    reason = triton_launch.missing(spec) or exported(spec)
    if reason is not None:
        return reason
    if args.out_dtype is not torch.bfloat16 or args.alpha != 1 or (args.bias is not None and args.beta != 0):
        return "Triton's product of groups gives bfloat16, without an alpha or a bias"
    if groups > MAX_GROUPS:
        return f"Triton's product of groups takes at most {MAX_GROUPS} groups, got {groups}"
    if any(n % INNER for n in multiples):
        return f"Triton's product of groups needs multiples of {INNER}, got {multiples[1]} and {multiples[0]}"
    return None


def _in_bfloat16(side: GemmOperand) -> FakeQuantized:
    """An operand whose groups have global scales, with values in bfloat16, which represents them."""
    assert isinstance(side, FakeQuantized)
    return replace(side, values=side.values.to(torch.bfloat16))


def matrix(stack: Operand | FakeQuantized | Tensor, i: int) -> Operand | FakeQuantized | Tensor:
    """Matrix ``i`` of a stack (G, N, K), with the scale that all matrices share if there is only one."""
    if isinstance(stack, Tensor):
        return stack.select(0, i)
    if isinstance(stack, FakeQuantized):
        return replace(stack, values=stack.values.select(0, i))
    scale = stack.scale.select(0, i if stack.scale.shape[0] > 1 else 0)
    return Operand(stack.data.select(0, i), scale, stack.global_scale, stack.format, stack.shape[1:])


def run_grouped(a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> Tensor:
    if has_group_scales(a):
        left_rows, right_rows = (global_scales.rows_with_scales(_in_bfloat16(side)) for side in (a, b))
        return fp8_rows_grouped.multiply(*left_rows, *right_rows, ends, a.shape[0])
    left, _ = _values(a)
    if left.device.type == "cuda":
        right, _ = _values(b)
        return zero_after(torch._grouped_mm(left, right.transpose(-1, -2), offs=ends), ends)
    if is_traced(left, data_of(b), ends):
        return emulated.grouped_mm(left, _values(b)[0], ends, args)
    if isinstance(b, Unquantized):
        b = FakeQuantized(_values(b)[0], None, b.format)
    assert not isinstance(b, RowOperand)
    out = left.new_zeros(left.shape[0], b.shape[1])
    for i, (start, end) in enumerate(pairwise([0, *ends.tolist()])):
        if start < end:
            out[start:end] = run(left[start:end], matrix(b, i), args)
    return out


def refuses_wgrad(spec: Spec, a: GemmOperand, b: GemmOperand, groups: Groups, args: GemmArgs) -> str | None:
    if spec.device.type == "cuda":
        if has_group_scales(a) and has_group_scales(b):
            return _refuses_group_scales(spec, (spec.shapes[0][0], spec.shapes[1][0]), groups.number, a, b, args)
        reason = _refuses_on_cuda((spec.shapes[0][0], spec.shapes[1][0]), groups.number, a, b, args)
        if reason is not None:
            return reason
    elif _has_global_scale(a, b):
        return "multiplies groups of columns without a global scale"
    return refuses(spec, a, b, args)


def run_wgrad(a: GemmOperand, b: GemmOperand, groups: Groups, args: GemmArgs) -> Tensor:
    if has_group_scales(a):
        left_columns, right_columns = (global_scales.columns_with_scales(_in_bfloat16(side), groups) for side in (a, b))
        return fp8_rows_grouped.multiply(*left_columns, *right_columns, groups.given, groups.rows, groups.block)
    left, right = _values(a)[0], _values(b)[0]
    if left.device.type == "cuda":  # the padding of a group is zeros, and every group has some rows
        return torch._grouped_mm(left, right.transpose(-1, -2), offs=groups.padded_ends)
    return emulated.grouped_wgrad(left, right, groups.padded_ends, args)


KERNEL = Kernel("dequant", refuses, run, expected_us=expected_us)
GROUPED = Kernel("dequant", refuses_grouped, run_grouped)
GROUPED_WGRAD = Kernel("dequant", refuses_wgrad, run_wgrad)

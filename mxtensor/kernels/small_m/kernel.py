"""Products of few rows on any GPU from sm_80 on: the kernels ``small_m``, and their custom ops.

``refuses`` says which products a kernel takes. ``run`` calls ``launch`` directly; a traced graph holds the op
``mxtensor::small_m``, or ``mxtensor::small_m_shared`` for several weights of one input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.kernel import Kernel, Spec
from ...core.names import dtype_name
from ...core.repeated import recorded
from ...core.tracing import is_traced
from ...numerics.cast import Cast
from ...numerics.formats import E8M0, UE4M3, Format, Rounding, ScaleCalculationMode, get_format
from ...numerics.operand import Operand
from ...numerics.validate import check_sizes
from .. import expected_time
from ..gemm.spec import (
    GemmArgs,
    as_rows,
    not_a_bias_of_groups,
    not_row_scaled,
    not_rows_by_matrix,
    readable_bias,
)
from ..operands import FakeQuantized, GemmOperand, RowOperand, Unquantized
from ..quantize.choose_cast import dequantize_operand, fake_quantize_rows
from ..runtime.custom_op import check_argument, check_codes, check_scalars
from ..runtime.nvrtc import ELEMENTS, TYPES, no_cuda_sources
from . import heuristics
from .config import SCALES, can_use_wgmma
from .heuristics import most_rows
from .launch import Weight, launch

HALVES = (torch.bfloat16, torch.float16)


def is_cast_here(cast: Cast, x: Tensor) -> bool:
    """Whether the CUDA sources do this cast: to MX blocks of 32 or to NVFP4 blocks of 16, from a 16-bit dtype.

    ``casts.cuh`` rounds to an even mantissa, which an element without mantissa bits lacks; ELEMENTS are tested.
    """
    f = cast.format
    if cast.rounding is not Rounding.NEAREST or x.dtype not in HALVES or f.element not in ELEMENTS:
        return False
    if cast.why_not_plain is not None:
        return False
    if f.scale is E8M0:
        return f.block == (1, 32)
    return f.scale is UE4M3 and f.block == (1, 16)


def check_arguments(
    op: str, x: Tensor, weights: Sequence[Weight], format: Format, cols: int, x_global: Tensor | None,
    ends: Tensor | None, out_dtype: torch.dtype, cast: Cast | None,
) -> None:  # fmt: skip
    """Raise TypeError or ValueError unless the kernels can read these arguments of an op, on whatever device."""
    decoded = format.element in ELEMENTS and (format.scale, format.block[1]) in SCALES and out_dtype in TYPES
    if not decoded or (cast is not None and not is_cast_here(cast, x)):
        raise ValueError(f"{op} cannot multiply {x.dtype} by {format} to {out_dtype} with the cast {cast}")
    check_argument(op, "x", x, HALVES, (None, cols), x.device)
    if not x.is_contiguous() and (x.stride(1) != 1 or x.stride(0) < cols):
        raise ValueError(f"{op}: the rows of x must be contiguous, one after the other, got strides {x.stride()}")
    check_scalars(op, "a global scale", [x_global, *(w.global_scale for w in weights)], x.device)
    for w in weights:
        sizes = (None, None) if ends is None else (None, None, None)
        check_argument(op, "data", w.data, (torch.uint8, format.element.dtype), sizes, x.device)
        check_codes(op, w.data, w.scale, w.global_scale, format, (*w.data.shape[:-1], cols))
        width = w.data.shape[-2]
        if w.bias is not None:
            check_argument(op, "bias", w.bias, tuple(TYPES), (x.shape[0], width)[2 - max(w.bias.dim(), 1) :], x.device)
        if not all(t.is_contiguous() for t in (w.data, w.scale, w.bias) if t is not None):
            raise ValueError(f"{op}: codes, scales and bias must be contiguous; copy them with contiguous()")
    if ends is not None:
        check_argument(op, "ends", ends, (torch.int32,), (weights[0].data.shape[0],), x.device)
        if not ends.is_contiguous():
            raise ValueError(f"{op}: ends must be contiguous; copy them with contiguous()")


# ---------------------------------------------------------------------------------------------- the ops


@custom_ops.define("mxtensor::small_m")
@recorded
def small_m(
    x: Tensor, data: Tensor, scale: Tensor, format: str, cols: int, x_global: Tensor | None,
    global_scale: Tensor | None, bias: Tensor | None, ends: Tensor | None, alpha: float, beta: float,
    out_dtype: torch.dtype, cast: str, scaling: str,
) -> Tensor:  # fmt: skip
    """``alpha * global scales * x @ decode(data, scale)^T + beta * bias`` (M, N), summed in float32 and rounded once.

    x (M, K) is bfloat16 or float16; it is first cast to the format ``cast`` unless that is empty. ``data`` and
    ``scale`` are those of an (N, K) operand of ``format``, and ``cols`` is K. ``bias`` is (N,) or (M, N). With ``ends``
    (G,) the operand is a stack (G, N, K): rows ``ends[g - 1]`` to ``ends[g]`` of x are multiplied by matrix g, and the
    rows after the last end are zeros.
    """
    f, weights = get_format(format), [Weight(data, scale, global_scale, bias)]
    to = Cast(get_format(cast), ScaleCalculationMode(scaling)) if cast else None
    check_arguments("mxtensor::small_m", x, weights, f, cols, x_global, ends, out_dtype, to)
    return launch(x, weights, f, cols, x_global, ends, alpha, beta, out_dtype, to)[0]


@custom_ops.fake_of(small_m)
def _(x, data, scale, format, cols, x_global, global_scale, bias, ends, alpha, beta, out_dtype, cast, scaling):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], data.shape[-2], dtype=out_dtype)


@custom_ops.define("mxtensor::small_m_shared")
@recorded
def small_m_shared(
    x: Tensor, data: list[Tensor], scale: list[Tensor], format: str, cols: int, x_global: Tensor | None,
    global_scale: Sequence[Tensor | None], bias: Sequence[Tensor | None], alpha: float, beta: float,
    out_dtype: torch.dtype, cast: str, scaling: str,
) -> list[Tensor]:  # fmt: skip
    """``small_m`` of one x by each of several weights, without groups."""
    if not data or len({*map(len, (data, scale, global_scale, bias))}) > 1:
        raise ValueError("mxtensor::small_m_shared: data, scale, global_scale and bias must have one length, not 0")
    f, weights = get_format(format), [*map(Weight, data, scale, global_scale, bias)]
    to = Cast(get_format(cast), ScaleCalculationMode(scaling)) if cast else None
    check_arguments("mxtensor::small_m_shared", x, weights, f, cols, x_global, None, out_dtype, to)
    return launch(x, weights, f, cols, x_global, None, alpha, beta, out_dtype, to)


@custom_ops.fake_of(small_m_shared)
def _(x, data, scale, format, cols, x_global, global_scale, bias, alpha, beta, out_dtype, cast, scaling):  # type: ignore[no-untyped-def]
    return [x.new_empty(x.shape[0], d.shape[-2], dtype=out_dtype) for d in data]


@custom_ops.define("mxtensor::written")
def written(x: Tensor) -> Tensor:
    """A copy of x by a kernel that does not let the next kernel start early.

    So a product may read the copy without waiting: x and the copy are complete when the product starts.
    """
    return x.clone()


@custom_ops.fake_of(written)
def _(x):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


# ---------------------------------------------------------------------------------------------- refusals


def _refuses(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> str | None:
    reason = no_cuda_sources(spec)
    if reason is not None:
        return reason
    if isinstance(a, RowOperand) or not isinstance(b, Operand):
        return not_row_scaled(a, b) or "needs a quantized right operand, this one has no codes"
    f = b.format
    if f.element not in ELEMENTS:
        return f"has no decoder for elements of {f.element.name}"
    if (f.scale, f.block[1]) not in SCALES:
        return f"has no decoder for {f.scale.name} scales of {f.block[0]}x{f.block[1]} blocks"
    if args.out_dtype not in TYPES:
        return f"writes bfloat16, float16 or float32, not {dtype_name(args.out_dtype)}"
    x = a.values if isinstance(a, FakeQuantized) else a
    if isinstance(x, Tensor) and x.dtype not in HALVES:
        name = dtype_name(x.dtype)
        return f"needs activations in bfloat16 or float16, these are {name}"
    if not isinstance(a, Tensor) and not a.format.exact_in_bfloat16:
        return f"the values of {a.format} are not exact in bfloat16, because its scales are {a.format.scale.name}"
    if 0 in (*spec.shapes[0], *spec.shapes[1]):
        return "no values"
    return None


def refuses(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> str | None:
    reason = not_rows_by_matrix(spec, a) or _refuses(spec, a, b, args)
    if reason is None:
        assert isinstance(b, Operand)
        wgmma = can_use_wgmma(b.format, b.shape[-1], 0, (0, 0))
        rows, most = math.prod(spec.shapes[0][:-1]), most_rows(spec.capability, wgmma)
        if rows > most:
            return f"for at most {most} rows, this product has {rows}"
    return reason


def expected_us(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> float | None:
    """The time of the product and, for activations that are not plain, of their cast."""
    figures = expected_time.figures_of(spec.capability)
    if figures is None:
        return None
    assert isinstance(b, Operand)
    rows, (width, cols) = math.prod(spec.shapes[0][:-1]), spec.shapes[1]
    us = heuristics.expected_time(b.format.name, rows, width, cols)
    if us is None or isinstance(a, Tensor):
        return us
    cast = figures["small_m"]  # what it adds to the kernel that prepares the activations
    return float(us + cast["start_of_cast"] + cast["cast"] * rows * cols)


def refuses_grouped(spec: Spec, a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> str | None:
    reason = not_a_bias_of_groups(args) or _refuses(spec, a, b, args)
    if reason is None:
        assert isinstance(b, Operand)
        if b.format.rows_are_blocked and b.scale.shape[0] != b.shape[0]:
            return f"{b.format} has one scale for all groups"
        most = most_rows(spec.capability, False) * b.shape[0]
        if spec.shapes[0][0] > most:
            return f"for at most {most} rows in {b.shape[0]} groups, this product has {spec.shapes[0][0]}"
    return reason


# ---------------------------------------------------------------------------------------------- the kernels


def _activations(a: GemmOperand) -> tuple[Tensor, Tensor | None, Cast | None]:
    """The activations in 16 bits, their global scale, and the cast that the kernel still has to do."""
    if isinstance(a, Unquantized):
        if is_cast_here(a.cast, a.x):
            return a.x, None, a.cast
        return *fake_quantize_rows(a.x, a.cast, torch.bfloat16), None
    if isinstance(a, FakeQuantized):
        return a.values, a.global_scale, None
    if isinstance(a, Operand):
        return dequantize_operand(replace(a, global_scale=None), torch.bfloat16), a.global_scale, None
    assert isinstance(a, Tensor)
    return a, None, None


def _run(a: GemmOperand, b: GemmOperand, *rest: Any, traced: bool = False) -> Tensor:
    """The product; ``rest``: the arguments, and of a grouped product its ends before. ``traced``: as the custom op."""
    *ends, args = rest
    assert isinstance(b, Operand) and not b.has_stack_scales  # the device code reads one
    if not is_traced(b.data):
        check_sizes(b, strided=True)
    x, x_global, cast = _activations(a)
    shape = (*x.shape[:-1], b.shape[-2])
    rows, data, scale, cols = as_rows(x), b.data.contiguous(), b.scale.contiguous(), b.shape[-1]
    bias, where = readable_bias(args, shape, TYPES), ends[0].contiguous() if ends else None
    numbers = float(args.alpha), float(args.beta), args.out_dtype
    if traced:
        names = ("", "") if cast is None else (cast.format.name, cast.scaling.value)
        weight = b.global_scale, bias
        out = small_m(rows, data, scale, b.format.name, cols, x_global, *weight, where, *numbers, *names)
    else:
        weights = (Weight(data, scale, b.global_scale, bias),)
        out = launch(rows, weights, b.format, cols, x_global, where, *numbers, cast)[0]
    return out if len(shape) == 2 else out.view(shape)  # type: ignore[no-any-return]


_TRACED = partial(_run, traced=True)
KERNEL = Kernel("small_m", refuses, _run, "cuda", _TRACED, expected_us)
GROUPED = Kernel("small_m", refuses_grouped, _run, "cuda", _TRACED)

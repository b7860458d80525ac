"""The kernel rows ``small_m`` of the GEMM tables: products of few rows on any GPU from sm_80 on.

``refuses`` says which products the kernel takes. ``run`` calls ``launch`` directly; a traced graph holds the op
``mxtensor::small_m`` (``ops.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core import recording
from ...core.kernel import Kernel, Spec
from ...core.names import dtype_name
from ...core.tracing import is_traced
from ...numerics.cast import Cast
from ...numerics.formats import Format
from ...numerics.operand import Operand
from ...numerics.validate import check_sizes
from ..gemm.by_codes import as_rows, fits_one_launch, readable_bias
from ..gemm.row_operand import RowOperand
from ..gemm.spec import (
    FakeQuantized,
    GemmArgs,
    GemmOperand,
    Unquantized,
    not_a_bias_of_groups,
    not_row_scaled,
    not_rows_by_matrix,
)
from ..quantize.select import dequantize_operand, fake_quantize
from ..runtime.availability import no_cuda_sources
from ..runtime.cuda_macros import ELEMENTS, TYPES
from .config import SCALES, can_use_wgmma
from .heuristics import most_rows
from .later_launch import GroupedLaunch, Launch, make_launch
from .launch import Weight, launch
from .ops import HALVES, is_cast_here, small_m

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
        return *fake_quantize(a.x, a.cast, torch.bfloat16), None
    if isinstance(a, FakeQuantized):
        return a.values, a.global_scale, None
    if isinstance(a, Operand):
        return dequantize_operand(replace(a, global_scale=None), torch.bfloat16), a.global_scale, None
    assert isinstance(a, Tensor)
    return a, None, None


def _one(
    x: Tensor, data: Tensor, scale: Tensor, format: Format, cols: int, x_global: Tensor | None,
    global_scale: Tensor | None, bias: Tensor | None, *rest: Any,
) -> Tensor:  # fmt: skip
    """``launch`` of one weight."""
    return launch(x, (Weight(data, scale, global_scale, bias),), format, cols, x_global, *rest)[0]


def _call(a: GemmOperand, b: GemmOperand, ends: Tensor | None, args: GemmArgs, work: Callable[..., Tensor]) -> Tensor:
    """Call ``work`` with the arguments of ``_one``, made from the operands of the product."""
    assert isinstance(b, Operand)
    if not is_traced(b.data):
        check_sizes(b, strided=True)
    x, x_global, cast = _activations(a)
    shape = (*x.shape[:-1], b.shape[-2])
    out = recording.call(
        work, as_rows(x), b.data.contiguous(), b.scale.contiguous(), b.format, b.shape[-1], x_global, b.global_scale,
        readable_bias(args, shape, TYPES), None if ends is None else ends.contiguous(), float(args.alpha),
        float(args.beta), args.out_dtype, cast,
    )  # fmt: skip
    return out if len(shape) == 2 else out.view(shape)


def _op(x: Tensor, data: Tensor, scale: Tensor, format: Format, *rest: Any) -> Tensor:
    """``_one`` as the custom op, for traced graphs."""
    *others, cast = rest
    cast_strings = ("", "") if cast is None else (cast.format.name, cast.scaling.value)
    return small_m(x, data, scale, format.name, *others, *cast_strings)  # type: ignore[no-any-return]


def run(a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Tensor:
    return _call(a, b, None, args, _one)


def run_traced(a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Tensor:
    return _call(a, b, None, args, _op)


def _launch_for(
    x: Tensor, a: GemmOperand, b: GemmOperand, args: GemmArgs, ends: Tensor | None, kind: type[Launch]
) -> Launch | None:
    """A launch of this kind for any x with this layout; None if the product takes more than one kernel.

    a is x (..., K) as rows, unquantized or plain.
    """
    assert isinstance(b, Operand)
    cast = a.cast if isinstance(a, Unquantized) else None
    if not isinstance(a, Tensor) and (cast is None or not is_cast_here(cast, x)):
        return None
    if not fits_one_launch(x, b, args, TYPES) or not (ends is None or ends.is_contiguous()):
        return None
    check_sizes(b)
    weight = Weight(b.data, b.scale, b.global_scale, args.bias)
    return make_launch(x, [weight], b.format, b.shape[-1], cast, ends=ends, kind=kind)


def launch_for(x: Tensor, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Launch | None:
    """The launch of ``run(a, b, args)``."""
    return _launch_for(x, a, b, args, None, Launch)


def grouped_launch_for(x: Tensor, a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> Launch | None:
    """The launch of ``run_grouped(a, b, ends, args)``."""
    return _launch_for(x, a, b, args, ends, GroupedLaunch)


def run_grouped(a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> Tensor:
    return _call(a, b, ends, args, _one)


def run_grouped_traced(a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> Tensor:
    return _call(a, b, ends, args, _op)


KERNEL = Kernel("small_m", refuses, run, "cuda", run_traced, launch_for)
GROUPED = Kernel("small_m", refuses_grouped, run_grouped, "cuda", run_grouped_traced, grouped_launch_for)

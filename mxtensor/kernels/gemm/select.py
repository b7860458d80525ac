"""Products: the tuples of product kernels, and the one function that runs each.

A tuple has the kernels in the order of their usual speed. Where expected times are known they decide
(``core/select.py``, ``kernels/expected_time.py``).

Where torch compiles for any number of rows, on a GPU, the graph holds one op, ``mxtensor::product``, which chooses its
kernel when it runs: one graph serves every batch size, with the kernel that is best for each.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.explain import record
from ...core.kernel import Kernel, Plan, Spec
from ...core.names import dtype_name
from ...core.select import KERNEL_NAMES, accepted, forced_kernel, perform, plan_for
from ...core.tracing import is_traced
from ...numerics.cast import Cast
from ...numerics.formats import get_format
from ...numerics.groups import Groups
from ...numerics.operand import Operand
from ..gemm import (
    cpu_codes,
    dequant,
    dot_scaled,
    emulated,
    fp8_rows,
    fp8_rows_grouped,
    scaled_mm,
)
from ..operands import Form, GemmOperand, Unquantized, data_of, format_of, has_group_scales
from ..quantize.to_row_scaled_both import wants_rows
from ..runtime.custom_op import exported
from ..small_m import kernel as small_m
from .global_scales import (
    has_row_global_scales,
    of_groups,
    scales_of_rows,
    scales_the_result,
    times_global_scales,
    without_global_scales,
)
from .spec import GemmArgs, facts_of, without_lazy_signs, zero_after

GEMM: tuple[Kernel, ...] = (
    scaled_mm.KERNEL, dot_scaled.KERNEL, fp8_rows.KERNEL, small_m.KERNEL, cpu_codes.KERNEL, dequant.KERNEL,
    emulated.KERNEL,
)  # fmt: skip
GROUPED: tuple[Kernel, ...] = (
    scaled_mm.GROUPED, dot_scaled.GROUPED, fp8_rows_grouped.GROUPED, small_m.GROUPED,
    cpu_codes.GROUPED, dequant.GROUPED, emulated.GROUPED,
)  # fmt: skip
"""The same kernels for a stack of weights, each multiplied by rows of its own."""
GROUPED_WGRAD: tuple[Kernel, ...] = (fp8_rows_grouped.GROUPED_WGRAD, dequant.GROUPED_WGRAD, emulated.GROUPED_WGRAD)
"""And for products over the columns of each group, which give a stack."""
VALUES = {dequant.KERNEL.name: dequant.values_dtype, emulated.KERNEL.name: emulated.values_dtype}
"""Kernels that multiply values and not codes -> the dtype that they want them in, given the product's arguments."""
KERNEL_NAMES.update(kernel.name for kernel in GEMM)


def _spec(op: str, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Spec:
    left, right = data_of(a), data_of(b)
    formats, shapes = (format_of(a), format_of(b)), (tuple(a.shape), tuple(b.shape))
    return Spec(op, shapes, formats, args.out_dtype, right.device, is_traced(left, right))


def _check_devices(
    op: str, device: torch.device, left: Tensor, bias: Tensor | None, ends: Tensor | None = None
) -> None:
    """Raise ValueError unless all are on the device of the right operand: kernels get addresses only."""
    for name, t in (("left operand", left), ("bias", bias), ("group ends", ends)):
        if t is not None and t.device != device:
            raise ValueError(f"{op}: {name} on {t.device}, right operand on {device}; move one with .to()")


def gemm(op: str, a: GemmOperand, b: GemmOperand, args: GemmArgs, prefer: str | None = None) -> Tensor:
    """``alpha * a @ b^T + beta * bias``: a (..., M, K), b (..., N, K), both blocked along K; result (..., M, N).

    Accumulated in float32 and rounded once to ``args.out_dtype``. ``op`` names the caller in ``explain()``; ``prefer``
    names the kernel that must run. Raises ValueError for shapes that do not fit and for operands on two devices.
    """
    a, b, args = without_lazy_signs(a, b, args)
    spec = _spec(op, a, b, args)
    _check_devices(op, spec.device, data_of(a), args.bias)
    left, right = spec.shapes
    if left[-1] != right[-1]:
        raise ValueError(
            f"{op}: the contracted dimensions differ: {left} has {left[-1]} columns, the other operand {right[-1]} rows"
        )
    if scales_the_result(a) or scales_the_result(b):
        unscaled = without_global_scales(a, b, args)
        return times_global_scales(gemm(op, unscaled.a, unscaled.b, unscaled.args, prefer), unscaled.scales, args)
    if _is_chosen_later(spec, a, b):
        return _chosen_later(spec, a, b, args, prefer)  # type: ignore[arg-type]
    return perform(GEMM, spec, a, b, args, prefer=prefer, facts=facts_of(a, b, args))  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- any number of rows

CHOSEN_LATER = {"cuda"}
"""Types of devices with a graph of one op for any number of rows. On a CPU the compiler fuses casts with what is around
them."""


def _is_chosen_later(spec: Spec, a: GemmOperand, b: GemmOperand) -> bool:
    """Whether this product is traced for any number of rows of ``a``, by a weight ``b`` of known size."""
    if not spec.traced or spec.device.type not in CHOSEN_LATER or all(type(n) is int for n in spec.shapes[0]):
        return False
    rows = isinstance(a, (Tensor, Unquantized)) and isinstance(b, Operand)
    return rows and all(type(n) is int for n in spec.shapes[1]) and exported(spec) is None


def _chosen_later(spec: Spec, a: Tensor | Unquantized, b: Operand, args: GemmArgs, prefer: str | None) -> Tensor:
    reason = "the number of rows is not known here: the kernel is chosen in each call"
    record(spec, "chosen when it runs", {kernel.name: reason for kernel in GEMM})
    cast = a.cast if isinstance(a, Unquantized) else None
    names = ("", "", "", "") if cast is None else (
        cast.format.name, cast.scaling.value, cast.rounding.value,
        "" if cast.four_over_six is None else cast.four_over_six.value,
    )  # fmt: skip
    number = (None, 0.0) if cast is None else (cast.seed, float(cast.amax_epsilon))
    return product(  # type: ignore[no-any-return]
        data_of(a), b.data, b.scale, b.global_scale, args.bias, spec.op, b.format.name, list(b.shape), *names, *number,
        args.out_dtype, float(args.alpha), float(args.beta), forced_kernel() or prefer or "",
    )  # fmt: skip


@custom_ops.define("mxtensor::product")
def product(
    x: Tensor, data: Tensor, scale: Tensor, global_scale: Tensor | None, bias: Tensor | None, op: str, format: str,
    shape: list[int], cast: str, scaling: str, rounding: str, four_over_six: str, seed: int | None,
    amax_epsilon: float, out_dtype: torch.dtype, alpha: float, beta: float, prefer: str,
) -> Tensor:  # fmt: skip
    """``gemm`` of x (..., M, K), cast to the format ``cast`` unless that is empty, by the operand (data, scale,
    global_scale) of ``shape`` (..., N, K): (..., M, N), by the kernel that is best for so many rows."""
    a: GemmOperand = x
    if cast:
        a = Unquantized(x, Cast.of(cast, scaling, rounding, seed, amax_epsilon, four_over_six or None))
    b, args = (
        Operand(data, scale, global_scale, get_format(format), tuple(shape)),
        GemmArgs(out_dtype, bias, alpha, beta),
    )
    kernel = accepted(plan_of(op, a, b, args, prefer or None))
    out: Tensor = (kernel.run_traced or kernel.run)(a, b, args)  # the ops of a graph store launches
    return out.contiguous()


@custom_ops.fake_of(product)
def _(x, data, scale, global_scale, bias, op, format, shape, *rest):  # type: ignore[no-untyped-def]
    return x.new_empty(*x.shape[:-1], shape[-2], dtype=rest[6])


def plan_of(op: str, a: GemmOperand, b: GemmOperand, args: GemmArgs, prefer: str | None = None) -> Plan:
    """The plan by which ``gemm`` would run; nothing is logged."""
    if has_row_global_scales(a) or has_row_global_scales(b):
        a, b, args, _ = without_global_scales(a, b, args, casts=False)
    return plan_for(GEMM, _spec(op, a, b, args), a, b, args, prefer=prefer, facts=facts_of(a, b, args))


def wanted_form(
    op: str, a: GemmOperand, b: GemmOperand, args: GemmArgs, prefer: str | None = None
) -> Form | torch.dtype:
    """The form in which the kernel for this product wants operands that are cast for it: the dtype of their values,
    codes, or codes under the scales of rows."""
    if has_row_global_scales(a) or has_row_global_scales(b):
        a, b, args, _ = without_global_scales(a, b, args, casts=False)
    kernel = plan_of(op, a, b, args, prefer).kernel
    if kernel is fp8_rows.KERNEL and wants_rows(a, b):
        return Form.ROWS
    wanted = None if kernel is None else VALUES.get(kernel.name)
    return Form.CODES if wanted is None else wanted(args)


def grouped_gemm(
    op: str, a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs, prefer: str | None = None
) -> Tensor:
    """Rows of a (M, K) times the weight of their group, b (G, N, K): rows ``ends[g - 1]`` to ``ends[g]`` times b[g].

    ``ends``: int32 (G,), never decreasing; a group may have no rows; rows after the last end give zeros. A cast of
    ``a`` sees all its rows at once. Result (M, N). Raises ValueError for shapes that do not fit and for tensors on two
    devices, TypeError for ends of another dtype.
    """
    if len(a.shape) != 2 or len(b.shape) != 3 or a.shape[1] != b.shape[2] or tuple(ends.shape) != (b.shape[0],):
        raise ValueError(
            f"{op}: needs rows (M, K), weights (G, N, K) and G group ends, got {tuple(a.shape)}, {tuple(b.shape)} and "
            f"{tuple(ends.shape)}"
        )
    if ends.dtype is not torch.int32:
        kind = dtype_name(ends.dtype)
        raise TypeError(f"{op}: the group ends must be int32, got {kind}; convert them with .to(torch.int32)")
    a, b, args = without_lazy_signs(a, b, args)
    spec = _spec(op, a, b, args)
    _check_devices(op, spec.device, data_of(a), args.bias, ends)
    if isinstance(b, Operand) and b.has_stack_scales:
        one, unscaled_args, scales = of_groups(b, args)
        out = grouped_gemm(op, a, one, ends, unscaled_args, prefer)
        out = times_global_scales(out, [scales_of_rows(scales, ends, a.shape[0])], args)
        return out if args.bias is None else zero_after(out, ends)
    if has_row_global_scales(a) and not (has_group_scales(a) and has_group_scales(b)):
        unscaled = without_global_scales(a, b, args)
        return times_global_scales(
            grouped_gemm(op, unscaled.a, unscaled.b, ends, unscaled.args, prefer), unscaled.scales, args
        )
    return perform(GROUPED, spec, a, b, ends, args, prefer=prefer, facts=_group_facts(a, b, args))  # type: ignore[no-any-return]


def _group_facts(a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Hashable:
    """``facts_of``, and how many scales there are for the matrices of the stack."""
    scales = b.scale.shape[0] if isinstance(b, Operand) else 0
    return facts_of(a, b, args), scales


def grouped_plan_of(
    op: str, a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs, prefer: str | None = None
) -> Plan:
    """The plan by which ``grouped_gemm`` would run; nothing is logged."""
    if isinstance(b, Operand) and b.has_stack_scales:
        b, args, _ = of_groups(b, args)
    if has_row_global_scales(a):
        a, b, args, _ = without_global_scales(a, b, args, casts=False)
    return plan_for(GROUPED, _spec(op, a, b, args), a, b, ends, args, prefer=prefer, facts=_group_facts(a, b, args))


def grouped_wgrad(
    op: str, a: GemmOperand, b: GemmOperand, groups: Groups, args: GemmArgs, prefer: str | None = None
) -> Tensor:
    """The products over the columns of each group of a padded matrix: a (N, P) by b (K, P), result (G, N, K).

    Both are blocked along P, and the padding between groups is zeros. ``args`` without alpha and bias. Raises
    ValueError for shapes that do not fit and for tensors on two devices.
    """
    padded = groups.length
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != padded or b.shape[1] != padded:
        raise ValueError(
            f"{op}: needs (N, P) and (K, P) with P = {padded} columns in groups, got {tuple(a.shape)} and "
            f"{tuple(b.shape)}"
        )
    a, b, args = without_lazy_signs(a, b, args)
    spec = _spec(op, a, b, args)
    _check_devices(op, spec.device, data_of(a), None, groups.ends)
    return perform(GROUPED_WGRAD, spec, a, b, groups, args, prefer=prefer)  # type: ignore[no-any-return]


def grouped_wanted_form(
    op: str, a: GemmOperand, b: GemmOperand, groups: Groups, args: GemmArgs, prefer: str | None = None
) -> Form | torch.dtype:
    """``wanted_form`` of the product that ``grouped_gemm`` or, for two matrices, ``grouped_wgrad`` would run."""
    kernels, given = (GROUPED, groups.ends) if len(b.shape) == 3 else (GROUPED_WGRAD, groups)
    facts = _group_facts(a, b, args), groups.number
    kernel = plan_for(kernels, _spec(op, a, b, args), a, b, given, args, prefer=prefer, facts=facts).kernel
    if kernel in (fp8_rows_grouped.GROUPED, fp8_rows_grouped.GROUPED_WGRAD):
        return Form.ROWS
    wanted = None if kernel is None else VALUES.get(kernel.name)
    return Form.CODES if wanted is None else wanted(args)

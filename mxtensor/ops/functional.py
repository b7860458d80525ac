"""Rules of torch functions that run before aten decomposes them, when that saves work and the result is identical."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ..core.compat import any_autocast_is_active, functorch_interpreter
from ..core.dispatch import implements_function
from ..core.plan import PLANS
from ..core.repeated import DEVICES
from ..core.select import is_observed
from ..core.shapes import as_matrix, layout
from ..core.torch_autocast import torch_autocasts
from ..core.tracing import is_captured, is_traced, refuse_jit_trace
from ..kernels.gemm import select
from ..kernels.gemm.spec import GemmArgs
from ..numerics.operand import Operand
from ..tensor.mxtensor import MXTensor
from .bodies import EXPORTED
from .fallback import read
from .matmul import OTHER_LAYOUT, Side, gemm_operands, preference
from .matmul import linear as linear_rule
from .product_checks import has_other_layout
from .repeated import RepeatedProduct, repeated

aten = torch.ops.aten
FEW_ROWS = 64
"""Rows up to which no kernel wants a cached form of a weight, so that a CUDA graph decides as eager code does."""


def _runs_whole(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether no gradient, trace, mode or autocast needs the aten ops between torch's function and the product."""
    if torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return False
    return not (
        is_traced(input, bias)  # torch.compile, dispatch modes, functorch, other subclasses
        or has_other_layout(input)
        or functorch_interpreter() is not None
        or unpack_dual(input).tangent is not None  # forward-mode differentiation
        or input.is_neg()  # a lazy minus sign, which aten carries out and a launch does not
        or (bias is not None and bias.is_neg())
        or (any_autocast_is_active() and torch_autocasts(input.device))
    )


def launch_key(x: Tensor, weight: MXTensor, operand: Operand, *more: Hashable) -> Hashable:
    """The key of a plan with a launch: all that the launch depends on, addresses included. ``more``: the same of other
    tensors, such as the bias.

    If the memory of a weight is freed and another weight gets it, the other one finds this plan only if all of this is
    equal. The launch is then right for it too.
    """
    global_scale = operand.global_scale
    return (
        x.shape, layout(x), x.dtype, x.device, x.data_ptr() & 15,  # kernels read 16 bytes at a time
        operand.data.data_ptr(), operand.scale.data_ptr(), 0 if global_scale is None else global_scale.data_ptr(),
        operand.layouts, operand.shape, weight.dtype, id(weight.recipe),  # pinned by the plan; it has the format
        more,
    )  # fmt: skip


@implements_function(F.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, **out: Tensor) -> Tensor:
    """Without gradients the product runs at once: no ``t``, no second dispatch, no expanded batch.

    The second call of a kind goes straight to the launch of its plan, if that has one.
    """
    matrix = type(weight) is MXTensor and weight.dim() == 2 and input.dim() > 0 and not out
    if not matrix or not _runs_whole(input, weight, bias):
        refuse_jit_trace("an MXTensor")
        if not out and (has_other_layout(input) or has_other_layout(weight)):
            return read(aten.linear.default, (input, weight, bias), {}, OTHER_LAYOUT)  # type: ignore[no-any-return]
        if EXPORTED[-1:] == [True] and not out:
            return linear_rule(aten.linear.default, (input, weight, bias), {})  # type: ignore[no-any-return]
        return F.linear(input, weight, bias, **out)
    assert isinstance(weight, MXTensor)
    operand, key = weight._rowwise, None
    # Where a kernel has launches: look for that of an earlier call of this kind.
    if operand is not None and select.has_launches(input.device) and not is_observed():
        added = None if bias is None else (bias.data_ptr(), bias.dtype, bias.shape, layout(bias))
        captured = input.numel() > FEW_ROWS * input.shape[-1] and is_captured(input)
        key = launch_key(input, weight, operand, added, captured)
        plan = PLANS.get(key)
        if plan is not None and plan.launch is not None:
            launch = plan.launch
            if type(launch) is RepeatedProduct:
                work = partial(linear_rule, aten.linear.default, (input, weight, bias), {})
                return launch.product(input, operand, bias, work)
            return launch(input)  # type: ignore[no-any-return]
        key = key if plan is None else None
    # The general way, which is also the first call of a kind; ``_cache_launch`` stores a launch for the next one.
    product: Tensor = linear_rule(aten.linear.default, (input, weight, bias), {})
    if key is not None:
        _cache_launch(key, input, weight, bias)
    return product


def _cache_launch(key: Hashable, x: Tensor, weight: MXTensor, bias: Tensor | None) -> None:
    """Cache the plan of an ``F.linear`` that has just run, with its launch: the kernel's, or the program of a later
    call."""
    a, b = gemm_operands("linear", Side(as_matrix(x), False), Side(weight, False))
    args = GemmArgs(x.dtype, bias)
    plan = select.plan_of("linear", a, b, args, preference(weight))
    launch_for = None if plan.kernel is None else plan.kernel.launch_for
    launch = None if launch_for is None else launch_for(x, a, b, args)
    if launch is None and plan.kernel is not None and x.device.type in DEVICES:
        assert weight._rowwise is not None
        launch = repeated(plan, x, weight._rowwise, bias, weight.recipe)
    PLANS.put(key, replace(plan, launch=launch, pinned=(weight.recipe,)))


@implements_function(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def matmul(input: Tensor, other: Tensor, **out: Tensor) -> Tensor:
    """torch's own. Nested tensors get the dequantized values, because torch asks for their sizes before any rule."""
    if not out and any(has_other_layout(t) and t.is_nested for t in (input, other)):
        return read(aten.matmul.default, (input, other), {}, OTHER_LAYOUT)  # type: ignore[no-any-return]
    return torch.matmul(input, other, **out)

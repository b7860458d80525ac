"""Grouped products of a stack of weights without gradients: the second call of a kind goes straight to its launches.

Experts that decode call ``F.grouped_mm`` twice a layer, with groups that differ in each call. Their ends stay on the
device; a launch takes their address.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.dispatch import implements
from ..core.plan import PLANS
from ..core.select import is_observed
from ..core.tracing import is_traced
from ..kernels.gemm import select
from ..kernels.gemm.spec import GemmArgs
from ..numerics.operand import Operand
from ..tensor.mxtensor import MXTensor
from .fallback import read
from .matmul import Side, gemm_operands, preference

aten = torch.ops.aten


@implements(aten._grouped_mm.default)
def grouped_mm(func: Any, args: Any, kwargs: Any) -> Tensor:
    """(M, K) @ (G, K, N) with ``offs``, the end of each group's rows."""
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    a, b, offs = given["self"], given["mat2"], given.get("offs")
    plain_call = given.get("bias") is None and given.get("out_dtype") in (None, a.dtype)
    if not plain_call or offs is None or a.dim() != 2 or not isinstance(b, MXTensor) or b.dim() != 3:
        return read(func, args, kwargs, "not rows for a stack of weights, in groups")  # type: ignore[no-any-return]
    key = _launch_key(a, b, offs)
    plan = None if key is None else PLANS.get(key)
    if plan is not None and plan.launch is not None:
        return plan.launch(a, offs)  # type: ignore[no-any-return]
    sides = gemm_operands("_grouped_mm", Side(a, False), Side(b, True))
    product = select.grouped_gemm("_grouped_mm", *sides, offs, GemmArgs(a.dtype), prefer=preference(b))
    if key is not None and plan is None:
        _prepare(key, a, b, offs)
    return product


def _launch_key(x: Tensor, weight: MXTensor, ends: Tensor) -> Hashable:
    """All that a launch holds of its tensors, as that of ``F.linear``; None for a call that takes the general way."""
    operand = weight._columnwise  # of the transposed stack: that of the stack itself, blocked along the contraction
    if operand is None or not select.has_launches(x.device) or is_observed():
        return None
    if is_traced(x, ends) or x.is_neg() or x.device != ends.device or ends.dtype is not torch.int32:
        return None
    global_scale = operand.global_scale
    return (
        "groups", x.shape, x.is_contiguous(), x.dtype, x.device, x.data_ptr() & 15, ends.shape, ends.is_contiguous(),
        operand.data.data_ptr(), operand.scale.data_ptr(), 0 if global_scale is None else global_scale.data_ptr(),
        operand.is_contiguous, operand.shape, weight.dtype, id(weight.recipe),  # pinned by the plan
    )  # fmt: skip


def _prepare(key: Hashable, x: Tensor, weight: MXTensor, ends: Tensor) -> None:
    """Cache the plan of a product that has just run, with the launch of its kernel if it has one."""
    a, b = gemm_operands("_grouped_mm", Side(x, False), Side(weight, True))
    args = GemmArgs(x.dtype)
    plan = select.grouped_plan_of("_grouped_mm", a, b, ends, args, preference(weight))
    prepare = None if plan.kernel is None else plan.kernel.prepare
    launch = prepare(x, a, b, ends, args) if prepare is not None and isinstance(b, Operand) else None
    PLANS.put(key, replace(plan, launch=launch, pinned=(weight.recipe,)))

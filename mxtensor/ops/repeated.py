"""Repeated products without gradients of kernels without ``Kernel.launch_for``: the program of an earlier call.

``F.linear`` decides, casts and checks in general; what that does to tensors is recorded once for each kind of call
(``core/recording.py``) and shared by all layers of that kind. So a float8 product, or one that dequantizes its weight
for many rows, costs the host a look-up, its allocations and its launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..core.plan import PLANS, Plan
from ..core.repeated import Repeated, kind_of
from ..kernels.runtime.triton_launch import is_watched
from ..numerics.operand import Operand


class RepeatedProduct(Repeated):
    """A kind of product with one weight."""

    def product(self, x: Tensor, operand: Operand, bias: Tensor | None, general: Callable[[], Tensor]) -> Tensor:
        """What ``general`` returns, which multiplies these."""
        if is_watched():
            return general()
        return self(lambda: (general(),), (x, operand.data, operand.scale, operand.global_scale, bias))[0]


def repeated(like: Plan, x: Tensor, operand: Operand, bias: Tensor | None, recipe: Any) -> RepeatedProduct:
    """The kind of this call, whose first call has just been decided by ``like``."""
    components = tuple(kind_of(t) for t in (x, operand.data, operand.scale, operand.global_scale, bias))
    key = "repeated", components, operand.format, operand.shape, id(recipe)
    plan = PLANS.get(key)
    if plan is None:
        plan = Plan(like.spec, like.kernel, like.refusals, RepeatedProduct(), (recipe,))
        PLANS.put(key, plan)
    assert isinstance(plan.launch, RepeatedProduct)
    return plan.launch

"""Repeated products without gradients whose kernels have no prepared launch: the program of an earlier call.

``F.linear`` decides, casts and checks in general; what that does to tensors is recorded once for each kind of call
(``core/recording.py``) and shared by all layers of that kind. So a float8 product, or one that dequantizes its weight
for many rows, costs the host a look-up, its allocations and its launches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..core import recording
from ..core.plan import PLANS, Plan
from ..core.program import Program
from ..kernels.runtime.triton_launch import is_watched
from ..numerics.operand import Operand

General = Callable[[], Tensor]


def _kind(t: Tensor | None) -> Hashable:
    """All of a tensor that kernels and ops decide on."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15)


class Repeated:
    """A kind of call. The second call is recorded: a kind that comes only once is spared the milliseconds. Holds no
    tensor."""

    __slots__ = ("calls", "program")

    def __init__(self) -> None:
        self.calls = 1
        self.program: Program | None = None

    def __call__(self, x: Tensor, operand: Operand, bias: Tensor | None, general: General) -> Tensor:
        inputs = x, operand.data, operand.scale, operand.global_scale, bias
        if is_watched():
            return general()
        if self.program is None:
            return self._recorded(general, inputs)
        try:
            return self.program(*inputs)[0]  # type: ignore[no-any-return]
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the general way names the kernel and its operands
            return general()

    def _recorded(self, general: General, inputs: tuple[Tensor | None, ...]) -> Tensor:
        """The result of ``general``, whose program later calls take if this is the second call of the kind."""
        x = inputs[0]
        assert x is not None
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return general()  # the memory of a recorded call would be that of the graph
        self.calls += 1
        if self.calls != 2:
            return general()
        try:
            out, self.program = recording.record(general, inputs, lambda y: [y])
        except torch.OutOfMemoryError:  # all tensors of a recorded call live until its end
            return general()
        return out


def repeated(like: Plan, x: Tensor, operand: Operand, bias: Tensor | None, recipe: Any) -> Repeated:
    """The kind of this call, whose first call has just been decided by ``like``."""
    components = tuple(_kind(t) for t in (x, operand.data, operand.scale, operand.global_scale, bias))
    key = "repeated", components, operand.format, operand.shape, id(recipe)
    plan = PLANS.get(key)
    if plan is None:
        plan = Plan(like.spec, like.kernel, like.refusals, Repeated(), (recipe,))
        PLANS.put(key, plan)
    assert isinstance(plan.launch, Repeated)
    return plan.launch

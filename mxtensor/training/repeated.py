"""Repeated layers: later calls of a linear layer run the program of an earlier call of the same kind.

``passes.py`` decides, checks and casts in general. What it does to tensors is recorded (``core/recording.py``) for each
kind of call: recipe, shapes, strides, dtypes, devices, alignment, and which gradients are needed. A later call costs
the host a look-up, the allocations and the launches. There is no second definition of a pass: a call that cannot be
recorded, and one inside ``explain()`` or ``kernels()``, takes the general way.

The second call of a kind is recorded. Recording takes some milliseconds, which a shape that comes only once is spared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.kernel import Spec
from ..core.plan import PLANS, Plan
from ..core.program import Program
from ..core.repeated import DEVICES, kind_of, recorded, run
from ..core.select import is_observed
from ..core.tracing import is_captured, is_traced
from ..kernels.runtime.triton_launch import is_watched
from . import passes
from .accumulate import WeightOperands
from .operands import Scales
from .passes import Inputs, Options, SavedOperands
from .stack_operands import layout_of
from .training_weight import values_of

MAX_BACKWARD = 64
"""Backward passes that a layer holds: one for each layout and alignment of its gradients and saved tensors."""


class RepeatedLayer:
    """A kind of call: its forward pass, and its backward passes by the kind of their gradients. Holds no tensor."""

    __slots__ = ("backward", "calls", "forward", "operands", "whole")

    def __init__(self) -> None:
        self.calls = 0
        self.forward: Program | None = None
        """None: not recorded, or not to be recorded."""
        self.operands: SavedOperands | None = None
        self.whole = False
        """Whether the weight itself is saved for the backward pass."""
        self.backward: dict[Any, Program | None] = {}


def _is_general(*tensors: Tensor | None) -> bool:
    """Whether a call with these tensors takes the general way."""
    if is_observed() or is_traced(*tensors) or is_watched():
        return True
    return any(t is not None and (t.is_neg() or t.layout is not torch.strided) for t in tensors)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, scales: Scales | None, needs: tuple[bool, ...],
    cached: WeightOperands | None = None, ends: Tensor | None = None,
) -> tuple[Tensor, Sequence[Tensor], SavedOperands, RepeatedLayer | None]:  # fmt: skip
    """``passes.forward`` of a high-precision weight, and the layer for ``backward``; None if there is none. ``cached``:
    the operands of the weight, from an earlier call. ``ends``: of the groups of rows that a stack multiplies."""

    def work() -> tuple[Tensor, list[Tensor], SavedOperands]:
        groups = None if ends is None else layout_of(ends, x.shape[0], options.linear_recipe)
        operands = None if cached is None else cached.operands()
        return passes.forward(x, weight, bias, options, scales, operands, needs, groups)

    w = values_of(weight)
    if x.device.type not in DEVICES or _is_general(x, w, bias, ends):
        return *work(), None
    amax, record = (None, None) if scales is None else scales[:2]
    recipe = options.linear_recipe
    key = (
        "layer", id(recipe), needs, options.dtype, options.save_input, kind_of(x), kind_of(w), kind_of(bias),
        kind_of(amax), kind_of(record), kind_of(ends),
        *(() if cached is None else (cached.row, cached.column, *map(kind_of, cached.tensors))),
    )  # fmt: skip
    plan = PLANS.get(key)
    if plan is None:
        spec = Spec("linear", (tuple(x.shape), tuple(w.shape)), (x.dtype, w.dtype), x.dtype, x.device)
        plan = Plan(spec, None, {}, RepeatedLayer(), (recipe,))  # type: ignore[arg-type]
        PLANS.put(key, plan)
    layer: RepeatedLayer = plan.launch  # type: ignore[assignment]
    inputs = x, w, bias, amax, record, ends, *(() if cached is None else cached.tensors)
    program = layer.forward
    if program is None:
        captured = is_captured(x)
        layer.calls += not captured
        if captured or layer.calls != 2:
            return *work(), None
        out, program = recorded(work, inputs, lambda out: _flat(out, weight))
        layer.operands, layer.whole = out[2], any(t is weight for t in out[1])
        layer.forward = program
        return *out, None if program is None else layer
    assert layer.operands is not None
    y, *tensors = run(program, lambda: _flat(work(), weight), inputs)
    if layer.whole:
        tensors.append(weight)
    return y, tensors, layer.operands, layer


def _flat(out: tuple[Tensor, list[Tensor], SavedOperands], weight: Tensor) -> list[Tensor]:
    """The results of a forward pass as its program gives them."""
    return [out[0], *(t for t in out[1] if t is not weight)]


def backward(
    grad: Tensor, tensors: Sequence[Tensor], operands: SavedOperands, inputs: Inputs, options: Options,
    scales: Scales | None, layer: RepeatedLayer | None, ends: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """``passes.backward``."""

    def work() -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        groups = None if ends is None else layout_of(ends, inputs.shape[0], options.linear_recipe)
        return passes.backward(grad, tensors, operands, inputs, options, scales, groups)

    if layer is None or options.on_wgrad is not None:
        return work()
    given = [values_of(t) for t in tensors] if layer.whole else tensors
    if _is_general(grad, *given, ends):
        return work()
    every = (grad, *given, ends) if scales is None else (grad, *given, ends, *scales)
    key = tuple(map(kind_of, every))
    if key in layer.backward:
        program = layer.backward[key]
        return work() if program is None else run(program, work, every)
    if is_captured(grad):
        return work()
    out, program = recorded(work, every, lambda out: out)
    if len(layer.backward) >= MAX_BACKWARD:
        layer.backward.clear()
    layer.backward[key] = program
    return out

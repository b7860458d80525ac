"""Stacks of weights, such as the experts of a mixture: what is one, and the products by one that cannot be quantized.

A tensor is of a stack if it is a parameter with three or more dimensions, a view of one, or gathered from one.
``interception.py`` runs the products by a stack that ``calls.py`` can read as linear layers. Others (``einsum``,
``baddbmm``) run in high precision: ``explain()`` logs them and ``strict()`` raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.compat import called_while_traced
from ..core.compat_compile import run_uncompiled
from ..core.dispatch import OPEN, is_inside_strict, is_strict
from ..core.explain import LOGS, record, record_traced
from ..core.kernel import Spec
from ..core.tracing import is_traced
from ..tensor.mxtensor import MXTensor
from .histories import owner_of
from .training_weight import TrainingWeight

REASON = "this product by stacked experts is not read as linear layers"
GATHERED = "_mxtensor_gathered"
"""The attribute of a tensor that is gathered from a stack of weights: the stack; in a traced graph, only True."""
GATHERS = frozenset({Tensor.__getitem__, torch.index_select, Tensor.index_select})
COPIES = frozenset({
    Tensor.to, Tensor.float, Tensor.bfloat16, Tensor.half, Tensor.contiguous, Tensor.clone, Tensor.type, torch.clone,
    Tensor.transpose, torch.transpose, Tensor.permute, torch.permute, Tensor.view, Tensor.reshape, Tensor.unsqueeze,
    Tensor.mT.__get__, Tensor.expand,  # type: ignore[attr-defined]
})  # fmt: skip
"""Copies, and views of copies, which eager code finds by their nodes of autograd: Dynamo has none."""
PRODUCTS = frozenset({
    torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm, torch.einsum, torch._grouped_mm, torch.tensordot,
    torch.mm, Tensor.mm, torch.addmm, Tensor.addmm, torch.matmul, Tensor.matmul, Tensor.__matmul__,
})  # fmt: skip
"""torch functions that multiply."""
MOVES = frozenset(
    f"{name}Backward0"
    for name in (
        "Alias", "AsStrided", "Clone", "Expand", "Gather", "Index", "IndexSelect", "Narrow", "Permute", "ReshapeAlias",
        "Select", "Slice", "Split", "SplitWithSizes", "Squeeze", "T", "ToCopy", "Transpose", "Unbind", "UnsafeView",
        "Unsqueeze", "View",
    )
)  # fmt: skip
"""Nodes of autograd that change no value but its place, shape or dtype."""
DEPTH = 8
"""Nodes that are followed from an operand to its parameter."""


def note_experts(op: str, x: Tensor, weight: Tensor) -> None:
    """Log a product of ``x`` by a stack of weights, in high precision; NotImplementedError inside ``strict()``."""
    if torch.compiler.is_dynamo_compiling():
        _note_in_graph(op, weight)
        return
    if is_strict():
        _refuse(op, tuple(weight.shape))
    spec = Spec(op, (tuple(x.shape), tuple(weight.shape)), (x.dtype, weight.dtype), x.dtype, x.device, is_traced(x))
    record(spec, "high precision", {"quantized": REASON})


def _refuse(op: str, shape: tuple[int, ...]) -> None:
    raise NotImplementedError(
        f"{op} would multiply by a stack of weights {shape} in high precision ({REASON}), which mx.strict() forbids; "
        "use torch.bmm, torch._grouped_mm, F.linear of a slice, or mx.nn.GroupedLinear"
    )


def _note_in_graph(op: str, weight: Tensor) -> None:
    """``note_experts`` while Dynamo traces: only the call that compiles is logged."""
    shape = tuple(weight.shape) if all(type(n) is int for n in weight.shape) else ()
    is_open = OPEN["strict"] > 0  # the guard that compiles the graph anew inside ``strict()``
    if _noted_in_graph(op, shape, str(weight.dtype), str(weight.device)) and is_open:
        _refuse(op, shape)


@called_while_traced
def _noted_in_graph(op: str, shape: tuple[int, ...], dtype: str, device: str) -> bool:
    """Log a product; whether it must raise."""
    given = getattr(torch, dtype.removeprefix("torch."))
    spec = Spec(op, (shape,), (given,), given, torch.device(device), True)
    log = LOGS.get()
    if log is not None and all(entry.spec != spec for entry in log.entries):  # Dynamo may trace a function twice
        record_traced(spec, "high precision", {"quantized": REASON})
    return is_inside_strict()


def note_if_experts(func: Any, args: Any, kwargs: Any, in_mode: bool = False) -> bool:
    """Call ``note_experts`` if a product has a stack as operand, and return whether it has. ``in_mode``: skip
    TrainingWeights, which do it."""
    operands = [t for t in _tensors((args, kwargs)) if t.is_floating_point()]
    for stack in operands:
        if is_of_stack(stack) and not (in_mode and isinstance(stack, TrainingWeight)):
            x = [t for t in operands if t is not stack and t.dim() > 1]
            note_experts(getattr(func, "__name__", str(func)), x[0] if x else stack, stack)
            return True
    return False


def watched(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a torch function that is not a linear layer; a product by a stack of weights is noted first.

    Grouped products of other libraries are known by their names. What is gathered from a stack is marked, since it is
    not a view.
    """
    if func in PRODUCTS or (not torch.compiler.is_dynamo_compiling() and "grouped_mm" in getattr(func, "__name__", "")):
        note_if_experts(func, args, kwargs, in_mode=True)
        return func(*args, **kwargs)
    out = func(*args, **kwargs)
    first = args[0] if args else None
    if isinstance(first, Tensor) and isinstance(out, Tensor) and out.dim() > 2:
        gathered = func in GATHERS and _is_stack(first)
        copied = func in COPIES and torch.compiler.is_dynamo_compiling() and is_of_stack(first)
        if gathered or copied:
            stack = getattr(first, GATHERED, first)
            stack = owner_of(first) if stack is True else stack  # the stack of a rank, for ExpertParallel
            setattr(out, GATHERED, True if torch.compiler.is_dynamo_compiling() else stack)
    return out


def _tensors(arguments: Any) -> list[Tensor]:
    if isinstance(arguments, Tensor):
        return [arguments]
    if isinstance(arguments, dict):
        return _tensors(tuple(arguments.values()))
    return [t for argument in arguments for t in _tensors(argument)] if isinstance(arguments, (tuple, list)) else []


def _is_stack(t: Any) -> bool:
    return isinstance(t, (nn.Parameter, TrainingWeight)) and t.dim() > 2 and not isinstance(t, MXTensor)


def is_of_stack(t: Tensor) -> bool:
    """Whether ``t`` is a stack of weights, a view of one, or gathered from one."""
    if _is_stack(t) or _is_stack(t._base) or hasattr(t, GATHERED) or hasattr(t._base, GATHERED):
        return True
    if torch.compiler.is_dynamo_compiling():
        return False
    node: Any = t.grad_fn
    for _ in range(DEPTH):
        if node is None or node.name() not in MOVES:
            break
        node = node.next_functions[0][0]
    return node is not None and _is_stack(getattr(node, "variable", None))


# After a graph break, eager code calls these; compiled one by one, they would ask for a ContextVar in vain.
run_uncompiled(note_experts, _note_in_graph, _noted_in_graph, _refuse, note_if_experts)

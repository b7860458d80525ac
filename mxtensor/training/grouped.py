"""Grouped layers, such as the experts of a mixture: stacks of weights (groups, N, K), and tokens permuted by expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.compat import called_while_traced, is_functorch_wrapped_tensor, nonstrict_trace
from ..core.compat_compile import run_uncompiled
from ..core.dispatch import OPEN, is_inside_strict, is_strict
from ..core.explain import LOGS, record, record_traced
from ..core.kernel import Spec
from ..core.tracing import is_traced
from ..kernels.permute import choose_permutation, definition
from ..tensor.mxtensor import MXTensor
from .delayed_scaling import owner_of
from .training_weight import TrainingWeight

# ---------------------------------------------------------------------------------------------- stacks of weights

# A tensor is of a stack if it is a parameter with three or more dimensions, a view of one, or gathered from one.
# ``interception.py`` runs the products by a stack that it can read as linear layers. Others (``einsum``, ``baddbmm``)
# run in high precision: ``explain()`` logs them and ``strict()`` raises.

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
        "use torch.bmm, torch._grouped_mm, F.linear of a slice, or te.GroupedLinear"
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


# ---------------------------------------------------------------------------------------------- permutation

# Rows of tokens are sorted by expert and put back, with gradients: each pass runs the first kernel that accepts it.
# Gradients of gradients, and the transforms of torch.func, take the definition in plain torch
# (``kernels/permute/definition.py``), which torch differentiates.

Pair = tuple[Tensor, Tensor | None]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor | None, row_id_map: Tensor, choices: Tensor, offsets: Tensor | None
    ) -> Pair:
        ctx.save_for_backward(row_id_map, offsets)
        return choose_permutation.gather(x, choices, row_id_map.shape[1], probs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, probs_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        row_id_map, offsets = ctx.saved_tensors
        merge = definition.merge if torch.is_grad_enabled() else choose_permutation.merge
        return *merge(grad, row_id_map, offsets, None, probs_grad), None, None, None


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor | None, row_id_map: Tensor, offsets: Tensor | None) -> Pair:
        ctx.rows = y.shape[0]
        ctx.save_for_backward(None if weights is None else y, weights, row_id_map, offsets)
        return choose_permutation.merge(y, row_id_map, offsets, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        y, weights, row_id_map, offsets = ctx.saved_tensors
        kernels: Any = definition if torch.is_grad_enabled() else choose_permutation
        if weights is None:
            choices = kernels.choices_of_rows(row_id_map, ctx.rows, offsets)
            return kernels.gather(grad, choices, row_id_map.shape[1], None)[0], None, None, None
        wants = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        return *kernels.spread(grad, y, row_id_map, offsets, weights, wants), None, None


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probs: Tensor | None, source: Tensor, target: Tensor) -> Pair:
        ctx.save_for_backward(source, target)
        return choose_permutation.gather(x, source, 1, None if probs is None else probs.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, grad: Tensor, probs_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        source, target = ctx.saved_tensors
        return *moved(grad, probs_grad, target, source), None, None


# ---------------------------------------------------------------------------------------------- the three functions


def permuted(
    x: Tensor, probs: Tensor | None, row_id_map: Tensor, choices: Tensor, offsets: Tensor | None = None
) -> Pair:
    """The rows that ``choices`` names, of tokens x (T, K), and their weights in ``probs`` (T, experts).

    ``row_id_map`` and ``offsets`` are the way back, for gradients.
    """
    return _run("permute", x, probs, row_id_map, choices, offsets)


def merged(y: Tensor, weights: Tensor | None, row_id_map: Tensor, offsets: Tensor | None = None) -> Tensor:
    """The sum of the rows of each token in y, times ``weights``."""
    return _run("merge", y, weights, row_id_map, offsets)[0]


def moved(x: Tensor, probs: Tensor | None, source: Tensor, target: Tensor) -> Pair:
    """Rows of x, and of their weights ``probs`` (rows,), at other places.

    ``source`` has the row of x for each row of the result, -1 for zeros; ``target`` is the inverse.
    """
    return _run("move", x, probs, source, target)


DEFINITIONS: dict[str, Callable[..., Pair]] = {
    "permute": lambda x, probs, row_id_map, choices, _: definition.gather(x, choices, row_id_map.shape[1], probs),
    "merge": lambda y, weights, row_id_map, offsets: definition.merge(y, row_id_map, offsets, weights, None),
    "move": lambda x, probs, source, _: definition.gather(x, source, 1, None if probs is None else probs.unsqueeze(1)),
}
FUNCTIONS = {"permute": _Permute, "merge": _Merge, "move": _Move}


def _run(name: str, *args: Tensor | None) -> Pair:
    if not torch.compiler.is_dynamo_compiling():
        return _apply(name, *args)
    has = "".join("-" if t is None else "x" for t in args)
    out = _traced(name, has, *[t for t in args if t is not None])
    return out[0], out[1] if len(out) > 1 else None


def _apply(name: str, *args: Tensor | None) -> Pair:
    if any(t is not None and is_functorch_wrapped_tensor(t) for t in args):
        return DEFINITIONS[name](*args)
    out: Pair = FUNCTIONS[name].apply(*args)
    return out


@nonstrict_trace
def _traced(name: str, has: str, *given: Tensor) -> list[Tensor]:
    """``_apply`` for Dynamo, which leaves it to AOTAutograd: kernels are chosen as in eager code. ``has``: an x for an
    argument, a - for None."""
    tensors = iter(given)
    out = _apply(name, *[next(tensors) if mark == "x" else None for mark in has])
    return [t for t in out if t is not None]

"""Products by a stack of weights, such as the experts of a mixture: they do not train quantized, and say so.

``autocast`` sees every torch function. A product is one of a stack if an operand is a parameter with three or more
dimensions, a view of one, or gathered from one. It runs in high precision, ``explain()`` logs it and ``strict()``
raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..core.dispatch import is_strict
from ..core.explain import record
from ..core.kernel import Spec
from ..core.tracing import is_traced
from ..tensor.mxtensor import MXTensor

REASON = "products by stacked experts do not train quantized"
GATHERED = "_mxtensor_gathered"
"""The attribute of a tensor that is gathered from a stack of weights."""
GATHERS = frozenset({Tensor.__getitem__, torch.index_select, Tensor.index_select})
PRODUCTS = frozenset({
    torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm, torch.einsum, torch._grouped_mm, torch.tensordot,
    torch.mm, Tensor.mm, torch.addmm, Tensor.addmm, torch.matmul, Tensor.matmul, Tensor.__matmul__,
})  # fmt: skip
"""torch functions that multiply; with ``F.linear`` a slice of a stack is a layer like any other."""
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
    if is_strict():
        raise NotImplementedError(
            f"{op} would multiply by a stack of weights {tuple(weight.shape)} in high precision ({REASON}), which "
            "mx.strict() forbids; use mx.nn.GroupedLinear, or a linear layer for each expert"
        )
    spec = Spec(op, (tuple(x.shape), tuple(weight.shape)), (x.dtype, weight.dtype), x.dtype, x.device, is_traced(x))
    record(spec, "high precision", {"quantized": REASON})


def note_if_experts(func: Any, args: Any, kwargs: Any) -> None:
    """``note_experts`` if this product is one of a stack."""
    operands = [t for t in _tensors((args, kwargs)) if t.is_floating_point()]
    stack = next((t for t in operands if _is_of_stack(t)), None)
    if stack is not None:
        x = next((t for t in operands if t is not stack and t.dim() > 1), stack)
        note_experts(getattr(func, "__name__", str(func)), x, stack)


def watched(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a torch function that is no linear layer; a product by a stack of weights is noted first.

    Grouped products of other libraries are known by their names. What is gathered from a stack is marked, since it is
    not a view.
    """
    if func in PRODUCTS or "grouped_mm" in getattr(func, "__name__", ""):
        note_if_experts(func, args, kwargs)
        return func(*args, **kwargs)
    out = func(*args, **kwargs)
    if func in GATHERS and isinstance(out, Tensor) and out.dim() > 2 and _is_stack(args[0] if args else None):
        setattr(out, GATHERED, True)
    return out


def _tensors(arguments: Any) -> Iterator[Tensor]:
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, (tuple, list)):
        for argument in arguments:
            yield from _tensors(argument)
    elif isinstance(arguments, dict):
        yield from _tensors(tuple(arguments.values()))


def _is_stack(t: Any) -> bool:
    return isinstance(t, nn.Parameter) and t.dim() > 2 and not isinstance(t, MXTensor)


def _is_of_stack(t: Tensor) -> bool:
    """Whether ``t`` is a stack of weights, a view of one, or gathered from one."""
    if _is_stack(t) or _is_stack(t._base) or hasattr(t, GATHERED):
        return True
    node: Any = t.grad_fn
    for _ in range(DEPTH):
        if node is None or node.name() not in MOVES:
            break
        node = node.next_functions[0][0]
    return node is not None and _is_stack(getattr(node, "variable", None))

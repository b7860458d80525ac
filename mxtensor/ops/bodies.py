"""Ops of torch that call functions (``torch.cond``, ``map``, compile regions), with quantized weights as operands.

torch has no rule for a wrapper subclass there. Such an op is called again, with the tensors that the weights are made
of, and with functions that make the weights anew. Weights in the functions themselves are operands, too, once Dynamo
has traced them. A region of ``nested_compile_region`` becomes a part of the graph around it: its op is a call. Dynamo
refuses a subclass in ``while_loop`` before any rule is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.compat import disable_subclass_torch_function, enable_torch_function
from ..core.dispatch import implements_function
from ..tensor.attributes import KeepsAttributes

REGION = torch.ops.higher_order.invoke_subgraph
BODIES = (*(getattr(torch.ops.higher_order, name) for name in ("cond", "scan", "map_impl")), REGION)
"""Ops of torch whose operands are those of the functions that they call, in the same order."""


class _Components(NamedTuple):
    """What a weight is made of, as its ``__tensor_flatten__`` says."""

    kind: Any
    names: list[str]
    context: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def weight(self, tensors: Sequence[Tensor]) -> Tensor:
        inner = dict(zip(self.names, tensors, strict=True))
        return self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)  # type: ignore[no-any-return]


class _Values(torch.autograd.Function):
    """The one tensor that a weight is made of; its gradient is that of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, name: str) -> Tensor:
        values: Tensor = getattr(weight, name)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Weight(torch.autograd.Function):
    """The weight that is made of one tensor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, components: _Components) -> Tensor:
        return components.weight([values.detach()])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _tensors_of(name: str, operand: Any) -> tuple[list[Any], _Components | None]:
    """The operands in the place of one, and what a weight is made of.

    Raises NotImplementedError for a weight that trains and is stored quantized: its codes have no gradient.
    """
    if not isinstance(operand, KeepsAttributes):
        return [operand], None
    names, context = operand.__tensor_flatten__()  # type: ignore[attr-defined]
    if operand.requires_grad and len(names) > 1:
        raise NotImplementedError(
            f"{name}: a weight {tuple(operand.shape)} that trains is stored quantized, and its codes have no gradient; "
            "use quantize_(model, recipe), whose weights stay in high precision, or compute it outside"
        )
    components = _Components(type(operand), names, context, tuple(operand.shape), operand.stride())
    if operand.requires_grad:
        return [_Values.apply(operand, names[0])], components
    return [getattr(operand, n) for n in names], components


def _with_weights(body: Callable[..., Any], found: Sequence[_Components | None], *operands: Any) -> Any:
    """``body`` with the weights that are made of ``operands``."""
    rest, args = iter(operands), []
    for components in found:
        if components is None:
            args.append(next(rest))
        elif len(components.names) == 1:
            args.append(_Weight.apply(next(rest), components))
        else:
            args.append(components.weight(list(islice(rest, len(components.names)))))
    with enable_torch_function():  # torch disables it where it traces the backward pass of a body
        return body(*args)


def on_components(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An op of BODIES whose operands, in tuples or lists, are plain tensors in the place of weights."""
    if torch.compiler.is_dynamo_compiling():  # the op of the graph, when it is traced or runs, comes here again
        with disable_subclass_torch_function():
            return func(*args, **kwargs)
    if func is REGION:
        body, _, *operands = args
        return body(*operands)
    found: list[_Components | None] = []
    given: list[Any] = []
    for a in args:
        if not isinstance(a, (tuple, list)):
            given.append(a)
            continue
        pairs = [_tensors_of(func.__name__, operand) for operand in a]
        found += [components for _, components in pairs]
        given.append(type(a)(t for tensors, _ in pairs for t in tensors))
    bodies = [partial(_with_weights, a, found) if _is_function(a) else a for a in given]
    return func(*bodies, **kwargs)


def _is_function(a: Any) -> bool:
    return callable(a) and not isinstance(a, Tensor)


def _rule_of(func: Any) -> Callable[..., Any]:
    def rule(*args: Any, **kwargs: Any) -> Any:
        """The same op, with functions that make the weights from their components; a region is called."""
        return on_components(func, args, kwargs)

    return rule


for op in BODIES:
    implements_function(op)(_rule_of(op))

"""Ops of torch that call functions (``torch.cond``, ``map``, compile regions), with quantized weights as operands.

torch has no rule for a wrapper subclass there. Such an op is called again, with the tensors that the weights are made
of, and with functions that make the weights anew; weights that these functions return go the same way. Weights in the
functions themselves are operands, too, once Dynamo has traced them. A region of ``nested_compile_region`` becomes a
part of the graph around it: its op is a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.compat import disable_subclass_torch_function, enable_torch_function, is_exporting
from ..core.compat_compile import hook_bodies
from ..core.dispatch import implements_function
from ..core.when_imported import when_imported
from ..tensor.attributes import KeepsAttributes
from ..tensor.dequantized_view import DequantizedView


class _Op(NamedTuple):
    """What an op of torch does with the lists of its operands and with the results of its functions."""

    sliced: int | None = None
    """The list whose tensors are cut along their first dimension: each call of a function gets one slice."""
    carries: bool = False
    """Whether the first results of a function take the place of the operands of the first list."""
    stacks: bool = False
    """Whether the other results of its calls are stacked."""
    only: int | None = None
    """The one function whose results are those of the op; None: all."""


REGION = torch.ops.higher_order.invoke_subgraph
_OPS = {
    torch.ops.higher_order.cond: _Op(),
    torch.ops.higher_order.scan: _Op(sliced=1, carries=True, stacks=True),
    torch.ops.higher_order.map_impl: _Op(sliced=0, stacks=True),
    torch.ops.higher_order.while_loop: _Op(carries=True, only=1),
    REGION: _Op(),
}
"""Op of torch whose operands are those of the functions that it calls, in the same order."""
BODIES = tuple(_OPS)


class _Components(NamedTuple):
    """What a weight is made of, as its ``__tensor_flatten__`` says."""

    kind: Any
    names: list[str]
    dtypes: list[torch.dtype]
    context: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, weight: Any) -> _Components:
        names, context = weight.__tensor_flatten__()
        dtypes = [getattr(weight, name).dtype for name in names]
        return cls(type(weight), names, dtypes, context, tuple(weight.shape), weight.stride())

    def tensors(self, weight: Any) -> list[Tensor]:
        """The tensors of such a weight. The gradient of the only one is that of the weight.

        Codes in float8 are bytes here: torch would add up gradients of them, for which float8 has no kernel.
        """
        if weight.requires_grad:
            return [_Values.apply(weight, self.names[0])]
        tensors = [getattr(weight, name) for name in self.names]
        return [t.view(torch.uint8) if _is_float8(t.dtype) else t for t in tensors]

    def weight(self, tensors: Sequence[Tensor]) -> Tensor:
        typed = (t.view(dtype) if _is_float8(dtype) else t for t, dtype in zip(tensors, self.dtypes, strict=True))
        inner = dict(zip(self.names, typed, strict=True))
        return self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)  # type: ignore[no-any-return]

    def next(self, tensors: Iterator[Any]) -> Tensor:
        """The weight that is made of the next tensors."""
        taken = list(islice(tensors, len(self.names)))
        return _Weight.apply(taken[0], self) if len(taken) == 1 else self.weight(taken)


def _is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


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


Found = list[_Components | None]
"""What each tensor of a list is made of; None for one that is not a weight."""


def _tensors_of(name: str, operand: Any) -> tuple[list[Any], _Components | None]:
    """The operands in the place of one, and what a weight is made of.

    Raises NotImplementedError for a weight that trains and is stored quantized: its codes have no gradient.
    """
    if not isinstance(operand, KeepsAttributes):
        return [operand], None
    components = _Components.of(operand)
    if operand.requires_grad and len(components.names) > 1:
        raise NotImplementedError(
            f"{name}: a weight {tuple(operand.shape)} that trains is stored quantized, and its codes have no gradient; "
            "use quantize_(model, recipe), whose weights stay in high precision, or compute it outside"
        )
    return components.tensors(operand), components


def _slices_of(name: str, operand: Any) -> tuple[list[Any], _Components | None]:
    """The operands in the place of one that is cut along its first dimension, and what each slice is made of.

    Raises NotImplementedError if the slices of a quantized weight have no codes of their own.
    """
    tensors, components = _tensors_of(name, operand)
    if components is None:
        return tensors, None
    one = operand.detach().select(0, 0)
    if not isinstance(one, KeepsAttributes) or len((slice_ := _Components.of(one)).names) != len(tensors):
        raise NotImplementedError(
            f"{name}: slices of a weight {tuple(operand.shape)} along its first dimension cut its blocks; slice "
            ".dequantize() of it, or compute it outside"
        )
    found = zip(tensors, slice_.tensors(one), strict=True)
    return [_repeated(whole, part.shape, operand.shape[0]) for whole, part in found], slice_


def _repeated(whole: Tensor, shape: torch.Size, count: int) -> Tensor:
    """A tensor of ``count`` slices of this shape: ``whole``, of which a slice may lack dimensions of size 1, or a scale
    that all of them share."""
    if whole.shape == (count, *shape):
        return whole
    one_each = whole.dim() > len(shape) and whole.shape[0] == count
    return whole.reshape(count, *shape) if one_each else whole.reshape(shape).expand(count, *shape)


EXPORTED: list[bool] = []
"""Whether the bodies that run are traced by ``torch.export``, the innermost last: its mode takes ops of plain tensors
only, before they reach a class. A list, because Dynamo reads no ContextVar."""


def _on_tensors(body: Callable[..., Any], found: Found, results: _Results | None) -> Callable[..., Any]:
    """A function of an op, on the tensors that its weights are made of."""

    def call(*operands: Any) -> Any:
        rest = iter(operands)
        with enable_torch_function():  # torch disables it where it traces the backward pass of a body
            args = [next(rest) if components is None else components.next(rest) for components in found]
            EXPORTED.append(is_exporting())
            try:
                out = body(*args)
            finally:
                EXPORTED.pop()
            return out if results is None else results.tensors(out)

    return call


class _Results:
    """The results of the functions of an op: what weights among them are made of.

    ``carried``: what takes the place of operands. ``stacks``: the others are stacked.
    """

    def __init__(self, name: str, carried: Found, stacks: bool) -> None:
        self.name, self.carried, self.stacks = name, carried, stacks
        self.others: Found | None = None

    def tensors(self, out: Any) -> Any:
        """The results of one call in plain tensors. Raises ValueError if weights are not those that are expected."""
        if not isinstance(out, (tuple, list)):
            tensors, found = self._of_others([out])
            return tensors[0] if found == [None] else tensors
        count = len(self.carried)
        pairs = [_tensors_of(self.name, value) for value in out[:count]]
        self._check(self.carried, [components for _, components in pairs])
        others, found = self._of_others(out[count:])
        return (*(t for tensors, _ in pairs for t in tensors), *others)

    def _of_others(self, out: Sequence[Any]) -> tuple[list[Any], Found]:
        pairs = [_tensors_of(self.name, value) for value in out]
        found = [components for _, components in pairs]
        if self.stacks:
            for tensors, components in pairs:
                if components is not None and len(tensors) > 1:
                    raise NotImplementedError(
                        f"{self.name} stacks its results, and a quantized one {components.size} has several tensors; "
                        "return .dequantize() of it"
                    )
            return [tensors[0] for tensors, _ in pairs], [None] * len(out)
        if self.others is not None:
            self._check(self.others, found)
        self.others = found
        return [t for tensors, _ in pairs for t in tensors], found

    def _check(self, expected: Found, found: Found) -> None:
        for i, (one, other) in enumerate(zip(expected, found, strict=False)):  # torch says so if there are more of one
            if one != other:
                raise ValueError(
                    f"{self.name}: result {i} is {_described(other)}, where {_described(one)} is expected: return "
                    "the same kind of weight each time, or .dequantize() of it"
                )

    def of(self, out: Any) -> Any:
        """The results of the op, with weights made of its plain tensors."""
        found = [*self.carried, *(self.others or [])]
        if not any(found):
            return out
        rest = iter(out)
        made = [next(rest) if components is None else components.next(rest) for components in found]
        return type(out)((*made, *rest))


def _described(components: _Components | None) -> str:
    if components is None:
        return "not a quantized weight"
    return f"{components.kind.__name__} {components.size} of {components.context[0]}"


def on_components(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An op of BODIES whose operands, in tuples or lists, are plain tensors in the place of weights."""
    if torch.compiler.is_dynamo_compiling():  # the op of the graph, when it is traced or runs, comes here again
        with disable_subclass_torch_function():
            return func(*args, **kwargs)
    if func is REGION:
        body, _, *operands = args
        return body(*operands)
    op, name = _OPS[func], func.__name__
    lists = [i for i, a in enumerate(args) if isinstance(a, (tuple, list))]
    given: list[Any] = list(args)
    found: Found = []
    for position, i in enumerate(lists):
        split = _slices_of if position == op.sliced else _tensors_of
        operands = args[i]
        if op.carries and not position:  # results will replace them: each is a weight of its own, not part of one
            operands = [operand.clone() if isinstance(operand, KeepsAttributes) else operand for operand in operands]
        pairs = [split(name, operand) for operand in operands]
        found += [components for _, components in pairs]
        given[i] = type(args[i])(t for tensors, _ in pairs for t in tensors)
    results = _Results(name, found[: len(args[lists[0]])] if op.carries else [], op.stacks)
    for i, a in enumerate(args):
        if callable(a) and not isinstance(a, Tensor):
            given[i] = _on_tensors(a, found, results if op.only in (None, i) else None)
    if kwargs.get("mutated_arg_indices"):  # each weight is as many operands as it has tensors
        counts = [1 if components is None else len(components.names) for components in found]
        ends = list(accumulate(counts))
        indices = (range(ends[i] - counts[i], ends[i]) for i in map(int, kwargs["mutated_arg_indices"].split(",")))
        kwargs = kwargs | {"mutated_arg_indices": ",".join(str(i) for several in indices for i in several)}
    return results.of(func(*given, **kwargs))


def _rule_of(func: Any) -> Callable[..., Any]:
    def rule(*args: Any, **kwargs: Any) -> Any:
        """The same op, with functions that make the weights from their components; a region is called."""
        return on_components(func, args, kwargs)

    return rule


when_imported(
    "torch._dynamo.variables.higher_order_ops",
    lambda: hook_bodies(
        (KeepsAttributes, DequantizedView), lambda w: [getattr(w, name) for name in w.__tensor_flatten__()[0]]
    ),
)
for op in BODIES:
    implements_function(op)(_rule_of(op))

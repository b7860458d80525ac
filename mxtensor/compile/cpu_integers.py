"""Integers that change from call to call, such as a count of tokens in Python, are computed outside of a CPU graph.

Dynamo passes such an integer to a graph as an argument, and the integers that the code computes of it are results. A
recording has the integers of its call, so that no later call could use it. ``taken_out`` leaves tensors only: integers
for the caller are computed in Python, and those that an op on tensors takes are the elements of one more argument.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from .cpu_recording import picker

_NAMES = "add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne"
_SAME_OF_TENSORS = {getattr(module, name) for module in (operator, torch) for name in _NAMES} | {
    getattr(operator, name) for name in ("iadd", "isub", "imul")
}
"""Functions of tensors that compute the same of a number and of a tensor without dimensions that has it."""


UNUSED = 0
"""What a graph gets in the place of an integer that it does not need. Dynamo reads the arguments of a graph also after
this, so that none may be left out."""


class Integers:
    """What a caller of a graph passes and gets beside tensors."""

    def __init__(self, places: list[int], compute: Callable[..., Any], results: list[bool]) -> None:
        """``places``: of the integers among the arguments; ``compute``: of them those that ops on tensors take, and
        those among the results, whose places ``results`` tells.
        """
        self._places, self._integers_of, self._compute = places, picker(places), compute
        tensors = results.count(False)
        numbers = iter(range(tensors)), iter(range(tensors, len(results)))
        self._arranged = picker([next(numbers[is_integer]) for is_integer in results])

    def run(self, graph: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
        """The results of a graph without integers for a caller who passes and gets them."""
        taken, results = self._compute(*self._integers_of(args))
        given = list(args)
        for i in self._places:
            given[i] = UNUSED
        if taken:
            given[self._places[0]] = torch.tensor(taken)
        return tuple(self._arranged([*graph(*given), *results]))


def taken_out(module: fx.GraphModule, inputs: list[Any]) -> Integers | None:
    """Take the integers out of a graph and its inputs, in place.

    None if it has none, or needs one for something else than arithmetic, such as the size of a tensor.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    sizes = set().union(*(free_symbols(value) for p in placeholders if isinstance(value := _value(p), Tensor)))
    places = [
        i
        for i, p in enumerate(placeholders)
        if isinstance(value := _value(p), torch.SymInt) and not free_symbols(value) & sizes
    ]
    if not places:
        return None
    users = _Users([placeholders[i] for i in places])
    return users.take_out(module, places, inputs) if users.known else None


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else node


def _is_arithmetic(node: fx.Node) -> bool:
    """Whether a node computes the same of tensors and numbers as of tensors and 64-bit integers without dimensions."""
    given = [value for n in node.all_input_nodes if isinstance(value := _value(n), Tensor)]
    kinds = [[torch.result_type(t, of) for of in (1, torch.zeros((), dtype=torch.int64))] for t in given]
    known = node.target in _SAME_OF_TENSORS and isinstance(_value(node), Tensor) and not node.kwargs
    return known and all(one == other for one, other in kinds)


class _Users:
    """What becomes of integers in a graph.

    ``computed``: integers and nodes that compute integers of them alone; ``ops``: ops on tensors that take one of
    these; ``known``: whether there is nothing else but the output of the graph.
    """

    def __init__(self, integers: list[fx.Node]) -> None:
        self.integers = integers
        self.computed = dict.fromkeys(integers)
        self.ops: dict[fx.Node, None] = {}
        self.known = True
        for node in integers[0].graph.nodes:
            if any(given in self.computed for given in node.all_input_nodes):
                self._add(node)

    def _add(self, node: fx.Node) -> None:
        if node.op == "output":
            (results,) = node.args
            self.known &= isinstance(results, (list, tuple)) and all(
                isinstance(r, (fx.Node, type(None))) for r in results
            )
        elif isinstance(_value(node), (int, torch.SymInt)) and all(n in self.computed for n in node.all_input_nodes):
            self.computed[node] = None
        elif _is_arithmetic(node):
            self.ops[node] = None
        else:
            self.known = False

    def take_out(self, module: fx.GraphModule, places: list[int], inputs: list[Any]) -> Integers:
        """Changes the graph and its inputs. ``places``: of the integers among these."""
        (output,) = module.graph.find_nodes(op="output")
        (values,) = output.args
        results = [value in self.computed for value in values]
        taken = [n for n in self.computed if any(user in self.ops for user in n.users)]
        compute = self._function(taken, [value for value in values if value in self.computed])
        output.args = (tuple(value for value in values if value not in self.computed),)
        if taken:
            self._give_elements(taken)
            inputs[places[0]] = torch.zeros(len(taken), dtype=torch.int64)
        for node in reversed(self.computed):
            if node.op != "placeholder" and not node.users:
                module.graph.erase_node(node)
        module.recompile()
        return Integers(places, compute, results)

    def _function(self, *wanted: list[fx.Node]) -> Callable[..., Any]:
        """Computes these integers of those of the caller."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.computed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple([copies[node] for node in nodes] for nodes in wanted))
        function: Callable[..., Any] = fx.GraphModule({}, graph).forward
        return function

    def _give_elements(self, taken: list[fx.Node]) -> None:
        """The ops on tensors take the elements of the first argument that was an integer."""
        holder = self.integers[0]
        graph = holder.graph
        first = next(node for node in graph.nodes if node.op != "placeholder")
        elements = {}
        with graph.inserting_before(first):
            for i, node in enumerate(taken):
                elements[node] = graph.call_function(operator.getitem, (holder, i))
        for op in self.ops:
            for node, element in elements.items():
                op.replace_input_with(node, element)

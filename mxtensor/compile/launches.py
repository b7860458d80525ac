"""When products of a compiled graph start: as soon as the kernel before them does, and not before there are weights.

Kernels of torch's compiler may let the next one start before they end (programmatic dependent launch). Products wait
for the kernel before them, and so for all before that, ere they read anything but weights, which they ask for at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..core.compat import tree_leaves
from ..core.compat_hooks import hook_kernel_lines
from .graph import ONE, SHARED, arguments, needs

PRODUCTS = ONE, SHARED

# ---------------------------------------------------------------------------------------------- weights


def _is_input(value: Any) -> bool:
    """Whether it is there before the graph begins."""
    return all(node.op in ("placeholder", "get_attr") for node in needs(value))


def _subgraphs(node: Node) -> Iterator[Graph]:
    """The graphs that a node calls: a region, branches, a loop."""
    owner = node.graph.owning_module
    for given in node.all_input_nodes if owner is not None else ():
        if given.op == "get_attr":
            module = attrgetter(str(given.target))(owner)
            if isinstance(module, GraphModule):
                yield module.graph


def _weights_of(node: Node) -> list[Node]:
    """What products read without waiting, of those that a node is or calls."""
    if node.target in PRODUCTS:
        given = arguments(node)
        found = [v for name in ("data", "scale", "global_scale") for v in tree_leaves(given[name])]
    else:
        found = []
        for graph in _subgraphs(node):
            inside = {v for other in graph.nodes for weight in _weights_of(other) for v in needs(weight)}
            inputs = graph.find_nodes(op="placeholder")  # which are the last of what a node is given
            leaves = tree_leaves((node.args, node.kwargs))
            found += [here for there, here in zip(reversed(inputs), reversed(leaves), strict=False) if there in inside]
    return [value for value in dict.fromkeys(found) if isinstance(value, Node)]


def wait_for_weights(graph: Graph) -> None:
    """Where a kernel of the compiler's may make a weight, and let the next one start before it has written, a copy
    comes between, which does not."""
    for node in list(graph.nodes):
        for value in _weights_of(node):
            if not _is_input(value):
                with graph.inserting_before(node):
                    written = graph.call_function(torch.ops.mxtensor.written.default, (value,))
                written.meta.update(value.meta)
                node.replace_input_with(value, written)


# ---------------------------------------------------------------------------------------------- launches


def _product_is_next(scheduler: Any) -> bool:
    """Whether the kernel after the one that is being written is one of ours."""
    nodes = iter(scheduler.nodes if scheduler else ())
    if not any(node is scheduler.current_node for node in nodes):
        return False
    following = next((node.node for node in nodes if type(node).__name__ != "NopKernelSchedulerNode"), None)
    return getattr(following, "op_overload", None) in PRODUCTS


def _launch_first(lines: Sequence[Any], launch: str) -> list[Any]:
    """Those of a kernel, which lets the next one start before anything else, if it did so at all."""
    cached_value = [line for line in lines if not (isinstance(line, str) and launch in line)]
    return [launch, *cached_value] if len(cached_value) < len(lines) else cached_value


@cache
def launch_products_early() -> None:
    """Have torch's compiler, in graphs whose pass says ``launches_early``, write kernels that let a product start as
    soon as they begin themselves.

    Else a kernel lets the next one start once it has read its inputs, for one of the compiler's may read without
    waiting what comes from the kernel before the last. A torch that writes kernels otherwise is left alone.
    """

    def wanted(config: Any, scheduler: Any) -> bool:
        early = getattr(config.post_grad_custom_pre_pass, "launches_early", False)
        return early and _product_is_next(scheduler)

    hook_kernel_lines(_launch_first, wanted)

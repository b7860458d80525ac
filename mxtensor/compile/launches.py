"""When products of a compiled graph start: as soon as the previous kernel starts, but after their weights are written.

A kernel of torch's compiler may allow the next kernel to start before it ends (programmatic dependent launch). A
product loads its weights at once. Before it reads anything else it waits for the previous kernel, and so for all
kernels before that.
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
    """Whether the value exists before the graph starts."""
    return all(node.op in ("placeholder", "get_attr") for node in needs(value))


def _subgraphs(node: Node) -> Iterator[Graph]:
    """The graphs that a node calls: a nested region, branches, a loop."""
    owner = node.graph.owning_module
    for given in node.all_input_nodes if owner is not None else ():
        if given.op == "get_attr":
            module = attrgetter(str(given.target))(owner)
            if isinstance(module, GraphModule):
                yield module.graph


def _weights_of(node: Node) -> list[Node]:
    """The weights that a node reads without waiting, if it is a product or calls a graph with products."""
    if node.target in PRODUCTS:
        given = arguments(node)
        found = [v for name in ("data", "scale", "global_scale") for v in tree_leaves(given[name])]
    else:
        found = []
        for graph in _subgraphs(node):
            inside = {v for other in graph.nodes for weight in _weights_of(other) for v in needs(weight)}
            inputs = graph.find_nodes(op="placeholder")  # these are the last arguments of the node
            leaves = tree_leaves((node.args, node.kwargs))
            found += [here for there, here in zip(reversed(inputs), reversed(leaves), strict=False) if there in inside]
    return [value for value in dict.fromkeys(found) if isinstance(value, Node)]


def wait_for_weights(graph: Graph) -> None:
    """Insert a copy between the computation of a weight and its product.

    The kernel that computes the weight may allow the product to start before the weight is written; the copy does not.
    """
    for node in list(graph.nodes):
        for value in _weights_of(node):
            if not _is_input(value):
                with graph.inserting_before(node):
                    written = graph.call_function(torch.ops.mxtensor.written.default, (value,))
                written.meta.update(value.meta)
                node.replace_input_with(value, written)


# ---------------------------------------------------------------------------------------------- launches


def _product_is_next(scheduler: Any) -> bool:
    """Whether the kernel after the one being generated is a small-M product."""
    nodes = iter(scheduler.nodes if scheduler else ())
    if not any(node is scheduler.current_node for node in nodes):
        return False
    following = next((node.node for node in nodes if type(node).__name__ != "NopKernelSchedulerNode"), None)
    return getattr(following, "op_overload", None) in PRODUCTS


def _launch_first(lines: Sequence[Any], launch: str) -> list[Any]:
    """The lines of a kernel with its launch call first, if it had one."""
    others = [line for line in lines if not (isinstance(line, str) and launch in line)]
    return [launch, *others] if len(others) < len(lines) else others


@cache
def launch_products_early() -> None:
    """Have torch's compiler generate kernels that allow a following product to start when they start themselves.

    This holds in graphs whose pass has ``launches_early``. Elsewhere a kernel allows the next one to start after it has
    read its inputs, because a kernel of the compiler may read without waiting what the kernel before the previous one
    wrote. Nothing changes with a torch that generates such kernels in another way.
    """

    def wanted(config: Any, scheduler: Any) -> bool:
        early = getattr(config.post_grad_custom_pre_pass, "launches_early", False)
        return early and _product_is_next(scheduler)

    hook_kernel_lines(_launch_first, wanted)

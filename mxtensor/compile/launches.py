"""Programmatic dependent launch (PDL) in compiled graphs: a product starts while the kernel before it still runs.

A kernel may allow the next one to start before it ends. A product loads its weights at once: they must have been
written before. It waits for the previous kernel before it reads anything else. Every kernel of torch's compiler waits
before all else. A kernel that waits for the previous one has therefore waited for all before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..core.compat import tree_leaves
from ..core.compat_compile import hook_kernel_lines
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


def _is_read_later(graph: Any) -> bool:
    """Whether the kernel being generated writes what is there after the graph: a result, or one of its inputs.

    The product after it may belong to another graph, which does not know that its weight was written just now.
    """
    scheduler = graph.scheduler
    node = getattr(scheduler, "current_node", None)
    if node is None:
        return True
    names = node.get_buffer_names()
    if any(_is_in_another(scheduler.name_to_buf.get(name)) for name in names):
        return True
    written = {scheduler.mutation_real_name.get(name, name) for name in names}
    return not written.isdisjoint((*graph.get_output_names(), *graph.graph_input_names))


def _is_in_another(buffer: Any) -> bool:
    """Whether a buffer is a place in a larger one, such as a result of ``torch.cat``, under another name."""
    return type(getattr(getattr(buffer, "node", None), "layout", None)).__name__ == "NonOwningLayout"


def _ordered(lines: Sequence[Any], wait: str, launch: str, graph: Any) -> list[Any]:
    """The lines of a kernel, which waits for the kernel before first of all.

    It lets the next one start where it did, but first of all if that is a product, and never if what it writes is read
    after the graph.
    """
    marks = [mark for mark in (wait, launch) for line in lines if isinstance(line, str) and mark in line]
    plain = [line for line in lines if not (isinstance(line, str) and (wait in line or launch in line))]
    if launch not in marks or _is_read_later(graph):
        return [wait, *plain]
    if _product_is_next(graph.scheduler):
        return [launch, wait, *plain]
    return [wait, *(line for line in lines if not (isinstance(line, str) and wait in line))]


@cache
def launch_products_early() -> None:
    """Have torch's compiler generate kernels that allow a following product to start when they start themselves.

    This holds in graphs whose pass has ``launches_early``. Elsewhere a kernel allows the next one to start after it has
    read its inputs, and waits only for what it reads itself: one that follows may then read what the kernel before the
    previous one has not written yet. Nothing changes with a torch that generates such kernels in another way.
    """
    hook_kernel_lines(_ordered, lambda config: getattr(config.post_grad_custom_pre_pass, "launches_early", False))

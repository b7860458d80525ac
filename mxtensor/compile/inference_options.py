"""Options of ``torch.compile`` for decoding: ``torch.compile(model, options=mx.inference_options())``.

- Layers with one input (query, key and value; gate and up) become one launch.
- Kernels may start before the previous kernel has ended (programmatic dependent launch, from sm_90 on). A product loads
  its weights first, so it may start as soon as the previous kernel has started.
- Independent kernels of torch's compiler become one kernel.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from operator import getitem
from typing import Any

from torch._inductor import config as config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from ..core.dispatch import arguments_of
from ..core.fingerprint import fingerprint
from .attention import read_values_once
from .graph import CPU_SHARED, MERGED, OF_A_WEIGHT, arguments, aten, is_view, needs
from .launches import launch_products_early, wait_for_weights


def _key(value: Any) -> Any:
    """A key that is equal for equal views of one node."""
    if not is_view(value):
        return value
    return value.target, _key(value.args[0]), repr(value.args[1:]), repr(value.kwargs)


def _repeated(graph: Graph, value: Any) -> Any:
    """The same view, inserted at the graph's insertion point."""
    if not is_view(value):
        return value
    view = graph.call_function(value.target, (_repeated(graph, value.args[0]), *value.args[1:]), dict(value.kwargs))
    view.meta.update(value.meta)
    return view


def _groups(graph: Graph) -> list[list[Node]]:
    """Groups of products of one input that can all be computed at the place of the first one, in graph order."""
    index = {node: i for i, node in enumerate(graph.nodes)}
    found: dict[Any, list[list[Node]]] = {}
    for node in (node for one in MERGED for node in graph.find_nodes(op="call_function", target=one)):
        given = arguments(node)
        if given.get("ends") is not None:
            continue
        key = node.target, *(_key(v) for name, v in given.items() if name not in OF_A_WEIGHT)
        same = found.setdefault(key, [])
        ready = max((index[v] for name in OF_A_WEIGHT for v in needs(given[name])), default=-1)
        group = next((group for group in same if ready < index[group[0]]), None)
        if group is None:
            same.append([node])
        else:
            group.append(node)
    return [group for groups in found.values() for group in groups if len(group) > 1]


def _results(graph: Graph, call: Node, group: list[Node]) -> list[Node]:
    """The result of each product of a group from their one ``call``: a list of them, or all side by side."""
    values = [node.meta["val"] for node in group]
    if call.target is not CPU_SHARED:
        call.meta["val"] = values
        return [graph.call_function(getitem, (call, i)) for i in range(len(group))]
    ends = [0, *accumulate(value.shape[1] for value in values)]
    call.meta["val"] = values[0].new_empty(values[0].shape[0], ends[-1])
    return [graph.call_function(aten.slice.Tensor, (call, 1, *place)) for place in pairwise(ends)]


def _merge(graph: Graph, group: list[Node]) -> None:
    """Replace a group of products by one call."""
    all_of = [arguments(node) for node in group]
    shared = {name: v for name, v in all_of[0].items() if name not in (*OF_A_WEIGHT, "ends")}
    with graph.inserting_before(group[0]):
        of_each = {name: [_repeated(graph, given[name]) for given in all_of] for name in OF_A_WEIGHT}
        call = graph.call_function(MERGED[group[0].target], kwargs=shared | of_each)
        seen: list[Any] = [node.meta.get("eager_input_vals") for node in group]
        if all(seen):  # from these the compiler keeps the strides of the inputs
            own = [arguments_of(group[0].target, args, kwargs) for args, kwargs in seen]
            values = {name: own[0][name] for name in shared}
            call.meta["eager_input_vals"] = (), values | {name: [v[name] for v in own] for name in OF_A_WEIGHT}
        for node, result in zip(group, _results(graph, call, group), strict=True):
            result.meta.update(node.meta)
            node.replace_all_uses_with(result)
    for node in group:
        graph.erase_node(node)


class Products(CustomGraphPass):
    """The pass that merges products of one input by several weights into one call, and reads caches on a CPU once."""

    launches_early = True
    """Tells ``launch_products_early`` that this graph wants it."""

    def __call__(self, graph: Graph) -> None:
        """Change the graph in place."""
        launch_products_early()
        for group in _groups(graph):
            _merge(graph, group)
        wait_for_weights(graph)
        read_values_once(graph)

    def uuid(self) -> bytes:
        """A hash of the package, for torch's cache of compiled graphs."""
        return fingerprint().encode()


def decoding(early: bool = True) -> dict[str, Any]:
    """The options for combined kernels and ``early`` starts, of those that this torch has."""
    known = config.get_config_copy()
    names = ("combo_kernels", "triton.enable_pdl") if early else ("combo_kernels",)
    return {name: True for name in names if name in known}


def inference_options() -> dict[str, Any]:
    """Options of ``torch.compile`` for decoding with a model of quantized layers.

    Use them with the default backend and without ``mode``. Options that this torch does not have are left out. Graphs
    with products of few rows get them by default (``mx.compile_passes``).
    """
    return {"post_grad_custom_pre_pass": Products()} | decoding()

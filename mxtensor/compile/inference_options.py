"""What ``torch.compile`` is told of a model that decodes: ``torch.compile(model, options=mx.inference_options())``.

Layers that read one input (query, key and value; gate and up) become one launch. Kernels may start while the one before
them ends (programmatic dependent launch, sm_90 on), and a product, which asks for its weights first, while it begins.
Kernels of torch's compiler that do not need each other become one.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from ..compile import graph, launches
from .graph import NAMES, OF_A_WEIGHT, ONE, SHARED, arguments, is_view, needs
from .launches import launch_products_early, wait_for_weights


def _key(value: Any) -> Any:
    """The same for equal views of one node."""
    if not is_view(value):
        return value
    return value.target, _key(value.args[0]), repr(value.args[1:]), repr(value.kwargs)


def _again(graph: Graph, value: Any) -> Any:
    """The same view, made where the graph is inserting."""
    if not is_view(value):
        return value
    made = graph.call_function(value.target, (_again(graph, value.args[0]), *value.args[1:]), dict(value.kwargs))
    made.meta.update(value.meta)
    return made


def _groups(graph: Graph) -> list[list[Node]]:
    """Products of one input, in their order: those that could all be made where the first one is."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    found: dict[Any, list[list[Node]]] = {}
    for node in graph.find_nodes(op="call_function", target=ONE):
        given = arguments(node)
        if given["ends"] is not None:
            continue
        same = found.setdefault(tuple(_key(v) for name, v in given.items() if name not in OF_A_WEIGHT), [])
        global_scale = max((place[v] for name in OF_A_WEIGHT for v in needs(given[name])), default=-1)
        group = next((group for group in same if global_scale < place[group[0]]), None)
        if group is None:
            same.append([node])
        else:
            group.append(node)
    return [group for groups in found.values() for group in groups if len(group) > 1]


def _make_one(graph: Graph, group: list[Node]) -> None:
    """One call in the place of some products."""
    all_of = [arguments(node) for node in group]
    shared = {name: v for name, v in all_of[0].items() if name not in (*OF_A_WEIGHT, "ends")}
    with graph.inserting_before(group[0]):
        of_each = {name: [_again(graph, given[name]) for given in all_of] for name in OF_A_WEIGHT}
        call = graph.call_function(SHARED, kwargs=shared | of_each)
        call.meta["val"] = [node.meta.get("val") for node in group]
        seen: list[Any] = [node.meta.get("eager_input_vals") for node in group]
        if all(seen):  # by which the compiler keeps inputs laid out as they were
            own = [dict(zip(NAMES, args, strict=False)) | kwargs for args, kwargs in seen]
            values = {name: own[0][name] for name in shared}
            call.meta["eager_input_vals"] = (), values | {name: [v[name] for v in own] for name in OF_A_WEIGHT}
        for i, node in enumerate(group):
            result = graph.call_function(getitem, (call, i))
            result.meta.update(node.meta)
            node.replace_all_uses_with(result)
    for node in group:
        graph.erase_node(node)


class Products(CustomGraphPass):
    """Products of one input by several weights as one call: ``mxtensor::small_m_shared``."""

    launches_early = True
    """What ``launch_products_early`` looks for."""

    def __call__(self, graph: Graph) -> None:
        """Change the graph in place."""
        launch_products_early()
        for group in _groups(graph):
            _make_one(graph, group)
        wait_for_weights(graph)

    def uuid(self) -> bytes:
        """Of these files, for torch's cache of compiled graphs."""
        return get_hash_for_files((__file__, graph.__file__, launches.__file__))


def inference_options() -> dict[str, Any]:
    """Options of ``torch.compile`` for a model of quantized layers that decodes.

    They go with the default backend and no ``mode``; what this torch does not know is left out.
    """
    options = {"post_grad_custom_pre_pass": Products(), "triton.enable_pdl": True, "combo_kernels": True}
    known = config.get_config_copy()
    return {name: value for name, value in options.items() if name in known}

"""What ``torch.compile`` is told of a model that decodes: ``torch.compile(model, options=mx.inference_options())``.

Layers that read one input (query, key and value; gate and up) become one launch. Kernels may start while the one before
them ends (programmatic dependent launch, sm_90 on), and a product, which asks for its weights first, while it begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from .kernels import small_batch  # noqa: F401  (registers the ops)

ONE, SHARED = torch.ops.mxtensor.small_batch.default, torch.ops.mxtensor.small_batch_shared.default
NAMES = tuple(argument.name for argument in ONE._schema.arguments)
OF_A_WEIGHT = ("data", "scale", "last", "bias")
"""Arguments of a product that go with its weight; the others are the same in products that are made together."""
aten = torch.ops.aten
VIEWS = (
    aten.reshape.default, aten.view.default, aten.view.dtype, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.alias.default,
    aten.detach.default,
)  # fmt: skip
"""What layers put between what they share and their products, each for itself."""


def _arguments(node: Node) -> dict[str, Any]:
    """By name, with the defaults."""
    return dict(zip(NAMES, node.args, strict=False)) | dict(node.kwargs)


def _is_view(value: Any) -> bool:
    return isinstance(value, Node) and value.target in VIEWS


def _needs(value: Any) -> Iterator[Node]:
    """What there has to be before a view can be made again."""
    if _is_view(value):
        yield from _needs(value.args[0])
        yield from (node for node in value.all_input_nodes if node is not value.args[0])
    elif isinstance(value, Node):
        yield value


def _key(value: Any) -> Any:
    """The same for equal views of one node."""
    if not _is_view(value):
        return value
    return value.target, _key(value.args[0]), repr(value.args[1:]), repr(value.kwargs)


def _again(graph: Graph, value: Any) -> Any:
    """The same view, made where the graph is inserting."""
    if not _is_view(value):
        return value
    made = graph.call_function(value.target, (_again(graph, value.args[0]), *value.args[1:]), dict(value.kwargs))
    made.meta.update(value.meta)
    return made


def _groups(graph: Graph) -> list[list[Node]]:
    """Products of one input, in their order: those that could all be made where the first one is."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    found: dict[Any, list[list[Node]]] = {}
    for node in graph.find_nodes(op="call_function", target=ONE):
        arguments = _arguments(node)
        if arguments["ends"] is not None:
            continue
        same = found.setdefault(tuple(_key(v) for name, v in arguments.items() if name not in OF_A_WEIGHT), [])
        last = max((place[v] for name in OF_A_WEIGHT for v in _needs(arguments[name])), default=-1)
        group = next((group for group in same if last < place[group[0]]), None)
        if group is None:
            same.append([node])
        else:
            group.append(node)
    return [group for groups in found.values() for group in groups if len(group) > 1]


def _make_one(graph: Graph, group: list[Node]) -> None:
    """One call in the place of some products."""
    all_of = [_arguments(node) for node in group]
    shared = {name: v for name, v in all_of[0].items() if name not in (*OF_A_WEIGHT, "ends")}
    with graph.inserting_before(group[0]):
        of_each = {name: [_again(graph, arguments[name]) for arguments in all_of] for name in OF_A_WEIGHT}
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


def _is_input(value: Any) -> bool:
    """Whether it is there before the graph begins."""
    return all(node.op in ("placeholder", "get_attr") for node in _needs(value))


def _wait_for_weights(graph: Graph) -> None:
    """Products read their weights before the kernel before them has ended. Where that may be one of the compiler's that
    makes the weight, and lets the next one start before it has written, a copy comes between, which does not."""
    for target in (ONE, SHARED):
        for node in graph.find_nodes(op="call_function", target=target):
            arguments = _arguments(node)
            given = [v for name in ("data", "scale", "last") for v in pytree.tree_leaves(arguments[name])]
            for value in dict.fromkeys(given):
                if _is_input(value):
                    continue
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
    return getattr(following, "op_overload", None) in (ONE, SHARED)


def _launch_first(lines: Sequence[Any], launch: str) -> list[Any]:
    """Those of a kernel, which lets the next one start before anything else, and not after it has read."""
    kept = [line for line in lines if not (isinstance(line, str) and launch in line)]
    return [launch, *kept] if len(kept) < len(lines) else kept


@cache
def _launch_products_early() -> None:
    """Have torch's compiler write kernels that let a product start as soon as they begin themselves.

    It lets the next kernel start once one has read its inputs, for a kernel of its own may read without waiting what
    comes from the one before the last. Products wait before they read anything but weights: started as soon as there is
    room, they have weights by the time that their input is there. A torch that writes kernels otherwise is left alone.
    """
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.virtualized import V

    usual, launch = getattr(TritonKernel, "_filter_pdl", None), getattr(TritonKernel, "GDC_LAUNCH", None)
    if usual is None or launch is None:
        return

    def filter_pdl(self: Any, code: Any) -> None:
        usual(self, code)
        if _product_is_next(V.graph.scheduler):
            code._lines = _launch_first(code._lines, launch)

    TritonKernel._filter_pdl = filter_pdl  # type: ignore[method-assign]


class Products(CustomGraphPass):
    """Products of one input by several weights as one call: ``mxtensor::small_batch_shared``."""

    def __call__(self, graph: Graph) -> None:
        """Change the graph in place."""
        _launch_products_early()
        for group in _groups(graph):
            _make_one(graph, group)
        _wait_for_weights(graph)

    def uuid(self) -> bytes:
        """Of this file, for torch's cache of compiled graphs."""
        return get_hash_for_files((__file__,))


def inference_options() -> dict[str, Any]:
    """Options of ``torch.compile`` for a model of quantized layers that decodes.

    They go with the default backend and no ``mode``; what this torch does not know is left out.
    """
    options, known = {"post_grad_custom_pre_pass": Products(), "triton.enable_pdl": True}, config.get_config_copy()
    return {name: value for name, value in options.items() if name in known}

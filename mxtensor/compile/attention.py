"""Attention of a few queries in graphs with quantized products: one op that reads a cache of keys once.

Models repeat each head of keys for the heads of queries that read it, and torch's attention takes the copies. The ops
``mxtensor::cpu_attention`` and ``cuda_attention`` read the cache itself, and only places that the mask does not hide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..kernels.attention import cpu_attention
from ..kernels.attention.choose_attention import op_of_values
from .graph import arguments, is_view

aten = torch.ops.aten
USUAL = tuple(
    getattr(aten, f"_scaled_dot_product_{name}").default
    for name in ("flash_attention_for_cpu", "cudnn_attention", "efficient_attention", "flash_attention")
    if hasattr(aten, f"_scaled_dot_product_{name}")
)
"""What torch's attention is in a graph."""
RESHAPES = aten.view.default, aten.reshape.default, aten._unsafe_view.default


def _value(node: Any) -> Tensor:
    return node.meta["val"]  # type: ignore[no-any-return]


def _before_repeat(node: Node) -> Node:
    """The keys (batch, heads of keys, keys, size) of which ``node`` has each head several times; otherwise ``node``."""
    steps = [node]
    for wanted in (RESHAPES, (aten.clone.default,), (aten.expand.default,), (aten.unsqueeze.default,)):
        last = steps[-1]
        if last.target not in wanted or not isinstance(last.args[0], Node):
            return node
        steps.append(last.args[0])
    base, repeated = _value(steps[-1]), _value(steps[2])
    if base.dim() != 4 or steps[-2].args[1] not in (2, -3) or repeated.dim() != 5:
        return node
    batch, heads, times, count, size = repeated.shape
    same = base.shape == (batch, heads, count, size) and _value(node).shape == (batch, heads * times, count, size)
    return steps[-1] if same else node


def _in_float32(graph: Graph, mask: Any) -> Any:
    """The mask in the dtype of the CPU's op, which would convert it in each call; the compiler fuses this."""
    if not isinstance(mask, Node) or _value(mask).dtype not in (torch.bfloat16, torch.float16):
        return mask
    converted = graph.call_function(torch.ops.prims.convert_element_type.default, (mask, torch.float32))
    converted.meta["val"] = _value(mask).to(torch.float32)
    return converted


def _has_fixed_strides(node: Node) -> bool:
    """Whether a view of the result takes the strides of torch's attention for granted."""
    users = [user for result in node.users for user in result.users]
    while users:
        user = users.pop()
        if user.target is aten.as_strided.default:
            return True
        if is_view(user):
            users += user.users
    return False


def _replace(graph: Graph, node: Node) -> None:
    given = arguments(node)
    key, value = _before_repeat(given["key"]), _before_repeat(given["value"])
    has_others = any(result.args[1] != 0 and result.users for result in node.users)
    if has_others or given.get("dropout_p", 0) or _has_fixed_strides(node):
        return
    if given.get("is_causal", False):  # query i reads keys 0 to i, not all
        return
    query, scale = given["query"], given.get("scale")
    scale = 1 / math.sqrt(_value(query).shape[-1]) if scale is None else scale
    mask = given.get("attn_mask", given.get("attn_bias"))
    op = op_of_values(_value(query), _value(key), _value(value), None if mask is None else _value(mask))
    if op is None:
        return
    with graph.inserting_before(node):
        mask = _in_float32(graph, mask) if op is cpu_attention.attention_of_values else mask
        out = graph.call_function(op, (query, key, value, mask, scale))
    for result in list(node.users):
        if result.args[1] == 0:
            out.meta.update(result.meta)
            result.replace_all_uses_with(out)
        graph.erase_node(result)
    graph.erase_node(node)


def _calls(graph: Graph) -> Iterator[Node]:
    for op in USUAL:
        yield from graph.find_nodes(op="call_function", target=op)


def read_values_once(graph: Graph) -> None:
    """Change the graph in place."""
    found = list(_calls(graph))
    for node in found:
        _replace(graph, node)
    if found:
        graph.eliminate_dead_code()

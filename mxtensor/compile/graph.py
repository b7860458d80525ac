"""The custom ops of small-M products in FX graphs: their arguments, and the views that layers put before these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from ..core.dispatch import arguments_of
from ..kernels.gemm import cpu_codes
from ..kernels.small_m import kernel  # noqa: F401  (registers the kernel)

ONE, SHARED = torch.ops.mxtensor.small_m.default, torch.ops.mxtensor.small_m_shared.default
CPU_ONE, CPU_SHARED = cpu_codes.linear, cpu_codes.linear_shared
MERGED = {ONE: SHARED, CPU_ONE: CPU_SHARED}
"""A product with one weight -> products of one input with several weights."""
OF_A_WEIGHT = ("data", "scale", "global_scale", "bias")
"""Arguments that belong to the weight of a product; products that are merged agree in all others."""
aten = torch.ops.aten
VIEWS = (
    aten.reshape.default, aten.view.default, aten.view.dtype, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.alias.default,
    aten.detach.default,
)  # fmt: skip
"""View ops that each layer puts between the shared input and its product."""


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an op, by name."""
    return arguments_of(node.target, node.args, node.kwargs)


def is_view(value: Any) -> bool:
    return isinstance(value, Node) and value.target in VIEWS


def needs(value: Any) -> Iterator[Node]:
    """The nodes that must exist before this chain of views can be repeated."""
    if is_view(value):
        yield from needs(value.args[0])
        yield from (node for node in value.all_input_nodes if node is not value.args[0])
    elif isinstance(value, Node):
        yield value

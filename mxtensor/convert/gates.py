"""Gates of MLPs: linear layers that are called ``gate`` as routers are, and that are not routers.

The structure tells them apart, not the name: a gate of an MLP has the shape of the layer beside it whose outputs it
multiplies, and no experts are near it. A router has one output for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

NAME = "gate"
LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def mlp_gates(model: nn.Module) -> set[str]:
    """The fully qualified names of the gates of MLPs in a model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        f"{name}.{NAME}" if name else NAME
        for name, parent in modules.items()
        if "router" not in name.split(".")
        and isinstance(gate := parent._modules.get(NAME), nn.Linear)
        and _is_of_mlp(gate, parent, modules.get(name.rpartition(".")[0]))
    }


def _shape(module: nn.Module | None) -> tuple[int, ...] | None:
    weight = None if module is None else module._parameters.get("weight")
    return None if weight is None or not isinstance(module, nn.Linear) else tuple(weight.shape)


def _is_of_mlp(gate: nn.Linear, parent: nn.Module, around: nn.Module | None) -> bool:
    """Whether ``gate``, a layer of ``parent``, multiplies the outputs of another layer of it. ``around``: the module
    that has ``parent``, which may have the experts of a router that is a module of its own."""
    shape = _shape(gate)
    beside = [_shape(module) for module in parent._modules.values() if module is not gate]
    if shape is None or shape not in beside or any(True for _ in _numbers_of_experts(parent)):
        return False
    return around is None or shape[0] not in _numbers_of_experts(around)


def _numbers_of_experts(module: nn.Module) -> Iterator[int]:
    """The lengths of lists inside a module, and of stacks of matrices: of its experts, if it has experts; 0 for others
    that are experts by their names. The module itself may be a list, or an expert."""
    for name, inner in module.named_modules():
        yield from (len(p) for p in inner._parameters.values() if p is not None and p.dim() == 3)
        if inner is not module and isinstance(inner, LISTS):
            yield len(inner)
        if inner is not module and ("expert" in name.lower() or "Expert" in type(inner).__name__):
            yield 0

"""The head of a language model: the layer that makes logits, and the embedding that may share its weight."""

from __future__ import annotations

from torch import nn

HEAD_NAMES = ("lm_head",)
"""Last parts of module names that are heads, whatever weight they have."""


def is_head(fqn: str) -> bool:
    """Whether a module is a head by its name."""
    return fqn.rpartition(".")[2] in HEAD_NAMES


def lookups(model: nn.Module) -> set[int]:
    """The ids of embedding weights: a linear layer with such a weight is a head, whatever its name."""
    found = (module._parameters.get("weight") for module in model.modules() if isinstance(module, nn.Embedding))
    return {id(weight) for weight in found if weight is not None}


def heads(model: nn.Module) -> dict[str, nn.Linear]:
    """Every head by its fully qualified name: ``lm_head``, and linear layers that share a weight with an embedding."""
    tied = lookups(model)
    return {
        fqn: module
        for fqn, module in model.named_modules()
        if isinstance(module, nn.Linear) and (is_head(fqn) or id(module._parameters.get("weight")) in tied)
    }

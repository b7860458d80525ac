"""Watched models: every layer is called as a module, so that hooks see its inputs and outputs, in evaluation mode."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def in_evaluation(*models: nn.Module) -> Iterator[None]:
    """Inside, all modules of the models are in evaluation mode: no dropout, and norms of batches keep their sums."""
    training = {module: module.training for model in models for module in model.modules()}
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module, was in training.items():
            module.training = was


@contextmanager
def layers_are_called() -> Iterator[None]:
    """Inside, compiled modules run eagerly, and torch's encoder layers call their layers instead of one fused op.

    Compiled code was traced without the hooks, and does not run them. A model that ``torch.compile`` has not seen needs
    no stance, and is not made to import torch's compiler.
    """
    fused = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(torch.backends.mha.set_fastpath_enabled, fused)
        torch.backends.mha.set_fastpath_enabled(False)
        yield


# ------------------------------------------------------------- caches in the arguments of a model, to which a call adds

Copies = dict[int, tuple[Any, Any]]
"""The id of a cache -> the cache, and a copy of it."""


def with_fresh_cache(value: Any, copies: Copies) -> Any:
    """A copy of ``value`` if it is a cache, so that another call gets it as it was; else ``value`` itself.

    ``copies`` has those of caches that were seen before, and gets the new one.
    """
    if not _is_cache(value):
        return value
    if id(value) not in copies:
        copies[id(value)] = value, copy.deepcopy(value)
    return copies[id(value)][1]


def _is_cache(value: Any) -> bool:
    """transformers' caches of keys and values, by their method, and those of states and of padding, by name."""
    if isinstance(value, nn.Module):
        return False
    return hasattr(value, "get_seq_length") or type(value).__name__.endswith("Cache")

"""Watched models: every layer is called as a module, so that hooks see its inputs and outputs, in evaluation mode."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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

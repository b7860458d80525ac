"""Watched models: every layer is called as a module, so that hooks see its inputs and outputs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


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

"""TorchScript is refused: it reads and saves the storage of tensors, which a wrapper does not have."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.compat_hooks import PACKAGE, hook_torchscript
from ..core.tracing import refuse_torchscript


def _check(module: torch.nn.Module) -> None:
    """Raise NotImplementedError if ``module`` itself has a tensor of one of the classes of this package."""
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False), *vars(module).items())
    for name, t in own:
        if isinstance(t, Tensor) and type(t).__module__.startswith(PACKAGE):
            refuse_torchscript(f"{type(module).__name__}.{name} ({type(t).__name__})")


hook_torchscript(_check)

"""The local tensor of a DTensor, and a DTensor like another one, without an import of torch's distributed package."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def local_of(t: Any) -> Any:
    """The local tensor of a DTensor; anything else itself."""
    module = sys.modules.get("torch.distributed.tensor")  # a DTensor exists only after this import
    return t if module is None or not isinstance(t, module.DTensor) else t._local_tensor


def is_sharded(t: Any) -> bool:
    """Whether this is a DTensor."""
    return local_of(t) is not t


def sharded_like(t: Any, local: Tensor) -> Tensor:
    """A DTensor like ``t`` whose local tensor is ``local``; ``local`` itself if ``t`` is not a DTensor."""
    if not is_sharded(t):
        return local
    kind, size, stride = sys.modules["torch.distributed.tensor"].DTensor, t.shape, t.stride()
    with torch.no_grad():
        out: Tensor = kind.from_local(local, t.device_mesh, t.placements, run_check=False, shape=size, stride=stride)
    return out

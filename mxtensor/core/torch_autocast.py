"""``torch.autocast``: whether it is active, its dtype, and code that runs without it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def torch_autocasts(device: torch.device) -> bool:
    """Whether torch.autocast is active for tensors of ``device``. False for meta, for which torch would raise."""
    kind = device.type
    return kind != "meta" and torch.is_autocast_enabled(kind)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that torch.autocast gives products of ``x``; None outside it and for float64, which it leaves alone."""
    if torch_autocasts(x.device) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return None


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """The context without torch.autocast, for code that chooses dtypes itself."""
    return torch.autocast(device.type, enabled=False) if torch_autocasts(device) else nullcontext()

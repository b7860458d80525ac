"""Codes and scales of weights on a CPU in pages of 2 MB: ``core/devices.py`` for MXTensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..core.devices import move_to_huge_pages
from .mxtensor import MXTensor


def use_huge_pages(tensors: Iterable[Any]) -> int:
    """Have Linux move codes and scales of MXTensors to pages of 2 MB; returns how many of these there are now.

    ``tensors``: those that are not MXTensors are left alone. See ``move_to_huge_pages``.
    """
    return move_to_huge_pages(part for t in tensors if isinstance(t, MXTensor) for part in t.components)

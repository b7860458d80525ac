"""Facts of a device, asked once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def cached(function: Callable[..., Result]) -> Callable[..., Result]:
    """``functools.cache`` that Dynamo sees through; it warns of the plain one."""
    cached_value = cache(function)

    @wraps(function)
    def call(*args: Any) -> Result:
        return function(*args) if torch.compiler.is_dynamo_compiling() else cached_value(*args)

    return call


@cached
def device_capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability of ``device``; (0, 0) for a device that is not CUDA, or not present."""
    present = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if present else (0, 0)


@cached
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 4 for others, where Triton's interpreter runs the programs, and for one that is
    not present."""
    present = device.type == "cuda" and torch.cuda.is_available()
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if present else 4

"""Memory that stays in use after a call, such as a cached form of a weight.

A graph of ``mode="reduce-overhead"`` runs first with a pool of memory that belongs to the graph, from which comes all
that the thread allocates. torch raises an error where such a tensor lives on, and replays would write over it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Made = TypeVar("Made")


def staying(device: torch.device, make: Callable[[], Made]) -> Made:
    """``make()``, whose tensors are stored for later calls: on a GPU in another thread, on the same stream."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return make()
    stream, grad = torch.cuda.current_stream(device), torch.is_grad_enabled()

    def work() -> Made:
        with torch.cuda.stream(stream), torch.set_grad_enabled(grad):
            return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()

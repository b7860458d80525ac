"""Devices and their memory: facts that are asked once, memory that outlives a call, large pages on a CPU."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

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


# -------------------------------------------- memory that stays in use after a call, such as a cached form of a weight

# A graph of ``mode="reduce-overhead"`` runs first with a pool of memory that belongs to the graph, from which comes all
# that the thread allocates. torch raises an error where such a tensor lives on, and replays would write over it.

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


# ---------------------------- memory of weights on a CPU in pages of 2 MB, on Linux, which otherwise has pages of 4 KB

# A product of one row reads each code once, from memory: with pages of 4 KB it waits for the translation of addresses,
# a tenth to a fifth of its time. ``MXTENSOR_HUGE_PAGES=0`` leaves the memory as it is.

PAGE = 1 << 21
LEAST = 1 << 25
"""Bytes of weights from which moving them is worth the time; fewer stay in the processor's caches."""
SECONDS = 5.0
"""How long moving may take: a page takes up to ten milliseconds on a virtual machine."""
VARIABLE = "MXTENSOR_HUGE_PAGES"
_HUGEPAGE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE and MADV_COLLAPSE of Linux


@cache
def _advise() -> Callable[[int, int, int], bool] | None:
    """madvise for some pages: (the first, how many, what to do with them) -> whether it was done. None: not Linux."""
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return lambda first, count, advice: madvise(first * PAGE, count * PAGE, advice) == 0


def _is_wanted(t: Tensor) -> bool:
    return type(t) is Tensor and t.device.type == "cpu" and os.environ.get(VARIABLE) != "0"


def request_huge_pages(t: Tensor) -> None:
    """Have Linux back new memory of a CPU tensor with pages of 2 MB when it is written first. Not if it is small."""
    if torch.compiler.is_dynamo_compiling() or type(t) is not Tensor or t.nbytes < 2 * PAGE or not _is_wanted(t):
        return  # small ones first: each eager cast on a CPU comes here
    advise, start = _advise(), t.data_ptr()
    first, end = -(-start // PAGE), (start + t.nbytes) // PAGE
    if advise is not None and end > first:
        advise(first, end - first, _HUGEPAGE)


def move_to_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Have Linux move the memory of CPU tensors to pages of 2 MB; returns how many of these there are now.

    Other tensors are left alone, and all if they have less than 32 MB. Values and addresses do not change. What Linux
    before 6.1 and the time do not allow, it does later, in the background; other systems do nothing.
    """
    advise = _advise()
    found = [t for t in tensors if t.nbytes and _is_wanted(t)]
    if advise is None or sum(t.nbytes for t in found) < LEAST:
        return 0
    pages = dict.fromkeys(page for t in found for page in _pages(t))
    end, made = time.monotonic() + SECONDS, 0
    for page in pages:
        advise(page, 1, _HUGEPAGE)
        if time.monotonic() < end:
            made += advise(page, 1, _COLLAPSE)
    return made


def _pages(t: Tensor) -> range:
    """The numbers of the pages of 2 MB that have a part of a tensor."""
    start = t.data_ptr()
    return range(start // PAGE, (start + t.nbytes - 1) // PAGE + 1)

"""Launches of NVRTC kernels whose arguments are packed once: a later call writes some addresses and launches."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.cuda import check_error

from ...core import compat, recording
from .nvrtc import use_context

Step = tuple[Any, tuple[int, int], int, Sequence[int | float]]
"""A launch: the kernel, its blocks along x and y, its bytes of shared memory, and its arguments."""
WINDOW = 1 << 50
"""An argument less than this many bytes above a base is an address that moves with it."""


def moved_arguments(steps: Sequence[Step], bases: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """(index of the step, of the argument, of its base, bytes above the base) of every argument that is an address
    relative to one of ``bases``."""
    return [
        (step, at, base, value - bases[base])
        for step, (*_, arguments) in enumerate(steps)
        for at, value in enumerate(arguments)
        for base in range(len(bases))
        if isinstance(value, int) and 0 <= value - bases[base] < WINDOW
    ]


class PreparedLaunches:
    """Launches one after the other on one device, whose arguments differ from call to call in some addresses only.

    ``bases``: the values that these addresses are relative to in the arguments of ``steps``. Calls of several threads
    take turns: they share the argument blocks.
    """

    def __init__(self, device: torch.device, steps: Sequence[Step], bases: Sequence[int]) -> None:
        self._index, self._lock, self._local = device.index, threading.Lock(), threading.local()
        prepared = [kernel.prepared(*grid, memory, arguments) for kernel, grid, memory, arguments in steps]
        self._calls = [
            (launch, ctypes.byref(config), kernel.handle, pointers, config, owners)
            for (kernel, *_), (launch, config, pointers, *owners) in zip(steps, prepared, strict=True)
        ]
        self._moved = [
            (ctypes.c_uint64.from_buffer(prepared[step][3], steps[step][0].offset_of(at)), base, offset)
            for step, at, base, offset in moved_arguments(steps, bases)
        ]
        """(a 64-bit argument in its block, index of its base, how far above it)"""

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launch all on the current stream of the device, with these addresses in the place of the bases."""
        recording.refuse("CUDA kernels got addresses")
        index = self._index
        if compat.current_cuda_device() != index:
            with torch.cuda.device(index):
                self(addresses)
            return
        if not hasattr(self._local, "ready"):
            use_context()
            self._local.ready = True
        stream = compat.current_cuda_stream(index)
        with self._lock:
            for argument, base, offset in self._moved:
                argument.value = addresses[base] + offset
            for launch, reference, handle, pointers, config, _ in self._calls:
                config.stream = stream
                result = launch(reference, handle, pointers, None)
                if result:
                    check_error(result)

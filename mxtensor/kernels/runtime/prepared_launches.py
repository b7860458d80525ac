"""Launches of NVRTC kernels whose arguments are packed once: a later call writes some addresses and launches."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.cuda import check_error

from ...core import compat
from .nvrtc import Function, use_context


class PreparedLaunches:
    """Launches one after the other on one device, whose arguments differ from call to call in some addresses only.

    ``steps``: (kernel, blocks along x and y, bytes of shared memory, arguments). ``bases``: the value of each address
    in these arguments; an argument less than ``WINDOW`` above a base moves with it. Calls of several threads
    take turns: they share the argument blocks.
    """

    WINDOW = 1 << 50

    def __init__(
        self, device: torch.device, steps: Sequence[tuple[Any, tuple[int, int], int, Any]], bases: Sequence[int]
    ) -> None:
        self._index, self._lock, self._local = device.index, threading.Lock(), threading.local()
        self._calls: list[tuple[Any, ...]] = []
        self._moved: list[tuple[Any, int, int]] = []
        """(a 64-bit argument, index of its base, how far above it)"""
        self._steps = [(kernel, grid, memory, list(arguments)) for kernel, grid, memory, arguments in steps]
        self._places = [
            (step, at, base, value - bases[base])
            for step, (*_, arguments) in enumerate(self._steps)
            for at, value in enumerate(arguments)
            for base in range(len(bases))
            if isinstance(value, int) and 0 <= value - bases[base] < self.WINDOW and value >= min(bases)
        ]
        self._own = all(isinstance(kernel, Function) for kernel, *_ in steps)
        if self._own:
            self._prepare()

    def _prepare(self) -> None:
        for kernel, (x, y), memory, arguments in self._steps:
            launch, config, buffer, pointers, attributes = kernel.prepared(x, y, memory, arguments)
            self._calls.append((launch, ctypes.byref(config), kernel.handle, pointers, config, buffer, attributes))
        for step, at, base, offset in self._places:
            kernel, buffer = self._steps[step][0], self._calls[step][5]
            self._moved.append((ctypes.c_uint64.from_buffer(buffer, kernel.offset_of(at)), base, offset))

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launch all on the current stream of the device, with these addresses in the place of the bases."""
        if not self._own:  # kernels of tests
            for step, at, base, offset in self._places:
                self._steps[step][3][at] = addresses[base] + offset
            for kernel, grid, memory, arguments in self._steps:
                kernel(*grid, memory, arguments)
            return
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
            for launch, reference, handle, pointers, config, _, _ in self._calls:
                config.stream = stream
                result = launch(reference, handle, pointers, None)
                if result:
                    check_error(result)

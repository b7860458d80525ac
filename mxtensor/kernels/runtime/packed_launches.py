"""Launches of NVRTC kernels whose arguments are packed once: a later call writes some addresses and launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...core import compat, recording
from . import host_calls
from .tensor_map import Argument, TensorMap

KernelCall = tuple[Any, tuple[int, int], int, Sequence[Argument]]
"""The kernel, its blocks along x and y, its bytes of shared memory, and its arguments. ``host_calls.Step`` is the same,
packed."""
WINDOW = 1 << 50
"""An argument less than this many bytes above a base is an address that moves with it."""


def moved_arguments(steps: Sequence[KernelCall], bases: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """(index of the step, of the argument, of its base, bytes above the base) of every argument that is an address, or
    the map of a tensor at an address, relative to one of ``bases``."""
    return [
        (step, at, base, address - bases[base])
        for step, (*_, arguments) in enumerate(steps)
        for at, value in enumerate(arguments)
        for address in [value.address if isinstance(value, TensorMap) else value]
        for base in range(len(bases))
        if isinstance(address, int) and 0 <= address - bases[base] < WINDOW
    ]


class PackedLaunches:
    """Launches one after the other on one device, whose arguments differ from call to call in some addresses only.

    ``bases``: the values that these addresses are relative to in the arguments of ``steps``.
    """

    def __init__(self, device: torch.device, steps: Sequence[KernelCall], bases: Sequence[int]) -> None:
        self._index = device.index
        moved: list[list[tuple[int, int, int]]] = [[] for _ in steps]
        maps: list[list[tuple[int, int, int]]] = [[] for _ in steps]
        for step, at, base, above in moved_arguments(steps, bases):
            kernel, *_, arguments = steps[step]
            places = maps if isinstance(arguments[at], TensorMap) else moved
            places[step].append((kernel.offset_of(at), base, above))
        packed, owners = [], []
        for i, (kernel, grid, memory, arguments) in enumerate(steps):
            given = [a._replace(address=0) if isinstance(a, TensorMap) else a for a in arguments]  # moved before use
            packed_step, attributes = kernel.step(*grid, memory, given)
            packed.append(packed_step._replace(moved=tuple(moved[i]), maps=tuple(maps[i])))
            owners.append((kernel, attributes))
        run = host_calls.launches(len(bases), packed, owners)
        assert run is not None, "more addresses than host_calls.py allows"
        self._run = run

    def __call__(self, addresses: Sequence[int]) -> None:
        """Launch all on the current stream of the device, with these addresses in the place of the bases."""
        recording.refuse("CUDA kernels got addresses")
        index = self._index
        if compat.current_cuda_device() != index:
            with torch.cuda.device(index):
                self(addresses)
            return
        self._run(compat.current_cuda_stream(index), *addresses)

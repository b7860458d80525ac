"""Launches of NVRTC kernels on tensors: at once, and as a step of the program that is being recorded, if one is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...core import recording
from . import host_calls


def launch(kernel: Any, blocks: int, memory: int, arguments: Sequence[Tensor | int | None]) -> None:
    """Run ``blocks`` blocks of a kernel of ``nvrtc.function``, each with ``memory`` bytes of shared memory.

    A tensor among the arguments stands for its address, None for the address 0.
    """
    values = [a.data_ptr() if isinstance(a, Tensor) else a or 0 for a in arguments]
    recorder = recording.active()
    if recorder is None:
        kernel(blocks, 1, memory, values)
        return
    with recorder.paused():
        kernel(blocks, 1, memory, values)
        step, attributes = kernel.step(blocks, 1, memory, values)
    places = [at for at, a in enumerate(arguments) if isinstance(a, Tensor)]
    moved = tuple((kernel.offset_of(at), base, 0) for base, at in enumerate(places))
    run = host_calls.launches(len(places), [step._replace(moved=moved)], (kernel, attributes))
    assert run is not None, "more addresses than host_calls.py allows"
    recorder.launch(recording.Launch(run, (), (), tuple(arguments[at] for at in places)))

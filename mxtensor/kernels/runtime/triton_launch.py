"""What all Triton kernels share: whether Triton can run, the instructions of the device, and a fast launch."""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

import torch

from ...core import compat, recording
from ...core.devices import cached, device_capability
from ...core.kernel import Spec, elsewhere
from ...core.repeated import WATCHERS
from . import host_calls
from .cuda_driver import other_build

OLDEST = (8, 0)
"""The lowest compute capability that Triton compiles for."""

_INSTALLED = importlib.util.find_spec("triton") is not None


def _installed() -> bool:
    return _INSTALLED


@cached
def interpreted() -> bool:
    """Whether Triton kernels run in its CPU interpreter, which is decided when triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def missing(spec: Spec) -> str | None:
    """Why Triton cannot run on the device of ``spec``; None if it can."""
    if spec.device.type != "cuda":
        return elsewhere("cuda", spec.device.type)
    if not _installed():
        return "triton is not installed"
    reason = other_build()
    if reason is not None:
        return reason
    if spec.capability < OLDEST:
        major, minor = spec.capability
        return f"Triton needs sm{OLDEST[0]}{OLDEST[1]}, this device is sm{major}{minor}"
    return None


def instructions_of(device: torch.device) -> tuple[int, int]:
    """The compute capability whose instructions a kernel may use; (0, 0), which has none, in the interpreter."""
    return (0, 0) if interpreted() else device_capability(device)


_HERE = nullcontext()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current CUDA device inside the block, because Triton launches on the current one."""
    return _HERE if device.type != "cuda" or device.index == compat.current_cuda_device() else torch.cuda.device(device)


@cache
def device_code(name: str) -> Any:
    """The kernel "file.function" of ``triton_device/``, imported at its first use because it imports triton."""
    file, function = name.split(".")
    return getattr(import_module(f"mxtensor.kernels.triton_device.{file}"), function)


_compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}


STAGES = 3
"""Steps of a loop whose loads are under way at once, unless a kernel says otherwise: Triton's own number."""


def launch(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: tuple[Any, ...], warps: int, stages: int = STAGES
) -> None:
    """Run a Triton kernel whose signature is ``arguments`` (tensors, ints, None) followed by ``constants``.

    Triton's own call binds and hashes every argument each time, which takes longer than a small cast. A compiled kernel
    depends only on its constants and a few facts of each argument; these are the key here.
    """
    recorder = recording.active()
    if recorder is None:
        _launch(kernel, programs, arguments, constants, warps, stages)
    elif interpreted():
        recorder.call(_launch, (kernel, programs, arguments, constants, warps, stages))
    else:
        with recorder.paused():
            compiled = _launch(kernel, programs, arguments, constants, warps, stages)
        native = host_calls.of_compiled(compiled, programs, arguments)
        if native is not None:
            recorder.launch(recording.Launch(native[0], (), (), native[1]))
        else:
            handles = compiled.function, compiled.packed_metadata, None, None, None
            recorder.launch(recording.Launch(compiled.run, (programs, 1, 1), handles, arguments + constants))


def zeros(count: int, device: torch.device) -> torch.Tensor:
    """An int32 vector of zeros."""
    recorder = recording.active()
    if recorder is None or device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    out = torch.empty(count, dtype=torch.int32, device=device)
    with recorder.paused():
        out.zero_()
    recorder.launch(recording.Launch(host_calls.clear, (), (), (out, count)))
    return out


def _launch(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: tuple[Any, ...], warps: int, stages: int
) -> Any:
    """``launch``; returns what Triton compiled."""
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    if interpreted():
        kernel[(programs,)](*arguments, *constants, **options)
        return None
    facts = [
        a and (a % 16 == 0, a == 1, a > 0x7FFFFFFF)
        if type(a) is int
        else a if a is None else (a.dtype, a.data_ptr() % 16 == 0)
        for a in arguments
    ]  # fmt: skip
    device = compat.current_cuda_device()
    key = (id(kernel), device, warps, stages, id(constants[0]), *constants[1:], *facts)
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[(programs,)](*arguments, *constants, **options)
        _compiled[key] = compiled, kernel, constants[0]  # stored with the result, so that their ids are not reused
        return compiled
    compiled = found[0]
    stream = compat.current_cuda_stream(device)
    if has_profiler():  # Triton's own call reports each launch to a profiler
        compiled[(programs, 1, 1)](*arguments, *constants)
    else:
        handles = (stream, compiled.function, compiled.packed_metadata)
        compiled.run(programs, 1, 1, *handles, None, None, None, *arguments, *constants)
    return compiled


def has_profiler() -> bool:
    """Whether a profiler observes the launches of Triton."""
    if "triton" not in sys.modules:
        return False
    enter, leave = _hooks()
    return bool(enter.calls or leave.calls)


@cache
def _hooks() -> tuple[Any, Any]:
    from triton import knobs

    return knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook


WATCHERS.append(has_profiler)

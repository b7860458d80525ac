"""Calls of the CUDA driver and of cuBLASLt, which differ from call to call in a stream and addresses only.

``host_calls.c`` carries them out; it is compiled once per machine, like Triton's own launchers. Without a compiler, or
without Python's headers, ``PythonLaunches`` does the same through ctypes, which takes the host twice as long, and
products are torch's.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, NamedTuple

from torch.cuda import check_error

from .cuda_driver import LaunchSettings, driver, use_context
from .disk_cache import warn_once
from .native_build import load
from .tensor_map import ALIGNMENT

SOURCE = Path(__file__).parent / "host_calls.c"
NAME = "mxtensor_host_calls"
FLAGS: tuple[str, ...] = ("-xc", "-O2", "-shared", "-fPIC", "-pthread")
MOST_ARGUMENTS, MOST_BYTES, MOST_ADDRESSES = 64, 4096, 32
"""Of a launch: arguments, bytes of them, and addresses of a call; as in ``host_calls.c``."""

Run = Callable[..., None]
"""``run(stream, *addresses)``."""


class Step(NamedTuple):
    """One launch; ``host_calls.c`` takes it as it is."""

    kernel: int
    """the driver's handle"""
    x: int
    y: int
    z: int
    threads: int
    memory: int
    """bytes of shared memory"""
    attributes: int
    """address of the launch attributes; 0 for none"""
    attribute_count: int
    block: bytes
    """all arguments"""
    offsets: tuple[int, ...]
    """where each argument begins in the block"""
    moved: tuple[tuple[int, int, int], ...]
    """(offset in the block, number of an address of the call, bytes above it) of each argument that is an address"""
    maps: tuple[tuple[int, int, int], ...] = ()
    """the same of each tensor map, which is moved to the address; offsets are multiples of ``ALIGNMENT``"""


@cache
def module() -> Any:
    """The compiled module, or the reason why it is not available."""
    if sys.platform != "linux":
        return f"host_calls.c is for Linux, not {sys.platform}"
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        return f"there are no headers of Python in {include}; install python3-dev"
    tag = f"-DMXTENSOR_PYTHON_{sys.implementation.cache_tag.replace('-', '_')}"  # a build for each version of Python
    library = load(SOURCE, (*FLAGS, f"-I{include}", tag), symbols=(f"PyInit_{NAME}",))
    if isinstance(library, str):
        return library
    loader = ExtensionFileLoader(NAME, library._name)
    spec = spec_from_loader(NAME, loader)
    assert spec is not None
    found = module_from_spec(spec)
    loader.exec_module(found)
    return found


def address_of(function: Any) -> int:
    """The address of a function of a library that ctypes has loaded."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def launches(addresses: int, steps: Sequence[Step], owners: Any = None) -> Run | None:
    """``run(stream, *addresses)``: all launches, one after the other, with these addresses in their arguments.

    ``owners``: what must live as long as the launches. None if a launch has more arguments than ``MOST_ARGUMENTS`` or
    ``MOST_BYTES``, or there are more addresses than ``MOST_ADDRESSES``. An error of the driver is a RuntimeError.
    """
    sizes = [(len(step.offsets), len(step.block)) for step in steps]
    if addresses > MOST_ADDRESSES or any(n > MOST_ARGUMENTS or size > MOST_BYTES for n, size in sizes):
        return None
    lib, compiled = driver(), module()
    replace = address_of(lib.cuTensorMapReplaceAddress) if any(step.maps for step in steps) else 0
    given = address_of(lib.cuLaunchKernelEx), address_of(lib.cuCtxGetCurrent), replace
    if isinstance(compiled, str):
        warn_once(f"{compiled}: launches take the host longer")
        return PythonLaunches(*given, use_context, check_error, addresses, tuple(steps), owners)
    run: Run = compiled.Launches(*given, use_context, check_error, addresses, tuple(map(tuple, steps)), owners)
    return run


@cache
def _memset() -> int:
    return address_of(driver().cuMemsetD32Async)


def clear(stream: int, address: int, count: int) -> None:
    """Write ``count`` zeros of 32 bits at an address, on ``stream``."""
    compiled = module()
    if isinstance(compiled, str):
        number, size, pointer = ctypes.c_uint64(address), ctypes.c_size_t(count), ctypes.c_void_p(stream)
        status = driver().cuMemsetD32Async(number, ctypes.c_uint(0), size, pointer)
    else:
        status = compiled.clear(_memset(), stream, address, count)
    if status:
        check_error(status)


class PythonLaunches:
    """What ``Launches`` of ``host_calls.c`` does, with the same arguments. Calls of several threads take turns."""

    def __init__(
        self, launch: int, current: int, replace: int, use_context: Callable[[], None], on_error: Callable[[int], None],
        addresses: int, steps: Sequence[Step], owners: Any,
    ) -> None:  # fmt: skip
        pointer = ctypes.c_void_p
        self._launch = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)(launch)
        self._current = ctypes.CFUNCTYPE(ctypes.c_int, pointer)(current) if current else None
        self._replace = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer)(replace) if replace else None
        self._use_context, self._on_error, self._addresses = use_context, on_error, addresses
        self._lock, self._owners = threading.Lock(), owners
        self._steps = [self._in_memory(step) for step in steps]

    def _in_memory(self, step: Step) -> tuple[Any, ...]:
        memory = ctypes.create_string_buffer(len(step.block) + ALIGNMENT)
        block = (ctypes.c_char * len(step.block)).from_buffer(memory, -ctypes.addressof(memory) % ALIGNMENT)
        block.raw = step.block
        start = ctypes.addressof(block)
        at = [start + offset for offset in step.offsets]
        pointers = (ctypes.c_void_p * len(at))(*at)
        settings = LaunchSettings(
            step.x, step.y, step.z, step.threads, 1, 1, step.memory, None, None, step.attribute_count
        )
        ctypes.c_uint64.from_buffer(settings, LaunchSettings.attributes.offset).value = step.attributes
        moved = [(ctypes.c_uint64.from_buffer(block, offset), base, added) for offset, base, added in step.moved]
        maps = [(start + offset, base, added) for offset, base, added in step.maps]
        return ctypes.byref(settings), step.kernel, pointers, moved, maps, settings, memory

    def __call__(self, *given: int) -> None:
        if len(given) != self._addresses + 1:
            raise TypeError(f"takes a stream and {self._addresses} addresses, got {len(given)} values")
        stream, *addresses = given
        context = ctypes.c_void_p()
        if self._current is not None and (self._current(ctypes.byref(context)) or not context):
            self._use_context()
        with self._lock:
            for reference, kernel, pointers, moved, maps, settings, _ in self._steps:
                for argument, base, added in moved:
                    argument.value = addresses[base] + added
                status = 0
                for at, base, added in maps:
                    assert self._replace is not None
                    status = status or self._replace(at, addresses[base] + added)
                settings.stream = stream
                status = status or self._launch(reference, kernel, pointers, None)
                if status:
                    self._on_error(status)

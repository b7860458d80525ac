"""Calls of the CUDA driver and of cuBLASLt, which differ from call to call in a stream and addresses only.

``host_calls.c`` carries them out; it is compiled once per machine, like Triton's own launchers. Without a compiler, or
without Python's headers, ``PythonLaunches`` does the same through ctypes, which takes the host twice as long, and
products are torch's.

Triton's own launch takes all arguments, constants included, and Python around a function in C: 9 us of the host on the
machine of an H100. A recorded launch differs from call to call in its addresses only. They are written to a block of
arguments that was made once, and the driver is called. The driver knows the sizes of a kernel's parameters
(cuFuncGetParamInfo, CUDA 12.4): if they are not those of the block, as with a Triton that passes its arguments in
another way, ``of_compiled`` gives None and Triton launches.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from torch.cuda import check_error

from ...core import recording
from ...core.compat import tree_leaves
from .cuda_driver import ALIGNMENT, Argument, LaunchSettings, TensorMap, driver, use_context
from .disk_cache import warn_once
from .native_build import load

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


# ---------------------------------------------------------------------------------------------- kernels of NVRTC


KernelCall = tuple[Any, tuple[int, int], int, Sequence[Argument]]
"""The kernel, its blocks along x and y, its bytes of shared memory, and its arguments. ``Step`` is the same,
packed."""
WINDOW = 1 << 50
"""An argument less than this many bytes above a base is an address that moves with it. No memory has addresses from
``WINDOW`` on: they are the bases while arguments are packed."""


class _At:
    """What stands for a tensor of this layout while arguments are packed: it has an address, and no memory."""

    def __init__(self, t: Tensor, address: int) -> None:
        self.shape, self.device, self.dtype = t.shape, t.device, t.dtype
        self._stride, self._address, self._size = t.stride(), address | t.data_ptr() & 15, t.element_size()

    def data_ptr(self) -> int:
        return self._address

    def stride(self, dim: int | None = None) -> Any:
        return self._stride if dim is None else self._stride[dim]

    def element_size(self) -> int:
        return self._size

    def dim(self) -> int:
        return len(self.shape)


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


def packed(steps: Sequence[KernelCall], bases: Sequence[int]) -> Run:
    """``run(stream, *addresses)``: the launches one after the other, with these addresses in the place of ``bases``."""
    moved: list[list[tuple[int, int, int]]] = [[] for _ in steps]
    maps: list[list[tuple[int, int, int]]] = [[] for _ in steps]
    for step, at, base, above in moved_arguments(steps, bases):
        kernel, *_, arguments = steps[step]
        places = maps if isinstance(arguments[at], TensorMap) else moved
        places[step].append((kernel.offset_of(at), base, above))
    made, owners = [], []
    for i, (kernel, grid, memory, arguments) in enumerate(steps):
        given = [a._replace(address=0) if isinstance(a, TensorMap) else a for a in arguments]  # moved before use
        step, attributes = kernel.step(*grid, memory, given)
        made.append(step._replace(moved=tuple(moved[i]), maps=tuple(maps[i])))
        owners.append((kernel, attributes))
    run = launches(len(bases), made, owners)
    assert run is not None, "more addresses than host_calls.py allows"
    return run


def launch_steps(steps: Callable[..., Sequence[KernelCall]], tensors: Sequence[Tensor | None]) -> None:
    """Make the launches ``steps(*tensors)``, on the current stream of the current device.

    ``steps`` reads shapes, strides, dtypes and addresses; its arguments depend on addresses by sums only.
    """
    recorder = recording.active()
    with nullcontext() if recorder is None else recorder.paused():
        for kernel, grid, memory, arguments in steps(*tensors):
            kernel(*grid, memory, arguments)
        if recorder is None:
            return
        stand_ins = [None if t is None else _At(t, WINDOW * (i + 1)) for i, t in enumerate(tensors)]
        run = packed(steps(*stand_ins), [t.data_ptr() for t in stand_ins if t is not None])
    recorder.launch(recording.Launch(run, (), (), tuple(t for t in tensors if t is not None)))


# ---------------------------------------------------------------------------------------------- kernels of Triton


SIZES = {"i1": 1, "i8": 1, "u8": 1, "i16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8}
"""Types of integers in the signatures of Triton -> bytes of the parameter."""
SCRATCH = 2
"""Pointers to memory of Triton's that follow the arguments: null, because these kernels ask for none."""
SLOT = 8


def parameters(signature: Sequence[Any], arguments: Sequence[Any]) -> list[tuple[int, int | None]] | None:
    """(bytes, value of an integer or None for an address) of each parameter; None if one is of an unknown kind.

    ``signature``: Triton's kinds of all arguments, "*bf16", "i32" or "constexpr"; ``arguments``: those that come first,
    which are not constants by name.
    """
    found: list[tuple[int, int | None]] = []
    for kind, value in zip(signature, arguments, strict=False):
        if kind == "constexpr":
            continue
        if isinstance(kind, str) and kind.startswith("*") and isinstance(value, Tensor):
            found.append((SLOT, None))
        elif kind in SIZES and type(value) is int:
            found.append((SIZES[kind], value))
        else:
            return None
    rest = tree_leaves([*signature[len(arguments) :]])  # a tuple stands for an argument that is one
    return found if all(kind == "constexpr" for kind in rest) else None


def _agrees(handle: int, sizes: Sequence[int]) -> bool:
    """Whether the driver knows a kernel with parameters of these sizes, and no others."""
    ask = getattr(driver(), "cuFuncGetParamInfo", None)
    if ask is None:
        return False
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    for i, wanted in enumerate(sizes):
        if ask(ctypes.c_void_p(handle), ctypes.c_size_t(i), ctypes.byref(offset), ctypes.byref(size)):
            return False
        if size.value != wanted:
            return False
    beyond = ctypes.c_size_t(len(sizes))
    return bool(ask(ctypes.c_void_p(handle), beyond, ctypes.byref(offset), ctypes.byref(size)))


def of_compiled(compiled: Any, programs: int, arguments: Sequence[Any]) -> tuple[Run, tuple[Tensor, ...]] | None:
    """The launch of what Triton compiled, and the tensors among ``arguments`` whose addresses it takes; None if only
    Triton can launch it."""
    launcher = compiled.run
    if type(launcher).__name__ != "CudaLauncher" or compiled.metadata.num_ctas != 1:
        return None
    metadata = compiled.metadata
    scratch = (getattr(launcher, name, 0) for name in ("global_scratch_size", "profile_scratch_size"))
    special = (getattr(launcher, name, False) for name in ("launch_cooperative_grid", "launch_pdl"))
    if any(scratch) or any(special):
        return None
    sizes = parameters([*compiled.src.signature.values()], arguments)
    if sizes is None or not _agrees(compiled.function, [*(size for size, _ in sizes), *([SLOT] * SCRATCH)]):
        return None
    kinds = compiled.src.signature.values()
    tensors = tuple(
        t for t, kind in zip(arguments, kinds, strict=False) if isinstance(t, Tensor) and kind != "constexpr"
    )
    block = b"".join(struct.pack("<q", value or 0) for _, value in sizes) + bytes(SLOT * SCRATCH)
    offsets = tuple(range(0, len(block), SLOT))
    addresses = [at for at, (_, value) in zip(offsets, sizes, strict=False) if value is None]
    moved = tuple((at, base, 0) for base, at in enumerate(addresses))
    threads = 32 * metadata.num_warps
    step = Step(compiled.function, programs, 1, 1, threads, metadata.shared, 0, 0, block, offsets, moved)
    run = launches(len(addresses), [step])
    return None if run is None else (run, tensors)

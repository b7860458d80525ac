"""CUDA sources: compiled at run time by torch's NVRTC, cached on disk, launched through the CUDA driver.

The sources are in ``kernels/cuda/``; constants are put before them as macros. A kernel compiles in about a second, once
per machine: the result is in ``~/.cache/mxtensor`` (``XDG_CACHE_HOME``).
"""

from __future__ import annotations

import ctypes
import re
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch
from torch.cuda import check_error

from ...core import compat, recording
from ...core.devices import cached, device_capability
from ...core.kernel import Spec
from ...numerics.cast import Cast
from ...numerics.elements import ElementFormat
from ...numerics.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, INT8
from .cuda_driver import Argument, LaunchAttribute, LaunchSettings, TensorMap, driver, other_build, use_context
from .custom_op import exported
from .disk_cache import find, store
from .host_calls import Step

SOURCES = Path(__file__).parent.parent / "cuda"
OLDEST = (8, 0)
"""The lowest compute capability of the sources, which use asynchronous copies."""
CLUSTERS = (9, 0)
"""The lowest compute capability with clusters of blocks and programmatic dependent launch."""
FLAGS = ("-std=c++17",)
SUFFIX = {(9, 0): "a"}
"""Compute capability -> suffix of the architecture name that enables its own instructions."""
Constants = tuple[tuple[str, object], ...]
"""(macro, value) pairs, in order."""


# ---------------------------------------------------------------------------------------------- the compiler


def _wheel() -> list[str]:
    """Paths of the NVRTC of a wheel that torch has not loaded, such as beside a CPU build of torch in the tests."""
    found: list[str] = []
    for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            names = [f for f in files(name) or [] if ".alt." not in f.name]
        except PackageNotFoundError:
            continue
        for built_in in (f for f in names if f.name.startswith("libnvrtc-builtins.so")):
            with suppress(OSError):  # before 13.1 NVRTC looks for it in the system's folders only
                ctypes.CDLL(str(built_in.locate()))
        found += [str(f.locate()) for f in names if f.name.startswith("libnvrtc.so")]
    return found


@compat.called_while_traced
def missing() -> str | None:
    """The reason why NVRTC is missing; None if it is available."""
    found = library()
    return found if isinstance(found, str) else None


@cache
def library() -> ctypes.CDLL | str:
    """NVRTC, or the reason why it is missing."""
    major = (torch.version.cuda or "").split(".")[0]
    for name in [*([f"libnvrtc.so.{major}"] if major else []), "libnvrtc.so", *_wheel()]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return "NVRTC is not installed; a CUDA build of torch installs it"


@cache
def _version() -> tuple[int, int]:
    lib, version = library(), (ctypes.c_int * 2)()
    assert not isinstance(lib, str)
    lib.nvrtcVersion(ctypes.byref(version, 0), ctypes.byref(version, 4))
    return version[0], version[1]


@cached
def _target(capability: tuple[int, int]) -> tuple[int, int] | None:
    """The newest architecture that NVRTC knows whose code this capability runs; None if there is none."""
    lib, count = library(), ctypes.c_int()
    assert not isinstance(lib, str)
    lib.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    known = (ctypes.c_int * count.value)()
    lib.nvrtcGetSupportedArchs(known)
    found = [divmod(number, 10) for number in known]
    return max((arch for arch in found if arch[0] == capability[0] and arch <= capability), default=None)


@compat.called_while_traced
def unknown(capability: tuple[int, int]) -> str | None:
    """Why NVRTC cannot compile for devices of this compute capability; None if it can."""
    if _target(capability) is not None:
        return None
    version, device = ".".join(map(str, _version())), "".join(map(str, capability))
    return f"NVRTC {version} cannot compile for sm{device}; a newer torch includes a newer NVRTC"


def compiled(names: Sequence[str], constants: Constants, capability: tuple[int, int]) -> bytes:
    """The machine code of these sources, concatenated, for a compute capability.

    Raises RuntimeError with the compiler's log if they do not compile.
    """
    lib = library()
    assert not isinstance(lib, str)
    text = "".join(f"#define {name} {value}\n" for name, value in constants)
    text += "".join((SOURCES / name).read_text() for name in names)
    target = _target(capability)
    assert target is not None, unknown(capability)
    key = text, FLAGS, target, _version()
    cached_file = find("cuda", key, "cubin")
    if cached_file is not None:
        return cached_file[1]
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = [
        flag.encode() for flag in (f"--gpu-architecture=sm_{target[0]}{target[1]}{SUFFIX.get(target, '')}", *FLAGS)
    ]
    lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), names[-1].encode(), 0, None, None)
    try:
        if lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, log)
            where = f"sm{target[0]}{target[1]}"
            raise RuntimeError(f"{names[-1]} did not compile for {where}: {log.value.decode().strip()}")
        lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetCUBIN(program, code)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))
    with suppress(OSError):  # if the cache cannot be written, compile again next time
        store("cuda", key, "cubin", lambda file: file.write_bytes(code.raw))
    return code.raw


# ---------------------------------------------------------------------------------------------- kernels

_CLUSTER, _OVERLAP, _MEMORY = 4, 6, 8  # ids of two launch attributes and one function attribute
_NO_SUCH_CLUSTER = 912  # error code for a cluster that the device cannot run


@cache
def offsets(layout: struct.Struct) -> tuple[int, ...]:
    """The bytes before each field of a struct of fields such as ``128s5Q3I2f``, in which ``128s`` is one field."""
    found = re.findall(r"(\d*)([A-Za-z])", layout.format)
    fields = [f for count, code in found for f in ([count + code] if code == "s" else [code] * int(count or 1))]
    return tuple(struct.calcsize("".join(fields[: i + 1])) - struct.calcsize(code) for i, code in enumerate(fields))


def pack(layout: struct.Struct, buffer: Any, arguments: Sequence[Argument]) -> None:
    """Write the arguments of a kernel, a tensor map as its bytes."""
    layout.pack_into(buffer, 0, *(a.packed() if isinstance(a, TensorMap) else a for a in arguments))


class Function:
    """A kernel on the current device: blocks of ``threads`` threads, ``depth`` blocks along z, optionally as a cluster.

    Its arguments are one C struct, packed by ``layout``.
    """

    def __init__(
        self, code: bytes, name: str, layout: struct.Struct, threads: int, depth: int, clustered: bool
    ) -> None:
        lib, module, self._function = driver(), ctypes.c_void_p(), ctypes.c_void_p()
        self._code, self._layout, self._local = code, layout, threading.local()
        self._threads, self._depth, self._clustered, self._memory = threads, depth, clustered and depth > 1, 0
        self._changes = threading.Lock()
        self._overlaps = torch.cuda.get_device_capability() >= CLUSTERS
        use_context()
        check_error(lib.cuModuleLoadData(ctypes.byref(module), code))
        check_error(lib.cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))
        self._launch = lib.cuLaunchKernelEx

    def _make(self) -> Any:
        use_context()
        attributes = (LaunchAttribute * 2)()
        count = 0
        if self._overlaps:
            attributes[0].id, attributes[0].value[0] = _OVERLAP, 1
            count = 1
            if self._clustered:
                attributes[1].id = _CLUSTER
                attributes[1].value[0], attributes[1].value[1], attributes[1].value[2] = 1, 1, self._depth
                count = 2
        config = LaunchSettings(1, 1, self._depth, self._threads, 1, 1, 0, None, attributes, count)
        buffer = ctypes.create_string_buffer(self._layout.size)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        return config, ctypes.byref(config), buffer, arguments, attributes

    def step(self, x: int, y: int, memory: int, arguments: Sequence[Argument]) -> tuple[Any, ...]:
        """One kind of launch as a ``host_calls.Step`` that moves no argument, and what its attributes need alive."""
        config, _, buffer, _, attributes = self._make()
        self._allow(memory)
        pack(self._layout, buffer, arguments)
        where = ctypes.addressof(attributes)
        block = buffer.raw[: self._layout.size]
        step = Step(
            self._function.value or 0, x, y, self._depth, self._threads, memory, where, config.count, block, (0,), ()
        )
        return step, attributes

    def offset_of(self, argument: int) -> int:
        """The bytes before an argument in the argument block."""
        return offsets(self._layout)[argument]

    def _allow(self, memory: int) -> None:
        if memory > self._memory:
            with self._changes:  # the driver's value and ours change together
                if memory > self._memory:
                    check_error(driver().cuFuncSetAttribute(self._function, _MEMORY, memory))
                    self._memory = memory

    def clusters(self, memory: int) -> int:
        """Clusters that the device runs at a time, with ``memory`` bytes of shared memory per block; 0 if none."""
        config, count = self._make()[0], ctypes.c_int()
        self._allow(memory)
        config.memory, config.x, config.y = memory, 1, 1
        of_driver = driver().cuOccupancyMaxActiveClusters
        result = of_driver(ctypes.byref(count), self._function, ctypes.byref(config))
        if result and result != _NO_SUCH_CLUSTER:
            check_error(result)
        return count.value

    def __call__(self, x: int, y: int, memory: int, arguments: Sequence[Argument]) -> None:
        """Launch x * y * depth blocks, each with ``memory`` bytes of shared memory, on the current stream."""
        recording.refuse("a CUDA kernel got addresses")
        launch = getattr(self._local, "launch", None)
        if launch is None:
            launch = self._local.launch = self._make()
        self._allow(memory)
        config, reference, buffer, pointers, _ = launch
        pack(self._layout, buffer, arguments)
        config.x, config.y, config.memory = x, y, memory
        config.stream = compat.current_cuda_stream(compat.current_cuda_device())
        result = self._launch(reference, self._function, pointers, None)
        if result:
            check_error(result)


@cache
def function(
    device: torch.device, sources: tuple[str, ...], constants: Constants, name: str, layout: struct.Struct,
    threads: int, depth: int = 1, clustered: bool = True,
) -> Function:  # fmt: skip
    """The kernel ``name`` of these sources, compiled for ``device``, which must be the current one; see ``Function``.

    It is cached: code that is loaded once stays in the GPU's instruction caches more often. Raises ValueError for
    another device than a CUDA device.
    """
    if device.type != "cuda":
        raise ValueError(f"the CUDA kernel {name} needs tensors on a CUDA device, not on {device}; use .to()")
    return Function(compiled(sources, constants, device_capability(device)), name, layout, threads, depth, clustered)


# ---------------------------------------------------------------------------------------------- macros


ELEMENTS: dict[ElementFormat, str] = {
    E4M3: "E4M3", E5M2: "E5M2", E3M2: "E3M2", E2M3: "E2M3", E2M1: "E2M1", INT8: "INT8",
}  # fmt: skip
"""Elements that the sources encode and decode -> their names there."""
TYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16", torch.float32: "FLOAT"}
"""Dtypes of values -> their names in the sources."""
RESERVED = 1024
"""Bytes of shared memory of each block that the system takes."""


def copy_size(address: int, *strides: int) -> int:
    """The most bytes, at most 16, that one copy can move from rows of these strides (bytes) at this address."""
    bits = 16 | address
    for stride in strides:
        bits |= stride
    return bits & -bits


def cast_constants(cast: Cast | None) -> Constants:
    """Macros of a cast (``casts.cuh``): to an element with power-of-two scales, or to NVFP4."""
    if cast is None:
        return (("CAST", 0),)
    e = cast.format.element
    inverse = torch.tensor(1.0 / e.max, dtype=torch.float32, device="cpu")
    return (
        ("CAST", 1 if cast.format.scale is E8M0 else 2),
        ("CAST_GLOBAL", int(cast.format.global_scale)),
        ("CAST_RULE", cast.scaling.name),
        ("CAST_INVERSE_MAX", f"{float(inverse).hex()}f"),
        ("CAST_MAX", f"{e.max.hex()}f"),
        ("CAST_EMAX", e.emax),
        ("CAST_MANTISSA", e.mantissa_bits),
        ("CAST_EMIN", f"({0 if e.is_integer else 1 - e.bias})"),
    )


# ---------------------------------------------------------------------------------------------- what is refused


def no_cuda_sources(spec: Spec) -> str | None:
    """Why the CUDA sources of the package cannot be compiled for the device of ``spec``; None if they can."""
    reason = other_build()
    if reason is not None:
        return reason
    if spec.capability < OLDEST:
        return f"needs sm80, this device is sm{spec.capability[0]}{spec.capability[1]}"
    return missing() or unknown(spec.capability) or exported(spec)

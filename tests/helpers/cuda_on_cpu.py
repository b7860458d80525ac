"""The CUDA sources of the package, run on the CPU.

``cuda_machine.h`` replaces ``machine.cuh`` and ``machine_sm90.cuh``; all other files are the sources themselves.
``function`` replaces ``mxtensor.kernels.runtime.nvrtc.function``. Shared memory is filled with NaNs before each launch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

from mxtensor.kernels.runtime import nvrtc
from mxtensor.kernels.runtime.cuda_driver import TensorMap
from mxtensor.kernels.runtime.host_calls import moved_arguments

MACHINE = Path(__file__).with_name("cuda_machine.h")
REPLACED = ("machine.cuh", "machine_sm90.cuh")
FLAGS = ("-Og", "-std=c++17", "-shared", "-fPIC", "-w", "-ffp-contract=off", "-fno-strict-aliasing")
ENTRY = """
extern "C" void fill_with(u32 value) {{ fill = value; }}
extern "C" void run(const void* arguments, u32 x, u32 y, u32 z, u32 clustered, u32 threads, u32 bytes) {{
    {struct} a;
    memcpy(&a, arguments, sizeof a);
    launch([&] {{ {kernel}(a); }}, x, y, z, clustered, threads, bytes);
}}
"""
STRUCTS = {
    "pipelined": "Arguments",
    "persistent": "Arguments",
    "wgmma": "Arguments",
    "activations": "ActivationArguments",
    "maxima": "ActivationArguments",
    "cast_both": "CastBothArguments",
}

FILL = 0xFFFFFFFF
"""The value of each word of shared memory before a kernel writes to it."""


def compiler():
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


@cache
def folder():
    """The folder of this user in which libraries are cached."""
    path = Path(tempfile.gettempdir()) / f"mxtensor-tests-{os.getuid()}"
    path.mkdir(exist_ok=True)
    return path


def build(text, path, suffix, *options):
    """Compile ``text`` to ``path``, whole or not at all, whichever process comes first."""
    with tempfile.TemporaryDirectory(dir=folder()) as scratch:
        built, source = Path(scratch) / "built", Path(scratch) / f"source{suffix}"
        source.write_text(text)
        done = subprocess.run([compiler(), *FLAGS, *options, "-o", built, source], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        built.replace(path)


@cache
def machine():
    """``cuda_machine.h`` with its compiled form beside it: parsing its headers takes half of the time of a kernel."""
    text = MACHINE.read_text()
    path = folder() / f"{hashlib.blake2b((text + repr(FLAGS)).encode(), digest_size=10).hexdigest()}.h"
    compiled = path.with_name(f"{path.name}.gch")
    if not compiled.exists():
        copy = folder() / f"{path.name}.{os.getpid()}"
        copy.write_text(text)
        copy.replace(path)  # the header first: whoever finds the compiled form finds both
        build(text, compiled, ".h", "-x", "c++-header")
    return path


@cache
def library(sources, constants, name):
    """The shared library of one kernel with its constants, cached on disk in a folder of this user."""
    defines = "".join(f"#define {key} {value}\n" for key, value in constants)
    rest = "".join((nvrtc.SOURCES / source).read_text() for source in sources if source not in REPLACED)
    text = defines + rest + ENTRY.format(struct=STRUCTS[name], kernel=name)
    key = MACHINE.read_text() + text + repr(FLAGS)
    path = folder() / f"{hashlib.blake2b(key.encode(), digest_size=10).hexdigest()}.so"
    if not path.exists():
        build(text, path, ".cpp", "-include", machine())
    return ctypes.CDLL(str(path))


def packed(tiles):
    """A tensor map as ``cuda_machine.h`` reads it."""
    return struct.pack("6Q80x", tiles.address, *tiles.sizes, tiles.stride, *tiles.box)


def function(device, sources, constants, name, layout, threads, depth=1, clustered=True):
    kernel = library(sources, constants, name)

    def call(x, y, memory, arguments):
        kernel.fill_with(ctypes.c_uint32(FILL))
        values = (packed(a) if isinstance(a, TensorMap) else a for a in arguments)
        kernel.run(layout.pack(*values), x, y, depth, clustered, threads, memory)

    return call


LOCK = threading.Lock()


def packed_steps(steps, bases):
    """Replaces ``packed_launches.packed`` for kernels of ``function``, which take all arguments in each call."""
    moved = moved_arguments(steps, bases)

    def run(stream, *addresses):
        calls = [(kernel, grid, memory, list(arguments)) for kernel, grid, memory, arguments in steps]
        for step, at, base, offset in moved:
            arguments, address = calls[step][3], addresses[base] + offset
            is_map = isinstance(arguments[at], TensorMap)
            arguments[at] = arguments[at]._replace(address=address) if is_map else address
        with LOCK:  # the stand-in for a GPU runs one kernel at a time
            for kernel, grid, memory, arguments in calls:
                kernel(*grid, memory, arguments)

    return run

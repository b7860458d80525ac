"""The CUDA driver through ctypes: its launch settings, the context of torch, and tensor maps.

A tensor map is what the copy engine of sm_90 has to know to copy boxes of a matrix to shared memory. A kernel gets one
as an argument (``TensorMap`` of ``cuda/machine_sm90.cuh``). The driver makes it, and moves it to another address: a
repeated launch costs no more than that.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import torch
from torch.cuda import check_error

from ...core import compat
from ...core.devices import cached


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of the driver, of which integers are used."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class LaunchSettings(ctypes.Structure):
    """CUlaunchConfig of the driver."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "ty", "tz", "memory")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


@cache
def driver() -> ctypes.CDLL:
    """The CUDA driver."""
    lib = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    lib.cuLaunchKernelEx.argtypes = [ctypes.POINTER(LaunchSettings), pointer, ctypes.POINTER(pointer), pointer]
    return lib


@cached
def library_of_torch(name: str) -> ctypes.CDLL | str:
    """The library "cublas" or "cublasLt" that torch has loaded, or the reason why it cannot be called."""
    if torch.version.cuda is None:
        return "this build of torch has no cuBLAS"
    file = f"lib{name}.so.{torch.version.cuda.split('.')[0]}"
    try:
        return ctypes.CDLL(file)
    except OSError as error:
        return f"{file} cannot be called: {error}"


def use_context() -> None:
    """Give this thread torch's CUDA context; a thread that has not called CUDA's runtime has none."""
    lib, context, device = driver(), ctypes.c_void_p(), ctypes.c_int()
    check_error(lib.cuCtxGetCurrent(ctypes.byref(context)))
    if not context:
        check_error(lib.cuDeviceGet(ctypes.byref(device), compat.current_cuda_device()))
        check_error(lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        check_error(lib.cuCtxSetCurrent(context))


def other_build() -> str | None:
    """Why this build of torch cannot run CUDA kernels; None if it can."""
    return None if torch.version.hip is None else "written for CUDA devices, this build of torch is for ROCm"


# ---------------------------------------------------------------------------------------------- tensor maps


BYTES, ALIGNMENT = 128, 64
"""Of a map in memory."""
_BFLOAT16, _SWIZZLE_128B, _L2_128B = 9, 3, 2  # enumerations of the driver; 0 stands for its other options


class TensorMap(NamedTuple):
    """A bfloat16 matrix and the boxes that are copied from it, swizzled in rows of 128 bytes. What the matrix does not
    have is zero in a box."""

    address: int
    sizes: tuple[int, int]
    """columns and rows"""
    stride: int
    """bytes from one row to the next, a multiple of 16"""
    box: tuple[int, int]
    """64 columns, and up to 256 rows"""

    def packed(self) -> bytes:
        """The map as a kernel gets it. Raises RuntimeError if the driver refuses it."""
        memory = ctypes.create_string_buffer(BYTES + ALIGNMENT)
        at = -(-ctypes.addressof(memory) // ALIGNMENT) * ALIGNMENT
        sizes, strides = (ctypes.c_uint64 * 2)(*self.sizes), (ctypes.c_uint64 * 1)(self.stride)
        box, every = (ctypes.c_uint32 * 2)(*self.box), (ctypes.c_uint32 * 2)(1, 1)
        address, options = ctypes.c_void_p(self.address), (0, _SWIZZLE_128B, _L2_128B, 0)
        encode = driver().cuTensorMapEncodeTiled
        check_error(encode(ctypes.c_void_p(at), _BFLOAT16, 2, address, sizes, strides, box, every, *options))
        return ctypes.string_at(at, BYTES)


Argument = int | float | TensorMap
"""Of a kernel."""

"""The CUDA driver through ctypes: its launch settings, and the context of torch."""

from __future__ import annotations

import ctypes
from functools import cache

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

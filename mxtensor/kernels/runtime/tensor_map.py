"""Tensor maps: what the copy engine of sm_90 has to know to copy boxes of a matrix to shared memory.

A kernel gets one as an argument (``TensorMap`` of ``cuda/machine_sm90.cuh``). The driver makes it, and moves it to
another address: a repeated launch costs no more than that.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from torch.cuda import check_error

from .cuda_driver import driver

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

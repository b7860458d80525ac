"""Launches of compiled Triton kernels, straight through the CUDA driver, for recorded programs.

Triton's own launch takes all arguments, constants included, and Python around a function in C: 9 us of the host on the
machine of an H100. A recorded launch differs from call to call in its addresses only. They are written to a block of
arguments that was made once, and the driver is called.

The driver knows the sizes of a kernel's parameters (cuFuncGetParamInfo, CUDA 12.4): if they are not those of the block,
as with a Triton that passes its arguments in another way, ``of_compiled`` gives None and Triton launches.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import host_calls
from .cuda_driver import driver

SIZES = {"i1": 1, "i8": 1, "u8": 1, "i16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8}
"""Types of integers in the signatures of Triton -> bytes of the parameter."""
SCRATCH = 2
"""Pointers to memory of Triton's that follow the arguments: null, because these kernels ask for none."""
SLOT = 8


def _leaves(kinds: Any) -> list[Any]:
    """The kinds in a signature; a tuple stands for an argument that is one."""
    return [leaf for kind in kinds for leaf in (_leaves(kind) if isinstance(kind, tuple) else (kind,))]


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
    rest = _leaves(signature[len(arguments) :])
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


def native_launch(
    handle: int, programs: int, threads: int, memory: int, sizes: Sequence[tuple[int, int | None]]
) -> host_calls.Run | None:
    """A launch of one kernel with one grid, whose integers never change: ``run(stream, *addresses)``, in the order of
    the kernel's parameters."""
    block = b"".join(struct.pack("<q", value or 0) for _, value in sizes) + bytes(SLOT * SCRATCH)
    offsets = tuple(range(0, len(block), SLOT))
    addresses = [at for at, (_, value) in zip(offsets, sizes, strict=False) if value is None]
    moved = tuple((at, base, 0) for base, at in enumerate(addresses))
    step = host_calls.Step(handle, programs, 1, 1, threads, memory, 0, 0, block, offsets, moved)
    return host_calls.launches(len(addresses), [step])


def of_compiled(
    compiled: Any, programs: int, arguments: Sequence[Any]
) -> tuple[host_calls.Run, tuple[Tensor, ...]] | None:
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
    run = native_launch(compiled.function, programs, 32 * metadata.num_warps, metadata.shared, sizes)
    return None if run is None else (run, tensors)

"""CPU graphs: calls that were recorded once, made again without Python. ``cpu/graph_op.cpp`` does the work.

Between ``begin`` and ``end`` each op of torch that this thread calls is recorded, and each kernel that ``kernel`` tells
of. A run makes the same calls on the same memory, so that whoever records keeps that memory alive.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .native_build import OP_HEADERS, load, torch_flags

SOURCE = Path(__file__).parent.parent / "cpu" / "graph_op.cpp"
SYMBOLS = tuple(f"mx_graph_{name}" for name in ("begin", "kernel", "wants", "take", "refuse", "drop", "free"))
_OPS = torch.library.Library("mxtensor", "FRAGMENT")
_OPS.define("cpu_graph_end(Tensor[] inputs, int[] given, int[] copied, Tensor[] outputs) -> (int, Tensor[])")
_OPS.define("cpu_graph_run(Tensor[] inputs, int number) -> Tensor[]")
end: Any = torch.ops.mxtensor.cpu_graph_end.default
"""(inputs, places of those that a run passes, places of those that it copies, outputs) -> the number of the graph, and
the outputs as a run returns them. The graph holds the inputs that a run does not pass. Raises NotImplementedError, with
the reason, if a call of the recording cannot be made again."""
run: Any = torch.ops.mxtensor.cpu_graph_run.default
"""(inputs that it passes, number) -> new tensors with the outputs, or none if an input that is not copied is at another
address."""


@cache
def library() -> ctypes.CDLL | str:
    """The compiled recorder, or the reason why it is not available."""
    lib = load(SOURCE, torch_flags(), OP_HEADERS, SYMBOLS)
    if not isinstance(lib, str):
        lib.mx_graph_kernel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        lib.mx_graph_refuse.argtypes = [ctypes.c_char_p]
        lib.mx_graph_free.argtypes = [ctypes.c_int64]
        for symbol in SYMBOLS:
            getattr(lib, symbol).restype = None
        for record in _ops:
            _connect(record, lib)
    return lib


_ops: list[Any] = []
"""The functions that ``connect_op`` got: an op may be loaded before the recorder."""


def _connect(record: Any, lib: ctypes.CDLL) -> None:
    record(*(ctypes.cast(function, ctypes.c_void_p) for function in (lib.mx_graph_wants, lib.mx_graph_take)))


def connect_op(record: Any) -> None:
    """Connect an op that offers a shorter way to repeat its calls (cpu/op_recorder.h) with the recorder.

    ``record``: the C function of the op's library that takes the two functions of the recorder. Call this once, when
    the library has been loaded.
    """
    _ops.append(record)
    if library.cache_info().currsize and not isinstance(lib := library(), str):
        _connect(record, lib)


class Kernel:
    """A kernel of torch's compiler for the CPU that records its calls, and makes them."""

    def __init__(self, lib: ctypes.CDLL, function: Any, address: int) -> None:
        self.lib, self.function, self.address = lib, function, address

    def __call__(self, *args: Any) -> None:
        self.function(*args)
        values = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
        if all(type(value) is int for value in values):
            given = (ctypes.c_int64 * len(values))(*values)
            self.lib.mx_graph_kernel(self.address, ctypes.addressof(given), len(values))
        else:
            self.lib.mx_graph_refuse(b"a kernel takes a number that is not an integer")

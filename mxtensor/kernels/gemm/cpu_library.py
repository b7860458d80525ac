"""The op ``mxtensor::cpu_linear``: products of rows with codes on CPU, compiled once on each machine.

Two libraries, built at first use (about 20 seconds of one core in all) and cached on disk. ``linear.cpp`` does the work
and knows no torch; it is compiled for the widest instruction set that this processor has. ``linear_op.cpp`` makes an op
of torch of it, with torch's headers, so that neither torch's threads nor a compiled graph goes through Python.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..runtime.native_build import instruction_sets, load

HERE = Path(__file__).parent.parent / "cpu"
HEADERS = tuple(
    HERE / name
    for name in ("elements.h", "problem.h", "linear.h", "linear_plain.h", "linear_avx2.h", "linear_avx512.h")
)
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off")
SYMBOLS = ("mx_linear_packed_bytes", "mx_linear_pack", "mx_linear_rows", "mx_linear_instructions")
X86 = {
    "avx512": (
        {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512vbmi"},
        ("-march=x86-64-v4", "-mavx512vbmi"),
    ),
    "avx2": ({"avx2", "fma", "f16c"}, ("-mavx2", "-mfma", "-mf16c")),
}
"""Instruction sets, widest first -> the flags that Linux shows for them, and those of the compiler."""
VARIABLE = "MXTENSOR_CPU_INSTRUCTIONS"
"""The environment variable that names an instruction set: avx512, avx2 or plain."""


def instructions() -> tuple[str, tuple[str, ...]]:
    """The instruction set to compile for, and the compiler's flags.

    Raises ValueError if the environment variable names one that is unknown or that this processor lacks.
    """
    has = instruction_sets()
    usable = [name for name, (needs, _) in X86.items() if needs <= has] if platform.machine() in ("x86_64", "AMD64") else []
    wanted = os.environ.get(VARIABLE) or (usable or ["plain"])[0]
    if wanted not in (*usable, "plain"):
        raise ValueError(f"{VARIABLE} is {wanted!r}; this processor runs {', '.join((*usable, 'plain'))}")
    flags = X86[wanted][1] if wanted in X86 else ()
    if wanted == "avx512" and "avx512_bf16" in has:
        flags = (*flags, "-mavx512bf16")
    return wanted, flags


def torch_flags() -> tuple[str, ...]:
    """How a library is compiled against this torch: its headers, and its libraries, which are loaded already."""
    root = Path(torch.__file__).parent
    linker = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-Wl,--no-as-needed",)
    return (
        "-O2", "-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", f"-L{root / 'lib'}", *linker, "-ltorch_cpu",
        "-lc10", f'-DMX_TORCH="{torch.__version__}"', f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    )  # fmt: skip


def load_kernels() -> ctypes.CDLL | str:
    """``linear.cpp`` for this processor, or the sentence that says why there is none."""
    kernels = load(HERE / "linear.cpp", (*FLAGS, *instructions()[1]), HEADERS, SYMBOLS)
    if isinstance(kernels, ctypes.CDLL):
        kernels.mx_linear_instructions.restype = ctypes.c_char_p
        kernels.mx_linear_packed_bytes.restype = ctypes.c_int64
    return kernels


class Library:
    """The loaded op."""

    def __init__(self, op: ctypes.CDLL, kernels: ctypes.CDLL) -> None:
        self.kernels, self.instructions = kernels, kernels.mx_linear_instructions().decode()
        self.forget = op.mx_linear_forget
        self.forget.argtypes = [ctypes.c_int64]
        addresses = [ctypes.cast(getattr(kernels, name), ctypes.c_void_p) for name in SYMBOLS[:3]]
        op.mx_linear_use(*addresses)
        self.linear: Any = torch.ops.mxtensor.cpu_linear.default
        self.prepare: Any = torch.ops.mxtensor.cpu_linear_prepare.default
        self.prepared: Any = torch.ops.mxtensor.cpu_linear_prepared.default
        torch.library.register_fake("mxtensor::cpu_linear", _fake)


def _fake(
    x: Tensor, data: Tensor, scale: Tensor, global_scale: Tensor | None, x_global: Tensor | None, bias: Tensor | None,
    format: list[int], alpha: float, beta: float, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], data.shape[0], dtype=out_dtype)


@cache
def library() -> Library | str:
    """The op, or the sentence that says why there is none."""
    with ThreadPoolExecutor(1) as pool:  # two compilers at once
        other = pool.submit(load_kernels)
        op = load(HERE / "linear_op.cpp", torch_flags(), HEADERS[1:2], ("mx_linear_use", "mx_linear_forget"))
        kernels = other.result()
    if isinstance(op, str) or isinstance(kernels, str):
        return op if isinstance(op, str) else str(kernels)
    return Library(op, kernels)

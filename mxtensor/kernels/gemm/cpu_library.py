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

from ...core.compat import called_while_traced
from ...numerics.formats import E2M1, E2M3, E3M2, E4M3, E5M2, INT8, Format
from ..quantize import cpu
from ..runtime import cpu_graph, native_ops
from ..runtime.disk_cache import warn_once
from ..runtime.native_build import instruction_sets, load
from ..runtime.native_ops import refuse_first_call

HERE = Path(__file__).parent.parent / "cpu"
HEADERS = tuple(
    HERE / name
    for name in (
        "format.h", "problem.h", "elements.h", "linear_tiles.h", "linear_narrow.h", "linear.h", "linear_plain.h",
        "linear_neon.h", "linear_avx2.h", "linear_avx2_integers.h", "linear_avx512.h", "linear_avx512_dots.h",
        "linear_avx512_integers.h", "linear_avx512_panels.h", "linear_avx512_integer_panels.h",
        "linear_avx512_bfloat16_panels.h", "linear_integers.h", "linear_no_integers.h", "linear_no_panels.h",
        "linear_amx.h", "tiles_amx.h", "linear_no_tiles.h",
    )
)  # fmt: skip
OP_HEADERS = (
    *native_ops.HEADERS,
    HERE / "elements.h",
    *(HERE / f"op_{name}.h" for name in ("functions", "cast", "overflow", "problem", "product")),
)
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC")
SYMBOLS = tuple(f"mx_linear_{name}" for name in ("packed_row", "pack", "rows", "decode", "finish", "instructions"))
"""The functions of ``linear.cpp``, in the order of ``Functions`` in linear_op.cpp; the op does not call the last."""
OP_SYMBOLS = "mx_linear_use", "mx_linear_record", "mx_linear_forget"
CASTS = ("mx_amax", "mx_encode", "mx_decode")
"""Functions of ``quantize.cpp``, which cast activations."""
ELEMENTS = (E4M3, E5M2, E3M2, E2M3, E2M1, INT8)
"""In the order of ``ElementId`` in cpu/problem.h; scales have that of ``quantize/cpu.py``."""
FEW_ROWS, FEW_ROWS_OF = 32, {"plain": 4, "neon": 8}
"""Rows up to which every code is decoded in registers, and those in float32 for some instruction sets; with more,
torch's BLAS multiplies decoded slabs. ``python -m benchmarks.cpu_sweep`` shows that neither is slower than decoding the
whole weight. That of 64-bit ARM is not measured."""
TILE_ROWS = 8, 512
"""The least and the most rows of bfloat16 that are multiplied in the tile registers of AMX, where the processor has
them. With fewer, decoding into registers is as fast; with more, torch's BLAS multiplies decoded slabs, in tiles too."""
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd", "avx512vbmi"})
_AVX512_FLAGS = ("-march=x86-64-v4", "-mavx512vbmi")
X86: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "amx": (
        _AVX512 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16"},
        (*_AVX512_FLAGS, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"),
    ),
    "avx512": (_AVX512, _AVX512_FLAGS),
    "avx2": (frozenset({"avx2", "fma", "f16c"}), ("-mavx2", "-mfma", "-mf16c")),
}
"""Instruction sets of x86, widest first -> the flags that Linux shows for them, and those of the compiler."""
ARM = ("neon",)
"""Those of 64-bit ARM, all of which such a processor has."""
VARIABLE = "MXTENSOR_CPU_INSTRUCTIONS"
"""The environment variable that names an instruction set: amx, avx512, avx2, neon or plain."""


@cache
def permits_tiles() -> bool:
    """Whether Linux lets this process use the tile registers of AMX, whose state it saves only where it was asked to.

    Asks for that, once: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, request, tile_data = 158, 0x1023, 18
    status = ctypes.CDLL(None).syscall(*map(ctypes.c_long, (arch_prctl, request, tile_data)))
    return int(status) == 0


def usable_instructions() -> list[str]:
    """The instruction sets that can be compiled for and run here, widest first."""
    if platform.machine() in ("aarch64", "arm64"):
        return [*ARM, "plain"]
    has = instruction_sets() if platform.machine() in ("x86_64", "AMD64") else set()
    found = [name for name, (needs, _) in X86.items() if needs <= has and (name != "amx" or permits_tiles())]
    return [*found, "plain"]


def instructions() -> tuple[str, tuple[str, ...]]:
    """The instruction set to compile for, and the compiler's flags.

    Raises ValueError if the environment variable names one that is unknown or that this processor lacks.
    """
    usable = usable_instructions()
    wanted = os.environ.get(VARIABLE) or usable[0]
    if wanted not in usable:
        raise ValueError(f"{VARIABLE} is {wanted!r}; this processor runs {', '.join(usable)}")
    return wanted, flags_of(wanted)


def flags_of(wanted: str) -> tuple[str, ...]:
    """The compiler's flags for an instruction set, and for more of them that go with it."""
    if wanted not in X86:
        return ("-DMX_PLAIN",) if wanted == "plain" else ()
    has, flags = instruction_sets(), X86[wanted][1]
    if wanted == "avx512" and "avx512_bf16" in has:
        flags = (*flags, "-mavx512bf16")
    if wanted == "avx512" and "avx512_vnni" in has:
        flags = (*flags, "-mavx512vnni")
    if wanted == "amx":
        flags = (*flags, *tile_flags())
    return flags


def tile_flags() -> tuple[str, ...]:
    """How linear_amx.h learns of ``TILE_ROWS``."""
    return f"-DTILES_FROM={TILE_ROWS[0]}", f"-DTILES_UP_TO={TILE_ROWS[1]}"


def load_kernels(name: str | None = None) -> ctypes.CDLL | str:
    """``linear.cpp`` for this processor, or for a named instruction set that it has; or why there is none."""
    wanted, flags = instructions() if name is None else (name, flags_of(name))
    kernels = load(HERE / "linear.cpp", (*FLAGS, *flags), HEADERS, SYMBOLS)
    if isinstance(kernels, str) and wanted == "amx" and not (name or os.environ.get(VARIABLE)):  # an old compiler
        kernels = load(HERE / "linear.cpp", (*FLAGS, *flags_of("avx512")), HEADERS, SYMBOLS)
    if isinstance(kernels, ctypes.CDLL):
        kernels.mx_linear_instructions.restype = ctypes.c_char_p
    return kernels


class Library:
    """The loaded op."""

    def __init__(self, op: ctypes.CDLL, kernels: ctypes.CDLL, casts: ctypes.CDLL) -> None:
        self._formats = [cpu.c_format(Format("cpu_linear", e, s, (1, 32))) for e in ELEMENTS for s in cpu.SCALES]
        self._op, self._casts, self.forget = op, casts, op.mx_linear_forget
        self.forget.argtypes = [ctypes.c_int64]
        cpu_graph.connect_op(op.mx_linear_record)
        self.use(kernels)

    def use(self, kernels: ctypes.CDLL) -> None:
        """Let all products run in these kernels from now on; benchmarks compare instruction sets so."""
        self.kernels, self.instructions = kernels, kernels.mx_linear_instructions().decode()
        functions = [getattr(kernels, name) for name in SYMBOLS[:-1]] + [getattr(self._casts, name) for name in CASTS]
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
        formats = (ctypes.c_void_p * len(self._formats))(*map(ctypes.addressof, self._formats))
        rows = FEW_ROWS, FEW_ROWS_OF.get(self.instructions, FEW_ROWS)
        self._op.mx_linear_use((ctypes.c_void_p * len(addresses))(*addresses), formats, *map(ctypes.c_int64, rows))


@cache
def library() -> Library | str:
    """The op, or the reason why it is not available."""
    # In other threads: two compilers run at once, and no mode of the caller, who may be tracing, changes the tables.
    with ThreadPoolExecutor(2) as pool:
        kernels = pool.submit(load_kernels)
        op = pool.submit(load, HERE / "linear_op.cpp", native_ops.torch_flags(), OP_HEADERS, OP_SYMBOLS)
        found = op.result(), kernels.result(), pool.submit(cpu.library).result()
        for part in found:
            if isinstance(part, str):
                warn_once(f"products on the CPU take the plain path, which decodes whole weights: {part}")
                return part
        return pool.submit(Library, *found).result()  # type: ignore[arg-type]


@called_while_traced  # Dynamo would trace the build
def missing() -> str | None:
    """Why there is no op; None if there is one."""
    found = library()
    return found if isinstance(found, str) else None


# ---------------------------------------------------------------------------------------------- the ops

_OPS = torch.library.Library("mxtensor", "FRAGMENT")
_OPS.define(
    "cpu_linear(Tensor x, Tensor data, Tensor scale, Tensor? global_scale, Tensor? x_global, Tensor? bias, "
    "int[] format, float alpha, float beta, ScalarType out_dtype, int[] cast, float amax_epsilon) -> Tensor"
)
_OPS.define(
    "cpu_linear_shared(Tensor x, Tensor[] data, Tensor[] scale, Tensor?[] global_scale, Tensor? x_global, "
    "Tensor?[] bias, int[] format, float alpha, float beta, ScalarType out_dtype, int[] cast, float amax_epsilon) "
    "-> Tensor"
)
_OPS.define(
    "cpu_linear_groups(Tensor x, Tensor data, Tensor scale, Tensor? global_scale, Tensor? x_global, Tensor ends, "
    "int[] format, float alpha, ScalarType out_dtype, int[] cast, float amax_epsilon) -> Tensor"
)
_OPS.define(
    "cpu_linear_bind(Tensor x, Tensor data, Tensor scale, Tensor? global_scale, Tensor? bias, int[] format, "
    "int[] cast, float amax_epsilon, int[] shape) -> int"
)
_OPS.define("cpu_linear_bound(Tensor x, int number) -> Tensor")
linear: Any = torch.ops.mxtensor.cpu_linear.default
linear_shared: Any = torch.ops.mxtensor.cpu_linear_shared.default
"""Products of one x with several weights of one format, side by side (M, N of all), in compiled graphs.
One tensor, because torch's C++ wrapper of a compiled graph calls an op with a list of results through Python."""
linear_groups: Any = torch.ops.mxtensor.cpu_linear_groups.default
"""Products of rows in groups with a stack of weights, a matrix for each group."""
bind: Any = torch.ops.mxtensor.cpu_linear_bind.default
bound: Any = torch.ops.mxtensor.cpu_linear_bound.default


@torch.library.impl(_OPS, "cpu_linear", "CompositeExplicitAutograd")
def _first_call(x: Tensor, *others: Any) -> Tensor:
    refuse_first_call("mxtensor::cpu_linear", x, missing)
    return linear(x, *others)  # type: ignore[no-any-return]


@torch.library.impl(_OPS, "cpu_linear_shared", "CompositeExplicitAutograd")
def _first_shared_call(x: Tensor, *others: Any) -> Tensor:
    refuse_first_call("mxtensor::cpu_linear_shared", x, missing)
    return linear_shared(x, *others)  # type: ignore[no-any-return]


@torch.library.impl(_OPS, "cpu_linear_groups", "CompositeExplicitAutograd")
def _first_call_with_groups(x: Tensor, *others: Any) -> Tensor:
    refuse_first_call("mxtensor::cpu_linear_groups", x, missing)
    return linear_groups(x, *others)  # type: ignore[no-any-return]


@torch.library.register_fake("mxtensor::cpu_linear", lib=_OPS)
def _(x, data, scale, global_scale, x_global, bias, format, alpha, beta, out_dtype, cast, amax_epsilon):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], data.shape[0], dtype=out_dtype)


@torch.library.register_fake("mxtensor::cpu_linear_groups", lib=_OPS)
def _(x, data, scale, global_scale, x_global, ends, format, alpha, out_dtype, cast, amax_epsilon):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], data.shape[1], dtype=out_dtype)


@torch.library.register_fake("mxtensor::cpu_linear_shared", lib=_OPS)
def _(x, data, scale, global_scale, x_global, bias, format, alpha, beta, out_dtype, cast, amax_epsilon):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], sum(each.shape[0] for each in data), dtype=out_dtype)

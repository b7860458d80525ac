"""Products of rows with codes on CPU that decode each code in registers, once.

No decoded copy of a weight is written to memory: a product of few rows takes the time of reading its codes. With many
rows, torch's BLAS multiplies slabs of the weight that are decoded into the cache.

The op ``mxtensor::cpu_linear`` is two libraries, built at first use (about 20 seconds of one core in all) and cached on
disk. ``linear.cpp`` does the work and knows no torch; it is compiled for the widest instruction set that this processor
has. ``linear_op.cpp`` makes an op of torch of it, with torch's headers, so that neither torch's threads nor a compiled
graph goes through Python.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.compat import called_while_traced
from ...core.kernel import Kernel, Spec
from ...core.names import dtype_name
from ...core.program import PREPARE
from ...core.tracing import is_traced
from ...numerics.cast import Cast
from ...numerics.formats import E2M1, E2M3, E3M2, E4M3, E5M2, INT8, Format, Rounding
from ...numerics.operand import Operand
from ...numerics.validate import check_sizes
from ..operands import FakeQuantized, GemmOperand, Unquantized
from ..quantize import cpu_casts
from ..quantize.choose_cast import fake_quantize_rows
from ..quantize.cpu_casts import BLOCKS, KINDS, MODES, SCALES
from ..runtime import cpu_graph, native_build
from ..runtime.custom_op import exported
from ..runtime.disk_cache import warn_once
from ..runtime.native_build import instruction_sets, load, refuse_first_call
from .spec import GemmArgs, as_rows, not_a_bias_of_groups, not_rows_by_matrix, readable_bias

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
    *native_build.OP_HEADERS,
    HERE / "elements.h",
    *(HERE / f"op_{name}.h" for name in ("functions", "cast", "overflow", "problem", "product")),
)
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC")
SYMBOLS = tuple(f"mx_linear_{name}" for name in ("packed_row", "pack", "rows", "decode", "finish", "instructions"))
"""The functions of ``linear.cpp``, in the order of ``Functions`` in linear_op.cpp; the op does not call the last."""
OP_SYMBOLS = "mx_linear_use", "mx_linear_record"
CASTS = ("mx_amax", "mx_encode", "mx_decode")
"""Functions of ``quantize.cpp``, which cast activations."""
ELEMENTS = (E4M3, E5M2, E3M2, E2M3, E2M1, INT8)
"""In the order of ``ElementId`` in cpu/problem.h; scales have that of ``quantize/cpu_casts.py``."""
FEW_ROWS, FEW_ROWS_OF = 32, {"plain": 4, "neon": 8}
"""Rows up to which every code is decoded in registers, and those in float32 for some instruction sets; with more,
torch's BLAS multiplies decoded slabs. ``python -m benchmarks.cpu sweep`` shows that neither is slower than decoding the
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
        self._formats = [
            cpu_casts.c_format(Format("cpu_linear", e, s, (1, 32))).contents for e in ELEMENTS for s in cpu_casts.SCALES
        ]
        self._op, self._casts = op, casts
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
        op = pool.submit(load, HERE / "linear_op.cpp", native_build.torch_flags(), OP_HEADERS, OP_SYMBOLS)
        found = op.result(), kernels.result(), pool.submit(cpu_casts.library).result()
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
    "cpu_linear_prepare(int[] format, float alpha, float beta, ScalarType out_dtype, int[] cast, float amax_epsilon) "
    "-> int"
)
_OPS.define(
    "cpu_linear_prepared(Tensor x, Tensor data, Tensor scale, Tensor? global_scale, Tensor? x_global, Tensor? bias, "
    "int number) -> Tensor"
)
linear: Any = torch.ops.mxtensor.cpu_linear.default
linear_shared: Any = torch.ops.mxtensor.cpu_linear_shared.default
"""Products of one x with several weights of one format, side by side (M, N of all), in compiled graphs.
One tensor, because torch's C++ wrapper of a compiled graph calls an op with a list of results through Python."""
linear_groups: Any = torch.ops.mxtensor.cpu_linear_groups.default
"""Products of rows in groups with a stack of weights, a matrix for each group."""


_numbers: dict[Hashable, int] = {}


def _prepared(args: tuple[Any, ...]) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """``cpu_linear`` with a number in the place of all its arguments that are not tensors: for programs."""
    tensors, options = args[:6], args[6:]
    key = tuple(tuple(one) if isinstance(one, (list, tuple)) else one for one in options)
    if key not in _numbers:
        _numbers[key] = torch.ops.mxtensor.cpu_linear_prepare(*options)
    return torch.ops.mxtensor.cpu_linear_prepared.default, (*tensors, _numbers[key])


PREPARE[linear] = _prepared


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


def _refuses(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> str | None:
    if spec.op.partition(" ")[0] in TRAINING:
        return "training multiplies values in the same way whether codes were saved or not"
    if not isinstance(b, Operand):
        return "needs a quantized right operand, this one has no codes"
    f = b.format
    if f.element not in ELEMENTS or f.scale not in SCALES:
        return f"has no decoder for {f.element.name} with {f.scale.name} scales"
    if f.block not in BLOCKS:
        return f"has no decoder for blocks of {f.block[0]}x{f.block[1]}"
    if isinstance(a, (Operand, FakeQuantized)):
        return "its left operand is cast already: the kernels of other forms of this operand give the same bits"
    x = a.x if isinstance(a, Unquantized) else a
    for dtype in (args.out_dtype, *((x.dtype,) if isinstance(x, Tensor) else ())):
        if dtype not in KINDS:
            return f"computes with float32, bfloat16 and float16, not {dtype_name(dtype)}"
    if 0 in (*spec.shapes[0], *spec.shapes[1]):
        return "no values"
    return exported(spec) or missing()


def refuses(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> str | None:
    return not_rows_by_matrix(spec, a) or _refuses(spec, a, b, args)


def refuses_grouped(spec: Spec, a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> str | None:
    reason = not_a_bias_of_groups(args) or _refuses(spec, a, b, args)
    if reason is None and isinstance(b, Operand) and b.scale.shape[0] != b.shape[0]:
        return f"{b.format} has one scale for all groups"
    return reason


TRAINING = frozenset({"fprop", "dgrad", "wgrad", "general_gemm"})
"""Products whose operands are codes in one step and rounded values in another: both take one kernel, for equal bits."""
_NUMBERS = {e.name: i for i, e in enumerate(ELEMENTS)} | {s.name: i for i, s in enumerate(SCALES)}
"""By name, because Dynamo cannot search a tuple of rows."""


def numbers_of(format: Format) -> tuple[int, int, int, int]:
    """A format as the op takes it: element, scale and extents of a block."""
    return _NUMBERS[format.element.name], _NUMBERS[format.scale.name], *format.block


def _is_cast_here(cast: Cast) -> bool:
    """Whether the op does this cast, in the library of the casts."""
    f = cast.format
    known = f.element in ELEMENTS and f.scale in SCALES and f.block in BLOCKS
    return known and cast.rounding is Rounding.NEAREST and cast.why_not_plain is None


def _numbers_of_cast(cast: Cast | None) -> tuple[tuple[int, ...], float]:
    """A cast as the op takes it; empty for none."""
    if cast is None:
        return (), 0.0
    f = cast.format
    return (*numbers_of(f), int(f.global_scale), int(f.signed_zero), MODES[cast.scaling]), cast.amax_epsilon


def _activations(a: GemmOperand) -> tuple[Tensor, Tensor | None, Cast | None]:
    """The activations as plain values, their global scale, and the cast that the op still has to do."""
    if isinstance(a, Unquantized):
        if _is_cast_here(a.cast):
            return a.x, None, a.cast
        return *fake_quantize_rows(a.x, a.cast, _dtype_of(a.format)), None
    assert isinstance(a, Tensor)
    return a, None, None


def _dtype_of(format: Format) -> torch.dtype:
    """The shorter dtype that holds values of a format without the global scale exactly."""
    return torch.bfloat16 if format.exact_in_bfloat16 else torch.float32


def run(a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Tensor:
    assert isinstance(b, Operand)
    if not is_traced(b.data):
        check_sizes(b, strided=True)
    x, x_global, cast = _activations(a)
    shape = (*x.shape[:-1], b.shape[-2])
    out: Tensor = linear(
        as_rows(x, dense=cast is not None), b.data.contiguous(), b.scale.contiguous(), b.global_scale, x_global,
        readable_bias(args, shape, KINDS), numbers_of(b.format), float(args.alpha), float(args.beta), args.out_dtype,
        *_numbers_of_cast(cast),
    )  # fmt: skip
    return out if len(shape) == 2 else out.view(shape)


def run_grouped(a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> Tensor:
    assert isinstance(b, Operand)
    if not is_traced(b.data):
        check_sizes(b, strided=True)
    x, x_global, cast = _activations(a)
    return linear_groups(  # type: ignore[no-any-return]
        x.contiguous(), b.data.contiguous(), b.scale.contiguous(), b.global_scale, x_global, ends.contiguous(),
        numbers_of(b.format), float(args.alpha), args.out_dtype, *_numbers_of_cast(cast),
    )  # fmt: skip


KERNEL = Kernel("cpu_codes", refuses, run, "cpu")
GROUPED = Kernel("cpu_codes", refuses_grouped, run_grouped, "cpu")

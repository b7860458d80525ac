"""Eager casts on CPU in C++: MX formats in blocks along rows, one pass over the values.

``native.cpp`` is compiled once a machine (about half a second) by the C++ compiler that torch.compile uses too, without
torch's headers, and called through ctypes. Where there is none, the slices of ``cast_blocked`` do the same work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..codec import Operand
from ..dispatch import Kernel, Spec
from ..elements import decode_elements
from ..formats import ElementFormat, Format, Rounding, ScaleCalculationMode
from ..recipe import Cast

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-trapping-math")
SOURCES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TARGETS = {torch.float32: 0, torch.bfloat16: 1}
MODES = {mode: i for i, mode in enumerate(ScaleCalculationMode)}
VALUES_PER_THREAD = 1 << 16


class _Element(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("exponent_bits", "mantissa_bits", "bias", "emax", "bits", "nan_code")),
        *((name, ctypes.c_float) for name in ("max", "inverse_max")),
    )


# ---------------------------------------------------------------------------------------------- the library


def _cache_path(compiler: str) -> Path:
    """Where the library of this source, these flags and this processor lies."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = [line for line in lines if line.startswith(("flags", "Features"))][:1]
    key = hashlib.blake2b(repr((SOURCE.read_text(), FLAGS, compiler, flags)).encode(), digest_size=10).hexdigest()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "mxtensor" / f"native-{key}.so"


@cache
def library() -> ctypes.CDLL | str:
    """The compiled casts, or the sentence that says why there are none."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        return "there is no C++ compiler"
    try:
        path = _cache_path(compiler)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                built = Path(folder) / path.name
                subprocess.run([compiler, *FLAGS, "-o", str(built), str(SOURCE)], check=True, capture_output=True)
                built.replace(path)  # whole or not at all, whoever else is building it
        lib = ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        return f"native.cpp did not build: {str(error).splitlines()[0]}"
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    lib.mx_encode.argtypes = [pointer, number, size, size, size, number, pointer, number, pointer, pointer]
    lib.mx_decode.argtypes = [pointer, pointer, size, size, size, number, pointer, pointer, pointer, number]
    return lib


_TABLES: dict[int, tuple[ElementFormat, _Element, Tensor]] = {}


def _tables(e: ElementFormat) -> tuple[ElementFormat, _Element, Tensor]:
    """(the format, so that its id stays its own; its fields for C; the value of every code, by the codec)."""
    tables = _TABLES.get(id(e))  # not functools.cache: hashing nine fields costs as much as the call into C
    if tables is None:
        codes = torch.arange(1 << e.bits, dtype=torch.uint8)
        values = decode_elements(codes if e.packed else codes.view(e.dtype), e)
        fields = (e.exponent_bits, e.mantissa_bits, e.bias, e.emax, e.bits, e.nan_code, e.max, 1.0 / e.max)
        tables = _TABLES[id(e)] = (e, _Element(*fields), values)
    return tables


_pool: list[ThreadPoolExecutor] = []
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_pool.clear)


def _over_rows(work: Callable[[int, int], int], rows: int, cols: int) -> None:
    """Run ``work(first, last)`` on spans of rows in as many threads as torch uses; ctypes lets go of the GIL."""
    spans_worth = rows * cols // VALUES_PER_THREAD
    threads = min(torch.get_num_threads(), spans_worth, rows) if spans_worth > 1 else 1
    if threads == 1:
        failed = work(0, rows)
    else:
        if not _pool:
            _pool.append(ThreadPoolExecutor(torch.get_num_threads(), "mxtensor"))
        spans = [(rows * i // threads, rows * (i + 1) // threads) for i in range(threads)]
        failed = max(_pool[0].map(lambda span: work(*span), spans))
    assert not failed


def _refuses(spec: Spec, format: Format, dtypes: dict[torch.dtype, int], contiguous: bool) -> str | None:
    if spec.device.type != "cpu":
        return f"runs on cpu, this tensor is on {spec.device.type}"
    if spec.traced:
        return "being traced: the codec itself fuses better"
    if format.scale.significant_bits != 1 or format.block[0] != 1:
        return "only MX formats in blocks along rows"
    if spec.dtype not in dtypes:
        return f"not for {str(spec.dtype).removeprefix('torch.')}"
    if not contiguous:
        return "not contiguous"
    built = library()
    return built if isinstance(built, str) else None


# ---------------------------------------------------------------------------------------------- quantize


def _refuses_quantize(spec: Spec, x: Tensor, cast: Cast) -> str | None:
    if cast.rounding is not Rounding.NEAREST:
        return "rounds to nearest only"
    return _refuses(spec, cast.format, SOURCES, x.is_contiguous())


def _quantize(x: Tensor, cast: Cast) -> Operand:
    lib, format, shape = library(), cast.format, tuple(x.shape)
    assert isinstance(lib, ctypes.CDLL)
    data = torch.empty(format.data_shape(shape), dtype=format.element.dtype)
    scale = torch.empty(format.scale_shape(shape), dtype=torch.uint8)
    last = torch.ones(()) if format.global_scale else None
    if x.numel():
        cols, element = shape[-1], ctypes.byref(_tables(format.element)[1])
        kind, mode, block = SOURCES[x.dtype], MODES[cast.scaling], format.block[1]
        source, codes, scales = x.data_ptr(), data.data_ptr(), scale.data_ptr()

        def work(first: int, end: int) -> int:
            return lib.mx_encode(source, kind, first, end, cols, block, element, mode, codes, scales)  # type: ignore[no-any-return]

        _over_rows(work, x.numel() // cols, cols)
    return Operand(data, scale, last, format, shape)


# ---------------------------------------------------------------------------------------------- dequantize


def _refuses_dequantize(spec: Spec, operand: Operand) -> str | None:
    contiguous = operand.data.is_contiguous() and operand.scale.is_contiguous()
    return _refuses(spec, operand.format, TARGETS, contiguous)


def decode_rows(operand: Operand, start: int, length: int, out: Tensor) -> Tensor:
    """Decode rows ``start`` to ``start + length`` of an operand (leading dimensions flat) into a contiguous ``out``."""
    lib, cols, block = library(), operand.shape[-1], operand.format.block[1]
    assert isinstance(lib, ctypes.CDLL)
    _, fields, values = _tables(operand.format.element)
    element, table, kind = ctypes.byref(fields), values.data_ptr(), TARGETS[out.dtype]
    codes = operand.data.data_ptr() + start * operand.data.shape[-1]
    scales, to = operand.scale.data_ptr() + start * operand.scale.shape[-1], out.data_ptr()

    def work(first: int, last: int) -> int:
        return lib.mx_decode(codes, scales, first, last, cols, block, element, table, to, kind)  # type: ignore[no-any-return]

    if length and cols:
        _over_rows(work, length, cols)
    return out


def _dequantize(operand: Operand, dtype: torch.dtype) -> Tensor:
    out = torch.empty(operand.shape, dtype=dtype)
    rows = out.numel() // max(operand.shape[-1], 1)
    return decode_rows(operand, 0, rows, out)


QUANTIZE = Kernel("native", _refuses_quantize, _quantize)
DEQUANTIZE = Kernel("native", _refuses_dequantize, _dequantize)

"""Eager casts on CPU in C++: every format, one pass over the values, and a pass for the amax if a scale needs it.

``quantize.cpp`` is compiled once on each machine (about two seconds) without torch's headers, by the C++ compiler that
torch.compile uses too, and called through ctypes. Without a compiler ``definition.py`` does the same work in slices.
``nvfp4.cpp`` casts to NVFP4 with four over six, or with a global scale for each row: it reads a block once and rounds
it with each of its two scales; ``quantize.cpp`` has one scale for a block.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from ...core import recording
from ...core.kernel import Kernel, Spec, elsewhere
from ...core.names import dtype_name
from ...core.shapes import as_matrix
from ...numerics.cast import Cast
from ...numerics.elements import decode_elements
from ...numerics.formats import (
    BLOCK_SIZES,
    E2M1,
    E8M0,
    FP32,
    FP32_POW2,
    FULL,
    UE4M3,
    Format,
    Rounding,
    ScaleCalculationMode,
)
from ...numerics.operand import Operand
from ...numerics.reference import global_scales, scale_to_float, tensor_amax
from ...numerics.validate import check_sizes, has_memory
from ..operands import by_matrix
from ..runtime.native_build import load

SOURCE, *HEADERS = (Path(__file__).parent.parent / "cpu" / name for name in ("quantize.cpp", "elements.h", "format.h"))
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-trapping-math")
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MODES = {mode: i for i, mode in enumerate(ScaleCalculationMode)}
SCALES = (E8M0, UE4M3, FP32, FP32_POW2)
BLOCKS = frozenset({(FULL, FULL), (1, FULL), *((rows, n) for n in BLOCK_SIZES for rows in (1, n))})
TRANSPOSED_ROWS = 128
"""Rows that are transposed at a time if the columns of x are contiguous: whole cache lines of each column."""
VALUES_PER_THREAD = 1 << 16
"""The least that a thread is given."""


class _Element(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("exponent_bits", "mantissa_bits", "bias", "emax", "bits", "nan_code")),
        ("first_special", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("max", "inverse_max")),
    )


class _Format(ctypes.Structure):
    _fields_ = (
        ("element", _Element),
        *((name, ctypes.c_int32) for name in ("scale", "rows", "cols", "signed_zero")),
        ("scale_values", ctypes.c_float * 256),
    )


# ---------------------------------------------------------------------------------------------- the library


@cache
def library() -> ctypes.CDLL | str:
    """The compiled casts, or the sentence that says why there are none."""
    lib = load(SOURCE, FLAGS, headers=HEADERS, symbols=("mx_amax", "mx_encode", "mx_decode"))
    if isinstance(lib, str):
        return lib
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    lib.mx_amax.argtypes = [pointer, number, size, size]
    lib.mx_encode.argtypes = [
        pointer, number, pointer, number, size, size, number, number, number, ctypes.c_float, size, size, pointer,
        pointer, pointer,
    ]  # fmt: skip
    lib.mx_decode.argtypes = [pointer, pointer, pointer, pointer, size, size, size, size, pointer, number]
    return lib


_FORMATS: dict[object, tuple[Any, ...]] = {}


def c_format(format: Format) -> Any:
    """A pointer to the fields of ``format`` for C, in memory that stays."""
    e, kind, block, signed_zero = format.element, format.scale, format.block, format.signed_zero
    key = (id(e), id(kind), block, signed_zero)  # by identity: to hash an element takes as long as to call C
    cached = _FORMATS.get(key)
    if cached is None:
        codes = torch.arange(256, dtype=torch.uint8, device="cpu")  # whatever torch's default device is
        magnitudes = codes[: 1 << (e.bits - 1)]
        finite = decode_elements(magnitudes if e.packed else magnitudes.view(e.dtype), e).isfinite()
        fields = (e.exponent_bits, e.mantissa_bits, e.bias, e.emax, e.bits, e.nan_code, int(finite.sum()))
        values = scale_to_float(codes, kind).tolist() if kind.dtype is torch.uint8 else ()
        element = _Element(*fields, e.max, 1.0 / e.max)
        c = _Format(element, SCALES.index(kind), *block, int(signed_zero), (ctypes.c_float * 256)(*values))
        # The entry references e and kind, so that no other object gets their ids.
        cached = _FORMATS[key] = (ctypes.pointer(c), e, kind)
    return cached[0]


_pool: list[ThreadPoolExecutor] = []
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_pool.clear)


def in_spans(work: Callable[[int, int], int], units: int, values: int, *memory: object) -> int:
    """The largest result of ``work(first, end)`` over spans of ``units`` units with ``values`` values in all.

    Runs in as many threads as torch uses; ctypes releases the GIL. This thread takes part, and does all of it where no
    thread can be started: while the interpreter shuts down (``atexit``, or a thread that outlives the main thread).
    ``memory``: what ``work`` reads and writes; threads hold it until they are done, also if this one is interrupted.
    """
    recording.refuse("C++ got addresses")
    spans_worth = values // VALUES_PER_THREAD
    threads = min(torch.get_num_threads(), spans_worth, units) if spans_worth > 1 else 1
    if threads == 1:
        return work(0, units)
    spans = deque((units * i // threads, units * (i + 1) // threads) for i in range(threads))
    results: SimpleQueue[int | BaseException] = SimpleQueue()

    def run(*memory: object) -> None:
        while spans:
            try:
                span = spans.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                results.put(work(*span))
            except BaseException as error:
                results.put(error)
                raise

    with suppress(RuntimeError, IndexError):  # the interpreter shuts down, the system has no more threads, or a fork
        if not _pool:
            _pool.append(ThreadPoolExecutor(torch.get_num_threads(), "mxtensor"))
        for _ in range(threads - 1):
            _pool[0].submit(run, *memory)
    run()
    found = [results.get() for _ in range(threads)]
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return max(found)  # type: ignore[type-var,return-value]


def _refuses(spec: Spec, format: Format) -> str | None:
    if spec.device.type != "cpu":
        return elsewhere("cpu", spec.device.type)
    if spec.traced:
        return "being traced: the reference fuses better"
    if spec.dtype not in KINDS:
        return f"not for {dtype_name(spec.dtype)}"
    if format.block not in BLOCKS or format.scale not in SCALES:
        return f"not for {format.scale.name} scales of {format.block[0]}x{format.block[1]} blocks"
    built = library()
    return built if isinstance(built, str) else None


# ---------------------------------------------------------------------------------------------- quantize


def _refuses_quantize(spec: Spec, x: Tensor, cast: Cast) -> str | None:
    if cast.rounding is not Rounding.NEAREST:
        return "rounds to nearest only"
    reason = cast.why_not_plain or _refuses(spec, cast.format)
    if reason is None and not (x.is_contiguous() or (x.dim() > 1 and x.transpose(-1, -2).is_contiguous())):
        return "neither contiguous nor the transpose of a contiguous tensor"
    return reason


@by_matrix
def _quantize(x: Tensor, cast: Cast) -> Operand:
    lib, format, shape = library(), cast.format, tuple(x.shape)
    assert isinstance(lib, ctypes.CDLL)
    out = Operand.empty(format, shape, x.device)
    values, cols, tile = x.numel(), shape[-1], format.block[0]
    if not has_memory(x):
        raise ValueError(f"the storage of a tensor of shape {shape} was freed: there are no values to quantize")
    if not values:
        if out.global_scale is not None:
            out.global_scale.fill_(1)
        return out
    rows, height, transposed = values // cols, max(tile, 1), not x.is_contiguous()
    if transposed or (tile > 1 and len(shape) > 1):
        rows = shape[-2]  # of one matrix; without blocks that span rows, a stack is one matrix
    if transposed:
        height = TRANSPOSED_ROWS
    fields, mode, kind = c_format(format), MODES[cast.scaling], KINDS[x.dtype]
    source, codes, scales = x.data_ptr(), out.data.data_ptr(), out.scale.data_ptr()
    global_scale = None if out.global_scale is None else out.global_scale.data_ptr()
    amax = 0
    if global_scale is not None or tile == FULL:
        amax = in_spans(lambda first, end: lib.mx_amax(source, kind, first, end), values, values, x)

    in_spans(
        lambda first, end: lib.mx_encode(
            fields, mode, source, kind, rows, cols, transposed, height, amax, cast.amax_epsilon, first, end, codes,
            scales, global_scale,
        ),
        values // (rows * cols) * -(-rows // height), values, x, out,
    )  # fmt: skip
    return out


# ---------------------------------------------------------------------------------------------- dequantize


def _refuses_dequantize(spec: Spec, operand: Operand, dtype: torch.dtype) -> str | None:
    reason = operand.why_not_plain or _refuses(spec, operand.format)
    if reason is None and not (operand.data.is_contiguous() and operand.scale.is_contiguous()):
        return "not contiguous"
    return reason


def decode_rows(operand: Operand, start: int, length: int, out: Tensor) -> Tensor:
    """Decode rows ``start`` to ``start + length`` of an operand (leading dimensions flat) into a contiguous ``out``."""
    lib, shape, global_scale = library(), operand.shape, operand.global_scale
    assert isinstance(lib, ctypes.CDLL)
    check_sizes(operand)  # all that the addresses below are read by
    assert (
        out.is_contiguous()
        and out.numel() == length * shape[-1]
        and 0 <= start <= start + length <= math.prod(shape[:-1])
    )
    if not out.numel():
        return out
    rows, cols = shape[-2] if len(shape) > 1 else 1, shape[-1]
    if operand.has_stack_scales:  # matrices with global scales of their own
        flat = out.view(length, cols)
        for place, matrix in enumerate(operand.matrices()):
            first, end = max(start, place * rows), min(start + length, (place + 1) * rows)
            if first < end:
                decode_rows(matrix, first - place * rows, end - first, flat[first - start : end - start])
        return out
    fields, kind, size = c_format(operand.format), KINDS[out.dtype], cols * out.itemsize
    codes, scales, to = operand.data.data_ptr(), operand.scale.data_ptr(), out.data_ptr()
    global_scale_at = None if global_scale is None else global_scale.data_ptr()
    in_spans(
        lambda first, end: lib.mx_decode(
            fields, codes, scales, global_scale_at, rows, cols, start + first, start + end, to + first * size, kind
        ),
        length, length * cols, operand, out,
    )  # fmt: skip
    return out


def _dequantize(operand: Operand, dtype: torch.dtype) -> Tensor:
    out = torch.empty(operand.shape, dtype=dtype, device=operand.data.device)
    return decode_rows(operand, 0, out.numel() // max(operand.shape[-1], 1), out)


QUANTIZE = Kernel("cpu", _refuses_quantize, _quantize, "cpu")
DEQUANTIZE = Kernel("cpu", _refuses_dequantize, _dequantize, "cpu")


# ---------------------------------------------------------------------------------------------- NVFP4


NVFP4_BLOCKS = ((1, 16), (16, 16))
NONE, MAE, MSE = range(3)
"""The order of Error in nvfp4.cpp."""


@cache
def nvfp4_library() -> ctypes.CDLL | str:
    """The compiled casts, or the sentence that says why there are none."""
    lib = load(SOURCE.with_name("nvfp4.cpp"), FLAGS, headers=HEADERS, symbols=("mx_encode_nvfp4",))
    if isinstance(lib, str):
        return lib
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    lib.mx_encode_nvfp4.argtypes = [
        pointer, number, size, size, size, size, number, number, ctypes.c_float, pointer, number, size, size, pointer,
        pointer,
    ]  # fmt: skip
    return lib


def _refuses_nvfp4(spec: Spec, x: Tensor, cast: Cast) -> str | None:
    if cast.why_not_plain is None:
        return "for four over six and global scales of rows"
    if spec.device.type != "cpu":
        return elsewhere("cpu", spec.device.type)
    if spec.traced:
        return "being traced: one op serves better"
    format = cast.format
    if format.block not in NVFP4_BLOCKS or format.element is not E2M1:
        return f"not for {format.element.name} in blocks of {format.block[0]}x{format.block[1]}"
    if spec.dtype not in KINDS:
        return f"not for {dtype_name(spec.dtype)}"
    if x.dim() != 2 and (format.rows_are_blocked or not x.is_contiguous()):
        return "not a matrix, and not contiguous rows"
    if not x.numel() or not has_memory(x):
        return "no values"
    built = nvfp4_library()
    return built if isinstance(built, str) else None


@by_matrix
def _quantize_nvfp4(x: Tensor, cast: Cast) -> Operand:
    lib, format, four, shape = nvfp4_library(), cast.format, cast.four_over_six, tuple(x.shape)
    assert isinstance(lib, ctypes.CDLL)
    x = as_matrix(x.detach())
    amax = x.abs().amax(1, keepdim=True).to(torch.float32) if format.row_scaled else tensor_amax(x)
    out = Operand.empty(format, tuple(x.shape), x.device)
    global_scale = global_scales(amax, cast)[1]
    error = NONE if four is None else MSE if four.squares else MAE
    bound = 448.0 if four is None else four.largest_scale
    (rows, cols), tile = x.shape, format.block[0]
    source, codes, scales, largest = (t.data_ptr() for t in (x, out.data, out.scale, amax))

    in_spans(
        lambda first, end: lib.mx_encode_nvfp4(
            source, KINDS[x.dtype], rows, cols, *x.stride(), tile, error, bound, largest, format.row_scaled, first, end,
            codes, scales,
        ),
        -(-rows // tile), x.numel(), x, out, amax,
    )  # fmt: skip
    data, scale = out.data.view(format.data_shape(shape)), out.scale.view(format.scale_shape(shape))
    return Operand(data, scale, global_scale.view(format.global_scale_shape(shape)), format, shape)


QUANTIZE_NVFP4 = Kernel("cpu nvfp4", _refuses_nvfp4, _quantize_nvfp4, "cpu")

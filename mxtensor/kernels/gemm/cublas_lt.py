"""Products of float8 codes by cuBLASLt, described once: the same call that ``torch._scaled_mm`` makes, without what it
asks anew each time.

torch describes the layouts, asks cuBLASLt for an algorithm and frees the descriptions in every call: 20 to 30 us of the
host. A program that is recorded (``core/recording.py``) keeps them. The algorithm is the one that torch's call gets,
which asks with the same description and the same limit of workspace, so that results are the same to the bit.
Source: the cuBLAS manual, cublasLtMatmul; torch's ``at::cuda::blas::scaled_gemm`` for what it sets.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core import recording
from ...core.devices import cached, device_capability
from ..runtime import host_calls
from ..runtime.cuda_driver import library_of_torch
from ..runtime.triton_launch import on

TYPES = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29, torch.bfloat16: 14, torch.float16: 2, torch.float32: 0}
"""dtype -> cudaDataType_t."""
COMPUTE_FLOAT32, FLOAT32 = 68, 0
TRANSA, TRANSB, EPILOGUE, BIAS, A_SCALE, B_SCALE, FAST, BIAS_TYPE, A_MODE, B_MODE = 3, 4, 7, 8, 17, 18, 25, 26, 31, 32
"""Attributes of a product: cublasLtMatmulDescAttributes_t."""
TRANSPOSED, PLAIN = 1, 0
ADD_BIAS = 4
"""The epilogue that adds a bias: cublasLtEpilogue_t."""
SCALAR, OUTER_VECTOR = 0, 3
"""One scale for all, or one for each row of an operand: cublasLtMatmulMatrixScale_t."""
MOST_WORKSPACE = 1
"""Attribute of a preference."""
WORKSPACE = 32 << 20
"""Bytes that torch offers on sm90."""
CAPABILITY = (9, 0)
"""Where torch calls cuBLASLt with this workspace; elsewhere it multiplies rows by CUTLASS, or offers other memory."""
OLDEST = 120900
"""The first cuBLASLt with a scale for each row."""


class Shape(NamedTuple):
    """What an algorithm depends on: (M, K) row-major by the transpose of (N, K) row-major."""

    rows: int
    cols: int
    inner: int
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype
    by_rows: bool
    """whether scales are one a row; else one for all"""
    biased: bool
    fast: bool
    """accumulation in fewer bits"""
    strides: tuple[int, int, int]
    """of rows of a, b and the result"""


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


def _checked(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt returned status {status}")


@cached
def library() -> ctypes.CDLL | str:
    """The cuBLASLt that torch has loaded, or the reason why it cannot be called."""
    lib = library_of_torch("cublasLt")
    if isinstance(lib, str):
        return lib
    lib.cublasLtGetVersion.restype = ctypes.c_size_t
    version = lib.cublasLtGetVersion()
    return lib if version >= OLDEST else f"cuBLASLt {version} has no scales for rows, {OLDEST} has"


@cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    lib = library()
    assert not isinstance(lib, str)
    with on(device):
        _checked(lib.cublasLtCreate(ctypes.byref(handle)))
    return handle


class _Descriptions:
    """The descriptions of one product: freed with it."""

    def __init__(self, lib: ctypes.CDLL, shape: Shape) -> None:
        self._lib = lib
        self.product = ctypes.c_void_p()
        _checked(lib.cublasLtMatmulDescCreate(ctypes.byref(self.product), COMPUTE_FLOAT32, FLOAT32))
        mode = OUTER_VECTOR if shape.by_rows else SCALAR
        given = [(TRANSA, TRANSPOSED), (TRANSB, PLAIN), (A_MODE, mode), (B_MODE, mode)]
        if shape.biased:
            given += [(EPILOGUE, ADD_BIAS), (BIAS_TYPE, TYPES[shape.out])]
        for attribute, value in given:
            self._set(attribute, ctypes.c_int32(value))
        self._set(FAST, ctypes.c_int8(shape.fast))
        for attribute in self.pointers(shape):  # an algorithm may depend on there being addresses
            self._set(attribute, ctypes.c_void_p(256))
        a, b, out = shape.strides
        # cuBLAS counts columns first: the transpose of the result is b times the transpose of a
        self.b = self._layout(shape.b, shape.inner, shape.cols, b)
        self.a = self._layout(shape.a, shape.inner, shape.rows, a)
        self.out = self._layout(shape.out, shape.cols, shape.rows, out)

    @staticmethod
    def pointers(shape: Shape) -> tuple[int, ...]:
        """Attributes that are addresses: of the scales of b, of those of a, and of the bias."""
        return (A_SCALE, B_SCALE, BIAS) if shape.biased else (A_SCALE, B_SCALE)

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _checked(self._lib.cublasLtMatmulDescSetAttribute(self.product, attribute, ctypes.byref(value), size))

    def _layout(self, dtype: torch.dtype, rows: int, cols: int, stride: int) -> ctypes.c_void_p:
        out = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(cols), ctypes.c_int64(stride)
        _checked(self._lib.cublasLtMatrixLayoutCreate(ctypes.byref(out), TYPES[dtype], *sizes))
        return out

    def __del__(self) -> None:
        for name in ("a", "b", "out"):
            if hasattr(self, name):
                self._lib.cublasLtMatrixLayoutDestroy(getattr(self, name))
        self._lib.cublasLtMatmulDescDestroy(self.product)

    def algorithm(self, handle: ctypes.c_void_p) -> tuple[bytes, int] | None:
        """(the algorithm, bytes of workspace); None if cuBLASLt has none."""
        preference, size, found = ctypes.c_void_p(), ctypes.c_size_t(WORKSPACE), ctypes.c_int()
        result, lib = _Heuristic(), self._lib
        _checked(lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        try:
            _checked(
                lib.cublasLtMatmulPreferenceSetAttribute(
                    preference, MOST_WORKSPACE, ctypes.byref(size), ctypes.c_size_t(ctypes.sizeof(size))
                )
            )
            layouts = self.b, self.a, self.out, self.out
            ask = lib.cublasLtMatmulAlgoGetHeuristic
            status = ask(handle, self.product, *layouts, preference, 1, ctypes.byref(result), ctypes.byref(found))
        finally:
            lib.cublasLtMatmulPreferenceDestroy(preference)
        return None if status or not found.value or result.state else (bytes(result.algorithm), result.workspace)


def host_product(shape: Shape, device: torch.device) -> tuple[host_calls.Run, int] | None:
    """``run(stream, b, a, out, workspace, scales of b, scales of a[, bias])`` with all as addresses, and the bytes of
    workspace; None if torch multiplies."""
    compiled, lib = host_calls.module(), library()
    if isinstance(compiled, str) or isinstance(lib, str) or device_capability(device) != CAPABILITY:
        return None
    with on(device):
        handle, of = _handle(device), _Descriptions(lib, shape)
        found = of.algorithm(handle)
    if found is None:
        return None
    functions = map(host_calls.address_of, (lib.cublasLtMatmul, lib.cublasLtMatmulDescSetAttribute))
    owned = (handle.value, of.product.value, of.b.value, of.a.value, of.out.value, of.out.value)
    return compiled.Product(*functions, *owned, *found, of.pointers(shape), _checked, of), found[1]


def recorded_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, fast: bool
) -> Tensor | None:
    """``a @ b^T``: (M, K) by (N, K) of float8 codes with a float32 scale for each row or for all, as a step of the
    program that is being recorded; None if nothing is, or torch multiplies."""
    recorder = recording.active()
    if recorder is None or not a.is_cuda:
        return None
    (rows, inner), cols = a.shape, b.shape[0]
    by_rows = scale_a.numel() == rows and scale_b.numel() == cols and rows + cols > 2
    if not by_rows and (scale_a.numel() != 1 or scale_b.numel() != 1):
        return None
    if a.stride(1) != 1 or b.stride(1) != 1 or any(n % 16 for n in (inner, cols, a.stride(0), b.stride(0))):
        return None
    if 0 in (rows, inner, cols) or any(t.data_ptr() % 16 for t in (a, b)) or out_dtype not in TYPES:
        return None
    if bias is not None and (bias.dtype is not out_dtype or not bias.is_contiguous()):
        return None
    if not scale_a.is_contiguous() or not scale_b.is_contiguous():
        return None
    shape = Shape(
        rows, cols, inner, a.dtype, b.dtype, out_dtype, by_rows, bias is not None, fast,
        (a.stride(0), b.stride(0), cols),
    )  # fmt: skip
    with recorder.paused():
        made = host_product(shape, a.device)
    if made is None:
        return None
    run, size = made
    out = torch.empty((rows, cols), dtype=out_dtype, device=a.device)
    workspace = torch.empty(size, dtype=torch.uint8, device=a.device) if size else None
    given = b, a, out, workspace, scale_b, scale_a, *([] if bias is None else [bias])
    with recorder.paused():
        run(torch.cuda.current_stream(a.device).cuda_stream, *(0 if t is None else t.data_ptr() for t in given))
    recorder.launch(recording.Launch(run, (), (), tuple(0 if t is None else t for t in given)))
    return out

"""cuBLAS and cuBLASLt through ctypes, for what torch does not offer.

cuBLAS: an ``alpha`` of the accumulator on the device, ``y = round(s * (a @ b^T) + beta * bias)`` with ``s`` a float32
on the GPU. torch's products take ``alpha`` from the host only; to read ``s`` back would wait for the GPU and make CUDA
graphs impossible. Source: the cuBLAS manual, cublasGemmEx and CUBLAS_POINTER_MODE_DEVICE.

cuBLASLt: products of float8 codes that are described once, the same call that ``torch._scaled_mm`` makes. torch
describes the layouts, asks for an algorithm and frees the descriptions in every call: 20 to 30 us of the host. A
program that is recorded (``core/recording.py``) keeps them. The algorithm is the one that torch's call gets, which asks
with the same description and the same limit of workspace, so that results are the same to the bit.
Source: the cuBLAS manual, cublasLtMatmul; torch's ``at::cuda::blas::scaled_gemm`` for what it sets.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core import custom_ops, recording
from ...core.devices import cached, device_capability, staying
from ...core.kernel import Spec
from ...core.tracing import is_traced
from ..runtime import host_calls
from ..runtime.cuda_driver import library_of_torch
from ..runtime.custom_op import check_argument, check_scalars
from ..runtime.triton_launch import on
from .spec import GemmArgs

_TRANSPOSE, _PLAIN = 1, 0
_BFLOAT16, _COMPUTE_FLOAT32, _DEFAULT_ALGORITHM = 14, 68, -1
_OUT = {torch.bfloat16: _BFLOAT16, torch.float32: 0}
_HOST_POINTERS, _DEVICE_POINTERS = 0, 1


def refuses(spec: Spec, args: GemmArgs) -> str | None:
    """Why a product with an ``alpha`` on the device cannot run here; None if it can."""
    library = library_of_torch("cublas")
    if isinstance(library, str):
        return library
    if len(spec.shapes[0]) != 2:
        return "applies a global scale to products of matrices only (through cuBLAS)"
    return None


_constants: dict[tuple[float, torch.device], Tensor] = {}


def _constant(value: float, device: torch.device) -> Tensor:
    """A float32 on the device; 0 and 1 are cached."""
    cached_value = _constants.get((value, device))
    if cached_value is None:
        stays = value in (0.0, 1.0) and not torch.cuda.is_current_stream_capturing()

        def make() -> Tensor:
            return torch.full((), value, dtype=torch.float32, device=device)

        cached_value = staying(device, make) if stays else make()
        if stays:
            torch.cuda.current_stream(device).synchronize()  # other streams will read it
            _constants[value, device] = cached_value
    return cached_value


def _by_rows(t: Tensor) -> tuple[Tensor, bool]:
    """(row-major matrix, whether it is t and not its transpose); a copy of t if neither is row-major."""
    for one, plain in ((t, True), (t.t(), False)):
        if one.stride(1) == 1 and one.stride(0) >= max(one.shape[1], 1):
            return one, plain
    return t.contiguous(), True


def eager_device_scaled_mm(
    a: Tensor,
    b: Tensor,
    scales: list[Tensor],
    bias: Tensor | None,
    alpha: float,
    beta: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """``alpha * prod(scales) * a @ b^T + beta * bias``: a (M, K), b (N, K) bfloat16, row-major or column-major.

    ``scales``: one or two float32 scalars. Result (M, N) in bfloat16 or float32. Raises RuntimeError if cuBLAS fails.
    """
    rows, inner, cols = a.shape[0], a.shape[1], b.shape[0]
    (a, a_plain), (b, b_plain) = _by_rows(a), _by_rows(b)
    multiplier = scales[0] if len(scales) == 1 else scales[0] * scales[1]
    if alpha != 1:
        multiplier = multiplier * alpha
    if bias is not None and beta != 0:
        out = bias.to(out_dtype).expand(rows, cols).contiguous()
        out = out.clone() if out.data_ptr() == bias.data_ptr() else out
    else:
        out, beta = a.new_empty(rows, cols, dtype=out_dtype), 0.0
    if not rows or not cols:
        return out
    if not inner:
        return out.mul_(beta) if beta else out.zero_()
    start = recording.constant(_constant, beta, a.device)
    layout = cols, rows, inner, b.stride(0), a.stride(0), b_plain, a_plain
    recording.call(_gemm, out, a, b, multiplier, start, layout)
    return out


def _gemm(out: Tensor, a: Tensor, b: Tensor, multiplier: Tensor, start: Tensor, layout: tuple[int, ...]) -> None:
    """``out = multiplier * a @ b^T + start * out`` in cuBLAS's terms: column-major, so that out^T = b a^T."""
    library = library_of_torch("cublas")
    assert isinstance(library, ctypes.CDLL)
    cols, rows, inner, b_stride, a_stride, b_plain, a_plain = layout
    with torch.cuda.device(a.device):
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        pointer = ctypes.c_void_p
        library.cublasSetPointerMode_v2(handle, _DEVICE_POINTERS)
        try:
            status = library.cublasGemmEx(
                handle, _TRANSPOSE if b_plain else _PLAIN, _PLAIN if a_plain else _TRANSPOSE, cols, rows, inner,
                pointer(multiplier.data_ptr()), pointer(b.data_ptr()), _BFLOAT16, b_stride,
                pointer(a.data_ptr()), _BFLOAT16, a_stride,
                pointer(start.data_ptr()), pointer(out.data_ptr()), _OUT[out.dtype], cols,
                _COMPUTE_FLOAT32, _DEFAULT_ALGORITHM,
            )  # fmt: skip
        finally:
            library.cublasSetPointerMode_v2(handle, _HOST_POINTERS)
    if status:
        raise RuntimeError(f"cublasGemmEx returned status {status}")


@custom_ops.define("mxtensor::device_scaled_mm")
def device_scaled_mm(
    a: Tensor, b: Tensor, scales: list[Tensor], bias: Tensor | None, alpha: float, beta: float, out_dtype: torch.dtype
) -> Tensor:
    """``eager_device_scaled_mm`` of checked arguments: one op for torch.compile."""
    op, library = "mxtensor::device_scaled_mm", library_of_torch("cublas")
    if a.device.type != "cuda" or isinstance(library, str):
        raise ValueError(f"{op} needs cuBLAS and tensors on a CUDA device; a is on {a.device}")
    check_argument(op, "a", a, (torch.bfloat16,), a.shape[:2] if a.dim() == 2 else (None, None), a.device)
    check_argument(op, "b", b, (torch.bfloat16,), (*b.shape[:1], a.shape[1]), a.device)
    check_scalars(op, "scales", scales, a.device)
    if len(scales) not in (1, 2) or out_dtype not in _OUT or (bias is not None and bias.device != a.device):
        raise ValueError(f"{op} takes one or two scales, a bias on {a.device} and gives bfloat16 or float32")
    return eager_device_scaled_mm(a, b, scales, bias, alpha, beta, out_dtype)


@custom_ops.fake_of(device_scaled_mm)
def _(a, b, scales, bias, alpha, beta, out_dtype):  # type: ignore[no-untyped-def]
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


def mm(a: Tensor, b: Tensor, scales: list[Tensor], args: GemmArgs) -> Tensor:
    """``device_scaled_mm``; eager calls skip torch's dispatcher."""
    work = device_scaled_mm if is_traced(a, b) else eager_device_scaled_mm
    return work(a, b, scales, args.bias, args.alpha, args.beta, args.out_dtype)


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

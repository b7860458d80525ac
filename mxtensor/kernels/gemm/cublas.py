"""cuBLAS through ctypes, for what torch does not offer: an ``alpha`` of the accumulator on the device.

``y = round(s * (a @ b^T) + beta * bias)`` with ``s`` a float32 on the GPU. torch's products take ``alpha``
from the host only; to read ``s`` back would wait for the GPU and make CUDA graphs impossible.
Source: the cuBLAS manual, cublasGemmEx and CUBLAS_POINTER_MODE_DEVICE.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ...core import custom_ops, recording
from ...core.kernel import Spec
from ...core.tracing import is_traced
from ..runtime.check import check_argument, check_scalars
from ..runtime.cuda_driver import library_of_torch
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
        cached_value = torch.full((), value, dtype=torch.float32, device=device)
        if value in (0.0, 1.0) and not torch.cuda.is_current_stream_capturing():
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

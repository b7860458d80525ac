"""Eager casts on CPU in C++ to NVFP4 with four over six, or with a global scale for each row.

``nvfp4.cpp`` reads a block once and rounds it with each of its two scales; ``quantize.cpp`` has one scale for a block.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from ...core.kernel import Kernel, Spec, elsewhere
from ...core.names import dtype_name
from ...numerics.cast import Cast
from ...numerics.formats import E2M1
from ...numerics.operand import Operand
from ...numerics.reference import global_scales, tensor_amax
from ...numerics.validate import has_memory
from ..runtime.native_build import load
from .cpu import FLAGS, HEADERS, KINDS, SOURCE, in_spans

BLOCKS = ((1, 16), (16, 16))
NONE, MAE, MSE = range(3)
"""The order of Error in nvfp4.cpp."""


@cache
def library() -> ctypes.CDLL | str:
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


def _refuses(spec: Spec, x: Tensor, cast: Cast) -> str | None:
    if cast.why_not_plain is None:
        return "for four over six and global scales of rows"
    if spec.device.type != "cpu":
        return elsewhere("cpu", spec.device.type)
    if spec.traced:
        return "being traced: one op serves better"
    format = cast.format
    if format.block not in BLOCKS or format.element is not E2M1:
        return f"not for {format.element.name} in blocks of {format.block[0]}x{format.block[1]}"
    if spec.dtype not in KINDS:
        return f"not for {dtype_name(spec.dtype)}"
    if x.dim() != 2 and (format.rows_are_blocked or not x.is_contiguous()):
        return "not a matrix, and not contiguous rows"
    if not x.numel() or not has_memory(x):
        return "no values"
    built = library()
    return built if isinstance(built, str) else None


def _quantize(x: Tensor, cast: Cast) -> Operand:
    lib, format, four, shape = library(), cast.format, cast.four_over_six, tuple(x.shape)
    assert isinstance(lib, ctypes.CDLL)
    x = x.detach() if x.dim() == 2 else x.detach().view(-1, shape[-1])
    amax = x.abs().amax(1, keepdim=True).to(torch.float32) if format.row_scaled else tensor_amax(x)
    out = Operand.empty(format, tuple(x.shape), x.device)
    global_scale = global_scales(amax, cast)[1]
    error = NONE if four is None else MSE if four.squares else MAE
    bound = 448.0 if four is None else four.largest_scale
    (rows, cols), tile = x.shape, format.block[0]
    source, codes, scales, largest = (t.data_ptr() for t in (x, out.data, out.scale, amax))

    def work(first: int, end: int) -> int:
        return lib.mx_encode_nvfp4(  # type: ignore[no-any-return]
            source, KINDS[x.dtype], rows, cols, *x.stride(), tile, error, bound, largest, format.row_scaled, first, end,
            codes, scales,
        )  # fmt: skip

    in_spans(work, -(-rows // tile), x.numel(), x, out, amax)
    data, scale = out.data.view(format.data_shape(shape)), out.scale.view(format.scale_shape(shape))
    return Operand(data, scale, global_scale.view(format.global_scale_shape(shape)), format, shape)


QUANTIZE = Kernel("cpu nvfp4", _refuses, _quantize, "cpu")

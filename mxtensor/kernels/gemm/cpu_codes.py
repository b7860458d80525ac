"""The kernel row ``cpu_codes``: products of rows with codes on CPU that decode each code in registers, once.

Weights stay codes: no decoded copy of a weight is written to memory. A product of few rows takes the time of reading the
codes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.kernel import Kernel, Spec
from ...core.tracing import is_traced
from ...numerics.formats import E2M1, E2M3, E3M2, E4M3, E5M2, INT8, Format
from ...numerics.operand import Operand
from ...numerics.validate import check_sizes
from ..quantize.cpu import KINDS, SCALES
from ..quantize.select import dequantize_operand, fake_quantize
from ..runtime.availability import exported
from .cpu_library import Library, library
from .spec import FakeQuantized, GemmArgs, GemmOperand, Unquantized, flat_bias, not_rows_by_matrix

ELEMENTS = (E4M3, E5M2, E3M2, E2M3, E2M1, INT8)
"""In the order of ``ElementId`` in cpu/problem.h; scales have that of ``SCALES``."""
MOST_ROWS = 64


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refuses(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> str | None:
    reason = not_rows_by_matrix(spec, a)
    if reason is not None:
        return reason
    if not isinstance(b, Operand):
        return "needs a quantized right operand, this one has no codes"
    f = b.format
    if f.element not in ELEMENTS or f.scale not in SCALES:
        return f"has no decoder for {f.element.name} with {f.scale.name} scales"
    x = a.values if isinstance(a, FakeQuantized) else a.x if isinstance(a, Unquantized) else a
    for dtype in (args.out_dtype, *((x.dtype,) if isinstance(x, Tensor) else ())):
        if dtype not in KINDS:
            return f"computes with float32, bfloat16 and float16, not {_name(dtype)}"
    if not (b.data.is_contiguous() and b.scale.is_contiguous()):
        return "the codes are not contiguous"
    if 0 in (*spec.shapes[0], *spec.shapes[1]):
        return "no values"
    rows = math.prod(spec.shapes[0][:-1])
    if rows > MOST_ROWS:
        return f"for at most {MOST_ROWS} rows, this product has {rows}"
    reason = exported(spec)
    if reason is None:
        found = library()
        reason = found if isinstance(found, str) else None
    return reason


def numbers_of(format: Format) -> tuple[int, int, int, int]:
    """A format as the op takes it: element, scale and extents of a block."""
    return ELEMENTS.index(format.element), SCALES.index(format.scale), *format.block


def _dtype_of(format: Format) -> torch.dtype:
    """The shorter dtype that holds values of a format without the global scale exactly."""
    return torch.bfloat16 if format.exact_in_bfloat16 else torch.float32


def _activations(a: GemmOperand) -> tuple[Tensor, Tensor | None]:
    """The activations as plain values, and their global scale."""
    if isinstance(a, Unquantized):
        return fake_quantize(a.x, a.cast, _dtype_of(a.format))
    if isinstance(a, FakeQuantized):
        return a.values, a.global_scale
    if isinstance(a, Operand):
        return dequantize_operand(replace(a, global_scale=None), _dtype_of(a.format)), a.global_scale
    return a, None


def run(a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Tensor:
    assert isinstance(b, Operand)
    if not is_traced(b.data):
        check_sizes(b)
    x, x_global = _activations(a)
    shape = (*x.shape[:-1], b.shape[-2])
    if len(shape) != 2:
        x = x.reshape(-1, x.shape[-1])
    if not x.is_contiguous() and (x.stride(1) != 1 or x.stride(0) < x.shape[1]):
        x = x.contiguous()
    bias = flat_bias(args, shape)
    if bias is not None and bias.dtype not in KINDS:
        bias = bias.float()
    found = library()
    assert not isinstance(found, str)
    out: Tensor = found.linear(
        x, b.data, b.scale, b.global_scale, x_global, bias, numbers_of(b.format), float(args.alpha), float(args.beta),
        args.out_dtype,
    )  # fmt: skip
    return out if len(shape) == 2 else out.view(shape)


class Launch:
    """A product with one weight whose addresses the op holds under a number. Stores no tensor."""

    __slots__ = ("_library", "_number", "_op")

    def __init__(self, found: Library, number: int) -> None:
        self._library, self._op, self._number = found, found.prepared, number

    def __call__(self, x: Tensor) -> Tensor:
        return self._op(x, self._number)  # type: ignore[no-any-return]

    def __del__(self) -> None:
        self._library.forget(self._number)


def prepare(x: Tensor, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Any:
    """The launch of ``run(a, b, args)`` for any x with this layout; None if the product takes more than one op."""
    assert isinstance(b, Operand)
    check_sizes(b)
    bias = args.bias
    simple = bias is None or (bias.dim() == 1 and bias.is_contiguous() and bias.dtype in KINDS)
    if not isinstance(a, Tensor) or not simple or args.alpha != 1 or args.beta != 1 or args.out_dtype is not x.dtype:
        return None
    if not x.is_contiguous():
        return None
    found = library()
    assert not isinstance(found, str)
    shape = (*x.shape[:-1], b.shape[-2])
    number = found.prepare(a, b.data, b.scale, b.global_scale, bias, numbers_of(b.format), shape)
    return Launch(found, number)


KERNEL = Kernel("cpu_codes", refuses, run, "cpu", prepare=prepare)

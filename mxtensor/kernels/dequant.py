"""Decode to bfloat16, which loses nothing, and multiply with the backend's own bfloat16 product.

An element of 8 bits or less times a power of two has at most 7 significant bits, so bfloat16 holds it exactly and a
bfloat16 product that accumulates in float32 equals the definition up to the order of summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..codec import Operand
from ..dispatch import Kernel, Spec, is_traced
from . import cast_blocked
from .emulated import values
from .gemm_spec import Factor, GemmArgs

SLICE = 1 << 21
"""Weight values decoded at a time on CPU: 4 MiB of bfloat16, reused, instead of a fresh copy of the weight."""


def refuses(spec: Spec, a: Factor, b: Factor, args: GemmArgs) -> str | None:
    if args.out_dtype is not torch.bfloat16:
        return f"computes in bfloat16, the result is {str(args.out_dtype).removeprefix('torch.')}"
    for factor in (a, b):
        if isinstance(factor, Operand) and not factor.format.scale.power_of_two:
            return f"{factor.format} has {factor.format.scale.name} scales: its values are not exact in bfloat16"
        if not isinstance(factor, Operand) and factor.dtype is not torch.bfloat16:
            return f"a factor is {str(factor.dtype).removeprefix('torch.')}"
    if spec.device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bfloat16 product that accumulates in float32"
    if len(spec.shapes[0]) > 3 and args.bias is not None:
        return "adds a bias to two- and three-dimensional products only"
    return None


def _product(a: Tensor, b: Tensor, args: GemmArgs) -> Tensor:
    """``a @ b`` with the bias added before rounding, which is what addmm and baddbmm do with bfloat16 operands."""
    if args.bias is None:
        return torch.matmul(a, b) if args.alpha == 1 else torch.matmul(a, b * args.alpha)
    add = torch.addmm if a.dim() == 2 else torch.baddbmm
    return add(args.bias, a, b, alpha=args.alpha, beta=args.beta)


def _sliced(a: Tensor, b: Operand, args: GemmArgs) -> Tensor:
    rows, cols = b.shape
    out = torch.empty(a.shape[0], rows, dtype=torch.bfloat16)
    step = max(1, SLICE // cols)
    buffer = torch.empty(min(step, rows), cols, dtype=torch.bfloat16)
    for start in range(0, rows, step):
        length = min(step, rows - start)
        weight = cast_blocked.decode_rows(b, start, length, buffer.narrow(0, 0, length)).t()
        target = out.narrow(1, start, length)
        if args.bias is None:
            torch.mm(a, weight, out=target)
        else:
            bias = args.bias.expand(a.shape[0], rows).narrow(-1, start, length)
            torch.addmm(bias, a, weight, alpha=args.alpha, beta=args.beta, out=target)
    return out


def run(a: Factor, b: Factor, args: GemmArgs) -> Tensor:
    left = values(a, torch.bfloat16)
    if isinstance(b, Operand) and left.dim() == 2 and left.shape[0] and (args.bias is not None or args.alpha == 1):
        spec = Spec("dequantize", (b.shape,), (str(b.format),), torch.bfloat16, b.data.device, is_traced(left, b.data))
        if cast_blocked.DEQUANTIZE.refuses(spec, b) is None:
            return _sliced(left, b, args)
    return _product(left, values(b, torch.bfloat16).transpose(-1, -2), args)


KERNEL = Kernel("dequant", refuses, run)

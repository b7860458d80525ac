"""Both operands quantized, multiplied by torch on the tensor cores with their scales, also grouped.

float8 from sm89 on, MXFP8, MXFP4 and NVFP4 from sm100 on: see ``scaled_mm_contract.py``. An alpha or a bias that these
kernels cannot apply before their one rounding is applied to a float32 result, or refused if there is none.

Grouped products are those of groups of rows by a stack of weights: float8 per row on sm90, MXFP8 on sm100; bfloat16
results. The host never reads the ends of the groups.
"""

from __future__ import annotations

import math
from typing import cast as typed

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import recording
from ...core.kernel import Kernel, Spec, elsewhere
from ...core.names import dtype_name
from ...core.tracing import is_traced
from ...numerics.cast import Cast
from ...numerics.derived import cached_value, round_up, swizzle, swizzle_groups
from ...numerics.formats import FP32, FULL, Format
from ...numerics.operand import Operand
from ..operands import MAX_GROUPS, GemmOperand, Unquantized, data_of, format_of
from ..quantize import triton_rows
from ..quantize.choose_cast import operand_of, quantize_operand
from ..runtime.cuda_driver import other_build
from .scaled_mm_contract import (
    FLOAT32,
    GROUPED_SCALINGS,
    LINE,
    ROW_BLOCK,
    SCALINGS,
    SQUARE_BLOCK,
    TENSOR_BLOCK,
    VECTOR_BLOCK,
    Block,
    Product,
    Scaling,
    multiply,
    plan_here,
    row_major,
)
from .spec import GemmArgs, finish, needs_codes, zero_after

WHOLE_SUMS = (10, 0)
"""The first compute capability whose tensor cores accumulate float8 products in full float32."""


def refuses(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> str | None:
    scaling = chosen(SCALINGS, spec, a, b)
    if isinstance(scaling, str):
        return scaling
    if len(spec.shapes[1]) > 2 and math.prod(spec.shapes[1][:-2]) != 1:
        return f"multiplies by one matrix, the right operand is a batch: {spec.shapes[1]}"
    for one in (a, b):
        if len(one.shape) < 2 or not _flattens(one):
            return f"a {format_of(one)} operand of shape {tuple(one.shape)} is not a matrix of whole blocks"
    if args.out_dtype is FLOAT32 and scaling.scale is FP32 and spec.capability < WHOLE_SUMS:
        return (
            f"tensor cores of sm{spec.capability[0]}{spec.capability[1]} accumulate float8 products in about 14 bits, "
            "too few for a float32 result"
        )
    if _output(scaling, args, spec.shapes[1][-2]) is None:
        names = " or ".join(dtype_name(d) for d in scaling.outputs)
        return (
            f"{scaling.name} scaling returns {names} only: this bias, alpha or "
            f"{dtype_name(args.out_dtype)} result needs a float32 product"
        )
    return None


def chosen(table: tuple[Scaling, ...], spec: Spec, a: GemmOperand, b: GemmOperand) -> Scaling | str:
    """The scaling for these operands on the device of ``spec``, or why there is none."""
    if spec.device.type != "cuda":
        return elsewhere("cuda", spec.device.type)
    reason = other_build()
    if reason is not None:
        return reason
    left, right = format_of(a), format_of(b)
    for format in (left, right):
        if not isinstance(format, Format):
            return f"needs both operands quantized, one is {str(format).removeprefix('torch.')}"
    return needs_codes(a, b) or plan_here(table, typed(Format, left), typed(Format, right), spec.device)


def _flattens(side: GemmOperand) -> bool:
    """Whether a stack can be read as one matrix: no block would cross from one matrix into the next."""
    rows = typed(Format, format_of(side)).block[0]
    return rows in (1, FULL) or math.prod(side.shape[:-2]) == 1 or side.shape[-2] % rows == 0


def _added_inside(scaling: Scaling, args: GemmArgs, cols: int) -> bool:
    """Whether the kernel itself applies alpha and the bias."""
    if args.alpha != 1 or args.bias is None or args.beta == 0:
        return args.alpha == 1
    fits = tuple(args.bias.shape) == (cols,) and args.bias.dtype is args.out_dtype and args.out_dtype is not FLOAT32
    return scaling.bias and args.beta == 1 and fits


def _output(scaling: Scaling, args: GemmArgs, cols: int) -> torch.dtype | None:
    """The dtype that the kernel has to return so that the result is rounded once; None if there is none."""
    if args.out_dtype not in (torch.bfloat16, torch.float16, FLOAT32):
        return None
    if args.out_dtype in scaling.outputs and _added_inside(scaling, args, cols):
        return args.out_dtype
    return FLOAT32 if FLOAT32 in scaling.outputs else None


# ---------------------------------------------------------------------------------------------- arguments


def dense(t: Tensor) -> Tensor:
    """``t`` row-major, strides of dimensions of size 1 included, with a start that is a multiple of 16 bytes."""
    if not t.is_contiguous():
        t = t.clone(memory_format=torch.contiguous_format)
    if t.stride() != row_major(tuple(t.shape)):
        t = t.as_strided(t.shape, row_major(tuple(t.shape)))
    return t.clone() if t.storage_offset() * t.dtype.itemsize % LINE else t


def padded(t: Tensor, rows: int, cols: int) -> Tensor:
    """``t`` with its last two dimensions zero-padded to multiples of ``rows`` and ``cols``."""
    down, right = -t.shape[-2] % rows, -t.shape[-1] % cols
    if not down and not right:
        return dense(t)
    one_byte = t.view(torch.uint8) if t.dtype.itemsize == 1 else t
    return F.pad(one_byte, (0, right, 0, down)).view(t.dtype)


def spread(scale: Tensor, block: Block, target: Block, shape: tuple[int, ...]) -> Tensor:
    """Scales of blocks ``block`` repeated to be scales of blocks ``target``, for values of ``shape``."""
    rows, cols = shape[-2:]
    if target[0] == 1 and block[0] == FULL:
        scale = scale.expand(*shape[:-1], scale.shape[-1])
    elif target[0] == 1 and block[0] != 1:
        scale = scale.repeat_interleave(block[0], -2).narrow(-2, 0, rows)
    if target[1] != block[1]:
        blocks = -(-cols // target[1])
        times = blocks if block[1] == FULL else block[1] // target[1]
        scale = scale.repeat_interleave(times, -1).narrow(-1, 0, blocks)
    return scale


def _scale_layout(scale: Tensor, block: Block, target: Block, shape: tuple[int, ...], whole_rows: int) -> Tensor:
    """The scales of values of ``shape`` in the layout of ``Product``, for data padded to ``whole_rows``."""
    scale = spread(scale, block, target, shape)
    if scale.dtype is torch.uint8:
        return swizzle(scale)
    if target == TENSOR_BLOCK:
        return dense(scale)
    if target == VECTOR_BLOCK:
        return (
            padded(scale.transpose(-1, -2), 1, whole_rows)
            if whole_rows != shape[-2]
            else dense(scale.transpose(-1, -2))
        )
    if target == SQUARE_BLOCK:
        return padded(scale, 1, 4)
    return padded(scale, whole_rows, 1)  # per row


def quantize_swizzled(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor, Tensor | None]:
    """(data, swizzled scale, global scale) of a matrix, by one kernel if Triton is available."""
    spec = Spec("quantize", (tuple(x.shape),), ((x.dtype, cast.format),), x.dtype, x.device, is_traced(x))
    if not spec.traced and triton_rows.refuses_quantize(spec, x, cast) is None:
        data, scale, global_scale = triton_rows.quantize_swizzled(x, cast)
        return data.view(cast.format.element.dtype), scale, global_scale
    operand = quantize_operand(x, cast)
    return operand.data, swizzle(operand.scale), operand.global_scale


def _as_matrix(quantized: Operand | Unquantized) -> Operand | Unquantized:
    if len(quantized.shape) == 2:
        return quantized
    shape = (math.prod(quantized.shape[:-1]), quantized.shape[-1])
    if isinstance(quantized, Unquantized):
        return Unquantized(quantized.x.reshape(shape), quantized.cast)
    data, scale = quantized.data.reshape(shape[0], -1), quantized.scale.reshape(-1, quantized.scale.shape[-1])
    return Operand(data, scale, quantized.global_scale, quantized.format, shape)


def side(quantized: Operand | Unquantized, scaling: Scaling, which: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, scales, global scale) of a matrix or a stack, padded, in the layout of the left (0) or right (1) side."""
    target, multiple = scaling.blocks[which], (scaling.rows, scaling.cols)[which]
    if isinstance(quantized, Unquantized):
        if scaling.swizzled and quantized.format.block == target and quantized.x.dim() == 2:
            data, scale, global_scale = quantize_swizzled(quantized.x, quantized.cast)
            return padded(data, multiple, scaling.inner), scale, global_scale
        operand, fresh = quantize_operand(quantized.x, quantized.cast), True
    else:
        operand, fresh = quantized, False
    shape, block, whole = operand.shape, operand.format.block, round_up(operand.shape[-2], multiple)

    def convert(scale: Tensor) -> Tensor:
        return _scale_layout(scale, block, target, shape, whole)

    def look_up(scale: Tensor) -> Tensor:
        return cached_value(scale, (block, target, shape, whole), convert)

    trivial = fresh or (block == target and block[1] == FULL)
    scale = convert(operand.scale) if trivial else recording.derived(convert, look_up, operand.scale)
    return padded(operand.data, multiple, scaling.inner), scale, operand.global_scale


def product_of(
    scaling: Scaling, a: GemmOperand, b: GemmOperand, bias: Tensor | None, out_dtype: torch.dtype
) -> Product:
    """The arguments of the product of two quantized operands; stacks are flattened to matrices."""
    assert isinstance(a, (Operand, Unquantized)) and isinstance(b, (Operand, Unquantized))
    left, scale_a, global_scale_a = side(_as_matrix(a), scaling, 0)
    right, scale_b, global_scale_b = side(_as_matrix(b), scaling, 1)
    global_scales = [t for t in (global_scale_a, global_scale_b) if t is not None]
    if len(global_scales) == 1:  # torch needs one for each side or none
        one = torch.ones_like(global_scales[0])
        global_scales = [one, global_scales[0]] if global_scale_a is None else [global_scales[0], one]
    if bias is not None:
        bias = dense(bias) if bias.shape[0] == right.shape[0] else F.pad(bias, (0, right.shape[0] - bias.shape[0]))
    return Product(scaling, left, right, scale_a, scale_b, global_scales, bias, out_dtype)


# ---------------------------------------------------------------------------------------------- the product


def run(a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Tensor:
    rows, cols, device = math.prod(a.shape[:-1]), b.shape[-2], data_of(b).device
    shape = (*a.shape[:-1], cols) if len(a.shape) >= len(b.shape) else (*b.shape[:-2], rows, cols)
    if 0 in (rows, cols, a.shape[-1]):
        return finish(torch.zeros(shape, dtype=FLOAT32, device=device), args)
    scaling = plan_here(SCALINGS, typed(Format, format_of(a)), typed(Format, format_of(b)), device)
    assert isinstance(scaling, Scaling)
    inside = _added_inside(scaling, args, cols) and args.out_dtype in scaling.outputs
    dtype = args.out_dtype if inside else FLOAT32
    bias = args.bias if inside and args.beta != 0 else None
    out = multiply(product_of(scaling, a, b, bias, dtype))
    if out.shape[1] != cols:
        out = out.narrow(1, 0, cols).clone(memory_format=torch.contiguous_format)
    if out.shape[0] != rows:
        out = out.narrow(0, 0, rows)
    out = out.view(shape)
    return out if inside else finish(out, args)


# ---------------------------------------------------------------------------------------------- grouped


def refuses_grouped(spec: Spec, a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> str | None:
    scaling = chosen(GROUPED_SCALINGS, spec, a, b)
    if isinstance(scaling, str):
        return scaling
    return why_not_groups(scaling, spec.shapes[1][0], args)


def why_not_groups(scaling: Scaling, groups: int, args: GemmArgs) -> str | None:
    """Why ``torch._scaled_grouped_mm`` cannot give this result of so many groups; None if it can."""
    if args.out_dtype not in scaling.outputs:
        return f"returns bfloat16, the result is {dtype_name(args.out_dtype)}"
    if args.alpha != 1 or (args.bias is not None and args.beta != 0):
        return "torch._scaled_grouped_mm rounds the product before an alpha or a bias could be applied"
    if groups > MAX_GROUPS:
        return f"torch._scaled_grouped_mm takes at most {MAX_GROUPS} groups, got {groups}"
    return None


def grouped_product_of(scaling: Scaling, a: GemmOperand, b: GemmOperand, ends: Tensor) -> Product:
    """The arguments for rows a (M, K) in groups that end at ``ends`` (G,) and weights b (G, N, K)."""
    assert isinstance(a, (Operand, Unquantized)) and isinstance(b, (Operand, Unquantized))
    rows = operand_of(a)
    scale_a = spread(rows.scale, rows.format.block, scaling.blocks[0], rows.shape)
    scale_a = swizzle_groups(scale_a, ends) if scaling.swizzled else dense(scale_a)
    right, scale_b, _ = side(b, scaling, 1)
    if scaling.blocks[1] == ROW_BLOCK:
        scale_b = scale_b.squeeze(-1)
    return Product(
        scaling, padded(rows.data, 1, scaling.inner), right, scale_a, scale_b, [], None, torch.bfloat16, dense(ends)
    )


def run_grouped(a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> Tensor:
    (rows, inner), (groups, cols, _) = a.shape, b.shape
    if 0 in (rows, inner, groups, cols):
        return torch.zeros(rows, cols, dtype=args.out_dtype, device=data_of(a).device)
    formats = typed(Format, format_of(a)), typed(Format, format_of(b))
    scaling = plan_here(GROUPED_SCALINGS, *formats, data_of(a).device)
    assert isinstance(scaling, Scaling)
    return zero_after(multiply(grouped_product_of(scaling, a, b, ends)).narrow(1, 0, cols), ends)


KERNEL = Kernel("scaled_mm", refuses, run, "cuda")
GROUPED = Kernel("scaled_mm", refuses_grouped, run_grouped, "cuda")

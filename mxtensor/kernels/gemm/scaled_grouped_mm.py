"""Groups of rows times a stack of weights, both quantized: ``torch._scaled_grouped_mm``.

float8 per row on sm90, MXFP8 on sm100; bfloat16 results. The host never reads the ends of the groups.
"""

from __future__ import annotations

from typing import cast as typed

import torch
from torch import Tensor

from ...core.kernel import Kernel, Spec
from ...core.names import dtype_name
from ...numerics.formats import Format
from ...numerics.operand import Operand
from ...numerics.swizzle import swizzle_groups
from ..quantize.select import operand_of
from .scaled_mm import chosen, dense, padded, side, spread
from .scaled_mm_call import multiply
from .scaled_mm_contract import GROUPED_SCALINGS, MAX_GROUPS, ROW_BLOCK, Product, Scaling, plan_here
from .spec import GemmArgs, GemmOperand, Unquantized, data_of, format_of, zero_after


def refuses(spec: Spec, a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> str | None:
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


def product_of(scaling: Scaling, a: GemmOperand, b: GemmOperand, ends: Tensor) -> Product:
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


def run(a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> Tensor:
    (rows, inner), (groups, cols, _) = a.shape, b.shape
    if 0 in (rows, inner, groups, cols):
        return torch.zeros(rows, cols, dtype=args.out_dtype, device=data_of(a).device)
    formats = typed(Format, format_of(a)), typed(Format, format_of(b))
    scaling = plan_here(GROUPED_SCALINGS, *formats, data_of(a).device)
    assert isinstance(scaling, Scaling)
    return zero_after(multiply(product_of(scaling, a, b, ends)).narrow(1, 0, cols), ends)


KERNEL = Kernel("scaled_mm", refuses, run, "cuda")

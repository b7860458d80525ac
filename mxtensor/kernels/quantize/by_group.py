"""Casts of rows in groups, or of a stack of matrices, where each group or matrix has a scale of its own.

The definition is ``numerics/groups.py``. In Triton one pass reads the values, after those that found each amax.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.kernel import Kernel, Spec
from ...core.repeated import recorded
from ...core.select import perform
from ...numerics.cast import Cast
from ...numerics.formats import FULL, get_format
from ...numerics.groups import scaled_values_of_groups, scales_by_group
from ..runtime.custom_op import check_argument, check_device
from ..runtime.triton_launch import device_code, launch, on
from . import definition, triton_common
from .choose_cast import cast_spec
from .triton_common import SOURCES, ceil_div, code_of, seed_of
from .triton_ops import cast_arguments

TILE, FLIPPED_TILE = (32, 128, 4), (128, 32, 4)
"""(rows, columns, warps) of a program; if rows are what is contiguous. Not measured."""
SPAN = 16
"""Values of a row that have one amax where a scale belongs to no block: groups of columns have multiples."""
Quantized = tuple[Tensor, Tensor]
"""``scaled_values_of_groups``: values, and the scales of their groups."""


def _values(x: Tensor, cast: Cast, amax: Tensor) -> Tensor:
    """The values of x (rows, cols) or (matrices, rows, cols)."""
    dtype = cast.format.element.dtype if cast.format.block[0] == FULL else torch.bfloat16
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    stack, size = x if x.dim() == 3 else x.unsqueeze(0), max(cast.format.block[1], SPAN)
    if stack.stride(2) != 1 and stack.stride(1) != 1:
        stack = stack.contiguous()
    matrices, rows, cols = stack.shape
    amax = amax if amax.dim() == 3 else amax.unsqueeze(0)
    of_blocks = amax[..., ::size].expand(matrices, rows, ceil_div(cols, size))
    flipped = stack.stride(2) != 1
    high, wide, warps = FLIPPED_TILE if flipped else TILE
    with on(x.device):
        launch(
            device_code("quantize.quantize_by_group"),
            matrices * ceil_div(rows, high) * ceil_div(cols, wide),
            (
                stack, out.view(torch.uint8) if out.element_size() == 1 else out, of_blocks, seed_of(cast, x.device),
                rows, cols, *stack.stride(), *of_blocks.stride(),
            ),
            (code_of(cast, x.device), high, wide, size, cast.format.block[0] == size, flipped),
            warps,
        )  # fmt: skip
    return out


@custom_ops.define("mxtensor::quantize_by_group")
@recorded
def quantize_by_group(
    x: Tensor, amax: Tensor, format: str, scaling: str, rounding: str, seed: int | None, amax_epsilon: float
) -> list[Tensor]:
    """Values and scales of x, a matrix or a stack, by the amax of each group, which broadcasts to x."""
    op, cast = "mxtensor::quantize_by_group", Cast.of(format, scaling, rounding, seed, amax_epsilon)
    check_argument(op, "x", x, SOURCES, (None,) * max(2, min(x.dim(), 3)), x.device)
    check_argument(op, "amax", amax, (torch.float32,), (None,) * x.dim(), x.device)
    check_device(op, x)
    if not cast.format.has_tensor_scale or 0 in x.shape:
        raise ValueError(f"{op} casts formats with a scale of the whole tensor, not {cast.format} {tuple(x.shape)}")
    if any(n not in (1, size) for n, size in zip(amax.shape, x.shape, strict=True)):
        raise ValueError(f"{op}: amax {tuple(amax.shape)} does not broadcast to {tuple(x.shape)}")
    return [_values(x, cast, amax), scales_by_group(cast, amax)]


@custom_ops.fake_of(quantize_by_group)
def _(x, amax, format, scaling, rounding, seed, amax_epsilon):  # type: ignore[no-untyped-def]
    row = get_format(format)
    values = x.new_empty(x.shape, dtype=row.element.dtype if row.block[0] == FULL else torch.bfloat16)
    return [values, torch.empty_like(amax)]


def _refuses(spec: Spec, x: Tensor, cast: Cast, amax: Tensor) -> str | None:
    if cast.four_over_six is not None:
        return "has no choice of four over six"
    if cast.format.block[1] not in (FULL, SPAN):
        return f"casts blocks of {SPAN} values, not those of {cast.format}"
    return triton_common.refuses(spec) or (None if x.dim() in (2, 3) else "casts matrices and stacks of them")


def _run(x: Tensor, cast: Cast, amax: Tensor, traced: bool = False) -> Quantized:
    if traced:
        values, scales = quantize_by_group(x.detach(), amax, *cast_arguments(cast))
        return values, scales
    return _values(x, cast, amax), scales_by_group(cast, amax)


BY_GROUP = (
    Kernel("triton", _refuses, _run, "cuda", partial(_run, traced=True)),
    Kernel("reference", definition.refuses, scaled_values_of_groups),
)
"""``run(x, cast, amax)``: values and scales."""


def quantized_by_group(x: Tensor, cast: Cast, amax: Tensor) -> Quantized:
    """``scaled_values_of_groups`` by the first kernel that accepts."""
    return perform(BY_GROUP, cast_spec("cast by group", x, cast, amax), x, cast, amax)  # type: ignore[no-any-return]

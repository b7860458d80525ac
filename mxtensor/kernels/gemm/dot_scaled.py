"""The block-scaled matrix instructions of Blackwell through Triton's ``tl.dot_scaled``, on codes and row-major scales.

``scaled_mm`` (cuBLAS) is asked first. This kernel takes the other products: any M, N and K, two different elements,
groups of rows, an epilogue in float32. Scales need no conversion. Device code: ``triton_device/dot_scaled.py``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import custom_ops, recording
from ...core.devices import cached, device_capability
from ...core.kernel import Kernel, Spec
from ...core.names import dtype_name
from ...core.tracing import is_traced
from ...numerics.elements import ElementFormat
from ...numerics.formats import E2M1, E4M3, E5M2, E8M0, UE4M3, Format, get_format
from ...numerics.operand import Operand
from ...numerics.validate import check_sizes
from ..operands import GemmOperand, Unquantized
from ..quantize.choose_cast import operand_of
from ..quantize.triton_common import power_above
from ..runtime import triton_launch
from ..runtime.custom_op import check_argument, check_codes, check_device
from .spec import GemmArgs, flat_bias, needs_codes, not_a_bias_of_groups, not_rows_by_matrix

MIXES = {(10, 0): True, (10, 3): True, (11, 0): True, (12, 0): False}
"""Compute capability -> whether 8-bit times 4-bit elements work too. For these Triton 3.6 and 3.7 compile
``tl.dot_scaled`` to block-scaled instructions. For others it decodes to bfloat16 and spills registers (seen in its PTX;
on sm121, too, where UE4M3 scales do not compile)."""
ELEMENTS = {E4M3: "e4m3", E5M2: "e5m2", E2M1: "e2m1"}
"""Element -> its name in ``tl.dot_scaled``."""


class ScaleKind(NamedTuple):
    """What belongs to one scale format."""

    block: int
    elements: tuple[ElementFormat, ...]
    dtype: torch.dtype
    """The dtype that Triton reads, from which it derives the block size, 16 or 32."""


SCALES = {
    E8M0: ScaleKind(32, (E4M3, E5M2, E2M1), torch.uint8),
    UE4M3: ScaleKind(16, (E2M1,), torch.float8_e4m3fn),
}
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Tile(NamedTuple):
    """The part of the result that one program computes and its launch options; its K is 128 bytes of codes."""

    rows: float
    """the largest number of rows of a product with this tile"""
    m: int
    n: int
    warps: int
    stages: int
    band: int


_TENSOR_MEMORY = (Tile(128, 128, 64, 4, 4, 8), Tile(math.inf, 128, 128, 4, 4, 8))
_REGISTERS = (Tile(64, 64, 64, 4, 3, 8), Tile(math.inf, 128, 64, 8, 3, 8))
TILES = {10: _TENSOR_MEMORY, 11: _TENSOR_MEMORY, 12: _REGISTERS}
"""Major compute capability -> tiles. tcgen05 always multiplies 128 rows; two programs fit in one SM's tensor memory.
None spills registers (``tests/helpers/triton_targets.py``). Not timed on a Blackwell GPU."""
SMALL = (Tile(math.inf, 32, 32, 4, 2, 2),)
"""The tile on other devices and in Triton's interpreter: for tests."""


class Constants(NamedTuple):
    """``P``, the compile-time argument of the kernels."""

    a: str
    a_pack: int
    """values in a byte of a"""
    a_rows: int
    """rows of a that share a scale"""
    b: str
    b_pack: int
    b_rows: int
    block: int
    unit: int
    """bytes of which a row of scales is a multiple"""
    even: bool
    """whether K is a multiple of tile_k"""
    bias_rows: bool
    tile_m: int
    tile_n: int
    tile_k: int
    band: int
    groups: int = 0


# ---------------------------------------------------------------------------------------------- refusals


def _sm(capability: tuple[int, int]) -> str:
    return f"sm{capability[0]}{capability[1]}"


@cached
def _lacks_instructions(capability: tuple[int, int]) -> str | None:
    if capability in MIXES:
        return None
    return f"needs {', '.join(map(_sm, MIXES))} for Triton's block-scaled products, this device is {_sm(capability)}"


def _refuses_format(format: Format | torch.dtype) -> str | None:
    if not isinstance(format, Format):
        return f"needs both operands quantized, one is {str(format).removeprefix('torch.')}"
    kind = SCALES.get(format.scale)
    taken = kind and format.element in kind.elements and format.block in ((1, kind.block), (kind.block, kind.block))
    if not taken:
        return (
            f"tl.dot_scaled takes e4m3, e5m2 and e2m1 with an e8m0 scale for 32 values, or e2m1 with an e4m3 scale for "
            f"16 values, not {format}"
        )
    return None


def _refuses(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> str | None:
    """The refusals that single and grouped products share."""
    reason = triton_launch.missing(spec)
    if reason is not None:
        return reason
    reason = _lacks_instructions(spec.capability)
    if reason is not None:
        return reason
    for format in spec.formats:
        reason = _refuses_format(format)  # type: ignore[arg-type]
        if reason is not None:
            return reason
    reason = needs_codes(a, b)
    if reason is not None:
        return reason
    left, right = (f for f in spec.formats if isinstance(f, Format))
    if left.scale is not right.scale:
        return f"needs one scale format for both operands, not {left.scale.name} with {right.scale.name}"
    if left.element.bits != right.element.bits and not MIXES[spec.capability]:
        return (
            f"Triton has no instruction for {left.element.name} with {right.element.name} on sm%d%d" % spec.capability
        )
    if args.out_dtype not in OUT_DTYPES:
        return f"writes bfloat16, float16 or float32, not {dtype_name(args.out_dtype)}"
    return None


def refuses(spec: Spec, a: GemmOperand, b: GemmOperand, args: GemmArgs) -> str | None:
    reason = _refuses(spec, a, b, args)
    if reason is not None:
        return reason
    return not_rows_by_matrix(spec, a)


def refuses_grouped(spec: Spec, a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> str | None:
    reason = _refuses(spec, a, b, args)
    return not_a_bias_of_groups(args) if reason is None else reason


# ---------------------------------------------------------------------------------------------- the launch


def _padded(t: Tensor) -> Tensor:
    """``t`` contiguous with each row zero-padded to a multiple of 16 bytes, the width of one load of the kernels."""
    short = -t.shape[-1] % 16
    return F.pad(t.contiguous().view(torch.uint8), (0, short)).view(t.dtype) if short else t.contiguous()


def _tile(device: torch.device, rows: float) -> Tile:
    tiles = TILES.get(device_capability(device)[0], SMALL)
    return next(tile for tile in tiles if rows <= tile.rows)


def eager_dot_scaled(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, a_format: str, b_format: str, cols: int,
    a_global: Tensor | None, b_global: Tensor | None, bias: Tensor | None, ends: Tensor | None,
    alpha: float, beta: float, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``alpha * global scales * a @ b^T + beta * bias`` from codes and scales, rounded once; result (M, N).

    Data and scales of ``Operand``: a (M, K), b (N, K), ``cols`` = K. ``bias``: (N,) or (M, N). With ``ends`` (G,) b is
    (G, N, K), and rows ``ends[g - 1]`` to ``ends[g]`` of a are multiplied by b[g]; rows after the last end give zeros.
    """
    from ..triton_device import dot_scaled as device

    left, right = get_format(a_format), get_format(b_format)
    rows, width = a.shape[0], b.shape[-2]
    out = a.new_empty(rows, width, dtype=out_dtype)
    if out.numel() == 0:
        return out
    tile = _tile(a.device, math.inf if ends is not None else rows)
    packs = (left.element.packing[0], right.element.packing[0])
    tile_k = 128 * min(packs)
    even = cols % tile_k == 0
    a, b = _padded(a), _padded(b)
    fit = Tensor.contiguous if even else _padded
    kind = SCALES[left.scale]
    a_scale, b_scale = (fit(scale).view(kind.dtype) for scale in (a_scale, b_scale))
    unit = math.gcd(16, a_scale.shape[-1], b_scale.shape[-1])
    constants = Constants(
        ELEMENTS[left.element], packs[0], left.block[0], ELEMENTS[right.element], packs[1], right.block[0],
        kind.block, unit, even, bias is not None and bias.dim() == 2, tile.m, tile.n, tile_k, tile.band,
    )  # fmt: skip
    row_tiles, col_tiles = -(-rows // tile.m), -(-width // tile.n)
    recording.refuse("Triton launches by itself")
    kernel, groups = device.matrix, []
    if ends is not None:
        count = ends.shape[0]
        constants = constants._replace(groups=power_above(count))
        row_tiles = rows // tile.m + count + 1
        kernel, groups = device.grouped, [ends.contiguous(), count]
    with triton_launch.on(a.device):
        kernel[(row_tiles * col_tiles,)](
            a, a_scale, b, b_scale, out, a_global, b_global, bias, *groups, rows, width, -(-cols // 16) * 16,
            a.shape[-1], a_scale.shape[-1] // unit, b.shape[-1], b_scale.shape[-1] // unit, float(alpha), float(beta),
            constants, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


@custom_ops.define("mxtensor::dot_scaled")
def dot_scaled(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, a_format: str, b_format: str, cols: int,
    a_global: Tensor | None, b_global: Tensor | None, bias: Tensor | None, ends: Tensor | None,
    alpha: float, beta: float, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``eager_dot_scaled`` of checked arguments: one op for torch.compile."""
    op, device, (left, right) = "mxtensor::dot_scaled", a.device, map(get_format, (a_format, b_format))
    reason = _refuses_format(left) or _refuses_format(right)
    if reason is not None or left.scale is not right.scale or out_dtype not in OUT_DTYPES:
        raise ValueError(f"{op} cannot multiply {left} and {right} to {out_dtype}; {reason or 'the scales differ'}")
    check_argument(op, "a", a, (torch.uint8, left.element.dtype), (None, None), device)
    check_argument(op, "b", b, (torch.uint8, right.element.dtype), (None,) * (2 if ends is None else 3), device)
    check_codes(op, a, a_scale, a_global, left, (a.shape[0], cols))
    check_codes(op, b, b_scale, b_global, right, (*b.shape[:-1], cols))
    if bias is not None:
        sizes = (b.shape[-2],) if bias.dim() == 1 else (a.shape[0], b.shape[-2])
        check_argument(op, "bias", bias, OUT_DTYPES, sizes, device)
        bias = bias.contiguous()
    if ends is not None:
        check_argument(op, "ends", ends, (torch.int32,), (b.shape[0],), device)
    check_device(op, a)
    rest = a_format, b_format, cols, a_global, b_global, bias, ends, alpha, beta, out_dtype
    return eager_dot_scaled(a, a_scale, b, b_scale, *rest)


@custom_ops.fake_of(dot_scaled)
def _(a, a_scale, b, b_scale, a_format, b_format, cols, a_global, b_global, bias, ends, alpha, beta, out_dtype):  # type: ignore[no-untyped-def]
    return a.new_empty(a.shape[0], b.shape[-2], dtype=out_dtype)


# ---------------------------------------------------------------------------------------------- the kernels


def _call(a: Operand, b: Operand, bias: Tensor | None, ends: Tensor | None, args: GemmArgs) -> Tensor:
    work = dot_scaled if is_traced(a.data, b.data) else eager_dot_scaled
    return work(
        a.data.flatten(0, -2), a.scale.flatten(0, -2), b.data, b.scale,
        a.format.name, b.format.name, a.shape[-1], a.global_scale, b.global_scale, bias, ends,
        float(args.alpha), float(args.beta), args.out_dtype,
    )  # fmt: skip


def _checked(side: Operand | Unquantized) -> Operand:
    operand = operand_of(side)
    if not is_traced(operand.data):
        check_sizes(operand)
    return operand


def run(a: GemmOperand, b: GemmOperand, args: GemmArgs) -> Tensor:
    assert isinstance(a, (Operand, Unquantized)) and isinstance(b, (Operand, Unquantized))
    left, right = _checked(a), _checked(b)
    shape = (*left.shape[:-1], right.shape[0])
    return _call(left, right, flat_bias(args, shape), None, args).view(shape)


def run_grouped(a: GemmOperand, b: GemmOperand, ends: Tensor, args: GemmArgs) -> Tensor:
    assert isinstance(a, (Operand, Unquantized)) and isinstance(b, (Operand, Unquantized))
    left, right = _checked(a), _checked(b)
    return _call(left, right, flat_bias(args, (left.shape[0], right.shape[1])), ends, args)


KERNEL = Kernel("dot_scaled", refuses, run, "cuda")
GROUPED = Kernel("dot_scaled", refuses_grouped, run_grouped, "cuda")

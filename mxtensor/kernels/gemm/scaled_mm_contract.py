"""What ``torch._scaled_mm`` accepts, as a table; the check of every call; the call, as one opaque op.

torch's own checks differ by version. In fake mode at least they skip the inner dimensions, the bias, the output dtype
and the pairs of formats. cuBLAS answers most mistakes with NOT_SUPPORTED and some with wrong numbers.
Sources: PyTorch's ScaledBlas.cpp, RowwiseScaledMM.cu, GroupedBlas.cpp; the cuBLAS manual, "Narrow Precision Data Types
Usage" and "Scaling factors layouts".

The op is opaque because torch's meta functions reject valid arguments (MXFP4, and a short last 128x128 block, in 2.11
and 2.13) and because inductor has no type for float4 and E8M0: outside this file both are uint8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import custom_ops, devices
from ...core.devices import cached
from ...core.names import dtype_name
from ...core.tracing import is_traced
from ...numerics.derived import round_up, swizzled_shape
from ...numerics.elements import ElementFormat, ScaleFormat
from ...numerics.formats import E2M1, E4M3, E5M2, E8M0, FP32, FULL, UE4M3, Format
from ..operands import MAX_GROUPS
from .cublas import recorded_product

Version = tuple[int, int]
Block = tuple[int, int]

TENSOR_BLOCK, ROW_BLOCK, VECTOR_BLOCK, SQUARE_BLOCK = (FULL, FULL), (1, FULL), (1, 128), (128, 128)
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
FLOAT8 = frozenset((E4M3, E5M2))
LINE = 16
"""Every row, scale and bias has to start at a multiple of so many bytes."""


@dataclass(frozen=True)
class Scaling:
    """One kind of scales in a product: the formats that can use it, the devices that have it, what it needs."""

    name: str
    scale: ScaleFormat
    """The scale format of both sides; another one with the same dtype is accepted (float32 powers of two)."""
    blocks: tuple[Block, Block]
    """The block of one scale, left and right; finer than a format's block if its scales can be repeated."""
    elements: tuple[frozenset[ElementFormat], frozenset[ElementFormat]]
    outputs: tuple[torch.dtype, ...]
    oldest: Version
    """The first compute capability with this scaling."""
    before: Version = (99, 0)
    """The first compute capability that no longer has it."""
    toolkit: Version = (11, 8)
    """The first CUDA release whose cuBLAS has it."""
    rows: int = 1
    """M has to be a multiple of this."""
    cols: int = 16
    """N has to be a multiple of this."""
    inner: int = 16
    """The bytes of a row have to be a multiple of this."""
    bias: bool = True
    """Whether it adds a bias in float32 before the result is rounded."""
    named: bool = False
    """Whether the scaling has to be named (``torch.nn.functional.scaled_mm``); ``_scaled_mm`` infers it from shapes."""

    def reads(self, scale: ScaleFormat) -> bool:
        """Whether the product accepts scales of this format."""
        return scale.view_dtype is self.scale.view_dtype

    @property
    def swizzled(self) -> bool:
        return self.scale is not FP32

    @cached_property
    def dtypes(self) -> tuple[frozenset[torch.dtype], ...]:
        """The dtypes of the codes, left and right."""
        return tuple(frozenset(e.dtype for e in side) for side in self.elements)

    @cached_property
    def packing(self) -> int:
        """Values in one entry of the code tensor."""
        return max(e.packing[0] // e.packing[1] for e in self.elements[0])


BLOCK_128 = {
    "scale": FP32, "elements": (FLOAT8, FLOAT8), "outputs": (BFLOAT16, FLOAT32), "oldest": (9, 0), "before": (10, 0),
    # rows: the left scales have stride M and start at multiples of 16 bytes; inner: whole blocks, cuBLAS gets no tail
    "toolkit": (12, 9), "rows": 4, "inner": 128, "named": True,
}  # fmt: skip
"""The scalings of DeepSeek-V3; torch has them on Hopper only."""

SCALINGS = (
    Scaling(
        "float8 per tensor", FP32, (TENSOR_BLOCK, TENSOR_BLOCK), (FLOAT8, FLOAT8), (BFLOAT16, FLOAT16, FLOAT32), (8, 9)
    ),
    Scaling(  # cuBLAS
        "float8 per row", FP32, (ROW_BLOCK, ROW_BLOCK), (FLOAT8, FLOAT8), (BFLOAT16, FLOAT16, FLOAT32), (9, 0), (10, 0),
        toolkit=(12, 9),
    ),
    Scaling(  # CUTLASS
        "float8 per row", FP32, (ROW_BLOCK, ROW_BLOCK), (FLOAT8, frozenset((E4M3,))), (BFLOAT16, FLOAT16), (8, 9)
    ),
    Scaling("float8 1x128 by 128x128", blocks=(VECTOR_BLOCK, SQUARE_BLOCK), **BLOCK_128),  # type: ignore[arg-type]
    Scaling("float8 128x128 by 1x128", blocks=(SQUARE_BLOCK, VECTOR_BLOCK), **BLOCK_128),  # type: ignore[arg-type]
    Scaling("float8 1x128 by 1x128", blocks=(VECTOR_BLOCK, VECTOR_BLOCK), **BLOCK_128),  # type: ignore[arg-type]
    Scaling(
        "mxfp8", E8M0, ((1, 32), (1, 32)), (FLOAT8, FLOAT8), (BFLOAT16, FLOAT16, FLOAT32), (10, 0), toolkit=(12, 8),
        inner=32,
    ),
    Scaling(  # MSLK; its bias argument is ignored
        "mxfp4", E8M0, ((1, 32), (1, 32)), (frozenset((E2M1,)), frozenset((E2M1,))), (BFLOAT16,), (10, 0), (11, 0),
        toolkit=(12, 8), bias=False, named=True,
    ),
    Scaling(
        "nvfp4", UE4M3, ((1, 16), (1, 16)), (frozenset((E2M1,)), frozenset((E2M1,))), (BFLOAT16, FLOAT16, FLOAT32),
        (10, 0), toolkit=(12, 8),
    ),
)  # fmt: skip
"""The first that fits is used: those with fewer scales come first."""

GROUPED_SCALINGS = (
    Scaling(  # CUTLASS for sm90
        "float8 per row", FP32, (ROW_BLOCK, ROW_BLOCK), (frozenset((E4M3,)), frozenset((E4M3,))), (BFLOAT16,), (9, 0),
        (10, 0), bias=False,
    ),
    Scaling(  # MSLK
        "mxfp8", E8M0, ((1, 32), (1, 32)), (frozenset((E4M3,)), frozenset((E4M3,))), (BFLOAT16,), (10, 0), (11, 0),
        toolkit=(12, 8), inner=32, bias=False,
    ),
)  # fmt: skip


@cached
def toolkit_version() -> Version:
    """The CUDA release that torch was built with; the newest for a build without CUDA, which sees fake tensors only."""
    version = torch.version.cuda
    if version is None:
        return (99, 0)
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _dotted(version: Version) -> str:
    return f"{version[0]}{version[1]}"


def _repeats(block: Block, target: Block) -> bool:
    """Whether scales of blocks ``block`` can be repeated to be scales of blocks ``target``."""
    rows = target[0] in (1, block[0])
    return rows and (target[1] == block[1] or (target[1] != FULL and (block[1] == FULL or block[1] % target[1] == 0)))


@cached
def plan(
    table: tuple[Scaling, ...], left: Format, right: Format, capability: Version, toolkit: Version
) -> Scaling | str:
    """The first scaling that these formats can use on this device, or the reason why there is none."""
    if left.element is E5M2 and right.element is E5M2:
        return f"no tensor core multiplies e5m2 by e5m2, the elements of {left} and {right}"
    reason = f"has no scaling for {left} by {right}"
    for s in table:
        if left.block[1] == right.block[1] == FULL != s.blocks[0][1]:
            continue  # scales that do not depend on K are not repeated along K
        sides = zip((left, right), s.blocks, s.elements, strict=True)
        if any(not s.reads(f.scale) or f.element not in e or not _repeats(f.block, b) for f, b, e in sides):
            continue
        if not s.oldest <= capability < s.before:
            end = f" and before sm{_dotted(s.before)}" if s.before[0] < 99 else ""
            reason = f"{s.name} scaling needs sm{_dotted(s.oldest)}{end}, this device is sm{_dotted(capability)}"
        elif toolkit < s.toolkit:
            want, have = (".".join(map(str, v)) for v in (s.toolkit, toolkit))
            reason = f"{s.name} scaling needs CUDA {want}, this torch was built with {have}"
        else:
            return s
    return reason


def plan_here(table: tuple[Scaling, ...], left: Format, right: Format, device: torch.device) -> Scaling | str:
    """``plan`` for a device and the torch that is running."""
    return plan(table, left, right, devices.device_capability(device), toolkit_version())


# ---------------------------------------------------------------------------------------------- the check


@dataclass(frozen=True)
class Product:
    """The arguments of one product, each tensor row-major and padded: a (M, K'), b (N, K'), K' the bytes of a row.

    Grouped: b (G, N, K') and ``ends`` (G,), the ends of groups of rows; or b (N, K') and ``ends`` of groups of columns,
    for a result (G, M, N). Packed codes and byte scales are uint8.
    """

    scaling: Scaling
    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    global_scales: Sequence[Tensor]
    bias: Tensor | None
    out_dtype: torch.dtype
    ends: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        groups = (self.ends.shape[0],) if self.ends is not None and self.has_groups_of_columns else ()
        return (*groups, self.a.shape[0], self.b.shape[-2])

    @property
    def has_groups_of_columns(self) -> bool:
        return self.ends is not None and self.b.dim() == 2


def scale_shape(scaling: Scaling, side: int, data_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of one side in ``Product``, for padded data (..., rows, K').

    (1, 1) per tensor; (rows, 1) per row; (blocks of K, rows) for 1x128; (blocks of rows, blocks of K rounded up to a
    multiple of 4) for 128x128; otherwise one buffer in the 128x4 layout, for a stack one buffer for each matrix.
    """
    block = scaling.blocks[side]
    lead, rows, inner = data_shape[:-2], data_shape[-2], data_shape[-1] * scaling.packing
    if block == TENSOR_BLOCK:
        return (1, 1)
    if block == ROW_BLOCK:
        return (*lead, rows) if lead else (rows, 1)
    blocks = -(-inner // block[1])
    if block == VECTOR_BLOCK:
        return (blocks, rows)
    if block == SQUARE_BLOCK:
        return (-(-rows // block[0]), round_up(blocks, 4))
    whole_rows, whole_cols = swizzled_shape(rows, blocks)
    return (*lead, whole_rows * whole_cols)


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a row-major tensor, also of dimensions of size 1, which ``is_contiguous`` does not check."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _dense(name: str, t: Tensor) -> None:
    if tuple(t.stride()) != row_major(tuple(t.shape)):
        raise ValueError(f"{name} must be row-major, got shape {tuple(t.shape)} with strides {t.stride()}; copy it")
    if t.storage_offset() * t.dtype.itemsize % LINE and t.numel() > 1:
        raise ValueError(
            f"{name} must start at a multiple of {LINE} bytes, got byte {t.storage_offset() * t.dtype.itemsize} of its "
            "storage; clone it"
        )


def _check_codes(p: Product) -> None:
    s = p.scaling
    if p.has_groups_of_columns and s.blocks != (ROW_BLOCK, ROW_BLOCK):
        raise ValueError(f"groups of columns need scales of rows, {s.name} scaling has others")
    for name, t, dtypes, dims in (
        ("a", p.a, s.dtypes[0], 2),
        ("b", p.b, s.dtypes[1], 2 if p.ends is None or p.has_groups_of_columns else 3),
    ):
        if t.dtype not in dtypes:
            names = " or ".join(sorted(dtype_name(d) for d in dtypes))
            raise TypeError(f"{name} must hold {names} codes for {s.name} scaling, got {t.dtype}")
        if t.dim() != dims:
            raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(t.shape)}")
        if 0 in t.shape:
            raise ValueError(f"{name} is empty, shape {tuple(t.shape)}: an empty product needs no kernel")
    if p.a.dtype is E5M2.dtype and p.b.dtype is E5M2.dtype:
        raise TypeError("a and b are both e5m2, which no tensor core multiplies; cast one of them to e4m3")
    if p.a.shape[-1] != p.b.shape[-1]:
        raise ValueError(
            f"a and b must have rows of one length, got {p.a.shape[-1]} and {p.b.shape[-1]} bytes (shapes "
            f"{tuple(p.a.shape)} and {tuple(p.b.shape)})"
        )
    for what, size, multiple in (
        ("a row of a and b", p.a.shape[-1], s.inner),
        ("the rows of a", p.a.shape[-2], s.rows),
        ("the rows of b", p.b.shape[-2], s.cols),
    ):
        if size % multiple:
            raise ValueError(f"{what} must come in multiples of {multiple} for {s.name} scaling, got {size}; pad them")
    _dense("a", p.a)
    _dense("b", p.b)


def _check_scales(p: Product) -> None:
    s = p.scaling
    for side, (name, scale, data) in enumerate((("scale_a", p.scale_a, p.a), ("scale_b", p.scale_b, p.b))):
        if scale.dtype is not s.scale.dtype:
            raise TypeError(f"{name} must be {s.scale.dtype} ({s.scale.name}) for {s.name} scaling, got {scale.dtype}")
        expected = scale_shape(s, side, data.shape)
        if p.ends is not None and p.has_groups_of_columns:  # the scales of all rows for each group
            expected = (p.ends.shape[0] * data.shape[0],)
        elif p.ends is not None and s.swizzled and side == 0:
            blocks = round_up(-(-data.shape[-1] * s.packing // s.blocks[0][1]), 4)
            expected = (round_up(data.shape[0] + 127 * p.ends.shape[0], 128), blocks)
        if tuple(scale.shape) != tuple(expected):
            raise ValueError(
                f"{name} must have shape {tuple(expected)} for {s.name} scaling of {tuple(data.shape)} codes, got "
                f"{tuple(scale.shape)}"
            )
        _dense(name, scale)
    if len(p.global_scales) not in (0, 2) or (p.global_scales and s.scale is not UE4M3):
        raise ValueError(
            f"global_scales must be none, or one of each side for nvfp4; got {len(p.global_scales)} for {s.name}"
        )
    for i, scale in enumerate(p.global_scales):
        if scale.dtype is not FLOAT32 or scale.numel() != 1:
            raise ValueError(f"global_scales[{i}] must be one float32, got {scale.dtype} of shape {tuple(scale.shape)}")


def _check_result(p: Product) -> None:
    s = p.scaling
    if p.out_dtype not in s.outputs:
        names = ", ".join(str(d) for d in s.outputs)
        raise TypeError(f"out_dtype must be one of {names} for {s.name} scaling, got {p.out_dtype}")
    if p.bias is not None:
        if not s.bias:
            raise ValueError(f"{s.name} scaling takes no bias; add it to the result in float32")
        if p.out_dtype is FLOAT32:
            raise TypeError("a product with a float32 result takes no bias; add it to the result")
        if p.bias.dtype is not p.out_dtype:
            raise TypeError(f"bias must have the dtype of the result, {p.out_dtype}, got {p.bias.dtype}")
        if tuple(p.bias.shape) != (p.b.shape[-2],):
            raise ValueError(
                f"bias must have shape ({p.b.shape[-2]},), one for each row of b, got {tuple(p.bias.shape)}"
            )
        _dense("bias", p.bias)
    if p.ends is not None:
        groups = p.ends.shape[0] if p.has_groups_of_columns and p.ends.dim() == 1 else p.b.shape[0]
        if p.ends.dtype is not torch.int32 or tuple(p.ends.shape) != (groups,):
            raise ValueError(
                f"ends must be int32 of shape ({groups},), one for each matrix of b, got {p.ends.dtype} of shape "
                f"{tuple(p.ends.shape)}"
            )
        if p.ends.shape[0] > MAX_GROUPS:
            raise ValueError(f"ends must name at most {MAX_GROUPS} groups, got {p.ends.shape[0]}; split the product")
        _dense("ends", p.ends)
    labels = ("b", "scale_a", "scale_b", "bias", "ends", "global_scales[0]", "global_scales[1]")
    device = p.a.device
    for name, t in zip(labels, (p.b, p.scale_a, p.scale_b, p.bias, p.ends, *p.global_scales), strict=False):
        if t is not None and t.device != device:
            raise ValueError(f"{name} must be on the device of a, {device}, got {t.device}")


def check(p: Product) -> None:
    """Raise TypeError or ValueError if ``p`` is not a valid call, with the tensor, what it is and what is needed."""
    _check_codes(p)
    _check_scales(p)
    _check_result(p)


USE_FAST_ACCUM = False
"""If True, Hopper accumulates float8 products in about 14 bits and no longer meets the definition."""


def _codes(t: Tensor) -> Tensor:
    return t.view(torch.float4_e2m1fn_x2) if t.dtype is torch.uint8 else t


def _scale(p: Product, side: int) -> Tensor:
    """The scales of one side as torch takes them: in their own dtype, blocks of K in the last dimension."""
    scale = (p.scale_a, p.scale_b)[side].view(p.scaling.scale.view_dtype)
    return scale if p.scaling.swizzled or p.scaling.blocks[side][1] == FULL else scale.t()


def _recipe(p: Product, side: int) -> tuple[list[Tensor], list[F.ScalingType], list[F.SwizzleType]]:
    """(scales, what each one scales, its layout) for ``F.scaled_mm``."""
    rows, cols = p.scaling.blocks[side]
    scales, kinds = [_scale(p, side)], [getattr(F.ScalingType, f"BlockWise{rows}x{cols}")]
    layouts = [F.SwizzleType.SWIZZLE_32_4_4 if p.scaling.swizzled else F.SwizzleType.NO_SWIZZLE]
    if p.global_scales:
        scales.append(p.global_scales[side].reshape(1))
        kinds.append(F.ScalingType.TensorWise)
        layouts.append(F.SwizzleType.NO_SWIZZLE)
    return scales, kinds, layouts


def launch(p: Product) -> Tensor:
    """The product (M, N), in ``p.out_dtype``."""
    check(p)
    a, b = _codes(p.a), _codes(p.b).transpose(-1, -2)
    if p.ends is not None:
        scale_a, scale_b = _scale(p, 0), _scale(p, 1)
        if p.scaling.blocks[0] == ROW_BLOCK:
            scale_a = scale_a.reshape(-1)
        return torch._scaled_grouped_mm(
            a, b, scale_a, scale_b, offs=p.ends, out_dtype=p.out_dtype, use_fast_accum=USE_FAST_ACCUM
        )
    fast = USE_FAST_ACCUM and not p.scaling.swizzled
    if p.scaling.named or p.global_scales:
        (scales_a, kinds_a, layouts_a), (scales_b, kinds_b, layouts_b) = _recipe(p, 0), _recipe(p, 1)
        return F.scaled_mm(
            a, b, scales_a, kinds_a, scales_b, kinds_b, layouts_a, layouts_b, p.bias, p.out_dtype, use_fast_accum=fast
        )
    scale_a, scale_b = _scale(p, 0), _scale(p, 1)
    if not p.scaling.swizzled and {p.scaling.blocks[0][1], p.scaling.blocks[1][1]} == {FULL}:
        out = recorded_product(a, _codes(p.b), scale_a, scale_b, p.bias, p.out_dtype, fast)
        if out is not None:
            return out
    if p.scaling.blocks[1] == ROW_BLOCK:
        scale_b = scale_b.t()
    return torch._scaled_mm(a, b, scale_a, scale_b, bias=p.bias, out_dtype=p.out_dtype, use_fast_accum=fast)


def _fake_is_wrong(p: Product) -> bool:
    """Whether torch's meta function rejects arguments that torch's kernel accepts."""
    square = [t for t, block in zip((p.a, p.b), p.scaling.blocks, strict=True) if block == SQUARE_BLOCK]
    packed = p.scaling.named and p.scaling.swizzled  # it counts the blocks of MXFP4 in bytes
    return packed or any(t.shape[-2] % SQUARE_BLOCK[0] for t in square)  # it rounds the number of blocks of rows down


# ---------------------------------------------------------------------------------------------- one op


def _product(
    a: Tensor, b: Tensor, scales: list[Tensor], bias: Tensor | None, ends: Tensor | None, row: int, dtype: torch.dtype
) -> Product:
    scaling = _ROWS[row]
    return Product(scaling, a, b, scales[0], scales[1], scales[2:], bias, dtype, ends)


_ROWS: tuple[Scaling, ...] = SCALINGS + GROUPED_SCALINGS


@custom_ops.define("mxtensor::scaled_mm")
def scaled_mm(
    a: Tensor, b: Tensor, scales: list[Tensor], bias: Tensor | None, ends: Tensor | None, row: int, dtype: torch.dtype
) -> Tensor:
    """``launch`` of a Product: ``scales`` of a, of b and the two global ones; ``row`` is the index of the scaling."""
    if not 0 <= row < len(_ROWS) or len(scales) < 2:
        raise ValueError(
            f"mxtensor::scaled_mm: row must be from 0 to {len(_ROWS) - 1} and scales at least two, got {row} and "
            f"{len(scales)}"
        )
    return launch(_product(a, b, scales, bias, ends, row, dtype))


@custom_ops.fake_of(scaled_mm)
def _(a, b, scales, bias, ends, row, dtype):  # type: ignore[no-untyped-def]
    p = _product(a, b, scales, bias, ends, row, dtype)
    if _fake_is_wrong(p):
        check(p)
        return a.new_empty(p.shape, dtype=dtype)
    return launch(p)


def multiply(p: Product) -> Tensor:
    """``launch(p)``; one op while being traced."""
    if not is_traced(p.a, p.b):
        return launch(p)
    scales = [p.scale_a, p.scale_b, *p.global_scales]
    return scaled_mm(p.a, p.b, scales, p.bias, p.ends, _ROWS.index(p.scaling), p.out_dtype)  # type: ignore[no-any-return]

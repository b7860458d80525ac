"""Compile Triton kernels for other devices: ``python -m tests.helpers.triton_targets [compute capability]``.

With a capability (90, say) it prints one JSON object, {variant: {registers, spills, ptx_has}}; without one, a table of
all targets. Run it without TRITON_INTERPRET, under which ``@triton.jit`` gives nothing that could be compiled.

A kernel is compiled as torch would launch it on that device: VARIANTS lists what is to be compiled, one row for each
set of compile-time arguments worth knowing.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from mxtensor.kernels.attention import triton_attention
from mxtensor.kernels.attention.arguments import AttentionArgs, Tokens
from mxtensor.kernels.gemm import dot_scaled, fp8_rows, fp8_rows_grouped
from mxtensor.kernels.operands import Form, RowOperand
from mxtensor.kernels.permute import triton_permute as permute
from mxtensor.kernels.quantize import to_row_scaled, to_row_scaled_both, triton_columns, triton_common, triton_rows
from mxtensor.kernels.runtime import triton_launch
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.formats import get_format
from mxtensor.numerics.groups import Groups, padded_length
from mxtensor.numerics.operand import Operand

TARGETS = (80, 89, 90, 100, 120)
HOSTS = (
    triton_common, triton_columns, triton_rows, fp8_rows, to_row_scaled_both, fp8_rows_grouped, to_row_scaled,
    triton_attention, permute,
)  # fmt: skip
"""The modules that launch casts, products of row-scaled operands, attention, and permutations."""


class Variant(NamedTuple):
    """One kernel with its compile-time arguments."""

    name: str
    kernel: str
    """"module.function" in mxtensor.kernels.triton_device"""
    signature: Mapping[str, str]
    """argument -> Triton type ("*bf16", "i32"), without those in ``constexprs``"""
    constexprs: Mapping[str, Any]
    """argument -> value; None for a pointer that is not given"""
    options: Mapping[str, int]
    """num_warps, num_stages"""
    needs: Mapping[int, tuple[str, ...]]
    """target to compile for -> instructions (substrings of their names) that its PTX must contain"""
    aligned: tuple[str, ...] = ()
    """integers that are multiples of 16, as all pointers are taken to be"""
    may_spill: tuple[int, ...] = (80, 89)
    """targets on which spilled registers are allowed"""


def everywhere(*instructions: str) -> dict[int, tuple[str, ...]]:
    """``needs`` of a variant that compiles for all targets, with the same instructions on each."""
    return dict.fromkeys(TARGETS, instructions)


# ---------------------------------------------------------------------------------------------- tl.dot_scaled

ELEMENT_POINTERS = {"e2m1": "*u8", "e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}
SCALE_POINTERS = {32: "*u8", 16: "*fp8e4nv"}
PRODUCT = ("a", "a_scale", "b", "b_scale", "out", "a_global", "b_global", "bias")
GROUPS = ("ends", "G")
SIZES = ("M", "N", "K", "a_width", "a_scale_width", "b_width", "b_scale_width")


def product(
    capability: int, kernel: str, pair: tuple[str, str], block: int, tile: dot_scaled.Tile, even: bool, bias: str
) -> Variant:
    """``dot_scaled.matrix`` or ``.grouped`` on one device; ``bias``: none, columns, or full (N aligned to nothing)."""
    packs = [2 if element == "e2m1" else 1 for element in pair]
    plan = dot_scaled.Constants(
        pair[0], packs[0], 1, pair[1], packs[1], 1, block, 4 if even else 16, even, bias == "full", tile.m, tile.n,
        128 * min(packs), tile.band, 16 if kernel == "grouped" else 0,
    )  # fmt: skip
    scale = SCALE_POINTERS[block]
    pointers = [ELEMENT_POINTERS[pair[0]], scale, ELEMENT_POINTERS[pair[1]], scale, "*bf16", "*fp32", "*fp32", "*bf16"]
    signature = dict(zip(PRODUCT, pointers, strict=True))
    if kernel == "grouped":
        signature |= dict(zip(GROUPS, ("*i32", "i32"), strict=True))
    signature |= dict.fromkeys(SIZES, "i32") | {"alpha": "fp32", "beta": "fp32"}
    absent = {} if block == 16 else {"a_global": None, "b_global": None}
    absent |= {"bias": None} if bias == "none" else {}
    words = (
        "dot_scaled",
        kernel,
        "x".join(pair),
        f"block{block}",
        f"{tile.m}x{tile.n}",
        "even" if even else "tail",
        bias,
    )
    needed = {100: ("tcgen05.mma", "block_scale", "cp.async"), 120: ("mma.sync", "block_scale", "cp.async")}
    return Variant(
        " ".join(words),
        f"dot_scaled.{kernel}",
        {name: kind for name, kind in signature.items() if name not in absent},
        {"P": plan, **absent},
        {"num_warps": tile.warps, "num_stages": tile.stages},
        {capability: needed[capability]},
        ("K", "a_width", "b_width"),
    )


PAIRS = {
    100: ((("e4m3", "e4m3"), 32), (("e4m3", "e2m1"), 32), (("e2m1", "e2m1"), 32), (("e2m1", "e2m1"), 16)),
    120: ((("e4m3", "e5m2"), 32), (("e2m1", "e2m1"), 32), (("e2m1", "e2m1"), 16)),
}


def products(capability: int) -> list[Variant]:
    """Every pair on the large tile, the first and the last also on the small one, in groups, and with a full bias."""
    small, large = dot_scaled.TILES[capability // 10]
    pairs = PAIRS[capability]
    rows = [product(capability, "matrix", *pair, large, False, "columns") for pair in pairs]
    for pair in (pairs[0], pairs[-1]):
        rows += [
            product(capability, "matrix", *pair, small, True, "none"),
            product(capability, "grouped", *pair, large, True, "columns"),
            product(capability, "matrix", *pair, large, True, "full"),
        ]
    return rows


# ---------------------------------------------------------------------------------------------- casts

POINTERS = {
    torch.bfloat16: "*bf16",
    torch.bool: "*i1",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
BF16, FP32 = torch.bfloat16, torch.float32
E4M3_PAIR = "cvt.rn.satfinite.e4m3x2.f32"
WGMMA = "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"
WGMMA_OF_GROUPS = {"of gradients": WGMMA.replace("e4m3.", "e5m2.", 1), "values": "m64n128k16.f32.bf16.bf16"}
"""Word in the label of a product of groups -> the instruction of other operands than E4M3."""
WITHOUT_CASTS = ("amax_of_tensor", "exponents_of_both", "map_tiles_of_groups")
"""Kernels that read values and write none."""


def values(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix without values."""
    return torch.empty(rows, cols, dtype=dtype, device="meta")


def operand(name: str) -> Operand:
    """4096x4096 values in a format."""
    return Operand.empty(get_format(name), (4096, 4096), "meta")


def quantize(name: str, dtype: torch.dtype, rows: int = 4096, cols: int = 4096, rounding: str = "nearest") -> None:
    """``triton_rows.quantize`` of a matrix of this size."""
    triton_rows.quantize(values(rows, cols, dtype), Cast.of(name, rounding=rounding))


def pair(
    name: str, rowwise: str, columnwise: str, rows: int = 4096, cols: int = 4096, dtype: torch.dtype = BF16,
    delayed: bool = False,
) -> None:  # fmt: skip
    """``triton_columns.pair`` of a matrix of this size, values in its dtype."""
    amax, record = torch.empty(2, dtype=FP32, device="meta").unbind() if delayed else (None, None)
    forms = Form(rowwise), Form(columnwise)
    triton_columns.pair(values(rows, cols, dtype), Cast.of(name), *forms, dtype, amax, record)


def rounded(name: str, dtype: torch.dtype) -> None:
    """``triton_rows.fake_quantize`` of a matrix to its own dtype."""
    triton_rows.fake_quantize(values(4096, 4096, dtype), Cast.of(name), dtype)


def transposed_values(name: str, dtype: torch.dtype) -> None:
    """``triton_rows.fake_quantize`` of a column-major matrix."""
    triton_rows.fake_quantize(values(4096, 4096, dtype).t(), Cast.of(name), dtype)


def row_operand(name: str, multiple: int) -> RowOperand:
    """4096x4096 values rescaled."""
    whole = operand(name)
    made = to_row_scaled.empty_rows(4096, 4096, whole.data.device)
    return RowOperand(*made, whole.scale, whole.format, (4096, 4096))


def row_cast(name: str, dtype: torch.dtype, cols: int) -> None:
    """``rows_of_values`` of a matrix with so many columns."""
    to_row_scaled.rows_of_values(values(4096, cols, dtype), Cast.of(name))


def both_rows(name: str, rows: int, cols: int, rowwise: bool = True) -> None:
    """``rows_of_both`` of a matrix of this size."""
    to_row_scaled_both.rows_of_both(values(rows, cols, BF16), cast_named(name), rowwise)


def cast_named(name: str) -> Cast:
    """The cast to a format; "mxfp4 stochastic" rounds stochastically."""
    format, _, rounding = name.partition(" ")
    return Cast.of(format, rounding=rounding or "nearest", seed=3 if rounding else None)


def both_of_matrices(name: str, rows: int, cols: int, groups: int, rowwise: bool = True) -> None:
    """``rows_of_both`` of a stack of four matrices, or of groups."""
    if groups:
        layout = Groups(of((groups,), torch.int32), rows, 32)
        to_row_scaled_both.rows_of_both(values(rows, cols, BF16), cast_named(name), rowwise, layout)
    else:
        to_row_scaled_both.rows_of_both(of((4, rows, cols), BF16), Cast.of(name), rowwise)


E4M3 = torch.float8_e4m3fn


def values_tile() -> fp8_rows_grouped.Tile:
    """The tile for values in bfloat16 on the device for which kernels are compiled."""
    tile = fp8_rows_grouped._tile(of((1,), BF16), of((1,), BF16), 512, 512, 512)
    assert tile is not None
    return tile


def product_of_groups(
    tile: fp8_rows_grouped.Tile, columns: bool, inner: int, groups: int, left: torch.dtype = E4M3,
    right: torch.dtype = E4M3, block: int = 32,
) -> None:  # fmt: skip
    """Triton's product of groups of rows with scales by 2048 columns."""
    ends = of((groups,), torch.int32)
    if columns:
        length = padded_length(4096, groups, block)
        sides = [
            t for n, dtype in ((1536, left), (inner, right)) for t in (of((n, length), dtype), of((groups * n,), FP32))
        ]
        fp8_rows_grouped.triton_columns(*sides, ends, 4096, block, tile)
    else:
        stack, scales = of((groups, 2048, inner), right), of((groups * 2048,), FP32)
        fp8_rows_grouped.triton_rows(of((4096, inner), left), of((4096,), FP32), stack, scales, ends, tile)


def exact(left: str, right: str, bias: bool) -> None:
    """The exact product of rows out of range."""
    out, added = torch.empty(4096, 4096, dtype=BF16, device="meta"), torch.empty(4096, dtype=BF16, device="meta")
    fp8_rows.exact_rows(row_operand(left, 1), row_operand(right, 16), added if bias else None, out)


def attention(name: str, size: int, group: int, dtype: torch.dtype, has_mask: bool = False) -> None:
    """One query for each of ``group`` heads that share a head of keys, over 4096 keys."""
    q = torch.empty(2, 8 * group, 1, size, dtype=dtype, device="meta")
    codes = Operand.empty(get_format(name), (2, 8, 4080, size), "meta")
    tokens = Tokens(torch.empty(2, 8, 16, size, device="meta"), codes)
    mask = torch.empty(2, 1, 1, 4096, device="meta") if has_mask else None
    triton_attention.run(q, tokens, tokens, AttentionArgs(size**-0.5, mask))


def attention_of_values(size: int, group: int, dtype: torch.dtype, mask: torch.dtype | None, count: int = 4096) -> None:
    """The same over keys and values of ``dtype``, with a mask of this dtype."""
    q, cache = of((2, 8 * group, 1, size), dtype), of((2, 8, count, size), dtype)
    triton_attention.attend(q, cache, cache, None if mask is None else of((2, 1, 1, count), mask), size**-0.5)


def of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def mask(experts: int, dtype: torch.dtype, padded: bool) -> None:
    """The map of 8192 tokens, of which some go to each expert."""
    permute.rows_of_mask(of((8192, experts), dtype), 16384, of((experts,), torch.int64) if padded else None)


def chunks(count: int, padded: bool) -> None:
    """4096 rows in chunks that are sorted or padded."""
    sizes = of((count,), torch.int64)
    permute.chunk_rows(sizes, None if padded else sizes, sizes if padded else None, 4096, 8192 if padded else 4096)


def gather(dtype: torch.dtype, cols: int, probs: torch.dtype | None) -> None:
    """8192 rows of 4096 tokens."""
    weights, per = (None, 1) if probs is None else (of((4096, 64), probs), 64)
    permute.gather(values(4096, cols, dtype), of((8192,), torch.int32), per, weights)


def merge(dtype: torch.dtype, cols: int, per: int, weights: torch.dtype | None, padded: bool = False) -> None:
    """8192 rows to 4096 tokens: their sums, or with weights also the backward pass."""
    rows, row_id_map = values(8192, cols, dtype), of((4096, per), torch.int32)
    offsets = of((per,), torch.int64) if padded else None
    if weights is None:
        permute.merge(rows, row_id_map, offsets, None, of((8192,), dtype))
        return
    given = of((4096, per), weights)
    permute.merge(rows, row_id_map, offsets, given, None)
    permute.spread(values(4096, cols, dtype), rows, row_id_map, offsets, given, (True, True))


CASTS: dict[str, tuple[Callable[[], Any], bool]] = {
    "mxfp8 bf16": (lambda: quantize("mxfp8", BF16), True),
    "mxfp8 fp32": (lambda: quantize("mxfp8", FP32), True),
    "mxfp6 bf16": (lambda: quantize("mxfp6", BF16), False),
    "mxint8 bf16": (lambda: quantize("mxint8", BF16), False),
    "nvfp4 fp32 tail": (lambda: quantize("nvfp4", FP32, 4095, 4095), False),
    "float8_1x128 bf16": (lambda: quantize("float8_1x128", BF16), True),
    "float8_tensor bf16": (lambda: quantize("float8_tensor", BF16), True),
    "mxfp6 bf16 stochastic": (lambda: quantize("mxfp6", BF16, rounding="stochastic"), False),
    "float8_row bf16": (lambda: quantize("float8_row", BF16), True),
    "float8_row fp32 long": (lambda: quantize("float8_row", FP32, 4096, 65536), True),
    "mxfp8[32x32] bf16": (lambda: quantize("mxfp8[32x32]", BF16), True),
    "float8_128x128 fp32": (lambda: quantize("float8_128x128", FP32), True),
    "mxfp4 bf16": (lambda: quantize("mxfp4", BF16), False),
    "mxfp8 bf16 tail swizzled": (
        lambda: triton_rows.quantize_swizzled(values(4095, 4088, BF16), Cast.of("mxfp8")),
        True,
    ),
    "nvfp4 bf16 tail swizzled": (
        lambda: triton_rows.quantize_swizzled(values(4095, 4088, BF16), Cast.of("nvfp4")),
        False,
    ),
    "mxfp8 bf16 values": (lambda: rounded("mxfp8", BF16), False),
    "mxfp8 fp32 values": (lambda: rounded("mxfp8", FP32), True),
    "mxfp8[32x32] bf16 values": (lambda: rounded("mxfp8[32x32]", BF16), True),
    "float8_tensor bf16 values": (lambda: rounded("float8_tensor", BF16), True),
    "float8_row bf16 values": (lambda: rounded("float8_row", BF16), True),
    "mxfp8 bf16 columns": (lambda: triton_rows.quantize(values(4096, 4096, BF16).t(), Cast.of("mxfp8")), True),
    "mxfp8 bf16 both": (lambda: triton_columns.pair(values(4096, 4096, BF16), Cast.of("mxfp8")), True),
    "mxfp8 bf16 both tail": (lambda: triton_columns.pair(values(4095, 4095, BF16), Cast.of("mxfp8")), True),
    "mxfp8 fp32 both": (lambda: triton_columns.pair(values(4096, 4096, FP32), Cast.of("mxfp8")), True),
    "nvfp4 bf16 both": (lambda: triton_columns.pair(values(4096, 4096, BF16), Cast.of("nvfp4")), False),
    "mxfp8 bf16 both values": (lambda: pair("mxfp8", "values", "values"), False),
    "mxfp8 bf16 both values tail": (lambda: pair("mxfp8", "values", "values", 4094, 4094), False),
    "mxfp8 bf16 values and codes": (lambda: pair("mxfp8", "values", "codes"), True),
    "mxfp8 bf16 values and codes tail": (lambda: pair("mxfp8", "values", "codes", 4092, 4094), True),
    "mxfp8_e5m2 bf16 values of columns": (lambda: transposed_values("mxfp8_e5m2", BF16), False),
    "mxint8 bf16 values": (lambda: rounded("mxint8", BF16), False),
    "mxfp8 fp32 both values": (lambda: pair("mxfp8", "values", "values", dtype=FP32), True),
    "nvfp4 bf16 both values": (lambda: pair("nvfp4", "values", "values"), False),
    "nvfp4 bf16 values and codes": (lambda: pair("nvfp4", "values", "codes"), False),
    "nvfp4 bf16 values of columns": (lambda: transposed_values("nvfp4", BF16), False),
    "float8_tensor bf16 both": (lambda: pair("float8_tensor", "codes", "codes"), True),
    "float8_tensor bf16 both delayed": (lambda: pair("float8_tensor", "codes", "codes", delayed=True), True),
    "float8_e5m2_tensor fp32 tail": (lambda: pair("float8_e5m2_tensor", "codes", "codes", 4095, 4095, FP32), False),
    "mxfp8 to bf16": (lambda: triton_rows.dequantize(operand("mxfp8"), BF16), False),
    "mxfp6 to fp32": (lambda: triton_rows.dequantize(operand("mxfp6"), FP32), False),
    "nvfp4 to bf16": (lambda: triton_rows.dequantize(operand("nvfp4"), BF16), False),
    "mxfp8 bf16 rows": (lambda: row_cast("mxfp8", BF16, 4096), True),
    "mxfp8 bf16 long rows": (lambda: row_cast("mxfp8", BF16, 14336), True),
    "mxfp8_e5m2 bf16 rows in steps": (lambda: row_cast("mxfp8_e5m2", BF16, 5120), True),
    "mxfp6 fp32 rows": (lambda: row_cast("mxfp6", FP32, 4096), True),
    "mxfp4 bf16 rows": (lambda: row_cast("mxfp4", BF16, 4096), True),
    "mxfp8 bf16 rows of both": (lambda: both_rows("mxfp8", 4096, 4096), True),
    "mxfp8 bf16 rows of both tail": (lambda: both_rows("mxfp8", 4112, 4080), True),
    "mxfp8_e5m2 bf16 rows of the transpose": (lambda: both_rows("mxfp8_e5m2", 4096, 4096, False), False),
    "mxfp4 bf16 rows of both": (lambda: both_rows("mxfp4", 4096, 4096), True),
    "mxfp4 bf16 stochastic rows of both": (lambda: both_rows("mxfp4 stochastic", 4096, 4096), False),
    "mxfp6_e3m2 bf16 rows of both tail": (lambda: both_rows("mxfp6_e3m2", 4112, 4080), True),
    "mxfp8[32x32] bf16 rows of both": (lambda: both_rows("mxfp8[32x32]", 4096, 4096), True),
    "mxfp4[32x32] bf16 rows of a stack tail": (lambda: both_of_matrices("mxfp4[32x32]", 1056, 4064, 0), True),
    "float8_e4m3_128x128_pow2 bf16 rows of a stack": (
        lambda: both_of_matrices("float8_e4m3_128x128_pow2", 2048, 4096, 0),
        True,
    ),
    "mxfp6 bf16 rows of groups": (lambda: both_of_matrices("mxfp6", 4096, 4096, 64), True),
    "mxfp4 bf16 stochastic rows of groups": (lambda: both_of_matrices("mxfp4 stochastic", 4096, 4080, 8), False),
    "mxfp8 bf16 rows of a stack": (lambda: both_of_matrices("mxfp8", 2048, 4096, 0), True),
    "mxfp8 bf16 rows of a stack tail": (lambda: both_of_matrices("mxfp8", 1040, 4080, 0, False), True),
    "mxfp8 bf16 rows of groups": (lambda: both_of_matrices("mxfp8", 4096, 4096, 64), True),
    "mxfp8_e5m2 bf16 rows of groups tail": (lambda: both_of_matrices("mxfp8_e5m2", 4096, 4080, 8, False), False),
    "mxfp8 to rows": (lambda: to_row_scaled.rows_of_operand(operand("mxfp8"), 16), True),
    "mxfp6 to rows": (lambda: to_row_scaled.rows_of_operand(operand("mxfp6"), 16), True),
    "mxfp4 to rows": (lambda: to_row_scaled.rows_of_operand(operand("mxfp4"), 16), True),
    "float8_e5m2_tensor_pow2 to rows": (
        lambda: to_row_scaled.rows_of_operand(operand("float8_e5m2_tensor_pow2"), 16),
        True,
    ),
    "attention mxfp8": (lambda: attention("mxfp8", 128, 4, BF16), False),
    "attention nvfp4 masked": (lambda: attention("nvfp4", 128, 8, BF16, True), False),
    "attention mxfp4 small": (lambda: attention("mxfp4", 64, 1, BF16), False),
    "attention mxfp6 fp32": (lambda: attention("mxfp6", 80, 4, FP32), False),
    "attention float8_row": (lambda: attention("float8_row", 128, 2, BF16), False),
    "attention of values masked": (lambda: attention_of_values(128, 4, BF16, torch.bool), False),
    "attention of values summands": (lambda: attention_of_values(128, 16, torch.float16, FP32), False),
    "attention of values one range": (lambda: attention_of_values(256, 1, BF16, BF16, 80), False),
    "attention of values fp32": (lambda: attention_of_values(128, 4, FP32, None), False),
    "mask of 64": (lambda: mask(64, torch.int32, False), False),
    "mask of 1024 padded": (lambda: mask(1024, torch.bool, True), False),
    "chunks sorted": (lambda: chunks(64, False), False),
    "chunks padded": (lambda: chunks(1024, True), False),
    "gather bf16": (lambda: gather(BF16, 4096, FP32), False),
    "gather bytes": (lambda: gather(torch.uint8, 4224, None), False),
    "gather short rows": (lambda: gather(BF16, 1000, None), False),
    "merge bf16": (lambda: merge(BF16, 4096, 64, FP32), False),
    "merge bf16 probs": (lambda: merge(BF16, 4096, 8, None), False),
    "merge fp32 padded": (lambda: merge(FP32, 1000, 1024, BF16, True), False),
    "merge short rows of one": (lambda: merge(BF16, 512, 1, BF16), False),
    "merge fp16 tail": (lambda: merge(torch.float16, 2047, 8, torch.float16), False),
    "groups of rows": (lambda: product_of_groups(fp8_rows_grouped.NARROW, False, 4096, 64), False),
    "groups of rows wide tail": (lambda: product_of_groups(fp8_rows_grouped.WIDE, False, 2064, 8), False),
    "groups of columns": (lambda: product_of_groups(fp8_rows_grouped.NARROW, True, 4096, 64), False),
    "groups of columns wide": (lambda: product_of_groups(fp8_rows_grouped.WIDE, True, 4096, 8), False),
    "groups of gradients": (
        lambda: product_of_groups(fp8_rows_grouped.WIDE, False, 4096, 64, torch.float8_e5m2),
        False,
    ),
    "groups of columns of gradients": (
        lambda: product_of_groups(fp8_rows_grouped.NARROW, True, 4096, 64, torch.float8_e5m2, E4M3, 16),
        False,
    ),
    "values in groups": (lambda: product_of_groups(values_tile(), False, 4096, 8, BF16, BF16), False),
    "values in groups of columns": (lambda: product_of_groups(values_tile(), True, 4096, 8, BF16, BF16, 16), False),
    "exact mxfp8 by mxfp8": (lambda: exact("mxfp8", "mxfp8", False), False),
    "exact mxfp8_e5m2 by mxfp4": (lambda: exact("mxfp8_e5m2", "mxfp4", True), False),
}
"""Name of a cast, attention or permutation -> (the call, whether its kernel rounds with float8 instructions)."""


def argument(value: Any) -> str | None:
    """The Triton type of an argument; None for one that Triton takes as a constant."""
    if value is None or (type(value) is int and value == 1):
        return None
    if type(value) is int:
        return "i64" if value > 0x7FFFFFFF else "i32"
    return POINTERS[value.dtype]


def launches(call: Callable[[], Any], target: int) -> list[tuple[Any, tuple[Any, ...], tuple[Any, ...], int, int]]:
    """(kernel, arguments, constants, warps, stages) of every launch of a host function on a device of this kind."""
    made: list[tuple[Any, tuple[Any, ...], tuple[Any, ...], int, int]] = []

    def launch(
        kernel: Any, programs: int, arguments: Any, constants: Any, warps: int, stages: int = triton_launch.STAGES
    ) -> None:
        made.append((kernel, arguments, constants, warps, stages))

    with ExitStack() as stack:
        for host in HOSTS:
            stack.enter_context(patch.object(host, "launch", launch))
        stack.enter_context(patch.object(triton_launch, "instructions_of", lambda device: divmod(target, 10)))
        call()
    return made


def casts(target: int) -> list[Variant]:
    """The launches of CASTS as the host code makes them, with the tiles and warps of ``triton_common.py``."""
    rows: dict[tuple[Any, ...], Variant] = {}
    for label, (call, converts) in CASTS.items():
        if target < 89 and label.startswith("exact"):
            continue  # only GPUs with FP8 tensor cores multiply rows
        if target != 90 and label.startswith("groups of"):
            continue  # only Hopper multiplies groups of codes
        for kernel, arguments, constants, warps, stages in launches(call, target):
            names = kernel.arg_names
            given = dict(zip(names, arguments, strict=False))
            kinds = {name: argument(value) for name, value in given.items()}
            fixed = {name: value for name, value in given.items() if kinds[name] is None}
            fixed |= dict(zip(names[len(arguments) :], constants, strict=True))
            signature = {name: kind for name, kind in kinds.items() if kind is not None}
            module = kernel.fn.__module__.rpartition(".")[2]
            function = kernel.fn.__name__
            needs = (E4M3_PAIR,) if converts and target >= 89 and function not in WITHOUT_CASTS else ()
            if function in ("rows_by_stack", "columns_of_groups"):
                others = [word for name, word in WGMMA_OF_GROUPS.items() if name in label]
                needs = () if target != 90 else (*others,) or (WGMMA,)
            variant = Variant(
                f"cast {function} {label} sm_{target}",
                f"{module}.{function}",
                signature,
                fixed,
                {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False},
                {target: needs},
                tuple(n for n, v in given.items() if n in signature and type(v) is int and v % 16 == 0),
            )
            key = (variant.kernel, *signature.items(), *fixed.items(), warps, stages, variant.aligned)
            rows.setdefault(key, variant)
    return list(rows.values())


# ---------------------------------------------------------------------------------------------- the list

VARIANTS: list[Variant] = [*products(100), *products(120)]
if importlib.util.find_spec("triton"):  # which names the arguments of the kernels
    VARIANTS += [variant for target in TARGETS for variant in casts(target)]


# ---------------------------------------------------------------------------------------------- compiling


def source(variant: Variant) -> Any:
    """The variant as an argument of ``triton.compile``."""
    from triton.compiler import ASTSource

    module, _, function = variant.kernel.partition(".")
    kernel = getattr(importlib.import_module(f"mxtensor.kernels.triton_device.{module}"), function)
    names = kernel.arg_names
    given = set(variant.signature) | set(variant.constexprs)
    assert given == set(names), f"{variant.name}: {sorted(given ^ set(names))} are or are not arguments"
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in variant.constexprs.items()}
    divisible = [["tt.divisibility", 16]]
    attributes = {
        (i,): divisible for i, name in enumerate(names) if signature[name].startswith("*") or name in variant.aligned
    }
    return ASTSource(kernel, signature, constants, attributes)


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread; the stack of these kernels has spilled registers only."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [str(tool), "--dump-resource-usage", str(file)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found, text
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def compiled(variant: Variant, target: int) -> dict[str, Any]:
    """{registers, spills (bytes per thread), ptx_has (needed instructions in its PTX)}. Raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget

    made = triton.compile(source(variant), target=GPUTarget("cuda", target, 32), options=dict(variant.options))
    registers, spills = resources(made.asm["cubin"])
    has = [instruction for instruction in variant.needs[target] if instruction in made.asm["ptx"]]
    return {"registers": registers, "spills": spills, "ptx_has": has}


def report(target: int) -> dict[str, dict[str, Any]]:
    """Every variant that compiles for ``target``, by name."""
    return {variant.name: compiled(variant, target) for variant in VARIANTS if target in variant.needs}


def in_own_process(target: int) -> dict[str, dict[str, Any]]:
    """``report`` of a fresh Python, for a process whose kernels are interpreted."""
    command = [sys.executable, "-m", "tests.helpers.triton_targets", str(target)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr[-4000:]}")
    result: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(arguments: list[str]) -> None:
    """The JSON of one target, or the table of all."""
    if arguments:
        print(json.dumps(report(int(arguments[0]))))
        return
    print(f"{'target':>6} {'registers':>9} {'spills':>6}  kernel")
    for target in TARGETS:
        for name, row in report(target).items():
            has = ", ".join(row["ptx_has"])
            print(f"{'sm_' + str(target):>6} {row['registers']:>9} {row['spills']:>6}  {name} [{has}]")


if __name__ == "__main__":
    main(sys.argv[1:])

"""The kernel row ``triton``: a few queries over codes on a CUDA device, in ranges of keys that fill the device.

Codes are decoded in registers; memory beside them holds the sums of each range. Device code:
``triton_device/attention.py``.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.devices import multiprocessors
from ...core.kernel import Kernel, Spec
from ...numerics.formats import FULL, Format
from ..quantize.triton_common import ceil_div
from ..quantize.triton_constants import CastCode, format_code
from ..runtime import triton_launch
from ..runtime.triton_launch import device_code, launch
from .spec import AttentionArgs, Tokens, additive, group_of, refuses_few_rows, refuses_head_size

MOST_ROWS = 64
"""Queries that read one head of keys."""
MOST_VALUES = {True: 256, False: 128}
"""Whether products are in bfloat16 -> values of a key: float32 takes twice the registers."""
PROGRAMS = 4
"""Programs for each multiprocessor."""
MOST_RANGES, LEAST_KEYS = 64, 128
"""Ranges of one head, and keys of a range."""
KEYS = {True: 64, False: 32}
"""Whether products are in bfloat16 -> keys that are decoded at a time, of up to 64 values; half as many of more."""
WARPS = {True: 4, False: 8}


class AttentionCode(NamedTuple):
    """The compile-time arguments of ``attend``, in their order."""

    k: CastCode
    v: CastCode
    k_cols: int
    """values that share a scale; 0: all of a key"""
    v_cols: int
    k_columns: int
    """a power of two, at least the values of a key"""
    v_columns: int
    rows: int
    keys: int
    """keys that are decoded at a time"""
    scale: float
    in_bfloat16: bool
    """whether products take bfloat16, in which all codes are exact"""


def refuses(spec: Spec, q: Tensor, k: Tokens, v: Tokens, args: AttentionArgs) -> str | None:
    reason = triton_launch.missing(spec) or refuses_few_rows(spec, q, k, args, MOST_ROWS)
    if reason is not None:
        return reason
    most = MOST_VALUES[_in_bfloat16(k.codes.format, v.codes.format, q.dtype)]
    for side in (k, v):
        f, reason = side.codes.format, refuses_head_size(side.shape[-1], most)
        if f.block[0] != 1:
            return f"has no decoder for blocks of {f.block[0]}x{f.block[1]}"
        if reason is not None:
            return reason
    return "no values" if 0 in (*q.shape, *k.shape, *v.shape) else None


def _in_bfloat16(k: Format, v: Format, dtype: torch.dtype) -> bool:
    """Whether bfloat16 products lose nothing of the codes; Triton's interpreter has none."""
    exact = k.exact_in_bfloat16 and v.exact_in_bfloat16
    return dtype is torch.bfloat16 and exact and not triton_launch.interpreted()


def power(n: int, least: int = 16) -> int:
    """The next power of two, at least ``least``."""
    return max(least, 1 << (n - 1).bit_length())


def _shared(format: Format, size: int) -> int:
    block = format.block[1]
    return 0 if block == FULL or block >= size else block


@cache
def _code(
    k: Format, v: Format, sizes: tuple[int, int], rows: int, scale: float, dtype: torch.dtype,
    capability: tuple[int, int],
) -> AttentionCode:  # fmt: skip
    columns = power(sizes[0]), power(sizes[1])
    exact = _in_bfloat16(k, v, dtype)
    return AttentionCode(
        format_code(k, capability, False), format_code(v, capability, False), _shared(k, sizes[0]),
        _shared(v, sizes[1]), *columns, power(rows), KEYS[exact] if max(columns) <= 64 else KEYS[exact] // 2, scale,
        exact,
    )  # fmt: skip


def ranges(heads: int, count: int, device: torch.device) -> int:
    """How many ranges of ``count`` keys fill the device, for so many heads of keys."""
    wanted = ceil_div(PROGRAMS * multiprocessors(device), heads)
    return max(1, min(wanted, ceil_div(count, LEAST_KEYS), MOST_RANGES))


def _arguments(tokens: Tokens) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, ...]]:
    """The tensors of one side, and strides of codes and scales."""
    first, data, scale = tokens.first.contiguous(), tokens.codes.data.view(torch.uint8), tokens.codes.scale
    data = data if data.stride(-1) == 1 else data.contiguous()
    scale = scale if scale.stride(-1) == 1 or scale.shape[-1] == 1 else scale.contiguous()
    if tokens.codes.global_scale is not None:
        first = first / tokens.codes.global_scale  # by which the kernel multiplies all keys
    return (first, data, scale), (*data.stride()[:3], *scale.stride()[:3])


def partial_sums(programs: int, rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for the sums of each range, and for its largest scores and sums of weights."""
    sums = torch.empty((programs, rows, size), dtype=torch.float32, device=device)
    return sums, torch.empty((programs, rows, 2), dtype=torch.float32, device=device)


def join(sums: Tensor, stats: Tensor, v_global: Tensor | None, out: Tensor, heads: int, rows: int, splits: int) -> None:
    """Write the sums of ``splits`` ranges to ``out`` (batch, heads of queries, queries, values)."""
    batch, _, queries, size = out.shape
    launch(
        device_code("attention.join"), batch * heads * rows,
        (sums, stats, v_global, out, heads, rows, queries, splits, size, *out.stride()[:3]),
        (power(splits, 1), power(size)), 1,
    )  # fmt: skip


def run(q: Tensor, k: Tokens, v: Tokens, args: AttentionArgs) -> Tensor:
    batch, all_heads, queries, k_size = q.shape
    heads, count, v_size, rows = k.shape[1], k.shape[2], v.shape[-1], group_of(q, k) * queries
    device, q = q.device, q.contiguous()
    splits = ranges(batch * heads, count, device)
    mask = additive(args, q, k, torch.float32)
    sums, stats = partial_sums(batch * heads * splits, rows, v_size, device)
    out = torch.empty((batch, all_heads, queries, v_size), dtype=q.dtype, device=device)
    capability = triton_launch.instructions_of(device)
    code = _code(k.codes.format, v.codes.format, (k_size, v_size), rows, float(args.scale), q.dtype, capability)
    (k_tensors, k_strides), (v_tensors, v_strides) = _arguments(k), _arguments(v)
    mask_strides = (0,) * 5 if mask is None else mask.stride()
    with triton_launch.on(device):
        launch(
            device_code("attention.attend"), batch * heads * splits,
            (q, *k_tensors, k.codes.global_scale, *v_tensors, mask, sums, stats, heads, rows, queries, count,
             k.first.shape[2], v.first.shape[2], splits, k_size, v_size, *k_strides, *v_strides, *mask_strides),
            tuple(code), WARPS[code.in_bfloat16],
        )  # fmt: skip
        join(sums, stats, v.codes.global_scale, out, heads, rows, splits)
    return out


KERNEL = Kernel("triton", refuses, run, "cuda")

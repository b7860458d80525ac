"""A few queries over keys and values on a CUDA device, in Triton: over codes, the kernel row ``triton``; else an op.

Codes are decoded in registers, in ranges of keys that fill the device; memory beside them holds the sums of each range.

The op ``mxtensor::cuda_attention`` is for keys and values in high precision: torch's attention has no kernel for few
queries with a mask whose keys serve several heads, and models repeat each head of keys in memory first. This op reads
keys as the cache stores them, and only where the mask does not hide them all. Device code:
``triton_device/attention.py``.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.devices import multiprocessors
from ...core.kernel import Kernel, Spec
from ...core.repeated import recorded
from ...numerics.formats import FULL, Format
from ..quantize.triton_common import CastCode, ceil_div, format_code, power
from ..runtime import triton_launch
from ..runtime.triton_launch import device_code, launch
from .arguments import DTYPES, AttentionArgs, Tokens, additive, group_of, refuses_few_rows, refuses_head_size

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
    reason = triton_launch.missing(spec) or refuses_few_rows(spec, q, k, v, args, MOST_ROWS)
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


@cache
def _code(
    k: Format, v: Format, sizes: tuple[int, int], rows: int, scale: float, dtype: torch.dtype,
    capability: tuple[int, int],
) -> AttentionCode:  # fmt: skip
    columns, exact = (power(sizes[0]), power(sizes[1])), _in_bfloat16(k, v, dtype)
    k_cols, v_cols = (
        0 if block == FULL or block >= size else block
        for block, size in zip((k.block[1], v.block[1]), sizes, strict=True)
    )
    return AttentionCode(
        format_code(k, capability, False), format_code(v, capability, False), k_cols, v_cols, *columns, power(rows),
        KEYS[exact] if max(columns) <= 64 else KEYS[exact] // 2, scale, exact,
    )  # fmt: skip


def ranges(heads: int, count: int, device: torch.device) -> int:
    """How many ranges of ``count`` keys fill the device, for so many heads of keys."""
    wanted = ceil_div(PROGRAMS * multiprocessors(device), heads)
    return max(1, min(wanted, ceil_div(count, LEAST_KEYS), MOST_RANGES))


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
    sides: list[Tensor] = []
    strides: list[int] = []
    for tokens in (k, v):
        first, data, scale = tokens.contiguous()
        sides += (first, data.view(torch.uint8), scale)
        strides += (*data.stride()[:3], *scale.stride()[:3])
    strides += (0,) * 5 if mask is None else mask.stride()
    with triton_launch.on(device):
        launch(
            device_code("attention.attend"), batch * heads * splits,
            (q, *sides[:3], k.codes.global_scale, *sides[3:], mask, sums, stats, heads, rows, queries, count,
             k.first.shape[2], v.first.shape[2], splits, k_size, v_size, *strides),
            tuple(code), WARPS[code.in_bfloat16],
        )  # fmt: skip
        join(sums, stats, v.codes.global_scale, out, heads, rows, splits)
    return out


KERNEL = Kernel("triton", refuses, run, "cuda")


# ---------------------------------------------------------------------------------------------- keys and values


VALUE_KEYS = {True: (64, 128), False: (32, 64)}
"""Whether products are in 16 bits -> keys that are read at a time, of up to so many values; half as many of more."""
LAYERS = 200
"""More than a model has layers: a cache that grows makes each number of keys a kind that comes once for each layer."""


def takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether the op computes this attention of q (batch, heads, queries, size) over k and v (batch, heads of keys,
    keys, size). Sizes may be symbols of a traced graph: then not."""
    tensors = [q, k, v] if mask is None else [q, k, v, mask]
    if not all(t.dim() == 4 and all(type(n) is int for n in (*t.shape, *t.stride())) for t in tensors):
        return False
    if q.device.type != "cuda" or any(t.device != q.device for t in tensors) or 0 in (*q.shape, *k.shape, *v.shape):
        return False
    if triton_launch.missing(Spec("attention", (), (), q.dtype, q.device)) is not None:
        return False
    heads, groups = q.shape[1], k.shape[1]
    shared = heads % groups == 0 and v.shape[:3] == k.shape[:3] and q.shape[0] == k.shape[0]
    if not shared or heads // groups * q.shape[2] > MOST_ROWS or q.shape[3] != k.shape[3]:
        return False
    known = q.dtype in DTYPES and k.dtype is q.dtype and v.dtype is q.dtype
    masked = mask is None or mask.dtype in (torch.bool, *DTYPES)
    sizes, most = (k.shape[3], v.shape[3]), MOST_VALUES[q.dtype is not torch.float32]
    small = all(size % 8 == 0 and size <= most for size in sizes)
    return known and masked and small and all(t.stride(3) == 1 for t in (q, k, v))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The op, for tensors that it takes."""
    batch, all_heads, queries, k_size = q.shape
    heads, count, v_size = k.shape[1], k.shape[2], v.shape[3]
    rows, device = all_heads // heads * queries, q.device
    splits = ranges(batch * heads, count, device)
    size, stride = (batch, all_heads, queries, v_size), (queries * all_heads * v_size, v_size, all_heads * v_size, 1)
    out = torch.empty_strided(size, stride, dtype=q.dtype, device=device)
    sums, stats = (None, None) if splits == 1 else partial_sums(batch * heads * splits, rows, v_size, device)
    own = q.dtype is not torch.float32 and not triton_launch.interpreted()  # the interpreter has no bfloat16
    columns, (keys, most) = (power(k_size), power(v_size)), VALUE_KEYS[own]
    steps: tuple[int, ...] = (0,) * 4
    if mask is not None:  # it repeats dimensions of size 1
        steps = tuple(0 if n == 1 else step for n, step in zip(mask.shape, mask.stride(), strict=True))
    with triton_launch.on(device):
        launch(
            device_code("attention.attend_values"), batch * heads * splits,
            (q, k, v, mask, sums, stats, out, heads, rows, queries, count, splits, k_size, v_size, *q.stride()[:3],
             *k.stride()[:3], *v.stride()[:3], *steps, *stride[:3]),
            (*columns, power(rows), keys if max(columns) <= most else keys // 2, scale, own, splits == 1), WARPS[own],
        )  # fmt: skip
        if sums is not None and stats is not None:
            join(sums, stats, None, out, heads, rows, splits)
    return out


@custom_ops.define("mxtensor::cuda_attention")
@recorded(after=LAYERS)
def attention_of_values(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(q k^T * scale + mask) v of q (batch, heads, queries, size), k and v (batch, heads of keys, keys, size).

    ``mask`` broadcasts to (batch, heads, queries, keys): summands, or bool, where False hides a key. A query that sees
    no key gives zeros. Sums are in float32; probabilities are rounded once to the dtype of q.

    Raises ValueError for an attention that it does not take.
    """
    wanted = (*q.shape[:-1], k.shape[-2])
    sizes = wanted if mask is None else tuple(mask.shape)
    if len(sizes) != len(wanted) or any(n not in (1, m) for n, m in zip(sizes, wanted, strict=True)):
        raise ValueError(f"mxtensor::cuda_attention: a mask of {sizes} does not broadcast to {wanted}")
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))  # a compiler may choose other strides
    if not takes(q, k, v, mask):
        raise ValueError(
            f"mxtensor::cuda_attention does not take {q.dtype} queries {tuple(q.shape)} and keys {tuple(k.shape)} on "
            f"{q.device}; use F.scaled_dot_product_attention"
        )
    return attend(q, k, v, mask, scale)


@custom_ops.fake_of(attention_of_values)
def _(q, k, v, mask, scale):  # type: ignore[no-untyped-def]
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)

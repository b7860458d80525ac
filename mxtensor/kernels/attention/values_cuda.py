"""The op ``mxtensor::cuda_attention``: a few queries over keys and values in high precision, on a CUDA device.

torch's attention has no kernel for few queries with a mask whose keys serve several heads: models repeat each head of
keys in memory first. This op reads keys as the cache stores them, and only where the mask does not hide them all.
Device code: ``triton_device/attention_values.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.kernel import Spec
from ..runtime import triton_launch
from ..runtime.recorded_op import recorded
from ..runtime.triton_launch import device_code, launch
from .spec import DTYPES
from .triton_ranges import MOST_ROWS, MOST_VALUES, join, partial_sums, power, ranges

KEYS = {True: (64, 128), False: (32, 64)}
"""Whether products are in 16 bits -> keys that are read at a time, of up to so many values; half as many of more."""
WARPS = {True: 4, False: 8}
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
    columns, (keys, most) = (power(k_size), power(v_size)), KEYS[own]
    with triton_launch.on(device):
        launch(
            device_code("attention_values.attend_values"), batch * heads * splits,
            (q, k, v, mask, sums, stats, out, heads, rows, queries, count, splits, k_size, v_size, *q.stride()[:3],
             *k.stride()[:3], *v.stride()[:3], *_steps(mask), *stride[:3]),
            (*columns, power(rows), keys if max(columns) <= most else keys // 2, scale, own, splits == 1), WARPS[own],
        )  # fmt: skip
        if sums is not None and stats is not None:
            join(sums, stats, None, out, heads, rows, splits)
    return out


def _steps(mask: Tensor | None) -> tuple[int, ...]:
    """Strides of a mask (batch, heads, queries, keys) that repeats dimensions of size 1."""
    if mask is None:
        return (0,) * 4
    return tuple(0 if n == 1 else step for n, step in zip(mask.shape, mask.stride(), strict=True))


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

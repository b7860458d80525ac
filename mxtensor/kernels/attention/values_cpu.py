"""The op ``mxtensor::cpu_attention``: a few queries over keys and values in high precision, on a CPU.

torch's attention packs all keys and values for each call, in bfloat16 even for one query. This op reads them once, with
the kernel of ``cpu.py``, and leaves out places of a static cache that the mask hides. ``compile/attention.py`` puts it
into graphs, ``integrations/attention.py`` into models of transformers.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..quantize.cpu import KINDS
from ..runtime import cpu_graph, native_ops
from ..runtime.native_build import load
from ..runtime.native_ops import refuse_first_call
from . import cpu

MOST_QUERIES = 8
"""With more queries of a head, torch's packing of its keys pays."""
HEADERS = (cpu.HERE / "attention_call.h", *native_ops.HEADERS)
_OPS = torch.library.Library("mxtensor", "FRAGMENT")
_OPS.define("cpu_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor")
attention_of_values: Any = torch.ops.mxtensor.cpu_attention.default
"""softmax(q k^T * scale + mask) v of q (batch, heads, queries, size), k and v (batch, heads of keys, keys, size)."""


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the op computes this attention, and faster than torch. Sizes may be symbols of a traced graph."""
    heads, queries, size, groups = *q.shape[1:], k.shape[1]
    if not all(type(n) is int for n in (heads, queries, size, groups)) or v.shape[1] != groups or not groups:
        return False
    few = queries <= MOST_QUERIES and heads // groups * queries <= cpu.MOST_ROWS
    small = max(size, v.shape[3]) <= cpu.MOST_VALUES
    return few and small and all(t.dtype in KINDS and t.device.type == "cpu" for t in (q, k, v))


@cache
def library() -> str | None:
    """Load the op. None, or the reason why it is not available."""
    kernels = cpu.library()
    if isinstance(kernels, str):
        return kernels
    op = load(
        cpu.HERE / "attention_op.cpp", native_ops.torch_flags(), HEADERS, ("mx_attention_use", "mx_attention_record")
    )
    if isinstance(op, str):
        return op
    functions = kernels.mx_attention, kernels.mx_attention_finish, kernels.mx_attention_part
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    op.mx_attention_use((ctypes.c_void_p * len(addresses))(*addresses))
    cpu_graph.connect_op(op.mx_attention_record)
    return None


@torch.library.impl(_OPS, "cpu_attention", "CompositeExplicitAutograd")
def _first_call(q: Tensor, *others: Any) -> Tensor:
    refuse_first_call("mxtensor::cpu_attention", q, library)
    return attention_of_values(q, *others)  # type: ignore[no-any-return]


@torch.library.register_fake("mxtensor::cpu_attention", lib=_OPS)
def _(q, k, v, mask, scale):  # type: ignore[no-untyped-def]
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)

"""A few queries over keys and values on a CPU, in C++: over codes, the kernel row ``cpu``; in high precision, an op.

``attention.cpp`` is compiled once on each machine (about two seconds) without torch's headers, and called through
ctypes, as the casts are. It decodes each tile of keys once, into the first cache. Threads share the heads, and ranges
of keys where there are few heads.

The op ``mxtensor::cpu_attention`` is for keys and values in high precision: torch's attention packs all of them for
each call, in bfloat16 even for one query. This op reads them once, with the same kernel, and leaves out places of a
static cache that the mask hides. ``compile/attention.py`` puts it into graphs, ``integrations/attention.py`` into
models of transformers.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...core import recording
from ...core.kernel import Kernel, Spec
from ...numerics.formats import FULL
from ..quantize.cpu_casts import BLOCKS, KINDS, SCALES, SOURCE, c_format, in_spans
from ..quantize.cpu_casts import FLAGS as CAST_FLAGS
from ..quantize.cpu_casts import HEADERS as CAST_HEADERS
from ..runtime import cpu_graph, native_build
from ..runtime.native_build import load, refuse_first_call
from .arguments import AttentionArgs, Tokens, additive, refuses_few_rows, refuses_head_size

HERE = SOURCE.parent
HEADERS = (*(HERE / f"attention{part}.h" for part in ("", "_call", "_lanes", "_products")), *CAST_HEADERS)
FLAGS = tuple(flag for flag in CAST_FLAGS if flag != "-ffp-contract=off")
SYMBOLS = ("mx_attention", "mx_attention_finish", "mx_attention_part")
MOST_ROWS, MOST_VALUES = 64, 512
"""Queries that read one head of keys, and values of a key: the buffers of attention.h."""
KEYS_PER_RANGE = 256
"""The least that a thread is given of a head."""


class _Side(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("first", "data", "scale", "format")),
        *((name, ctypes.c_int64 * 3) for name in ("data_strides", "scale_strides")),
        *((name, ctypes.c_int64) for name in ("size", "heads", "first_count")),
        ("float_scales", ctypes.c_int32), ("values", ctypes.c_int32),
    )  # fmt: skip


class _Attention(ctypes.Structure):
    _fields_ = (
        ("keys", _Side), ("values", _Side),
        *((name, ctypes.c_void_p) for name in ("q", "mask", "out", "partials")),
        ("mask_strides", ctypes.c_int64 * 5),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "group", "queries", "count", "splits")),
        ("scale", ctypes.c_float), ("value_scale", ctypes.c_float),
        ("kind", ctypes.c_int32), ("unused", ctypes.c_int32),
    )  # fmt: skip


@cache
def library() -> ctypes.CDLL | str:
    """The compiled kernel, or the reason why it is not available."""
    lib = load(HERE / "attention.cpp", FLAGS, HEADERS, SYMBOLS)
    if not isinstance(lib, str):
        lib.mx_attention.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        lib.mx_attention_finish.argtypes = lib.mx_attention_part.argtypes = [ctypes.c_void_p]
        lib.mx_attention_part.restype = ctypes.c_int64
    return lib


def refuses(spec: Spec, q: Tensor, k: Tokens, v: Tokens, args: AttentionArgs) -> str | None:
    reason = refuses_few_rows(spec, q, k, v, args, MOST_ROWS)
    if reason is not None:
        return reason
    for side in (k, v):
        f, reason = side.codes.format, refuses_head_size(side.shape[-1], MOST_VALUES)
        if f.block not in BLOCKS or f.block[0] != 1 or f.scale not in SCALES:
            return f"has no decoder for blocks of {f.block[0]}x{f.block[1]} with {f.scale.name} scales"
        if reason is not None:
            return reason
        if f.element.bits == 4 and f.block[1] % 2 and f.block[1] != FULL:
            return "needs blocks of whole bytes"
    if 0 in (*q.shape, *k.shape, *v.shape):
        return "no values"
    built = library()
    return built if isinstance(built, str) else None


def _side(tokens: Tokens) -> _Side:
    operand, (first, data, scale) = tokens.codes, tokens.contiguous()
    size, strides = data.element_size(), ctypes.c_int64 * 3
    side = _Side(
        first.data_ptr(), data.data_ptr(), scale.data_ptr(), ctypes.addressof(c_format(operand.format).contents),
        strides(*(size * s for s in data.stride()[:3])), strides(*scale.stride()[:3]), *operand.shape[-1:],
        operand.shape[1], first.shape[2], scale.is_floating_point(),
    )  # fmt: skip
    side.memory = first, data, scale
    return side


def run(q: Tensor, k: Tokens, v: Tokens, args: AttentionArgs) -> Tensor:
    recording.refuse("C++ got addresses")
    lib: Any = library()
    batch, heads, queries, _ = q.shape
    groups, count, size = k.shape[1], k.shape[2], v.shape[-1]
    q = q.contiguous()
    out = torch.empty((batch, heads, queries, size), dtype=q.dtype, device=q.device)
    mask = additive(args, q, k, torch.float32)
    splits = max(1, min(-(-2 * torch.get_num_threads() // (batch * groups)), count // KEYS_PER_RANGE))
    splits = splits if torch.get_num_threads() > 1 else 1
    keys, values = _side(k), _side(v)
    k_global, v_global = (1.0 if s is None else float(s) for s in (k.codes.global_scale, v.codes.global_scale))
    problem = _Attention(
        keys, values, q.data_ptr(), None if mask is None else mask.data_ptr(), out.data_ptr(), None,
        (ctypes.c_int64 * 5)(*(mask.stride() if mask is not None else ())), batch, groups, heads // groups, queries,
        count, splits, args.scale * k_global, v_global, KINDS[q.dtype],
    )  # fmt: skip
    part = lib.mx_attention_part(ctypes.byref(problem))
    partials = torch.empty(batch * heads * queries * splits * part, dtype=torch.float32, device=q.device)
    problem.partials = partials.data_ptr()
    address, units = ctypes.addressof(problem), batch * groups * splits

    memory = problem, q, mask, partials, out, keys.memory, values.memory
    in_spans(lambda first, end: lib.mx_attention(address, first, end), units, batch * groups * count * size, *memory)
    lib.mx_attention_finish(address)
    return out


KERNEL = Kernel("cpu", refuses, run, "cpu")


# ---------------------------------------------------------------------------------------------- keys and values


MOST_QUERIES = 8
"""With more queries of a head, torch's packing of its keys pays."""
OP_HEADERS = (HERE / "attention_call.h", *native_build.OP_HEADERS)
_OPS = torch.library.Library("mxtensor", "FRAGMENT")
_OPS.define("cpu_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor")
attention_of_values: Any = torch.ops.mxtensor.cpu_attention.default
"""softmax(q k^T * scale + mask) v of q (batch, heads, queries, size), k and v (batch, heads of keys, keys, size)."""


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the op computes this attention, and faster than torch. Sizes may be symbols of a traced graph."""
    heads, queries, size, groups = *q.shape[1:], k.shape[1]
    if not all(type(n) is int for n in (heads, queries, size, groups)) or v.shape[1] != groups or not groups:
        return False
    few = queries <= MOST_QUERIES and heads // groups * queries <= MOST_ROWS
    small = max(size, v.shape[3]) <= MOST_VALUES
    return few and small and all(t.dtype in KINDS and t.device.type == "cpu" for t in (q, k, v))


@cache
def op_library() -> str | None:
    """Load the op. None, or the reason why it is not available."""
    kernels = library()
    if isinstance(kernels, str):
        return kernels
    op = load(
        HERE / "attention_op.cpp", native_build.torch_flags(), OP_HEADERS, ("mx_attention_use", "mx_attention_record")
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
    refuse_first_call("mxtensor::cpu_attention", q, op_library)
    return attention_of_values(q, *others)  # type: ignore[no-any-return]


@torch.library.register_fake("mxtensor::cpu_attention", lib=_OPS)
def _(q, k, v, mask, scale):  # type: ignore[no-untyped-def]
    batch, heads, queries, _ = q.shape
    return q.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)

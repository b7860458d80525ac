"""Attention over codes: the definition, the tuple of kernels, and the op that a compiled graph calls.

The definition, the kernel row ``by heads``, is torch's attention of values, decoded a few heads at a time. Memory holds
the values of at most ``VALUES`` keys and values, or of one head, never of the whole cache. An op runs the kernels of
eager code, so that a compiled step of decoding reads codes too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import custom_ops
from ...core.kernel import Kernel, Spec
from ...core.select import perform
from ...core.tracing import is_traced
from ...numerics.cast import Cast
from ...numerics.formats import get_format
from ...numerics.operand import Operand
from ..quantize.choose_cast import dequantize_operand, quantize_operand
from ..quantize.definition import refuses
from . import cpu_attention, triton_attention
from .arguments import AttentionArgs, Tokens, codes_format, group_of

# ---------------------------------------------------------------------------------------------- the definition


VALUES = 1 << 22
"""Values of keys that are decoded at a time: 8 MiB in bfloat16."""
EVERYTHING = slice(None)


def _attend(q: Tensor, k: Tokens, v: Tokens, args: AttentionArgs, batch: slice, heads: slice) -> Tensor:
    """Attention of some rows of the batch over some heads of keys, by the queries that read them."""
    mask, group = args.mask, group_of(q, k)
    decoded: list[Tensor] = []
    for tokens in (k, v):
        operand, first = tokens.codes, tokens.first[batch, heads].to(q.dtype)
        data, scale = (t[batch, heads].contiguous() for t in (operand.data, operand.scale))
        some = operand.with_blocks(data, scale, (*data.shape[:2], *operand.shape[2:]))
        decoded.append(torch.cat((first, dequantize_operand(some, q.dtype)), 2))
    if heads != EVERYTHING:
        mine = slice(heads.start * group, heads.stop * group)
        q = q[batch, mine]
        if mask is not None:
            mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
            mask = mask if mask.shape[0] == 1 else mask[batch]
            mask = mask if mask.shape[1] == 1 else mask[:, mine]
    keys, values = decoded
    grouped = q.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(q, keys, values, mask, 0.0, args.causal, scale=args.scale, enable_gqa=grouped)


def by_heads(q: Tensor, k: Tokens, v: Tokens, args: AttentionArgs) -> Tensor:
    batch, heads, count, size = k.shape
    if batch * heads * count * size <= VALUES or is_traced(q, k.codes.data):
        return _attend(q, k, v, args, EVERYTHING, EVERYTHING)
    some, group = max(1, VALUES // max(count * size, 1)), group_of(q, k)
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    for b in range(batch):
        for h in range(0, heads, some):
            row, these = slice(b, b + 1), slice(h, min(h + some, heads))
            out[row, these.start * group : these.stop * group] = _attend(q, k, v, args, row, these)
    return out


BY_HEADS = Kernel("by heads", refuses, by_heads)


# ---------------------------------------------------------------------------------------------- the choice


ATTENTION: tuple[Kernel, ...] = (triton_attention.KERNEL, cpu_attention.KERNEL, BY_HEADS)
"""``run(q, k, v, args)``: the result, in the dtype of q."""


def attention(q: Tensor, k: Tokens, v: Tokens, args: AttentionArgs) -> Tensor:
    """softmax(q k^T * scale + mask) v: q (B, Hq, Q, D), k (B, H, S, D), v (B, H, S, E), Hq a multiple of H; result
    (B, Hq, Q, E) in the dtype of q.

    The values of codes are those that ``dequantize_operand`` gives, before they are rounded to the dtype of q.
    """
    shapes, formats = (tuple(q.shape), k.shape, v.shape), (q.dtype, k.codes.format, v.codes.format)
    data = k.codes.data
    spec = Spec("attention", shapes, formats, q.dtype, data.device, is_traced(q, data, v.codes.data, args.mask))
    return perform(ATTENTION, spec, q, k, v, args)  # type: ignore[no-any-return]


def op_of_values(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
    """The op that computes this attention of keys and values in high precision; None where torch's is the one to take.

    ``op(q, k, v, mask, scale)``, for real and for fake tensors.
    """
    if q.device.type == "cuda":
        return triton_attention.attention_of_values if triton_attention.takes(q, k, v, mask) else None
    return (
        cpu_attention.attention_of_values
        if cpu_attention.takes(q, k, v) and cpu_attention.op_library() is None
        else None
    )


# ---------------------------------------------------------------------------------------------- custom ops


@custom_ops.define("mxtensor::encode_tokens")
def encode_tokens(x: Tensor, format: str, scaling: str, rounding: str, amax_epsilon: float) -> list[Tensor]:
    """Codes and scales of tokens (batch, heads, tokens, head size), which a global scale was divided out of."""
    cast = Cast.of(format, scaling, rounding, None, amax_epsilon)
    operand = quantize_operand(x.contiguous(), replace(cast, format=codes_format(cast.format)))
    return [operand.data, operand.scale]


@custom_ops.fake_of(encode_tokens)
def _(x, format, scaling, rounding, amax_epsilon):  # type: ignore[no-untyped-def]
    return list(Operand.empty(codes_format(get_format(format)), x.shape, x.device).tensors)


@custom_ops.define("mxtensor::attention")
def attention_op(
    q: Tensor, k_first: Tensor, k_data: Tensor, k_scale: Tensor, k_global: Tensor | None, v_first: Tensor,
    v_data: Tensor, v_scale: Tensor, v_global: Tensor | None, mask: Tensor | None, format: str, scale: float,
    causal: bool,
) -> Tensor:  # fmt: skip
    """``attention`` of queries over keys and values, each as its first tokens, codes and scales."""
    keys, values = (
        Tokens(first, Operand(data, scales, of_all, get_format(format), (*data.shape[:3], first.shape[-1])))
        for first, data, scales, of_all in ((k_first, k_data, k_scale, k_global), (v_first, v_data, v_scale, v_global))
    )
    return attention(q, keys, values, AttentionArgs(scale, mask, causal)).contiguous()


@custom_ops.fake_of(attention_op)
def _(q, k_first, k_data, k_scale, k_global, v_first, *rest):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:3], v_first.shape[-1]))


def traced_attention(q: Tensor, k: Tokens, v: Tokens, args: AttentionArgs) -> Tensor:
    """``attention`` as one op of a graph. Both sides have one format."""
    sides = [t for s in (k, v) for t in (s.first, s.codes.data, s.codes.scale, s.codes.global_scale)]
    out: Tensor = attention_op(q, *sides, args.mask, k.codes.format.name, args.scale, args.causal)
    return out

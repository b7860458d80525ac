"""The kernel row ``by heads``: torch's attention of values, decoded a few heads at a time. It is the definition.

Memory holds the values of at most ``VALUES`` keys and values, or of one head, never of the whole cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.kernel import Kernel, Spec
from ...core.tracing import is_traced
from ..quantize.select import dequantize_operand
from .spec import AttentionArgs, Tokens, group_of

VALUES = 1 << 22
"""Values of keys that are decoded at a time: 8 MiB in bfloat16."""


def refuses(spec: Spec, q: Tensor, k: Tokens, v: Tokens, args: AttentionArgs) -> str | None:
    return None


def _values(tokens: Tokens, batch: slice, heads: slice, dtype: torch.dtype) -> Tensor:
    """The values of some heads."""
    operand, first = tokens.codes, tokens.first[batch, heads].to(dtype)
    data, scale = (t[batch, heads].contiguous() for t in (operand.data, operand.scale))
    some = operand.with_blocks(data, scale, (*data.shape[:2], *operand.shape[2:]))
    return torch.cat((first, dequantize_operand(some, dtype)), 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, args: AttentionArgs) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, args.causal, scale=args.scale, enable_gqa=grouped)


def _part(mask: Tensor | None, batch: slice, heads: slice) -> Tensor | None:
    """The mask of some rows of the batch and some heads of queries."""
    if mask is None:
        return None
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    mask = mask if mask.shape[0] == 1 else mask[batch]
    return mask if mask.shape[1] == 1 else mask[:, heads]


def run(q: Tensor, k: Tokens, v: Tokens, args: AttentionArgs) -> Tensor:
    batch, heads, count, size = k.shape
    everything = slice(None)
    if batch * heads * count * size <= VALUES or is_traced(q, k.codes.data):
        keys, values = (_values(side, everything, everything, q.dtype) for side in (k, v))
        return _attend(q, keys, values, args.mask, args)
    some, group = max(1, VALUES // max(count * size, 1)), group_of(q, k)
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    for b in range(batch):
        for h in range(0, heads, some):
            row, these = slice(b, b + 1), slice(h, min(h + some, heads))
            mine = slice(these.start * group, these.stop * group)
            keys, values = (_values(side, row, these, q.dtype) for side in (k, v))
            out[row, mine] = _attend(q[row, mine], keys, values, _part(args.mask, row, mine), args)
    return out


KERNEL = Kernel("by heads", refuses, run)

"""The fused attention ops of torch's inference fast path, decomposed so that their products reach the other rules.

``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` call these in eval mode without gradients. Under
torch.compile they call them even for a tensor subclass, for which eager code does not.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.dispatch import every_argument, implements

aten = torch.ops.aten

PADDING_MASK = 1
"""``mask_type`` of a (batch, keys) mask; the others broadcast to (batch, heads, queries, keys). True hides a key."""


def _additive(mask: Tensor | None, mask_type: int | None, like: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask_type == PADDING_MASK:
        mask = mask[:, None, None, :]
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)
    return mask.to(like.dtype)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, weights: tuple[Any, ...], mask: Tensor | None, mask_type: int | None
) -> tuple[Tensor, Tensor]:
    """(output, weights by head) of self- or cross-attention; ``weights``: qkv weight and bias, projection's."""
    qkv_weight, qkv_bias, out_weight, out_bias = weights
    if q is k and k is v:
        projected = F.linear(q, qkv_weight, qkv_bias).chunk(3, -1)
    else:
        components = zip((q, k, v), qkv_weight.chunk(3, 0), qkv_bias.chunk(3, 0), strict=True)
        projected = tuple(F.linear(x, w, b) for x, w, b in components)
    query, key, value = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in projected)
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    additive = _additive(mask, mask_type, scores)
    probability = torch.softmax(scores if additive is None else scores + additive, -1)
    mixed = (probability @ value).transpose(1, 2).flatten(-2)
    return F.linear(mixed, out_weight, out_bias), probability


@implements(aten._native_multi_head_attention.default)
def native_multi_head_attention(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    """(output, attention weights), the latter empty unless wanted."""
    q, k, v, _, heads, *weights, mask, need_weights, average, mask_type = every_argument(func, args, kwargs)
    out, probability = _attention(q, k, v, heads, tuple(weights), mask, mask_type)
    if not need_weights:
        return out, out.new_empty(0)
    return out, probability.mean(1) if average else probability


@implements(aten._transformer_encoder_layer_fwd.default)
def transformer_encoder_layer_fwd(func: Any, args: Any, kwargs: Any) -> Tensor:
    """One encoder layer, normalized first or last."""
    (
        x, width, heads, qkv_weight, qkv_bias, out_weight, out_bias, use_gelu, norm_first, eps,
        *norms, up_weight, up_bias, down_weight, down_bias, mask, mask_type,
    ) = every_argument(func, args, kwargs)  # fmt: skip
    first, second = ([width], *norms[:2], eps), ([width], *norms[2:], eps)

    def attend(y: Tensor) -> Tensor:
        return _attention(y, y, y, heads, (qkv_weight, qkv_bias, out_weight, out_bias), mask, mask_type)[0]

    def feed(y: Tensor) -> Tensor:
        y = F.linear(y, up_weight, up_bias)
        return F.linear(F.gelu(y) if use_gelu else F.relu(y), down_weight, down_bias)

    if norm_first:
        x = x + attend(F.layer_norm(x, *first))
        return x + feed(F.layer_norm(x, *second))  # type: ignore[no-any-return]
    x = F.layer_norm(x + attend(x), *first)
    return F.layer_norm(x + feed(x), *second)

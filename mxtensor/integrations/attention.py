"""``attn_implementation="mxtensor"`` of transformers: decoding reads each key and value of the cache once.

    model.set_attn_implementation("mxtensor")

transformers' own ``sdpa`` runs where no op is made for the call: many queries, gradients, a bias of positions. In a
compiled graph on a GPU that is ``sdpa`` too, which becomes the op there. The masks are those of ``sdpa``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels.attention.select import op_of_values

NAME = "mxtensor"
UNUSUAL = "cache", "softcap", "output_attentions"
"""Arguments that only transformers' own function knows, beside ``position_bias``, a tensor."""


def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The function that transformers calls: query (batch, heads, queries, size), key and value (batch, heads of keys,
    keys, size) -> (batch, queries, heads, size)."""
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError(
            f"attention of {type(module).__name__} has sinks (s_aux of {len(kwargs['s_aux'])} heads), which neither "
            f'"{NAME}" nor "sdpa" of transformers adds; use model.set_attn_implementation("eager")'
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    op = _op(query, key, value, attention_mask, dropout, causal, kwargs)
    if op is not None:
        scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
        return op(query, key, value, attention_mask, scale).transpose(1, 2).contiguous(), None
    rest = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal} | kwargs
    return sdpa_attention_forward(module, query, key, value, attention_mask, **rest)


def _op(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, others: dict[str, Any]
) -> Any:
    """The op that computes this attention, or None."""
    tensors = query, key, value
    if not all(type(t) is Tensor for t in tensors):  # tokens of mx.KVCache
        return None
    if dropout or others.get("position_bias") is not None or any(others.get(name) for name in UNUSUAL):
        return None
    if causal and mask is None and query.shape[2] != 1:
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return None
    if torch.compiler.is_compiling() and query.is_cuda:  # a pass of the compiler puts the op there
        return None
    return op_of_values(query, key, value, mask)


def install() -> None:
    """Register it under its name."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)

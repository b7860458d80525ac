"""``attn_implementation="mxtensor"`` of transformers: decoding reads each key and value of the cache once.

    model.set_attn_implementation("mxtensor")

transformers' own ``sdpa`` runs where no op is made for the call: many queries, gradients, a bias of positions. In a
compiled graph that is ``sdpa`` too, which becomes the op there. The masks are those of ``sdpa``.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels.attention.choose_attention import op_of_values

NAME = "mxtensor"
UNUSUAL = "cache", "softcap", "output_attentions"
"""Arguments that only transformers' own function knows, beside ``position_bias``, a tensor."""
UNKNOWN = {
    "s_aux": ("has sinks (s_aux of {shape[0]} heads)", "eager"),
    "sinks": ("has sinks (of the shape {shape})", "eager"),
    "indices": ("reads chosen keys (indices of the shape {shape})", "sdpa"),
    "block_indices": ("reads chosen keys (block_indices of the shape {shape})", "sdpa"),
}
"""Arguments that change the result and that no function here reads, and the implementation to use. With that one, a
model adds sinks itself, or puts the choice of keys into the mask."""


def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The function that transformers calls: query (batch, heads, queries, size), key and value (batch, heads of keys,
    keys, size) -> (batch, queries, heads, size)."""
    for name, (meaning, other) in UNKNOWN.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"attention of {type(module).__name__} {meaning.format(shape=tuple(kwargs[name].shape))}, which "
                f'"{NAME}" leaves out; use model.set_attn_implementation("{other}")'
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
    if torch.compiler.is_dynamo_compiling():  # a pass of the compiler puts the op there
        return None
    return op_of_values(query, key, value, mask)


@cache
def _check_model(config: type) -> None:
    """Raise NotImplementedError for the config of a model whose attention does not call ``attention_forward``: it would
    add the mask of ``sdpa``, which is bool, to its scores."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING  # imports modeling_utils, which registers this

    model = MODEL_MAPPING.get(config, None)
    if isinstance(model, type) and not getattr(model, "_can_set_attn_implementation", lambda: True)():
        raise NotImplementedError(
            f'{model.__name__} computes attention itself, and does not call "{NAME}"; load it with '
            'attn_implementation="eager"'
        )


def mask_of(*args: Any, config: Any = None, **kwargs: Any) -> Tensor | None:
    """The mask of ``sdpa``, for models that call ``attention_forward``."""
    if config is not None and not torch.compiler.is_compiling():
        kind: Any = type(config)
        _check_model(kind)
    return sdpa_mask(*args, config=config, **kwargs)


def install(models: Any) -> None:
    """Register it under its name in the registries of transformers, whose ``modeling_utils`` is imported."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_of)

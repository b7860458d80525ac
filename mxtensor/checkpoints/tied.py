"""Layers that share a weight with an embedding, so that a checkpoint does not store it by their name.

Readers take every linear layer for a quantized one unless the checkpoint lists it, and make codes of their own for one
that it has no codes of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import nn

from ..convert.heads import HEAD_NAMES, heads
from .known import Known
from .recipes import ends_in
from .transformers_names import tied_keys

LOOKUPS = (
    "embed_tokens", "wte", "word_embeddings", "tok_embeddings", "token_embd", "shared", "embeddings", "embed_in",
    "tokens_embed",
)  # fmt: skip
"""Last components of module names of embeddings that a head may share its weight with."""
USUAL_HEADS = (*HEAD_NAMES, "proj_out", "cls.predictions.decoder", "lm_head.decoder")
"""What most of transformers' heads are called."""

GGUF_HEAD = "output"
"""What llama.cpp calls the head."""


def tied_layers(model: nn.Module, quantized: Collection[str]) -> list[str]:
    """The weights of linear layers that share one in high precision, and are stored by its name only."""
    linear = {f"{fqn}.weight" for fqn, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    return [name for name, source in tied_keys(model).items() if name in linear and source not in quantized]


def usual_heads(config: Mapping[str, Any], quantized: Iterable[str], others: Iterable[str]) -> list[str]:
    """The same for a checkpoint of which only the names of quantized and of other weights are known: all USUAL_HEADS if
    it has an embedding and no head."""
    modules, rest = ([name.removesuffix(".weight") for name in names] for names in (quantized, others))
    tied = config.get("tie_word_embeddings", True) and any(ends_in(module, LOOKUPS) for module in rest)
    has_head = any(ends_in(module, USUAL_HEADS) for module in (*modules, *rest))
    return [f"{head}.weight" for head in USUAL_HEADS] if tied and not has_head else []


def head_modules(known: Known, names: Collection[str], config: Mapping[str, Any]) -> set[str]:
    """The modules of tensors with these ``names`` in the files that are heads, or embeddings that share their weight
    with a head.

    Where no model is ``known``, an embedding shares its weight if there is no head.
    """
    modules = {name: name.removesuffix(".weight") for name in names if name.endswith(".weight")}
    found = {module for module in modules.values() if module == GGUF_HEAD or ends_in(module, USUAL_HEADS)}
    if known.model is not None:
        every = {f"{fqn}.weight" for fqn in heads(known.model)}
        every |= {tied_keys(known.model)[name] for name in tied_layers(known.model, ())}
        return found | {
            m for name, m in modules.items() if not every.isdisjoint((name, *known.loaded(name).parameters))
        }
    if not found and config.get("tie_word_embeddings", True):
        return {module for module in modules.values() if ends_in(module, LOOKUPS)}
    return found

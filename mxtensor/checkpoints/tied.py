"""Layers that share a weight with an embedding, so that a checkpoint does not store it by their name.

Readers take every linear layer for a quantized one unless the checkpoint lists it, and make codes of their own for one
that it has no codes of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ..convert.heads import HEAD_NAMES
from .recipes import is_skipped

LOOKUPS = (
    "embed_tokens", "wte", "word_embeddings", "tok_embeddings", "token_embd", "shared", "embeddings", "embed_in",
    "tokens_embed",
)  # fmt: skip
"""Last components of module names of embeddings that a head may share its weight with."""
USUAL_HEADS = (*HEAD_NAMES, "proj_out", "cls.predictions.decoder", "lm_head.decoder")
"""What most of transformers' heads are called."""

GGUF_HEAD = "output"
"""What llama.cpp calls the head."""


def model_of(config: Mapping[str, Any]) -> nn.Module | None:
    """The model of a ``config.json``, without values; None if transformers is not there or does not know it."""
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture is None or "model_type" not in config or find_spec("transformers") is None:
        return None
    transformers = import_module("transformers")
    kind = getattr(transformers, architecture, None)
    rest = {name: value for name, value in config.items() if name not in ("model_type", "quantization_config")}
    if kind is None:
        return None
    try:
        with torch.device("meta"):
            model: nn.Module = kind(transformers.AutoConfig.for_model(config["model_type"], **rest))
    except Exception:  # a configuration of another version of transformers
        return None
    return model


def lookups_of(model: nn.Module | None) -> list[str]:
    """The modules of a model that are embeddings."""
    return [] if model is None else [fqn for fqn, m in model.named_modules() if isinstance(m, nn.Embedding)]


def tied_keys(model: nn.Module) -> Mapping[str, str]:
    """Weight that is not stored -> the weight that it shares, as transformers' models know it."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def tied_layers(model: nn.Module, quantized: Collection[str]) -> list[str]:
    """The weights of linear layers that share one in high precision, and are stored by its name only."""
    linear = {f"{fqn}.weight" for fqn, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    return [name for name, source in tied_keys(model).items() if name in linear and source not in quantized]


def usual_heads(config: Mapping[str, Any], quantized: Iterable[str], others: Iterable[str]) -> list[str]:
    """The same for a checkpoint of which only the names of quantized and of other weights are known: all USUAL_HEADS if
    it has an embedding and no head."""
    modules, rest = ([name.removesuffix(".weight") for name in names] for names in (quantized, others))
    tied = config.get("tie_word_embeddings", True) and any(is_skipped(module, LOOKUPS) for module in rest)
    has_head = any(module.endswith(USUAL_HEADS) for module in (*modules, *rest))
    return [f"{head}.weight" for head in USUAL_HEADS] if tied and not has_head else []


def head_modules(model: nn.Module | None, names: Collection[str], config: Mapping[str, Any]) -> set[str]:
    """The modules among ``names`` that are heads, and embeddings that share their weight with a head.

    ``model``: if it is known. Otherwise an embedding shares its weight if there is no head.
    """
    modules = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
    found = {module for module in modules if module == GGUF_HEAD or is_skipped(module, USUAL_HEADS)}
    if model is not None:
        tied = {tied_keys(model)[name].removesuffix(".weight") for name in tied_layers(model, ())}
        return found | (tied & modules)
    if not found and config.get("tie_word_embeddings", True):
        return {module for module in modules if is_skipped(module, LOOKUPS)}
    return found

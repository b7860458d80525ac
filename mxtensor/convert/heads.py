"""The head of a language model: the layer that makes logits, and the embedding that may share its weight."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

from torch import nn

HEAD_NAMES = ("lm_head",)
"""Last parts of module names that are heads, whatever weight they have."""

LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
"""Modules whose weight is a table: they read rows of it, and multiply nothing."""


def is_lookup(module: nn.Module) -> bool:
    """Whether the weight of a module is a table of embeddings."""
    return isinstance(module, LOOKUPS)


def is_head(fqn: str) -> bool:
    """Whether a module is a head by its name."""
    return fqn.rpartition(".")[2] in HEAD_NAMES


def embedding_weight_ids(model: nn.Module) -> set[int]:
    """The ids of embedding weights: a linear layer with such a weight is a head, whatever its name."""
    found = (module._parameters.get("weight") for module in model.modules() if is_lookup(module))
    return {id(weight) for weight in found if weight is not None}


def heads(model: nn.Module) -> dict[str, nn.Linear]:
    """Every head by its fully qualified name: ``lm_head``, linear layers that share a weight with an embedding, or that
    do so in other models of their class, and those that a model of transformers returns as its output embeddings."""
    tied, named = embedding_weight_ids(model), {*_output_embeddings(model), *_declared(model)}
    return {
        fqn: module
        for fqn, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (is_head(fqn) or module in named or id(module._parameters.get("weight")) in tied)
    }


def warn_of_no_head(caller: str, model: nn.Module, stacklevel: int) -> None:
    """Warn if ``include_head`` finds no head in a model."""
    if not heads(model):
        warnings.warn(
            f"{caller}: include_head=True found no head in {type(model).__name__}: it has no lm_head, names no output "
            "embeddings, and no linear layer shares a weight with an embedding; if it has a head, that is quantized as "
            "any other layer is",
            None,
            stacklevel + 1,
        )


def _output_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """What transformers' ``get_output_embeddings`` of the model, or of a model in it, returns: one module, or one for
    each codebook. RWKV calls its head ``head``, GIT ``output``, MusicGen ``lm_heads``."""
    for module in model.modules():
        method = getattr(type(module), "get_output_embeddings", None)
        try:
            found = None if method is None else method(module)
        except (AttributeError, NotImplementedError):  # it has none
            continue
        if isinstance(found, nn.Module):
            yield from found if isinstance(found, nn.ModuleList) else (found,)


def _declared(model: nn.Module) -> Iterator[nn.Module]:
    """Linear layers whose weight may be that of an embedding, as classes of transformers declare it: in a model with
    ``tie_word_embeddings=False`` it is not. FSMT's output embeddings are the embedding, tied or not, and its head is
    ``output_projection``."""
    for module in model.modules():
        pairs = getattr(type(module), "_tied_weights_keys", None)
        if isinstance(pairs, Mapping):
            inner = dict(module.named_modules())
            for pair in pairs.items():
                found = [inner.get(name.strip("^$").removesuffix(".weight")) for name in pair]
                if any(one is not None and is_lookup(one) for one in found):
                    yield from (one for one in found if isinstance(one, nn.Linear))

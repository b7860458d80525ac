"""What the default filter tells apart by the structure of a model: heads of language models, and gates of MLPs.

A head is the layer that makes logits; an embedding may share its weight. A gate of an MLP is called ``gate`` as routers
are, and is none: it has the shape of the layer beside it whose outputs it multiplies, and no experts are near it. A
router has one output for each expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from ..core.arguments import warn

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


def warn_of_no_head(caller: str, model: nn.Module) -> None:
    """Warn if ``include_head`` finds no head in a model."""
    if not heads(model):
        warn(
            f"{caller}: include_head=True found no head in {type(model).__name__}: it has no lm_head, names no output "
            "embeddings, and no linear layer shares a weight with an embedding; if it has a head, that is quantized as "
            "any other layer is"
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


# ---------------------------------------------------------------------------------------------- gates

GATE = "gate"
LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def mlp_gates(model: nn.Module) -> set[str]:
    """The fully qualified names of the gates of MLPs in a model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        f"{name}.{GATE}" if name else GATE
        for name, parent in modules.items()
        if "router" not in name.split(".")
        and isinstance(gate := parent._modules.get(GATE), nn.Linear)
        and _is_of_mlp(gate, parent, modules.get(name.rpartition(".")[0]))
    }


def _shape(module: nn.Module | None) -> tuple[int, ...] | None:
    weight = None if module is None else module._parameters.get("weight")
    return None if weight is None or not isinstance(module, nn.Linear) else tuple(weight.shape)


def _is_of_mlp(gate: nn.Linear, parent: nn.Module, around: nn.Module | None) -> bool:
    """Whether ``gate``, a layer of ``parent``, multiplies the outputs of another layer of it. ``around``: the module
    that has ``parent``, which may have the experts of a router that is a module of its own."""
    shape = _shape(gate)
    beside = [_shape(module) for module in parent._modules.values() if module is not gate]
    if shape is None or shape not in beside or any(True for _ in _numbers_of_experts(parent)):
        return False
    return around is None or shape[0] not in _numbers_of_experts(around)


def _numbers_of_experts(module: nn.Module) -> Iterator[int]:
    """The lengths of lists inside a module, and of stacks of matrices: of its experts, if it has experts; 0 for others
    that are experts by their names. The module itself may be a list, or an expert."""
    for name, inner in module.named_modules():
        yield from (len(p) for p in inner._parameters.values() if p is not None and p.dim() == 3)
        if inner is not module and isinstance(inner, LISTS):
            yield len(inner)
        if inner is not module and ("expert" in name.lower() or "Expert" in type(inner).__name__):
            yield 0

"""What the name of a tensor says: which parameters transformers makes of it, and whether it is a matrix of a product.

transformers 5 renames tensors while it loads them, splits a fused projection, and stacks experts. Its own lists of
layers have the names of modules, those of other readers the names in the files. ``Known`` asks the model that
transformers builds of a configuration; names alone decide for what no such model has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn

from ..convert.weights import (
    ATTENTION,
    EXPERTS,
    HEAD_NAMES,
    Kind,
    default_filter,
    heads,
    is_left_out,
    is_lookup,
    names_of_weights,
    unknown_experts,
    weights_to_quantize,
    without_heads,
)
from ..core.names import has_part
from ..numerics.formats import Orientation

LOOKUPS = (
    "embed_tokens", "wte", "word_embeddings", "tok_embeddings", "token_embd", "shared", "embeddings", "embed_in",
    "tokens_embed",
)  # fmt: skip
"""Last components of module names of embeddings that a head may share its weight with."""
SKIPPED = (
    *LOOKUPS, "embed_positions", "wpe", "position_embedding", "position_embeddings", "token_type_embeddings",
    "tile_embedding", "embedding", "input_embeds_layer", "position_embeds_layer", "relative_attention_bias",
    "embed_out", "output", "norm",
)  # fmt: skip
"""Last components of module names whose matrices stay in high precision where no model is known, beside heads and
routers: embeddings, and heads of other libraries."""
EMBEDDINGS = ("_embedding", "_embeddings")
"""Endings of module names of embeddings."""
USUAL_HEADS = (*HEAD_NAMES, "proj_out", "cls.predictions.decoder", "lm_head.decoder")
"""What most of transformers' heads are called."""
GGUF_HEAD = "output"
"""What llama.cpp calls the head."""
TRANSPOSED = ("gpt_oss", "llama4", "llama4_text", "aria", "aria_text", "openai_privacy_filter")
"""``model_type`` of transformers' models whose experts are (experts, in, out); those of all others are
(experts, out, in)."""
STACKED = tuple(sorted({name for names in EXPERTS for name in names}))
"""Parameters of a module ``experts`` that are stacks, of transformers."""
EXPERT = re.compile(r"\.experts\.\d+\.")
"""In the name of a matrix of one expert."""
PARALLEL = ("input_linear", "output_linear")
"""Modules of transformers' ParallelExperts."""

# ---------------------------------------------------------------------------------------------- by names alone


def module_of(name: str) -> str:
    """The module whose ``weight`` is called ``name``; the name itself for another parameter."""
    return name.removesuffix(".weight")


def ends_in(module: str, names: Iterable[str]) -> bool:
    """Whether the name of a module ends in one of ``names``, as whole components."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def stays(module: str) -> bool:
    """Whether a module stays in high precision by its name alone: as ``quantize_`` decides, or by the end of it."""
    return is_left_out(module) or ends_in(module, SKIPPED) or module.endswith(EMBEDDINGS)


def is_skipped(name: str, skip: Iterable[str]) -> bool:
    """Whether one of ``skip`` names a parameter, its module or a module around it, by the end of its name or all of it.

    So ``modules_to_not_convert`` of transformers names modules, too.
    """
    return any(has_part(name, part) for part in skip)


def check_skip(function: str, skip: Iterable[str], modules: Collection[str], parameters: Collection[str] = ()) -> None:
    """Raise ValueError for a name in ``skip`` that matches nothing, except for heads and routers, which stay anyway."""
    for name in skip:
        if not is_left_out(name) and not any(has_part(other, name) for other in (*modules, *parameters)):
            some = next((module for module in modules if "." in module), next(iter(modules), ""))
            raise ValueError(
                f"{function}: skip={name!r} matches no module; pass the whole name of one, or its end after a dot: "
                f"{some!r} or {some.rpartition('.')[2]!r}"
            )


def with_parameters(model: nn.Module | None) -> list[str]:
    """The names of modules that have parameters of their own."""
    return [] if model is None else [name for name, module in model.named_modules() if module._parameters]


def matrix_orientation(name: str, shape: Sequence[int], config: Mapping[str, Any]) -> Orientation | None:
    """How a product contracts the tensor called ``name``; None: no product has it.

    ``config``: the model's ``config.json``. Two dimensions: any ``weight`` (out, in), and the projections of
    nn.MultiheadAttention. Three: stacked experts of transformers, GGUF (``ffn_up_exps.weight``) and MLX
    (``experts.up_proj.weight``, ``switch_mlp.up_proj.weight``). Convolutions have three dimensions, too, so that names
    decide.
    """
    module, _, leaf = name.rpartition(".")
    if len(shape) == 2:
        return Orientation.ROWWISE if leaf in ("weight", *ATTENTION) else None
    if len(shape) != 3:
        return None
    parent, _, last = module.rpartition(".")
    if leaf in STACKED and last == "experts":
        nested = config.get("text_config")
        types = {c.get("model_type") for c in (config, nested) if isinstance(c, Mapping)}
        return Orientation.COLUMNWISE if types & {*TRANSPOSED} else Orientation.ROWWISE
    in_experts = parent.rpartition(".")[2] in ("experts", "switch_mlp") and last in STACKED
    if leaf == "weight" and (in_experts or last.endswith("_exps") or last in PARALLEL):
        return Orientation.ROWWISE
    return None


# ---------------------------------------------------------------------------------------------- by a model


def model_of(config: Mapping[str, Any]) -> nn.Module | None:
    """The model of a ``config.json``, without values; None if transformers is not there or does not know it."""
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture is None or "model_type" not in config or find_spec("transformers") is None:
        return None
    kind = getattr(import_module("transformers"), architecture, None)
    if kind is None:
        return None
    try:
        rest = {name: _floats(value) for name, value in config.items() if name != "quantization_config"}
        with torch.device("meta"):
            model: nn.Module = kind(kind.config_class.from_dict(rest))
    except Exception:  # a configuration of another version of transformers
        return None
    return model


def _floats(value: Any) -> Any:
    """``value`` with the floats that JSON does not have: transformers writes ``{"__float__": "Infinity"}``."""
    if isinstance(value, Mapping):
        return float(value["__float__"]) if [*value] == ["__float__"] else {k: _floats(v) for k, v in value.items()}
    return [_floats(item) for item in value] if isinstance(value, list) else value


class Loaded(NamedTuple):
    """What transformers makes of one tensor of a file."""

    parameters: tuple[str, ...] = ()
    """Names in the model: several for a tensor that is split, none for one that the model does not have."""
    operations: tuple[str, ...] = ()
    """Classes of transformers' operations that change the tensor on the way, such as ``Chunk``."""
    source: str | None = None
    """The pattern of transformers by which they take the tensor."""


def loaded_by(model: nn.Module, stored: Iterable[str], transforms: Iterable[Any] | None = None) -> dict[str, Loaded]:
    """Name in the files -> what transformers' ``model`` makes of the tensor.

    ``transforms``: those of one call of ``from_pretrained``; None: transformers' own for this class of models.
    """
    there = model.state_dict()
    try:
        loading = import_module("transformers.core_model_loading")
        known = import_module("transformers.conversion_mapping").get_model_conversion_mapping
    except ImportError:  # transformers 4, which renames next to nothing
        return {name: Loaded((name,) if name in there else ()) for name in stored}
    every = list(known(model) if transforms is None else deepcopy(list(transforms)))  # they note that they were used
    renamings = [one for one in every if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in every if isinstance(one, loading.WeightConverter)]
    by_source = {source: one for one in converters for source in one.source_patterns}
    prefix = getattr(model, "base_model_prefix", None)
    found = {}
    for name in sorted(stored, key=loading.dot_natural_key):
        new, source = loading.rename_source_key(name, renamings, converters, prefix, there)
        if new not in there and name in there:  # as transformers' own loop
            new, source = loading.rename_source_key(name, [], [], prefix, there)
        if source is None:
            found[name] = Loaded((new,) if new in there else ())
            continue
        first, *others = by_source[source].target_patterns
        targets = dict.fromkeys((new, *(new.replace(first, other) for other in others)))
        operations = tuple(type(operation).__name__ for operation in by_source[source].operations)
        found[name] = Loaded(tuple(target for target in targets if target in there), operations, source)
    return found


def names_in_files(config: Mapping[str, Any], wanted: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Parameter -> its name in the files, for those of ``wanted`` that transformers finds under another name."""
    wanted = set(wanted)
    model = model_of(config) if wanted else None
    if model is None:
        return {}
    single = {name: loaded.parameters for name, loaded in loaded_by(model, stored).items()}
    return {of[0]: name for name, of in single.items() if len(of) == 1 and of[0] in wanted}


class Known:
    """What ``quantize_`` would do with each tensor of a checkpoint, decided by a model without values.

    ``stored``: the names of tensors in its files; ``config``: its ``config.json``. ``Known(None)`` knows nothing,
    ``Known(model)`` no names in files.
    """

    def __init__(
        self, model: nn.Module | None, stored: Iterable[str] = (), config: Mapping[str, Any] | None = None
    ) -> None:
        self.model, self.config = model, config or {}
        self._loaded = {} if model is None else loaded_by(model, stored)
        self._lookups, self._tied = (set[str](), set[str]()) if model is None else tied_to_embeddings(model)
        self._pairs = {} if model is None else tied_keys(model)

    @cached_property
    def _kinds(self) -> dict[str, Kind | None]:
        """Parameter -> its kind, of those that ``quantize_`` converts; without weights that are computed from others,
        which it refuses. Experts of unknown kinds have None."""
        if self.model is None:
            return {}
        usual = default_filter(self.model)

        def accepts(module: nn.Module, fqn: str) -> bool:
            weights = (getattr(module, name, None) for name in names_of_weights(module))
            return usual(module, fqn) and all(isinstance(weight, nn.Parameter | None) for weight in weights)

        found = without_heads(self.model, weights_to_quantize(self.model, accepts))
        kinds: dict[str, Kind | None] = {w.fqn: w.kind for w in found if w.fqn not in self._tied}
        return kinds | {weight.fqn: None for weight in unknown_experts(self.model)}

    @cached_property
    def _is_complete(self) -> bool:
        """Whether the files have all weights of the model that ``quantize_`` converts."""
        there = {parameter for loaded in self._loaded.values() for parameter in loaded.parameters}
        names = [name for name, kind in self._kinds.items() if kind is not None]
        return bool(names) and all(name in there or self._pairs.get(name) in there for name in names)

    def loaded(self, name: str) -> Loaded:
        """What transformers makes of a tensor; nothing for one that the model does not have."""
        return self._loaded.get(name, Loaded())

    def names_of(self, name: str) -> tuple[str, ...]:
        """The names of a tensor: in the files, and of the parameters that transformers makes of it."""
        return name, *self.loaded(name).parameters

    def is_lookup(self, name: str) -> bool:
        """Whether a tensor is the weight of an embedding."""
        return not self._lookups.isdisjoint(self.names_of(name)) or ends_in(module_of(name), LOOKUPS)

    def is_shared(self, name: str) -> bool:
        """Whether a tensor is the weight of two or more modules, embeddings not counted."""
        shared = {one for pair in self._pairs.items() for one in pair} - self._tied
        return not shared.isdisjoint(self.names_of(name))

    def quantizes(self, name: str) -> bool | None:
        """Whether ``quantize_`` converts the module of a tensor; None if that is unknown.

        It does not convert what the model leaves out, such as layers for multi-token prediction. If the model lacks
        other tensors, the one that it leaves out may be one of them, with the name of another library.
        """
        parameters = self.loaded(name).parameters
        kinds = [self._kinds[parameter] for parameter in parameters if parameter in self._kinds]
        return None if None in kinds or not (parameters or self._is_complete) else bool(kinds)

    def orientation(self, name: str, shape: Sequence[int]) -> Orientation | None:
        """Which dimension of a tensor products contract; None: no product has it. The model decides if it is known, and
        the tensor is a weight as it is stored."""
        loaded = self.loaded(name)
        kind = self._kinds.get(loaded.parameters[0]) if len(loaded.parameters) == 1 and not loaded.operations else None
        return matrix_orientation(name, shape, self.config) if kind is None else kind.orientation

    def is_expert(self, name: str) -> bool:
        """Whether a matrix is one expert of many, which the model stacks."""
        loaded = self.loaded(name)
        return "MergeModulelist" in loaded.operations or (not loaded.parameters and EXPERT.search(name) is not None)


# ---------------------------------------------------------------------------------------------- shared weights


def tied_keys(model: nn.Module) -> Mapping[str, str]:
    """Weight that is not stored -> the weight that it shares, as transformers' models know it."""
    return getattr(model, "all_tied_weights_keys", None) or {}


def tied_groups(pairs: Mapping[str, str]) -> list[set[str]]:
    """The names of each weight that is shared, of the pairs of ``tied_keys``."""
    groups: dict[str, set[str]] = {}
    for name, source in pairs.items():
        groups.setdefault(source, {source}).add(name)
    return list(groups.values())


def tied_to_embeddings(model: nn.Module, pairs: Mapping[str, str] | None = None) -> tuple[set[str], set[str]]:
    """The weights of embeddings, and all weights that share one with an embedding. ``pairs``: as of ``tied_keys``."""
    pairs = tied_keys(model) if pairs is None else pairs
    lookups = {f"{name}.weight" for name, module in model.named_modules() if is_lookup(module)}
    return lookups, {name for pair in pairs.items() if lookups & set(pair) for name in pair}


def stored_by_others(model: nn.Module) -> dict[str, str]:
    """Weight that a checkpoint of ``model`` need not store -> the weight that it shares.

    transformers' list is of the time of loading: ``resize_token_embeddings`` and ``tie_weights`` tie weights again that
    were loaded apart, and a user may give one of them values of its own. Weights without values, as those that are
    offloaded, share what the list says.
    """
    declared = dict(tied_keys(model))
    expanded = getattr(model, "get_expanded_tied_weights_keys", None)
    known = declared | (dict(expanded(all_submodels=True)) if callable(expanded) else {})
    there: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    there |= dict(model.named_buffers(remove_duplicate=False))
    out = {}
    for name, source in known.items():
        one, other = there.get(name), there.get(source)
        if one is None or other is None:
            continue
        if one is other or (name in declared and one.is_meta and other.is_meta):
            out[name] = source
    return out


def tied_layers(model: nn.Module, quantized: Collection[str]) -> list[str]:
    """The weights of linear layers that share one in high precision, and are stored by its name only.

    Readers take every linear layer for a quantized one unless the checkpoint lists it, and make codes of their own for
    one that it has no codes of.
    """
    linear = {f"{fqn}.weight" for fqn, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    return [name for name, source in stored_by_others(model).items() if name in linear and source not in quantized]


def usual_heads(config: Mapping[str, Any], quantized: Iterable[str], others: Iterable[str]) -> list[str]:
    """``tied_layers`` for a checkpoint of which only the names of quantized and of other weights are known: all
    USUAL_HEADS if it has an embedding and no head."""
    modules, rest = ([module_of(name) for name in names] for names in (quantized, others))
    tied = config.get("tie_word_embeddings", True) and any(ends_in(module, LOOKUPS) for module in rest)
    has_head = any(ends_in(module, USUAL_HEADS) for module in (*modules, *rest))
    return [f"{head}.weight" for head in USUAL_HEADS] if tied and not has_head else []


def head_modules(known: Known, names: Collection[str]) -> set[str]:
    """The modules of tensors with these ``names`` in the files that are heads, or embeddings that share their weight
    with a head.

    Where no model is ``known``, an embedding shares its weight if there is no head.
    """
    modules = {name: module_of(name) for name in names if name.endswith(".weight")}
    found = {module for module in modules.values() if module == GGUF_HEAD or ends_in(module, USUAL_HEADS)}
    if known.model is not None:
        every = {f"{fqn}.weight" for fqn in heads(known.model)}
        sources = stored_by_others(known.model)
        every |= {sources[name] for name in tied_layers(known.model, ())}
        return found | {module for name, module in modules.items() if not every.isdisjoint(known.names_of(name))}
    if not found and known.config.get("tie_word_embeddings", True):
        return {module for module in modules.values() if ends_in(module, LOOKUPS)}
    return found

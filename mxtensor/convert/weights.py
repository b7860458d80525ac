"""Which weights ``quantize_`` converts: the kinds of modules it knows, and the default filter.

A new kind of module is a row of ``KINDS``. The default filter tells heads of language models and gates of MLPs apart by
the structure of a model. A head is the layer that makes logits; an embedding may share its weight. A gate of an MLP is
called ``gate`` as routers are, and is none: it has the shape of the layer beside it whose outputs it multiplies, and no
experts are near it. A router has one output for each expert.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ..core.arguments import FLAG, FUNCTION, check, described, optional, warn
from ..core.compat import is_sharded, local_of
from ..numerics.formats import Orientation
from ..tensor.mxtensor import MXTensor

FilterFn = Callable[[nn.Module, str], bool]
"""(module, its fully qualified name) -> whether to quantize its weights."""
Sharded = Callable[[nn.Module, Any], bool]
"""(module, its weight, a DTensor) -> whether the weight can be changed. None: none of them can be."""


@dataclass(frozen=True)
class Kind:
    """A kind of module, and those of its weights that enter a product (for an embedding, a lookup)."""

    matches: Callable[[nn.Module], bool]
    names: tuple[str, ...]
    orientation: Orientation = Orientation.ROWWISE
    """Which dimension products contract: ROWWISE the last one, of (out, in); COLUMNWISE the first, of (in, out)."""
    trains: bool = True
    """Whether the three products of training can be quantized."""
    multiplies: bool = True
    """Whether its weights enter a product; False for a lookup."""


class Weight(NamedTuple):
    """A weight that the filter has accepted."""

    module: nn.Module
    name: str
    kind: Kind
    module_name: str
    """The fully qualified name of the module; empty for the model itself."""

    @property
    def value(self) -> nn.Parameter:
        """The parameter. A Weight does not hold it, so that it can be freed when it is replaced."""
        return getattr(self.module, self.name)  # type: ignore[no-any-return]

    @property
    def fqn(self) -> str:
        """The name of the parameter in the model."""
        return f"{self.module_name}.{self.name}" if self.module_name else self.name


LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
"""Modules whose weight is a table: they read rows of it, and multiply nothing."""


def is_lookup(module: nn.Module) -> bool:
    """Whether the weight of a module is a table of embeddings."""
    return isinstance(module, LOOKUPS)


def _is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D, by name: a linear layer (GPT-2's) whose weight is (in, out)."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


ATTENTION = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Projections of nn.MultiheadAttention that are parameters of its own."""
EXPERTS = (
    ("gate_up_proj", "down_proj"), ("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj"),
    ("w1", "w3", "w2"), ("w1_EFD", "w3_EFD", "w2_EDF"),
)  # fmt: skip
"""Parameters that stack all experts of a module, from the first product to the last; one row for each naming:
transformers', then torchtitan's."""


def _are_experts(names: tuple[str, ...], transposed: bool) -> Callable[[nn.Module], bool]:
    """transformers' mixture of experts, by its parameters: (experts, out, in), or transposed (experts, in, out).

    Llama 4 has no flag for it; the shapes decide: ``down`` takes half of what ``gate_up`` returns, and returns what
    ``gate_up`` takes.
    """

    def matches(module: nn.Module) -> bool:
        weights = [weight for name in names if (weight := module._parameters.get(name)) is not None]
        if len(weights) < len(names) or any(weight.dim() != 3 for weight in weights):
            return False
        first, (low, high) = tuple(weights[0].shape[1:]), weights[-1].shape[1:]
        by_shape = first == (high, 2 * low) and first != (2 * high, low)
        return getattr(module, "is_transposed", by_shape) == transposed

    return matches


def _are_parallel_experts(module: nn.Module) -> bool:
    """transformers' ParallelExperts (JetMoe, Granite), by name: a linear layer for each expert, (experts, out, in)."""
    weight = module._parameters.get("weight")
    named = any(kind.__name__.endswith("ParallelExperts") for kind in type(module).__mro__)
    return named and weight is not None and weight.dim() == 3


KINDS = (
    Kind(lambda module: isinstance(module, nn.Linear), ("weight",)),
    Kind(lambda module: isinstance(module, nn.MultiheadAttention), ATTENTION),
    Kind(is_lookup, ("weight",), trains=False, multiplies=False),
    Kind(_is_conv1d, ("weight",), Orientation.COLUMNWISE),
    *(Kind(_are_experts(names, transposed=False), names) for names in EXPERTS),
    *(Kind(_are_experts(names, transposed=True), names, Orientation.COLUMNWISE) for names in EXPERTS),
    Kind(_are_parallel_experts, ("weight",)),
)
"""Every kind of module that ``quantize_`` knows; the first match counts."""

SKIPPED_NAMES = ("router", "gate")
"""Last parts of module names that the default filter leaves in high precision, beside heads: expert routers, unless
``mlp_gates`` knows better. What is inside a module named ``router`` (JetMoe's ``router.layer``) stays too."""


def default_filter(model: nn.Module, include_head: bool = False) -> FilterFn:
    """Linear layers and attention of a model; not heads, routers and embeddings, where rounding costs most and saves
    least. A ``gate`` of an MLP is not a router. ``include_head``: heads and embeddings with their weights, too.
    """
    gates = mlp_gates(model)
    included = heads(model) if include_head else {}
    tied = {id(head.weight) for head in included.values()}

    def accepts(module: nn.Module, fqn: str) -> bool:
        if is_lookup(module):
            return id(module.weight) in tied
        return fqn in included or fqn in gates or not is_left_out(fqn)

    return accepts


def is_left_out(fqn: str) -> bool:
    """Whether a module is a head or a router by its name."""
    *outer, last = fqn.split(".")
    return is_head(fqn) or last in SKIPPED_NAMES or "router" in outer


def _weights(model: nn.Module, filter_fn: FilterFn, sharded: Sharded | None) -> Iterator[Weight]:
    """Every weight that ``filter_fn`` accepts. Raises TypeError for a layer without a weight that has codes of another
    library."""
    for fqn, module in model.named_modules():
        kind = next((kind for kind in KINDS if kind.matches(module)), None)
        if kind is not None and _accepts(filter_fn, module, fqn):
            for name in kind.names:
                weight = getattr(module, name, None)
                whole = f"{fqn}.{name}" if fqn else name
                if weight is None and len(kind.names) == 1 and (codes := codes_of_others(module)):
                    raise TypeError(
                        f"quantize_: {whole} is quantized already, by another library, as {codes}; convert the "
                        "checkpoint by mx.checkpoints.convert and load the result, or leave the layer out by filter_fn"
                    )
                if weight is not None and not isinstance(local_of(weight), MXTensor):
                    _check_parameter(module, name, whole)
                    if is_sharded(weight) and not (sharded and sharded(module, weight)):
                        refuse_sharded(weight, whole)
                    yield Weight(module, name, kind, fqn)


def names_of_weights(module: nn.Module) -> tuple[str, ...]:
    """The parameters of ``module`` that ``quantize_`` can quantize, by its kind."""
    return next((kind.names for kind in KINDS if kind.matches(module)), ())


_UNKNOWN = Kind(lambda module: False, (), trains=False)


def unknown_experts(model: nn.Module) -> Iterator[Weight]:
    """The stacks of weights of modules that are experts by the name of their class, and of no kind that is known."""
    for fqn, module in model.named_modules():
        if "Expert" in type(module).__name__ and not any(kind.matches(module) for kind in KINDS):
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.dim() > 1 and "bias" not in name:
                    yield Weight(module, name, _UNKNOWN, fqn)


def modules_of_autocast(model: nn.Module) -> list[str]:
    """The names of modules of ``mxtensor.te`` with a high-precision weight: ``quantize_`` does not convert them."""
    return [
        fqn or type(module).__name__
        for fqn, module in model.named_modules()
        if getattr(module, "has_recipe_of_autocast", False)
        and any(p.dim() == 2 and not isinstance(p, MXTensor) for p in module.parameters(recurse=False))
    ]


def _accepts(filter_fn: FilterFn, module: nn.Module, fqn: str) -> bool:
    """Whether a filter accepts a module. Its answer may be any object that is true or false, but no array."""
    try:
        answer: Any = filter_fn(module, fqn)
    except (TypeError, AttributeError) as error:
        raise TypeError(
            f"quantize_: filter_fn({type(module).__name__}, {fqn!r}) failed: {error}; its first argument is a module, "
            "the second the name of it"
        ) from error
    try:
        return bool(answer)
    except (RuntimeError, ValueError, TypeError):
        given = described(answer)
        raise TypeError(f"quantize_: filter_fn returned {given} for {fqn!r}; return True or False") from None


def codes_of_others(module: nn.Module) -> str:
    """What another library stores in the place of a weight, or beside one that is codes: ``weight_packed`` and
    ``weight_scale`` of compressed-tensors, ``weight_scale_inv`` of transformers' float8. Empty if there is nothing."""
    stored = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return ", ".join(name for name, _ in stored if "scale" in name or "packed" in name)


def _check_parameter(module: nn.Module, name: str, fqn: str) -> None:
    weight = getattr(module, name)
    if nn.parameter.is_lazy(weight):
        raise ValueError(f"quantize_: {fqn} has no values yet; run one batch through the lazy module first")
    if any(name == buffer for buffer, _ in module.named_buffers(recurse=False)):
        raise ValueError(
            f"quantize_: {fqn} is a buffer, and quantize_ replaces parameters; assign it again as an nn.Parameter "
            "(with requires_grad=False if it does not train), leave the layer out by filter_fn, or train inside "
            "mx.autocast(recipe=...)"
        )
    if not isinstance(weight, nn.Parameter):
        raise ValueError(
            f"quantize_: {fqn} is not a parameter but computed from others (parametrize, weight_norm, prune); remove "
            "that first, leave the layer out by filter_fn, or train inside mx.autocast(recipe=...)"
        )


def weights_to_quantize(
    model: nn.Module, filter_fn: FilterFn | None, include_head: bool = False, sharded: Sharded | None = None
) -> list[Weight]:
    """Every weight that ``filter_fn`` accepts; None: ``default_filter``, with ``include_head`` the heads too.

    The default also skips heads of other names, and layers whose weight is that of an embedding. Raises ValueError for
    a weight that is not a parameter, has no values yet, or is a DTensor that ``sharded`` does not accept, and for
    ``include_head`` with a filter; TypeError for a filter that cannot be called.
    """
    check("quantize_", "filter_fn", filter_fn, optional(FUNCTION))
    if filter_fn is not None:
        with suppress(ValueError):  # some functions written in C have no signature
            arguments = inspect.signature(filter_fn)
            try:
                arguments.bind(None, "")
            except TypeError:
                raise TypeError(
                    f"quantize_: filter_fn is {described(filter_fn)}, which takes {arguments}; pass a function of two "
                    "arguments, the module and its name"
                ) from None
    check("quantize_", "include_head", include_head, FLAG)
    reshard(model)
    if filter_fn is not None:
        if include_head:
            raise ValueError(
                "quantize_: include_head=True extends the default filter, and filter_fn replaces it; pass one of them "
                "(a filter that returns True for the head includes it)"
            )
        return list(_weights(model, filter_fn, sharded))
    weights = list(_weights(model, default_filter(model, include_head), sharded))
    return weights if include_head else without_heads(model, weights)


def without_heads(model: nn.Module, weights: list[Weight]) -> list[Weight]:
    """``weights`` without those of heads and embeddings, as the default filter leaves them."""
    left = embedding_weight_ids(model) | {id(head._parameters.get("weight")) for head in heads(model).values()}
    return [weight for weight in weights if id(weight.value) not in left]


# ---------------------------------------------------------------------------------------------- heads

HEAD_NAMES = ("lm_head",)
"""Last parts of module names that are heads, whatever weight they have."""


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
    """The fully qualified names of the gates of MLPs in a model: each multiplies the outputs of a layer beside it."""
    modules, found = dict(model.named_modules(remove_duplicate=False)), set()
    for name, parent in modules.items():
        gate = parent._modules.get(GATE)
        if not isinstance(gate, nn.Linear) or "router" in name.split("."):
            continue
        layers = {id(m): m for m in parent._modules.values() if isinstance(m, nn.Linear)}
        shapes = {key: tuple(w.shape) for key, m in layers.items() if (w := m._parameters.get("weight")) is not None}
        shape = shapes.pop(id(gate), None)
        if shape is None or shape not in shapes.values():
            continue
        around = modules.get(name.rpartition(".")[0])  # may have the experts of a router that is a module of its own
        if any(True for _ in _numbers_of_experts(parent)):
            continue
        if around is None or shape[0] not in _numbers_of_experts(around):
            found.add(f"{name}.{GATE}" if name else GATE)
    return found


def _numbers_of_experts(module: nn.Module) -> Iterator[int]:
    """The lengths of lists inside a module, and of stacks of matrices: of its experts, if it has experts; 0 for others
    that are experts by their names. The module itself may be a list, or an expert."""
    for name, inner in module.named_modules():
        yield from (len(p) for p in inner._parameters.values() if p is not None and p.dim() == 3)
        if inner is not module and isinstance(inner, LISTS):
            yield len(inner)
        if inner is not module and ("expert" in name.lower() or "Expert" in type(inner).__name__):
            yield 0


# ---------------------------------------------------------------------------------------------- sharded weights


def refuse_sharded(weight: Any, fqn: str) -> None:
    """Raise ValueError for a weight that is a DTensor."""
    raise ValueError(
        f"quantize_: {fqn} is already sharded, {tuple(weight.shape)} as {weight.placements}; call quantize_ before "
        "fully_shard or parallelize_module, or on a model that is not sharded and has loaded the full state dict"
    )


def reshard(model: nn.Module) -> None:
    """Free what FSDP2 has gathered. Between two passes a parameter may be the whole weight: it looks like one that is
    not sharded, and FSDP2 would gather it again over what has replaced it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # FSDP2 exists only after this import
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def by_tensor_parallelism(module: nn.Module, weight: Any) -> bool:
    """A sharded weight is accepted if torch's tensor parallelism has made it, over one dimension of a mesh. FSDP2 would
    gather the parameter that it knows, and not the one that replaces it."""
    return weight.device_mesh.ndim == 1 and getattr(module, "_distribute_module_applied", False)

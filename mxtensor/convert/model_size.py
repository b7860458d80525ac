"""The size of a whole model: what is quantized, what is not, and the bits per weight over both.

print(mx.model_size(mx.quantize_(model, "mxfp4-weight-only")))

``quantize_`` warns if much stays in high precision, such as convolutions: they dominate the size of the model, or its
time, and nothing else shows that the layers that are quantized are a few per cent of it.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core.arguments import MODULE, check
from ..core.compat import local_of
from ..core.explain import text_table
from ..core.names import dtype_name
from ..tensor.mxtensor import MXTensor
from ..training.training_weight import TrainingWeight
from .weights import KINDS, heads

_log = logging.getLogger("mxtensor")

HEAD, TIED, LOOKUP, LAYER, REST = "head", "head and embedding", "embedding", "layers", "other parameters"
NOTABLE = 0.1
"""A warning if more than this fraction of the values stays: beside layers of 4 bits, a tenth in bfloat16 is a quarter
of the bytes. The norms, biases and routers of a transformer are less than a hundredth."""
NAMED = 0.01
"""Kinds of modules with a smaller fraction of the values are not named."""
ORDER = (LAYER, TIED, HEAD, LOOKUP, REST)


@dataclass(frozen=True)
class Group:
    """The parameters of one use that are stored in one way."""

    use: str
    """``layers`` (linear, attention, experts), ``head``, ``embedding``, ``head and embedding`` (one weight for both),
    or ``other parameters`` (norms, biases, convolutions)."""
    stored: str
    """A format, or the dtype of plain values."""
    quantized: bool
    values: int
    nbytes: int
    names: tuple[str, ...]
    """The parameters; one that several modules share has all its names, joined by ``=``."""

    @property
    def bits(self) -> float:
        """Stored bits for one value, scales included."""
        return 8 * self.nbytes / max(self.values, 1)


@dataclass(frozen=True)
class ModelSize:
    """The parameters of a model, each counted once. ``print`` shows a table."""

    groups: tuple[Group, ...]

    @property
    def values(self) -> int:
        return sum(group.values for group in self.groups)

    @property
    def nbytes(self) -> int:
        """Bytes of all codes, scales and plain values."""
        return sum(group.nbytes for group in self.groups)

    @property
    def bits(self) -> float:
        """Stored bits for one value, over the whole model."""
        return 8 * self.nbytes / max(self.values, 1)

    def __str__(self) -> str:
        header = ("use", "stored as", "values", "bits", "MB", "parameters")
        rows = []
        for p in self.groups:
            names = p.names[0] if len(p.names) == 1 else f"{len(p.names)} tensors"
            rows.append((p.use, p.stored, f"{p.values:,}", f"{p.bits:.2f}", f"{p.nbytes / 1e6:.1f}", names))
        rows.append(("whole model", "", f"{self.values:,}", f"{self.bits:.2f}", f"{self.nbytes / 1e6:.1f}", ""))
        return text_table(header, rows, left=(0, 1, 5))


def model_size(model: nn.Module) -> ModelSize:
    """The memory of the parameters of ``model``, by use and by format; buffers are not counted.

    A parameter that modules share is counted once. Of a sharded parameter, the shard of this rank is counted. Raises
    TypeError for anything but a module.
    """
    check("model_size", "model", model, MODULE)
    uses, all_names = uses_of(model), defaultdict[int, list[str]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        all_names[id(parameter)].append(name)
    found = defaultdict[tuple[str, str], list[tuple[str, Tensor]]](list)
    for parameter in model.parameters():
        weight = local_of(parameter)
        stored = str(weight.format) if isinstance(weight, MXTensor) else dtype_name(weight.dtype)
        found[uses[id(parameter)], stored].append((" = ".join(all_names[id(parameter)]), weight))
    groups = []
    for (use, stored), weights in found.items():
        names, tensors = zip(*weights, strict=True)
        quantized = isinstance(tensors[0], MXTensor)
        nbytes = sum(t.nbytes if quantized else t.numel() * t.element_size() for t in tensors)
        groups.append(Group(use, stored, quantized, sum(t.numel() for t in tensors), nbytes, names))
    return ModelSize(tuple(sorted(groups, key=lambda group: (ORDER.index(group.use), group.stored))))


def uses_of(model: nn.Module) -> dict[int, str]:
    """The use of each parameter, by its id."""
    uses = {id(parameter): REST for parameter in model.parameters()}
    embeddings = set()
    for module in model.modules():
        kind = next((kind for kind in KINDS if kind.matches(module)), None)
        for name in () if kind is None else kind.names:
            weight = id(module._parameters.get(name))
            if weight in uses and kind is not None:
                uses[weight] = LAYER if kind.multiplies else uses[weight]
                embeddings |= set() if kind.multiplies else {weight}
    made_logits = {id(head._parameters.get("weight")) for head in heads(model).values()} & set(uses)
    uses |= {weight: LOOKUP for weight in embeddings if uses[weight] == REST}
    uses |= {weight: TIED if weight in embeddings else HEAD for weight in made_logits}
    return uses


# ---------------------------------------------------------------------------------------------- what stays


def warn_of_unquantized(
    model: nn.Module, *, trains: bool = False, include_head: bool = False, said: Collection[int] = ()
) -> None:
    """Log a warning about what stays in high precision, if it is a large part of ``model``.

    ``trains``: weights train quantized; heads and embeddings are not counted then, for they save no memory. ``said``:
    ids of parameters that another warning has named. The warning is one of the logger ``mxtensor``, which Python prints
    to stderr unless a handler is set.
    """
    size = model_size(model)
    stored = [group for group in size.groups if group.quantized]
    looked_up = [] if trains else [g for g in size.groups if not g.quantized and g.use in (HEAD, TIED, LOOKUP)]
    unquantized = _unquantized(model, said)
    left = sum(group.values for group in looked_up) + sum(values for values, _ in unquantized.values())
    done = sum(group.values for group in stored)
    if trains:
        done = sum(local_of(p).numel() for p in model.parameters() if isinstance(p, TrainingWeight))
    if not done or left <= NOTABLE * size.values:
        return

    def amount(values: int) -> str:
        share = values / max(size.values, 1)
        number = f"{values / 1e6:.1f}M" if values >= 1e7 else f"{values:,}"
        return f"{number} ({f'{share:.0%}' if share >= 0.005 else 'less than 1%'})"

    named = {kind: row for kind, row in unquantized.items() if row[0] > NAMED * size.values}
    stay = [f"{amount(g.values)} of {', '.join(g.names)} ({g.use}) stay {g.stored}" for g in looked_up]
    for (name, dtype), (values, modules) in named.items():
        stay.append(f"{amount(values)} of {modules} {name} stay {dtype_name(dtype)}")
    bits = 8 * sum(group.nbytes for group in stored) / max(done, 1)
    now = "train quantized" if trains else f"have {bits:.2f} bits now"
    whole = "" if trains else f": {size.bits:.2f} bits over the whole model"
    total = amount(size.values).partition(" ")[0]
    ways = _ways_out({group.use for group in looked_up}, named, trains, include_head)
    _log.warning(
        f"quantize_: {amount(done).replace(' (', f' of {total} values (')} {now}; {' and '.join(stay)}{whole}; "
        f"{'; '.join(ways)}"
    )


def _unquantized(model: nn.Module, said: Collection[int]) -> dict[tuple[str, torch.dtype], tuple[int, int]]:
    """What stays beside heads and embeddings: (class of modules, dtype) -> (values, modules); the largest first."""
    uses, seen = uses_of(model), set(said)
    found: dict[tuple[str, torch.dtype], tuple[int, int]] = {}
    for module in model.modules():
        if getattr(module, "has_recipe_of_autocast", False):  # a module of mxtensor.te, which another warning names
            continue
        own = Counter[tuple[str, torch.dtype]]()
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in seen or uses[id(parameter)] in (HEAD, TIED, LOOKUP):
                continue
            seen.add(id(parameter))
            local: Tensor = local_of(parameter)
            if not isinstance(local, MXTensor) and not isinstance(parameter, TrainingWeight):
                own[type(module).__name__, local.dtype] += local.numel()
        for kind, number in own.items():
            values, modules = found.get(kind, (0, 0))
            found[kind] = values + number, modules + 1
    return dict(sorted(found.items(), key=lambda row: -row[1][0]))


def _ways_out(
    uses: Collection[str], named: Collection[tuple[str, torch.dtype]], trains: bool, include_head: bool
) -> list[str]:
    """What the user can do for heads and embeddings (``uses``), and for kinds of modules."""
    ways, linear = [], nn.Linear.__name__
    if not include_head and (HEAD in uses or TIED in uses):
        ways.append("include_head=True quantizes heads")
    if LOOKUP in uses:
        ways.append(
            "a second quantize_ with filter_fn=lambda module, name: isinstance(module, torch.nn.Embedding) quantizes "
            "embeddings"
        )
    if any(name == linear for name, _ in named):
        ways.append(f"a filter_fn that returns True for them quantizes the {linear}")
    others = list(dict.fromkeys(name for name, _ in named if name != linear))
    if others:
        what = "mx.model_size(model) shows what each part takes"
        if any(dtype in (torch.float32, torch.float64) for _, dtype in named):
            half = "model.bfloat16() before quantize_ halves what stays"
            what = "torch.autocast runs it in bfloat16" if trains else half
        ways.append(f"quantize_ has no quantized form of {', '.join(others)}; {what}")
    return ways or ["mx.model_size(model) shows what each part takes"]

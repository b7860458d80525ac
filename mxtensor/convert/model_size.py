"""The size of a whole model: what is quantized, what is not, and the bits per weight over both.

print(mx.model_size(mx.quantize_(model, "mxfp4-weight-only")))
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from ..core.arguments import MODULE, check
from ..core.local import local_of
from ..core.names import dtype_name
from ..core.text_table import text_table
from ..tensor.mxtensor import MXTensor
from .heads import heads
from .weights import KINDS

_log = logging.getLogger("mxtensor")

NOTABLE = 0.1
"""``quantize_`` warns if heads and embeddings in high precision are more than this fraction of the values."""
HEAD, TIED, LOOKUP, LAYER, REST = "head", "head and embedding", "embedding", "layers", "other parameters"
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
        rows = [
            (p.use, p.stored, f"{p.values:,}", f"{p.bits:.2f}", f"{p.nbytes / 1e6:.1f}", _named(p)) for p in self.groups
        ]
        rows.append(("whole model", "", f"{self.values:,}", f"{self.bits:.2f}", f"{self.nbytes / 1e6:.1f}", ""))
        return text_table(header, rows, left=(0, 1, 5))


def _named(group: Group) -> str:
    return group.names[0] if len(group.names) == 1 else f"{len(group.names)} tensors"


def model_size(model: nn.Module) -> ModelSize:
    """The memory of the parameters of ``model``, by use and by format; buffers are not counted.

    A parameter that modules share is counted once. Of a sharded parameter, the shard of this rank is counted. Raises
    TypeError for anything but a module.
    """
    check("model_size", "model", model, MODULE)
    uses = _uses(model)
    found: dict[tuple[str, str], list[tuple[str, Tensor]]] = {}
    for names, parameter in _parameters(model):
        weight = local_of(parameter)
        stored = str(weight.format) if isinstance(weight, MXTensor) else dtype_name(weight.dtype)
        found.setdefault((uses[id(parameter)], stored), []).append((" = ".join(names), weight))
    groups = [_group(use, stored, weights) for (use, stored), weights in found.items()]
    return ModelSize(tuple(sorted(groups, key=lambda group: (ORDER.index(group.use), group.stored))))


def _group(use: str, stored: str, weights: list[tuple[str, Tensor]]) -> Group:
    names, tensors = zip(*weights, strict=True)
    quantized = isinstance(tensors[0], MXTensor)
    nbytes = sum(t.nbytes if quantized else t.numel() * t.element_size() for t in tensors)
    return Group(use, stored, quantized, sum(t.numel() for t in tensors), nbytes, names)


def _parameters(model: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Each parameter once, with all its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for parameter in model.parameters():
        yield names[id(parameter)], parameter


def _uses(model: nn.Module) -> dict[int, str]:
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


def warn_of_unquantized_heads(model: nn.Module) -> None:
    """Log a warning about heads and embeddings that stay in high precision, if they are a large part of the model.

    They dominate the size of a small language model, which then has more bits per value than its layers. The warning is
    one of the logger ``mxtensor``, which Python prints to stderr unless a handler is set.
    """
    size = model_size(model)
    left = [group for group in size.groups if not group.quantized and group.use in (HEAD, TIED, LOOKUP)]
    done = [group for group in size.groups if group.quantized]
    if not heads(model) or not done or sum(group.values for group in left) <= NOTABLE * size.values:
        return
    total, values = size.values, sum(group.values for group in done)
    bits = 8 * sum(group.nbytes for group in done) / max(values, 1)
    said = " and ".join(f"{_millions(p.values)} of {', '.join(p.names)} ({p.use}) stay {p.stored}" for p in left)
    way_out = "; include_head=True quantizes heads" if any(group.use != LOOKUP for group in left) else ""
    _log.warning(
        f"quantize_: {_millions(values)} of {_millions(total)} values have {bits:.2f} bits now; {said}: "
        f"{size.bits:.2f} bits over the whole model{way_out}"
    )


def _millions(values: int) -> str:
    return f"{values / 1e6:.1f}M" if values >= 1e7 else f"{values:,}"

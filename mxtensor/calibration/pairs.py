"""Pairs in a block: a module whose output channels can be divided by numbers that its consumers multiply back.

A norm and the linear layers that read it; values and the projection after attention; one branch of a gated MLP and the
layer after it. Norms are found by their tensors, the others by the names of PAIRS.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor, nn

PAIRS = (("v_proj", "o_proj"), ("up_proj", "down_proj"))
"""Names of two layers of one module: each output channel of the first is one input channel of the second, times
something that does not depend on it, or a mean over tokens."""


class Pair(NamedTuple):
    """Channels that one module makes and others read."""

    producer: nn.Module
    """A norm with a weight (channels,), or a linear layer with (channels, cols)."""
    consumers: list[nn.Module]
    """Linear layers (rows, channels * copies)."""
    head: int
    """Channels of a head, where ``copies`` is more than 1; each head is read ``copies`` times, one after another."""
    copies: int

    def as_read(self, channels: Tensor) -> Tensor:
        """One number a channel of the producer as one a column of the consumers."""
        return channels.view(-1, 1, self.head).expand(-1, self.copies, -1).reshape(-1)

    def as_made(self, columns: Tensor) -> Tensor:
        """The largest number of the columns that read each channel."""
        return columns.view(-1, self.copies, self.head).amax(1).reshape(-1)


def pairs_of(block: nn.Module, layers: Collection[nn.Module], run: Callable[[], Any]) -> list[Pair]:
    """The pairs of a block whose consumers are all in ``layers``. ``run`` runs the block."""
    made: dict[int, nn.Module] = {}
    read: dict[int, list[nn.Module]] = {}
    alive: list[Any] = []

    def after(module: nn.Module, args: Any, out: Any) -> None:
        alive.append(out)
        made[id(out)] = module

    def before(layer: nn.Module, args: tuple[Any, ...]) -> None:
        alive.append(args[0])
        read.setdefault(id(args[0]), []).append(layer)

    with ExitStack() as hooks:
        for module in block.modules():
            if _is_norm(module):
                hooks.enter_context(module.register_forward_hook(after))
            if isinstance(module, nn.Linear):
                hooks.enter_context(module.register_forward_pre_hook(before))
        run()
    found = []
    for tensor, consumers in read.items():
        producer = made.get(tensor)
        if producer is not None:
            found.append(Pair(producer, consumers, len(producer.weight), 1))  # type: ignore[arg-type]
    for module in block.modules():
        children = dict(module.named_children())
        for first, second in PAIRS:
            if first in children and second in children:
                pair = _of_layers(module, children[first], children[second])
                found += [] if pair is None else [pair]
    return [pair for pair in found if all(layer in layers for layer in pair.consumers)]


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and not list(module.children())


def _of_layers(parent: nn.Module, first: nn.Module, second: nn.Module) -> Pair | None:
    if not (isinstance(first, nn.Linear) and isinstance(second, nn.Linear)):
        return None
    channels, columns = first.out_features, second.in_features
    head = channels if channels == columns else getattr(parent, "head_dim", 0)
    if not head or columns % channels or channels % head:
        return None
    return Pair(first, [second], head, columns // channels)

"""Pairs in a block: a module whose output channels can be divided by numbers that its consumers multiply back.

A norm and the linear layers that read it, if nothing else does; values and the projection after attention; one branch
of a gated MLP and the layer after it. Norms are found by their tensors, the others by the names of PAIRS.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.compat import tree_leaves
from .in_use import Call, first_of, with_first
from .layers import orientation_of
from .moments import Inputs, version_of
from .outputs import tensors_of

PAIRS = (("v_proj", "o_proj"), ("up_proj", "down_proj"))
"""Names of two layers of one module: each output channel of the first is one input channel of the second, times
something that does not depend on it, or a mean over tokens. Layers with an activation between them are not a pair."""
ROUNDING = 1e-2
"""The largest relative difference of inputs that rounding explains."""


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
    inputs: Inputs = {module: [] for module in block.modules() if orientation_of(module) is not None}
    alive: list[Any] = []
    elsewhere = _Reads(made)

    def after(module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            alive.append(out)
            made[id(out)] = module

    def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[layer].append(first_of(args, kwargs))
        elsewhere.active = False

    def done(layer: nn.Module, args: Any, out: Any) -> None:
        elsewhere.active = True

    with ExitStack() as hooks:
        for module in block.modules():
            if _is_norm(module):
                hooks.enter_context(module.register_forward_hook(after))
        for layer in inputs:
            hooks.enter_context(layer.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(done))
        with elsewhere:
            returned = tensors_of(run())
    found = _of_norms(made, inputs, elsewhere.ids | set(map(id, returned)))
    named = [pair for module in block.modules() for pair in _of_names(module)]
    found += linear_pairs(named, inputs, run) if named else []
    return [pair for pair in found if all(layer in layers for layer in pair.consumers)]


def _of_norms(made: Mapping[int, nn.Module], inputs: Inputs, elsewhere: Collection[int]) -> list[Pair]:
    """Norms and their readers. All outputs of a norm have the same readers, which read nothing else."""
    readers: dict[int, list[nn.Module]] = {}
    for layer, read in inputs.items():
        for tensor in dict.fromkeys(map(id, read)):
            readers.setdefault(tensor, []).append(layer)
    found = []
    for norm in dict.fromkeys(made[tensor] for tensor in readers if tensor in made):
        outputs = [tensor for tensor, module in made.items() if module is norm]
        consumers = readers.get(outputs[0], [])
        alone = all(readers.get(tensor) == consumers and tensor not in elsewhere for tensor in outputs)
        if alone and all(id(x) in outputs for layer in consumers for x in inputs[layer]):
            found.append(Pair(norm, consumers, len(norm.weight), 1))  # type: ignore[arg-type]
    return found


class _Reads(TorchFunctionMode):
    """The ids of those tensors, out of ``made``, that functions read. Not active inside of linear layers."""

    def __init__(self, made: Collection[int]) -> None:
        super().__init__()
        self.active, self.ids, self._made = True, set[int](), made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [value for value in tree_leaves((args, kwargs)) if self.active and id(value) in self._made]
        versions = [version_of(tensor) for tensor in read]
        out = func(*args, **(kwargs or {}))
        results = [id(result) for result in tree_leaves(out) if isinstance(result, Tensor)]
        for tensor, version in zip(read if results else [], versions, strict=False):  # a shape is not a reading
            if id(tensor) not in results or version_of(tensor) != version:  # .to() may return the tensor itself
                self.ids.add(id(tensor))
        return out


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1 and not list(module.children())


def _of_names(parent: nn.Module) -> Iterator[Pair]:
    """Pairs by the names of PAIRS, if their shapes fit."""
    children = dict(parent.named_children())
    for names in PAIRS:
        first, second = map(children.get, names)
        if isinstance(first, nn.Linear) and isinstance(second, nn.Linear):
            channels, columns = first.out_features, second.in_features
            head = channels if channels == columns else getattr(parent, "head_dim", 0)
            if head and columns % channels == 0 and channels % head == 0:
                yield Pair(first, [second], head, columns // channels)


def linear_pairs(pairs: Sequence[Pair], inputs: Inputs, run: Callable[[], Any]) -> list[Pair]:
    """Those of ``pairs`` whose second layer gets twice its input in the channels where the first one's output doubles.

    So a gate and attention do, and an activation between the two does not. ``inputs``: those of layers in another
    ``run``; the second layers get them in this one too, so that a pair changes nothing for those after it.
    """
    seen: dict[nn.Module, int] = {}
    wrong: set[nn.Module] = set()

    def doubles(pair: Pair) -> Any:
        return lambda layer, args, out: out * _scales(out.shape[-1]).to(out)

    def compares(pair: Pair) -> Any:
        (layer,) = pair.consumers
        scales = pair.as_read(_scales(pair.producer.out_features))  # type: ignore[arg-type]

        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            number = seen[layer] = seen.get(layer, 0) + 1
            x, plain = first_of(args, kwargs), inputs[layer][number - 1]
            expected = plain.float() * scales.to(x.device)
            if not (x.float() - expected).norm() <= ROUNDING * expected.norm():
                wrong.add(layer)
            return with_first(Call(args, kwargs), plain)

        return layer.register_forward_pre_hook(hook, with_kwargs=True)

    with ExitStack() as hooks:
        for pair in pairs:
            hooks.enter_context(pair.producer.register_forward_hook(doubles(pair)))
            hooks.enter_context(compares(pair))
        run()
    return [pair for pair in pairs if pair.consumers[0] in seen and pair.consumers[0] not in wrong]


def _scales(channels: int) -> Tensor:
    """1 or 2 for each channel, in an order that no head repeats."""
    return 1.0 + torch.randint(2, (channels,), generator=torch.Generator().manual_seed(0))

"""Smoothing: channels with large inputs are made smaller, and the columns of the weights that read them larger.

The output stays: ``(x / s) (w s)^T = x w^T``. What a block of a format has to hold together, in the input and in the
weight, gets closer to one size. ``s`` is folded into the module before, so that the model has the same layers as before
and costs no more. Methods differ in the scales that they try.

The module before and those that read it are a pair (``pairs_of``): a norm and the linear layers that read it, if
nothing else does; values and the projection after attention; one branch of a gated MLP and the layer after it. Norms
are found by their tensors, the others by the names of PAIRS.

Sources: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", 2022:
``s = amax_x^alpha / amax_w^(1 - alpha)``. Lin et al., "AWQ: Activation-aware Weight Quantization", 2023: each ``s`` is
the one of several with the least error of the quantized output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..convert.changes import Change
from ..core.arguments import COUNT, SHARE, check, described
from ..core.compat import tree_leaves
from ..core.shapes import as_matrix
from ..kernels.quantize.choose_cast import dequantize_operand, quantize_operand, quantize_rows
from ..numerics.cast import Cast
from .blocks import Call, Stream, tensors_of
from .layers import Edit, in_place, orientation_of, oriented
from .moments import Inputs, inputs_of, version_of

PAIRS = (("v_proj", "o_proj"), ("up_proj", "down_proj"))
"""Names of two layers of one module: each output channel of the first is one input channel of the second, times
something that does not depend on it, or a mean over tokens. Layers with an activation between them are not a pair."""
ROUNDING = 1e-2
"""The largest relative difference of inputs that rounding explains."""
ALPHAS = (0.25, 0.5, 0.75, 1.0)
"""Values of alpha that are tried."""
ROWS = 2048
"""Rows of input that the amax of channels, and the error of the output, are taken from."""
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The largest relative change of a block's output that rounding of edited weights explains."""


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


class Scaling(ABC):
    """A method that moves scales of channels from inputs to weights; each pair takes the best of some scales."""

    @abstractmethod
    def scales(self, pair: Pair, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """The scales to try: tensors (channels of the producer,). ``x``: (rows, columns) of input, float32."""

    def edits(self, stream: Stream, index: int, states: Sequence[Any], layers: dict[nn.Module, Change]) -> list[Edit]:
        """The parameters of a block after smoothing. Raises ValueError if the block then computes something else."""
        pairs = pairs_of(stream.blocks[index], layers, partial(stream.run, index, 0, states[0]))
        pairs = [pair for pair in pairs if not stream.is_shared(pair.producer, *pair.consumers)]
        consumers = [layer for pair in pairs for layer in pair.consumers]
        inputs = _rows(stream, index, states, consumers)
        edited: dict[tuple[nn.Module, str], Tensor] = {}
        for pair in pairs:
            x = inputs[pair.consumers[0]]
            if len(x) and x.isfinite().all():
                self._smooth(pair, x, layers, edited)
        found = [Edit(m, name, nn.Parameter(value, requires_grad=False)) for (m, name), value in edited.items()]
        if found:
            self._check(stream, index, states[0], found)
        return found

    def _smooth(
        self, pair: Pair, x: Tensor, layers: dict[nn.Module, Change], edited: dict[tuple[nn.Module, str], Tensor]
    ) -> None:
        """Add the edits of a pair. ``x``: (rows, columns) of its consumers' input."""
        layouts = [layers[layer].orientation for layer in pair.consumers]
        current = [_current(layer, "weight", edited) for layer in pair.consumers]
        weights = list(map(oriented, current, layouts))
        tries = [(s / s.log().mean().exp()).clamp(1e-3, 1e3) for s in self.scales(pair, x, weights)]
        casts = [layers[layer].recipe for layer in pair.consumers]
        best = tries[0]
        if len(tries) > 1:
            plain = [x @ w.float().T for w in weights]
            errors = []
            for s in tries:
                read = pair.as_read(s)
                errors.append(sum(
                    _error(x / read, w.float() * read, out, r.activation, r.stored)
                    for w, out, r in zip(weights, plain, casts, strict=True)
                ))  # fmt: skip
            best = tries[min(range(len(tries)), key=errors.__getitem__)]
        if (best == 1).all():
            return
        for layer, layout, w in zip(pair.consumers, layouts, weights, strict=True):
            scaled = (w.float() * pair.as_read(best)).to(w.dtype)
            edited[layer, "weight"] = oriented(scaled, layout).contiguous()
        for name in ("weight", "bias"):
            if getattr(pair.producer, name, None) is not None:
                value = _current(pair.producer, name, edited)
                divisor = best.view(-1, *[1] * (value.dim() - 1))
                edited[pair.producer, name] = (value.float() / divisor).to(value.dtype)

    def _check(self, stream: Stream, index: int, state: Any, edits: Sequence[Edit]) -> None:
        name, block = type(self).__name__, type(stream.blocks[index]).__name__
        out = stream.run(index, 0, state)
        before = tensors_of(out)
        if not before:
            raise ValueError(
                f"{name}: block {index} ({block}) returns {described(out)}, which has no floating-point tensor to "
                "compare; leave it out of method"
            )
        with in_place(edits):
            after = tensors_of(stream.run(index, 0, state))
        for output, new in zip(before, after, strict=True):
            old, new = output.float(), new.float()
            difference = torch.where(new == old, 0.0, new - old)  # infinite values, such as those of a mask, may stay
            changed = float(difference.norm() / old[old.isfinite()].norm().clamp(min=1e-30))
            if not changed <= TOLERANCE.get(output.dtype, 5e-2):
                raise ValueError(
                    f"{name}: block {index} ({block}) computes something else when channels of its norms are scaled "
                    f"and the layers after them scale back (its output changes by {changed:.1%}); leave it out of "
                    "method"
                )


@dataclass(frozen=True)
class SmoothQuant(Scaling):
    """``"smooth"``: moves per-channel scales from inputs into weights, before another method rounds the weights.

    ``alpha``: how much of a channel's scale moves, 0 (nothing) to 1. None: each module and the layers that read it take
    the one of several values, or no scaling, that gives the smallest error of the outputs.
    """

    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.alpha is not None:
            check("SmoothQuant", "alpha", self.alpha, SHARE)

    def scales(self, pair: Pair, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`Scaling`."""
        amax_x = pair.as_made(x.abs().amax(0)).clamp(min=1e-5)
        amax_w = pair.as_made(torch.stack([w.float().abs().amax(0) for w in weights]).amax(0)).clamp(min=1e-5)
        none = [torch.ones_like(amax_x)] if self.alpha is None else []
        return none + [amax_x**a / amax_w ** (1 - a) for a in (ALPHAS if self.alpha is None else (self.alpha,))]


@dataclass(frozen=True)
class AWQ(Scaling):
    """``"awq"``: as SmoothQuant, with scales from the mean magnitude of inputs alone: ``s = mean(|x|)^alpha``.

    ``grid``: the number of values of alpha from 0 (no scaling) up to 1 that are tried. Each module and the layers that
    read it take the value with the smallest error of the outputs. ``"mse"`` after it clips weights, as in the paper.
    """

    grid: int = 20

    def __post_init__(self) -> None:
        check("AWQ", "grid", self.grid, COUNT)

    def scales(self, pair: Pair, x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`Scaling`."""
        mean = pair.as_made(x.abs().mean(0)).clamp(min=1e-5)
        return [mean ** (step / self.grid) for step in range(self.grid)]


def _current(module: nn.Module, name: str, edited: dict[tuple[nn.Module, str], Tensor]) -> Tensor:
    value: Tensor = edited.get((module, name), getattr(module, name))
    return value.detach()


def _error(x: Tensor, w: Tensor, out: Tensor, activation: Cast | None, stored: Cast) -> float:
    """The squared error of the quantized output, relative to ``out``."""
    if activation is not None:
        x = dequantize_operand(quantize_rows(x, activation), torch.float32)
    w = dequantize_operand(quantize_operand(w, stored), torch.float32)
    return float((x @ w.T - out).square().sum() / out.square().sum().clamp(min=1e-30))


def _rows(stream: Stream, index: int, states: Sequence[Any], layers: Sequence[nn.Module]) -> dict[nn.Module, Tensor]:
    """Rows of the inputs of layers, float32, from the first batches."""
    found: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers}
    rows = 0
    for batch, state in enumerate(states):
        inputs, _ = inputs_of(layers, partial(stream.run, index, batch, state))
        for layer, calls in inputs.items():
            found[layer] += [as_matrix(x.detach()) for x in calls]
        rows = max((sum(map(len, calls)) for calls in found.values()), default=ROWS)
        if rows >= ROWS:
            break
    return {layer: torch.cat(calls)[:ROWS].float() if calls else torch.empty(0) for layer, calls in found.items()}


# ---------------------------------------------------------------------------------------------- pairs


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
        inputs[layer].append(Call(args, kwargs).first)
        elsewhere.active = False

    def done(layer: nn.Module, args: Any, out: Any) -> None:
        elsewhere.active = True

    with ExitStack() as hooks:
        for module in block.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.dim() == 1 and not list(module.children()):  # a norm
                hooks.enter_context(module.register_forward_hook(after))
        for layer in inputs:
            hooks.enter_context(layer.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(layer.register_forward_hook(done))
        with elsewhere:
            returned = tensors_of(run())
    found = _of_norms(made, inputs, elsewhere.ids | set(map(id, returned)))
    named = [pair for module in block.modules() for pair in _of_names(module)]
    found += _linear_pairs(named, inputs, run) if named else []
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


def _linear_pairs(pairs: Sequence[Pair], inputs: Inputs, run: Callable[[], Any]) -> list[Pair]:
    """Those of ``pairs`` whose second layer gets twice its input in the channels where the first one's output doubles.

    So a gate and attention do, and an activation between the two does not. ``inputs``: those of layers in another
    ``run``; the second layers get them in this one too, so that a pair changes nothing for those after it.
    """
    seen: dict[nn.Module, int] = {}
    wrong: set[nn.Module] = set()

    def compares(scales: Tensor, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = seen[layer] = seen.get(layer, 0) + 1
        call, plain = Call(args, kwargs), inputs[layer][number - 1]
        expected = plain.float() * scales.to(call.first.device)
        if not (call.first.float() - expected).norm() <= ROUNDING * expected.norm():
            wrong.add(layer)
        return call.with_first(plain)

    with ExitStack() as hooks:
        for pair in pairs:
            (consumer,), channels = pair.consumers, len(pair.producer.weight)  # type: ignore[arg-type]
            # 1 or 2 for each channel, in an order that no head repeats
            scales = 1.0 + torch.randint(2, (channels,), generator=torch.Generator().manual_seed(0))
            read = partial(compares, pair.as_read(scales))
            hooks.enter_context(pair.producer.register_forward_hook(lambda layer, args, out, s=scales: out * s.to(out)))
            hooks.enter_context(consumer.register_forward_pre_hook(read, with_kwargs=True))
        run()
    return [pair for pair in pairs if pair.consumers[0] in seen and pair.consumers[0] not in wrong]

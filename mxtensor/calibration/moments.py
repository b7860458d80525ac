"""What is measured of the inputs of a layer while a block runs: the inputs themselves, and sums of them.

Layers that get the same input, such as the projections to queries, keys and values, are one group and share sums.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..core.shapes import as_matrix
from ..kernels.quantize.choose_cast import dequantize_operand, quantize_rows
from ..numerics.cast import Cast
from .blocks import Call
from .rounding import check_inputs, inverse_cholesky

Inputs = dict[nn.Module, list[Tensor]]
"""Layer -> its inputs, one for each call."""


class _Enough(BaseException):
    """All inputs are known, and the rest of the block need not run."""


def inputs_of(
    layers: Collection[nn.Module], run: Callable[[], Any], stop: bool = False, copies: bool = False
) -> tuple[Inputs, Any]:
    """The inputs that ``layers`` get while ``run`` runs, and its result.

    ``stop``: ``run`` ends when each layer has had one input; the result is None then. If something writes into an input
    after its layer, all runs once more, with ``copies``.
    """
    saved, found, out = Saved(copies), {layer: list[Tensor]() for layer in layers}, None

    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[layer].append(saved.of(Call(args, kwargs).first))
        if stop and all(found.values()):
            raise _Enough

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(keep, with_kwargs=True))
        with suppress(_Enough):
            out = run()
    if saved.written and not copies:
        return inputs_of(layers, run, stop, copies=True)
    return found, out


class Saved:
    """Tensors as they are now: one object for each state of a tensor."""

    def __init__(self, copies: bool = False) -> None:
        self._copies = copies
        self._tensors: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def of(self, x: Tensor) -> Tensor:
        """``x``, or a copy of it."""
        key = id(x), version_of(x)
        if key not in self._tensors:
            self._tensors[key] = x, x.clone() if self._copies else x
        return self._tensors[key][1]

    @property
    def written(self) -> bool:
        """Whether something wrote into one of them since."""
        return any(version_of(x) != version for (_, version), (x, _) in self._tensors.items())


def version_of(x: Tensor) -> int:
    """The number of writes into a tensor. Tensors of ``torch.inference_mode`` do not count them."""
    return 0 if x.is_inference() else x._version


def groups_of(layers: Collection[nn.Module], run: Callable[[], Any]) -> list[tuple[list[nn.Module], bool]]:
    """``layers`` in groups that get the same tensors, in the order of their first calls while ``run`` runs, and whether
    each layer of a group was called once.

    A layer that is not called is a group of its own, at the end.
    """
    order: list[nn.Module] = []
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(lambda layer, args: order.append(layer)))
        found, _ = inputs_of(layers, run)
    groups: dict[tuple[int, ...], list[nn.Module]] = {}
    for layer in dict.fromkeys((*order, *layers)):
        same: list[Any] = found[layer] or [layer]
        groups.setdefault(tuple(map(id, same)), []).append(layer)
    return [(group, len(found[group[0]]) == 1) for group in groups.values()]


class Moments:
    """Sums over the inputs of one layer in float32, in the model before and in the quantized one.

    An input in the quantized model counts as the quantized layer sees it: rounded by the cast of activations.
    """

    def __init__(
        self, cols: int, device: torch.device, activation: Cast | None, correct: str = "none", *,
        second: bool = True, means: bool = False,
    ) -> None:  # fmt: skip
        """``activation``: how the quantized layer casts its input. ``correct``: the errors that ``cross`` is about,
        those of the whole input ("model") or of its cast ("cast"). ``second``, ``means``: whether they are needed."""
        self._activation, self._correct = activation, correct
        self._rows = self._rows_before = 0
        self._second = torch.zeros(cols, cols, device=device) if second else None
        self._cross = torch.zeros(cols, cols, device=device) if second and correct != "none" else None
        self._means = torch.zeros(2, cols, device=device) if means else None
        self._cholesky: dict[float, Tensor] = {}

    def add(self, calls: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """Add the inputs of all calls, (..., cols) each, and ``before``: those of the same batch in the model before.

        ``cross`` compares an input with itself if the model before has another number of calls, or of rows.
        """
        same = self._correct == "model" and len(calls) == len(before)
        for number, x in enumerate(calls):
            seen = plain = as_matrix(x.detach())
            if self._activation is not None and plain.numel():
                seen = dequantize_operand(quantize_rows(plain, self._activation), torch.float32)
            seen = seen.to(torch.float32)
            self._rows += len(seen)
            if self._second is not None:
                self._second.addmm_(seen.T, seen)
            if self._cross is not None:
                other = before[number].detach() if same and before[number].numel() == x.numel() else plain
                self._cross.addmm_(other.reshape(plain.shape).to(torch.float32).T, seen)
            if self._means is not None:
                self._means[1] += seen.sum(0)
        if self._means is not None:
            for x in before:
                self._means[0] += as_matrix(x.detach()).float().sum(0)
                self._rows_before += x.shape[:-1].numel()

    @cached_property
    def second(self) -> Tensor:
        """The mean of (input) times (input), (cols, cols); zero if the layer had no input."""
        assert self._second is not None
        return self._second / max(self._rows, 1)

    @cached_property
    def cross(self) -> Tensor | None:
        """The mean of (input before) times (input in the quantized model); None if it is not needed."""
        return None if self._cross is None else self._cross / max(self._rows, 1)

    def inverse_cholesky(self, damping: float) -> Tensor:
        """``rounding.inverse_cholesky`` of ``second``, computed once for all layers of a group."""
        if damping not in self._cholesky:
            self._cholesky[damping] = inverse_cholesky(self.second, damping)
        return self._cholesky[damping]

    def mean_error(self, weight: Tensor, rounded: Tensor) -> Tensor | None:
        """``W E[x] - Q(W) E[x']``, (rows,), with ``x`` the input before and ``x'`` that of the quantized layer.

        ``weight``: (rows, cols), before it was ``rounded`` (float32). None if the layer had no input in one of the
        models. Raises ValueError for inputs that are not finite.
        """
        if self._means is None or not self._rows or not self._rows_before:
            return None
        before, now = self._means[0] / self._rows_before, self._means[1] / self._rows
        check_inputs(before, now)
        return weight.float() @ before - rounded @ now

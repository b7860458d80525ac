"""peft: what merged adapters change of a quantized weight is rounded once, measured, and taken out bit for bit.

A layer of peft merges into the values of its weight, which are quantized afterwards. peft takes an adapter out by
subtracting what it changes from the sum. The sum was rounded to codes, and the difference would be rounded again: each
``merge_adapter`` and ``unmerge_adapter`` would leave other codes. Trainers that generate text between steps merge and
unmerge in each of them. The codes of before therefore stay in memory while adapters are merged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..core.compat_hooks import hook_method
from ..core.scopes import Scopes
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as

BEFORE = "_mxtensor_before_merge"
"""The attribute of a layer of peft with what its merges have changed."""
INSIDE = "_mxtensor_merging"
"""The attribute of a layer while it merges and its weights have no codes: DoRA takes adapters out and merges again."""
ROWS = 64
"""Rows of each weight that are compared."""


class Rounding(NamedTuple):
    """What a merge into a weight has lost."""

    layer: Any
    format: str
    lost: float
    """Norm of the rounding over the norm of what the adapters change."""


roundings: Scopes[list[Rounding] | None] = Scopes("roundings", None)
"""The list that gets what merges lose, inside a block."""


class Before:
    """The codes of a weight before the first merge into it."""

    def __init__(self, weight: MXTensor) -> None:
        self.weight = weight
        with torch.no_grad():
            self.codes = weight.detach().clone()
        self.layers = 0
        """The number of layers whose adapters are merged into the weight: an embedding and a head can share it."""
        self.version = 0
        """That of the weight after the last merge: codes that were loaded since then stay."""

    def end(self) -> None:
        """Give the weight its codes back, if no other layer has merged into it."""
        self.layers -= 1
        if self.layers == 0:
            _before.pop(id(self.weight), None)
            self.weight.data = self.codes.to(self.weight.device, self.weight.dtype)


_before: weakref.WeakValueDictionary[int, Before] = weakref.WeakValueDictionary()
"""The id of a weight -> its codes of before, which the layers hold."""


def _codes_of_before(weight: MXTensor) -> Before:
    """The codes of ``weight`` before the first merge into it, copied at that merge alone."""
    found = _before.get(id(weight))
    if found is None:
        found = _before[id(weight)] = Before(weight)
    return found


_hooked: set[tuple[type, str]] = set()


def install(tuner: type) -> None:
    """Hook the layers that ``tuner``, peft's BaseTuner, puts into models."""
    hook_method(tuner, "inject_adapter", _hooking_layers)


def _hooking_layers(inject: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of ``BaseTuner.inject_adapter``: each kind of layer has a ``merge`` and an ``unmerge`` of its own."""

    def inject_adapter(self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = inject(self, model, *args, **kwargs)
        for layer in model.modules():
            if hasattr(layer, "get_base_layer"):  # its weight may be quantized later
                for name, wrap in (("merge", _saving), ("unmerge", _restoring)):
                    kind = next((kind for kind in type(layer).__mro__ if name in vars(kind)), None)
                    if kind is not None and (kind, name) not in _hooked:
                        _hooked.add((kind, name))
                        hook_method(kind, name, wrap)
        return out

    return inject_adapter


def _places(layer: Any) -> Iterator[tuple[torch.nn.Module, str, MXTensor]]:
    """The quantized weights of the layer that a layer of peft wraps, with their modules and names."""
    for module in layer.get_base_layer().modules():
        for name, parameter in [*module._parameters.items()]:
            if isinstance(parameter, MXTensor):
                yield module, name, parameter


def has_codes(layer: Any) -> bool:
    """Whether a layer of peft wraps quantized weights that ``in_high_precision`` has not replaced."""
    return INSIDE not in vars(layer) and next(_places(layer), None) is not None


@contextmanager
def in_high_precision(layer: Any) -> Iterator[None]:
    """The weights of ``layer`` have no codes inside the block, and get those of their new values after it."""
    places = [*_places(layer)]
    setattr(layer, INSIDE, True)
    try:
        for module, name, weight in places:
            module._parameters[name] = torch.nn.Parameter(weight.detach().dequantize(), requires_grad=False)
        yield
        for module, name, weight in places:
            _store(layer, weight, module._parameters[name].detach())  # type: ignore[union-attr]
    finally:
        delattr(layer, INSIDE)
        for module, name, weight in places:
            module._parameters[name] = weight  # type: ignore[assignment]


def _store(layer: Any, weight: MXTensor, values: torch.Tensor) -> None:
    """Quantize ``values`` in the place of those of ``weight``, if they are others."""
    old = weight.detach().dequantize()
    if torch.equal(values, old):
        return
    weight.data = quantize_as(values.to(weight.dtype), weight.recipe, weight.copies)
    wanted, found = values[:ROWS].float(), roundings.get()
    change = float((wanted - old[:ROWS].float()).norm())
    if found is not None and change > 0:
        rounding = float((weight.detach()[:ROWS].dequantize().float() - wanted).norm())
        found.append(Rounding(layer, str(weight.format), rounding / change))


def _saving(merge: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of ``merge`` of a layer."""

    def merge_saved(self: Any, safe_merge: bool = False, adapter_names: Any = None) -> Any:
        done = [*self.merged_adapters]
        names = [*(self.active_adapters if adapter_names is None else adapter_names)]
        if all(name in done for name in names) or not has_codes(self):
            return merge(self, safe_merge, adapter_names)
        if BEFORE in vars(self):  # the sum of all is rounded once
            self.unmerge()
            names = [*done, *(name for name in names if name not in done)]
        setattr(self, BEFORE, [_codes_of_before(weight) for _, _, weight in _places(self)])
        try:
            with in_high_precision(self):
                return merge(self, safe_merge, names)
        finally:
            if not self.merged:
                vars(self).pop(BEFORE, None)
            for before in getattr(self, BEFORE, ()):
                before.layers += 1
                before.version = before.weight._version

    return merge_saved


def _restoring(unmerge: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of ``unmerge`` of a layer."""

    def unmerge_restored(self: Any, *args: Any, **kwargs: Any) -> Any:
        if INSIDE in vars(self):
            return unmerge(self, *args, **kwargs)
        saved = [before for before in vars(self).pop(BEFORE, ()) if before.version == before.weight._version]
        out = unmerge(self, *args, **kwargs)
        for before in saved:
            before.end()
        return out

    return unmerge_restored

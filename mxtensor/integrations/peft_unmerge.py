"""peft: a quantized weight has its codes of before, bit for bit, when merged adapters are taken out of it.

peft subtracts what an adapter changes from the sum. The sum was rounded to codes, and the difference would be rounded
again: each ``merge_adapter`` and ``unmerge_adapter`` would leave a model with other codes. Trainers that generate text
between steps merge and unmerge in each of them. The codes of before stay in memory while adapters are merged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..core.compat_hooks import hook_method
from ..tensor.mxtensor import MXTensor

BEFORE = "_mxtensor_before_merge"
"""The attribute of a layer of peft with what its merges have changed."""


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
_hooked: set[tuple[type, str]] = set()


def install(tuner: type) -> None:
    """Hook the layers that ``tuner``, peft's BaseTuner, puts into models."""
    hook_method(tuner, "inject_adapter", _hooking_layers)


def _hooking_layers(inject: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of ``BaseTuner.inject_adapter``: each kind of layer has a ``merge`` and an ``unmerge`` of its own."""

    def inject_adapter(self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = inject(self, model, *args, **kwargs)
        for layer in model.modules():
            if hasattr(layer, "get_base_layer") and next(_weights(layer), None) is not None:
                for name, wrap in (("merge", _saving), ("unmerge", _restoring)):
                    kind = next((kind for kind in type(layer).__mro__ if name in vars(kind)), None)
                    if kind is not None and (kind, name) not in _hooked:
                        _hooked.add((kind, name))
                        hook_method(kind, name, wrap)
        return out

    return inject_adapter


def _weights(layer: Any) -> Iterator[MXTensor]:
    """The quantized weights of the layer that a layer of peft wraps."""
    for parameter in layer.get_base_layer().parameters():
        if isinstance(parameter, MXTensor):
            yield parameter


def _saving(merge: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of ``merge`` of a layer."""

    def merge_saved(self: Any, *args: Any, **kwargs: Any) -> Any:
        first = BEFORE not in vars(self)
        if first:
            setattr(self, BEFORE, [_before.setdefault(id(w), Before(w)) for w in _weights(self)])
        try:
            return merge(self, *args, **kwargs)
        finally:
            if not self.merged:
                vars(self).pop(BEFORE, None)
            for before in getattr(self, BEFORE, ()):
                before.layers += first
                before.version = before.weight._version

    return merge_saved


def _restoring(unmerge: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of ``unmerge`` of a layer."""

    def unmerge_restored(self: Any, *args: Any, **kwargs: Any) -> Any:
        saved = [before for before in vars(self).pop(BEFORE, ()) if before.version == before.weight._version]
        out = unmerge(self, *args, **kwargs)
        for before in saved:
            before.end()
        return out

    return unmerge_restored

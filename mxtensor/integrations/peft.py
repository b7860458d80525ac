"""peft: adapters on quantized weights. Imported when peft is.

- Adapters that write the weights of the model when they are made (PiSSA, OLoRA, CorDA, LoRA-GA, LoftQ) take a part of a
  weight out of it. What is left is quantized again, and a warning says how much the second rounding costs. The new
  values are computed in high precision and rounded once.
- A merge adds what an adapter changes to the values of the weight. The sum is rounded once, and a warning says what is
  lost: a small change can be. peft takes an adapter out by subtracting it from the sum, which would leave other codes:
  trainers that generate text between steps merge and unmerge in each of them. The codes of before therefore stay in
  memory while adapters are merged, and come back bit for bit.
- Modules of ``modules_to_save`` and rows of ``trainable_token_indices`` are copied and trained whole, in high
  precision: steps of an optimizer would be lost in rounding. Layers that compute with a copy of the weight (SHiRA) get
  its values. The files of an adapter have values.

peft (0.21) has no event for any of this: ``inject_adapter``, ``merge_adapter`` and ``merge_and_unload`` of its tuners,
and ``update_layer``, ``merge`` and ``unmerge`` of each kind of its layers are wrapped.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..core.compat_hooks import around, hook_function, hook_method
from ..core.scopes import Scopes
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as

BEFORE = "_mxtensor_before_merge"
"""The attribute of a layer of peft with what its merges have changed."""
INSIDE = "_mxtensor_merging"
"""The attribute of a layer while its weights have no codes: DoRA takes adapters out and merges again."""
ROWS = 64
"""Rows of each weight that are compared."""
SAVING = ("peft.utils.save_and_load", "peft.utils", "peft.peft_model")
"""Where ``get_peft_model_state_dict`` is defined, and where it is imported by name."""


def install(tuners: Any) -> None:
    """Hook the tuners and layers of ``peft.tuners.tuners_utils``."""
    hook_method(tuners.BaseTuner, "inject_adapter", around(partial(_inject_adapter, tuners.BaseTunerLayer)))
    for name in ("merge_and_unload", "merge_adapter"):
        hook_method(tuners.BaseTuner, name, around(partial(_merge_all, name)))
    hook_method(tuners.BaseTunerLayer, "get_base_weight", around(_base_weight))


def install_copies(others: Any) -> None:
    """Hook ``ModulesToSaveWrapper`` of ``peft.utils.other``, which copies modules for an adapter."""
    hook_method(others.ModulesToSaveWrapper, "update", around(_copy_modules))


def install_saving(models: Any) -> None:
    """Let the state dict of an adapter have values. peft adds the weights of heads and embeddings that an adapter
    targets, or that were resized, and its files hold plain tensors."""
    hook_function(SAVING, "get_peft_model_state_dict", around(_state_dict))


def _state_dict(usual: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return {name: _in_high_precision(value) for name, value in usual(*args, **kwargs).items()}


def _copy_modules(update: Callable[..., Any], self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
    out = update(self, adapter_name, *args, **kwargs)
    for module in self.modules_to_save[adapter_name].modules():
        for name, p in [*module.named_parameters(recurse=False)]:
            setattr(module, name, _in_high_precision(p))
    return out


def _in_high_precision(p: Any) -> Any:
    """A parameter or buffer whose values are those of an MXTensor; any other thing itself."""
    if not isinstance(p, MXTensor):
        return p
    values = p.detach().dequantize()
    return torch.nn.Parameter(values, p.requires_grad) if isinstance(p, torch.nn.Parameter) else values


def _base_weight(usual: Callable[..., Any], self: Any) -> Any:
    weight = usual(self)
    return weight.dequantize() if isinstance(weight, MXTensor) else weight


# ---------------------------------------------------------------------------------------------- tuners


roundings: Scopes[list[tuple[Any, str, float]] | None] = Scopes("roundings", None)
"""The list that gets, inside a block, each layer that was changed, the format of its weight, and what was lost: the
norm of the rounding over the norm of the change."""
_hooked: set[type] = set()
"""Kinds of layers."""


def _inject_adapter(layers: type, inject: Callable[..., Any], self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """``BaseTuner.inject_adapter``, which makes layers. ``layers``: the class of all of them, each kind of which has
    its own methods. A weight may be quantized later, so that all kinds are hooked."""
    for kind in _kinds(layers):
        if kind not in _hooked:
            _hooked.add(kind)
            for name, call in (("update_layer", _update_layer), ("merge", _merge), ("unmerge", _unmerge)):
                hook_method(kind, name, around(call))
    with roundings.block([]) as found:
        out = inject(self, model, *args, **kwargs)
    if found:
        formats, mean, most, worst = _lost(found, dict(model.named_modules()))
        warnings.warn(
            f"peft: {len(found)} weights are in {formats}, and the initialization of the adapters took a part "
            f"out of them: the rest was rounded again. The rounding has {mean:.2g} of the norm of that part, "
            f"{most:.2g} in {worst}. To lose nothing, use init_lora_weights=True; or make the adapters for the model "
            "in high precision, and quantize its base layers: quantize_(model, format, lambda module, name: "
            "name.endswith('base_layer'))",
            UserWarning,
            stacklevel=3,
        )
    return out


def _kinds(kind: type) -> Iterator[type]:
    """A class and all that inherit from it."""
    yield kind
    inherits: list[type] = kind.__subclasses__()
    for one in inherits:
        yield from _kinds(one)


def _merge_all(name: str, merge: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method of ``BaseTuner`` that merges."""
    layers = dict(self.model.named_modules())  # a merge may unload them
    with roundings.block([]) as found:
        out = merge(self, *args, **kwargs)
    if found:
        formats, mean, most, worst = _lost(found, layers)
        warnings.warn(
            f"{name}: {len(found)} weights are in {formats}, and their sums with the adapters were rounded: "
            f"the rounding has {mean:.2g} of the norm of what the adapters change, {most:.2g} in {worst}. To lose "
            "less, keep the adapters, or merge them into the model in high precision and quantize that",
            UserWarning,
            stacklevel=3,
        )
    return out


def _lost(found: list[tuple[Any, str, float]], layers: Mapping[str, Any]) -> tuple[str, float, float, str | None]:
    """The formats, what the layers have lost on average, the most, and the name of the layer that has lost it."""
    worst, _, most = max(found, key=lambda one: one[2])
    name = next((name for name, layer in layers.items() if layer is worst), None)
    formats = ", ".join(sorted({format for _, format, _ in found}))
    return formats, sum(lost for _, _, lost in found) / len(found), most, name


# ---------------------------------------------------------------------------------------------- layers


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


_before: weakref.WeakValueDictionary[int, Before] = weakref.WeakValueDictionary()
"""The id of a weight -> its codes of before, copied at the first merge alone. The layers hold them."""


def _places(layer: Any) -> Iterator[tuple[torch.nn.Module, str, MXTensor]]:
    """The quantized weights of the layer that a layer of peft wraps, with their modules and names."""
    for module in layer.get_base_layer().modules():
        for name, parameter in [*module._parameters.items()]:
            if isinstance(parameter, MXTensor):
                yield module, name, parameter


def _has_codes(layer: Any) -> bool:
    """Whether a layer of peft wraps quantized weights that ``_without_codes`` has not replaced."""
    return INSIDE not in vars(layer) and next(_places(layer), None) is not None


@contextmanager
def _without_codes(layer: Any) -> Iterator[None]:
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
        found.append((layer, str(weight.format), rounding / change))


def _update_layer(update: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """``update_layer`` of a layer, which makes an adapter."""
    if not _has_codes(self):
        return update(self, *args, **kwargs)
    with _without_codes(self):
        return update(self, *args, **kwargs)


def _merge(merge: Callable[..., Any], self: Any, safe_merge: bool = False, adapter_names: Any = None) -> Any:
    """``merge`` of a layer."""
    done = [*self.merged_adapters]
    names = [*(self.active_adapters if adapter_names is None else adapter_names)]
    if all(name in done for name in names) or not _has_codes(self):
        return merge(self, safe_merge, adapter_names)
    if BEFORE in vars(self):  # the sum of all is rounded once
        self.unmerge()
        names = [*done, *(name for name in names if name not in done)]
    saved = []
    for _, _, weight in _places(self):
        saved.append(_before.get(id(weight)) or Before(weight))
        _before[id(weight)] = saved[-1]
    setattr(self, BEFORE, saved)
    try:
        with _without_codes(self):
            return merge(self, safe_merge, names)
    finally:
        if not self.merged:
            vars(self).pop(BEFORE, None)
        for before in getattr(self, BEFORE, ()):
            before.layers += 1
            before.version = before.weight._version


def _unmerge(unmerge: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """``unmerge`` of a layer, which gives weights their codes back, if no other layer has merged into them."""
    if INSIDE in vars(self):
        return unmerge(self, *args, **kwargs)
    saved = [before for before in vars(self).pop(BEFORE, ()) if before.version == before.weight._version]
    out = unmerge(self, *args, **kwargs)
    for before in saved:
        before.layers -= 1
        if before.layers == 0:
            _before.pop(id(before.weight), None)
            codes: Any = before.codes.to(before.weight.device)
            before.weight.data = codes.with_dtype(before.weight.dtype)
    return out

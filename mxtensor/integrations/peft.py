"""peft: a warning of what is rounded when an adapter is merged into a quantized weight, and high-precision copies of
what an adapter trains whole. Imported when peft is.

peft adds the change of an adapter to the values of the weight, and the sum is quantized: a small change can be lost.
Modules of ``modules_to_save`` and rows of ``trainable_token_indices`` are copied and trained whole: steps of an
optimizer would be lost in the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.compat_hooks import hook_method
from ..core.when_imported import after_import
from ..tensor.mxtensor import MXTensor
from . import peft_unmerge

ROWS = 64
"""Rows of each weight that are compared."""


class Merge(NamedTuple):
    """A weight before the merge."""

    name: str
    module: Any
    parameter: str
    change: Tensor
    """The first rows of what the adapters add, float32."""
    wanted: Tensor
    """The first rows of the sum, float32."""


def _merges(model: Any, adapters: Sequence[str] | None) -> list[Merge]:
    """The quantized weights to which a merge adds something."""
    found = []
    for name, layer in model.named_modules():
        delta = getattr(layer, "get_delta_weight", None)
        if delta is None or not hasattr(layer, "get_base_layer"):
            continue
        base, parameter = layer.get_base_layer(), getattr(layer, "parameter_name", "weight")
        weight = getattr(base, parameter, None)
        if not isinstance(weight, MXTensor):
            continue
        done = set(getattr(layer, "merged_adapters", ()))
        names = [a for a in (adapters or layer.active_adapters) if a not in done and a in getattr(layer, "lora_A", ())]
        if names:
            with torch.no_grad():
                change = torch.stack([delta(a)[:ROWS].float() for a in names]).sum(0)
                found.append(Merge(name, base, parameter, change, weight.dequantize()[:ROWS].float() + change))
    return found


def _lost(merges: list[Merge]) -> dict[str, float]:
    """Name of a layer -> norm of the rounding over the norm of the change."""
    lost = {}
    for merge in merges:
        with torch.no_grad():
            values = getattr(merge.module, merge.parameter).dequantize()[:ROWS].float()
        least = torch.finfo(torch.float32).tiny
        lost[merge.name] = float((values - merge.wanted).norm() / merge.change.norm().clamp(min=least))
    return lost


def _warning(call: str, position: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper of a method of peft's BaseTuner; ``position``: where it takes ``adapter_names``."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
            adapters = kwargs.get("adapter_names", args[position] if len(args) > position else None)
            merges = _merges(self.model, adapters)
            out = method(self, *args, **kwargs)
            lost = _lost([merge for merge in merges if bool(merge.change.any())])
            if lost:
                worst = max(lost, key=lambda name: lost[name])
                formats = ", ".join(sorted({str(getattr(m.module, m.parameter).format) for m in merges}))
                warnings.warn(
                    f"{call}: {len(lost)} weights are in {formats}, and their sums with the adapters were rounded: the "
                    f"rounding has {sum(lost.values()) / len(lost):.2g} of the norm of what the adapters change, "
                    f"{lost[worst]:.2g} in {worst}. To lose less, keep the adapters, or merge them into the model in "
                    "high precision and quantize that",
                    UserWarning,
                    stacklevel=3,
                )
            return out

        return merge

    return wrap


def _in_high_precision(p: Any) -> Any:
    """A parameter or buffer whose values are those of an MXTensor; any other thing itself."""
    if not isinstance(p, MXTensor):
        return p
    values = p.detach().dequantize()
    return torch.nn.Parameter(values, p.requires_grad) if isinstance(p, torch.nn.Parameter) else values


def _decoding_modules(update: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of ``ModulesToSaveWrapper.update``, which copies the module that it wraps for an adapter."""

    def update_decoded(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        out = update(self, adapter_name, *args, **kwargs)
        for module in self.modules_to_save[adapter_name].modules():
            for name, p in [*module.named_parameters(recurse=False)]:
                setattr(module, name, _in_high_precision(p))
        return out

    return update_decoded


def _decoding_tokens(update: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of ``TrainableTokensLayer.update_layer``, which copies some rows of an embedding for an adapter."""

    def update_decoded(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        out = update(self, adapter_name, *args, **kwargs)
        for rows in (self.trainable_tokens_delta, self.trainable_tokens_original):
            if adapter_name in rows:
                rows[adapter_name] = _in_high_precision(rows[adapter_name])
        return out

    return update_decoded


COPIES = (
    ("peft.utils.other", "ModulesToSaveWrapper", "update", _decoding_modules),
    ("peft.tuners.trainable_tokens.layer", "TrainableTokensLayer", "update_layer", _decoding_tokens),
)
"""Methods that copy parameters which an adapter trains."""


def install(module: Any) -> None:
    """Let the merges of ``peft.tuners.tuners_utils.BaseTuner`` warn and be undone, and what adapters copy and train be
    plain."""
    for name, position in (("merge_and_unload", 2), ("merge_adapter", 0)):
        hook_method(module.BaseTuner, name, _warning(name, position))
    peft_unmerge.install(module.BaseTuner)
    for name, kind, method, wrap in COPIES:
        after_import(name, partial(_hook_copies, name, kind, method, wrap))


def _hook_copies(name: str, kind: str, method: str, wrap: Callable[..., Any]) -> None:
    found = getattr(import_module(name), kind, None)
    if found is not None:
        hook_method(found, method, wrap)

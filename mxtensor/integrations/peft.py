"""peft: adapters on quantized weights. Imported when peft is.

A warning says what is lost by rounding when an adapter is merged into a quantized weight. Modules that an adapter
trains whole, or saves with itself, are copied to high precision.

peft adds the change of an adapter to the values of the weight, and the sum is quantized: a small change can be lost.
Modules of ``modules_to_save`` and rows of ``trainable_token_indices`` are copied and trained whole: steps of an
optimizer would be lost in the same way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from ..core.compat_hooks import hook_function, hook_method
from ..core.when_imported import after_import
from ..tensor.mxtensor import MXTensor
from . import peft_inits, peft_merges


def _warning(call: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper of a method of peft's BaseTuner that merges."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def merge(self: Any, *args: Any, **kwargs: Any) -> Any:
            names = {id(layer): name for name, layer in self.model.named_modules()}
            with peft_merges.roundings.block([]) as found:
                out = method(self, *args, **kwargs)
            if found:
                worst = max(found, key=lambda one: one.lost)
                formats = ", ".join(sorted({one.format for one in found}))
                warnings.warn(
                    f"{call}: {len(found)} weights are in {formats}, and their sums with the adapters were rounded: "
                    f"the rounding has {sum(one.lost for one in found) / len(found):.2g} of the norm of what the "
                    f"adapters change, {worst.lost:.2g} in {names.get(id(worst.layer))}. To lose less, keep the "
                    "adapters, or merge them into the model in high precision and quantize that",
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
    for name in ("merge_and_unload", "merge_adapter"):
        hook_method(module.BaseTuner, name, _warning(name))
    peft_merges.install(module.BaseTuner)
    peft_inits.install(module)
    for name, kind, method, wrap in COPIES:
        after_import(name, partial(_hook_copies, name, kind, method, wrap))


SAVING = ("peft.utils.save_and_load", "peft.utils", "peft.peft_model")
"""Where ``get_peft_model_state_dict`` is defined, and where it is imported by name."""


def install_saving() -> None:
    """Let the state dict of an adapter have values. peft adds the weights of heads and embeddings that an adapter
    targets, or that were resized, and its files hold plain tensors."""
    hook_function(SAVING, "get_peft_model_state_dict", _with_values)


def _with_values(usual: Callable[..., Any]) -> Callable[..., Any]:
    def get_peft_model_state_dict(*args: Any, **kwargs: Any) -> Any:
        found = usual(*args, **kwargs)
        return {name: _in_high_precision(value) for name, value in found.items()}

    return get_peft_model_state_dict


def _hook_copies(name: str, kind: str, method: str, wrap: Callable[..., Any]) -> None:
    found = getattr(import_module(name), kind, None)
    if found is not None:
        hook_method(found, method, wrap)

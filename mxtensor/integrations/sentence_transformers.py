"""sentence-transformers: ``save_pretrained`` stores the codes of modules after the transformer, such as ``Dense``, and
loading keeps them. Imported when its modules are.

safetensors has no place for an MXTensor: these modules are saved as ``pytorch_model.bin``, which is read without
running pickled code. ``save_torch_weights`` and ``load_torch_weights`` are the two methods by which all its modules do
both; there is no event.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ..core.compat_hooks import around, hook_method
from ..tensor.mxtensor import MXTensor
from .transformers_load import prepare


def install(module: Any) -> None:
    """Let ``Module`` of sentence-transformers save and load codes."""
    hook_method(module.Module, "save_torch_weights", around(_save_weights))
    hook_method(module.Module, "load_torch_weights", around(_load_weights))


def _save_weights(
    usual: Callable[..., Any], self: nn.Module, output_path: str, safe_serialization: bool = True
) -> None:
    quantized = any(isinstance(value, MXTensor) for value in self.state_dict().values())
    if quantized:  # an older file of that name would be read instead
        Path(output_path, "model.safetensors").unlink(missing_ok=True)
    usual(self, output_path, safe_serialization and not quantized)


def _load_weights(usual: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    """While it loads, ``load_state_dict`` of the new module puts MXTensors in the place of plain weights."""
    module: Any = kwargs.get("model")
    if module is None:
        return usual(cls, *args, **kwargs)
    load = module.load_state_dict

    def load_state_dict(state: Any, *more: Any, **options: Any) -> Any:
        if any(isinstance(value, MXTensor) for value in state.values()):
            options["assign"] = True
        return load(state, *more, **options)

    vars(module)["load_state_dict"] = load_state_dict
    try:
        loaded = usual(cls, *args, **kwargs)
    finally:
        del vars(module)["load_state_dict"]
    for part in module.modules():
        for parameter in part._parameters.values():
            if isinstance(parameter, MXTensor):
                parameter.requires_grad_(False)  # as quantize_ leaves it
                prepare(part)
    return loaded

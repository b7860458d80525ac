"""sentence-transformers: ``save_pretrained`` stores the codes of modules after the transformer, such as ``Dense``, and
loading keeps them. Imported when its modules are.

safetensors has no place for an MXTensor: these modules are saved as ``pytorch_model.bin``, which is read without
running pickled code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ..convert.instance_methods import show_format
from ..core.compat_hooks import hook_method
from ..tensor.mxtensor import MXTensor
from ..training.state_dict import register_state_dict_hooks


def install(module: Any) -> None:
    """Let ``Module`` of sentence-transformers save and load codes."""
    hook_method(module.Module, "save_torch_weights", _with_codes)
    hook_method(module.Module, "load_torch_weights", _keeping_codes)


def _with_codes(method: Callable[..., Any]) -> Callable[..., Any]:
    def save_torch_weights(self: nn.Module, output_path: str, safe_serialization: bool = True) -> None:
        quantized = any(isinstance(value, MXTensor) for value in self.state_dict().values())
        if quantized:  # an older file of that name would be read instead
            Path(output_path, "model.safetensors").unlink(missing_ok=True)
        method(self, output_path, safe_serialization and not quantized)

    return save_torch_weights


def _keeping_codes(method: Callable[..., Any]) -> Callable[..., Any]:
    def load_torch_weights(cls: type, *args: Any, **kwargs: Any) -> Any:
        with _assigns_codes(kwargs.get("model")):
            return method(cls, *args, **kwargs)

    return load_torch_weights


@contextmanager
def _assigns_codes(module: nn.Module | None) -> Iterator[None]:
    """Let ``load_state_dict`` put the MXTensors of a state dict into a module, which has plain weights, as they are."""
    if module is None:
        yield
        return
    usual = module.load_state_dict

    def load_state_dict(state: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, MXTensor) for value in state.values()):
            kwargs["assign"] = True
        return usual(state, *args, **kwargs)

    vars(module)["load_state_dict"] = load_state_dict
    try:
        yield
    finally:
        del vars(module)["load_state_dict"]
    for part in module.modules():
        for parameter in part._parameters.values():
            if isinstance(parameter, MXTensor):
                parameter.requires_grad_(False)  # as quantize_ leaves it
                register_state_dict_hooks(part)
                show_format(part)

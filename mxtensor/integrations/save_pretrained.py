"""transformers: ``save_pretrained`` of a model that ``quantize_`` has quantized after loading stores its codes, as that
of a model which was loaded quantized. Imported when its models are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..core.compat_hooks import hook_method
from ..tensor.mxtensor import MXTensor
from .transformers import MXQuantizationConfig, MXQuantizer

ABSENT = object()


def install(module: Any) -> None:
    """Let ``transformers.modeling_utils.PreTrainedModel`` save codes."""
    hook_method(module.PreTrainedModel, "save_pretrained", _with_codes)


def _with_codes(method: Callable[..., Any]) -> Callable[..., Any]:
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("state_dict", args[2] if len(args) > 2 else None)
        saved = self.parameters() if given is None else given.values()
        adapters_only = getattr(self, "_hf_peft_config_loaded", False)
        loaded_quantized = getattr(self, "hf_quantizer", None) is not None
        if adapters_only or loaded_quantized or not any(isinstance(value, MXTensor) for value in saved):
            return method(self, *args, **kwargs)
        with _quantizer(self):
            return method(self, *args, **kwargs)

    return save_pretrained


@contextmanager
def _quantizer(model: Any) -> Iterator[None]:
    """What transformers has in a model that was loaded quantized; afterwards the model is as before."""
    quantizer = MXQuantizer(MXQuantizationConfig(), pre_quantized=True)
    places = (vars(model), "hf_quantizer"), (vars(model.config), "quantization_config")
    converted = vars(model), "_weight_conversions"
    before = [(attributes, name, attributes.get(name, ABSENT)) for attributes, name in (*places, converted)]
    try:
        model.hf_quantizer, model.config.quantization_config = quantizer, quantizer.quantization_config
        yield
    finally:
        for attributes, name, value in before:
            attributes.pop(name, None) if value is ABSENT else attributes.update({name: value})

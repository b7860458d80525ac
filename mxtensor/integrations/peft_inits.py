"""peft: adapters that write the weights of the model when they are made, and those that add to a copy of one.

PiSSA, OLoRA, CorDA, LoRA-GA and LoftQ take a part of a weight out of it and put that into the adapter. What is left is
quantized again: the weight has been rounded twice, and a warning says how much is lost. The new values are computed in
high precision and rounded once. Layers that compute with a copy of the weight (SHiRA) get its values: their sum with
the adapter is not rounded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from ..core.compat_hooks import hook_method
from ..tensor.mxtensor import MXTensor
from .peft_merges import has_codes, in_high_precision, roundings

_hooked: set[type] = set()


def install(module: Any) -> None:
    """Hook the BaseTuner and the BaseTunerLayer of ``peft.tuners.tuners_utils``."""
    hook_method(module.BaseTuner, "inject_adapter", _with_warning(module.BaseTunerLayer))
    if hasattr(module.BaseTunerLayer, "get_base_weight"):
        hook_method(module.BaseTunerLayer, "get_base_weight", _with_values)


def _kinds(kind: type) -> Iterator[type]:
    """A class and all that inherit from it."""
    yield kind
    inherits: list[type] = kind.__subclasses__()
    for one in inherits:
        yield from _kinds(one)


def _with_warning(layers: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper of ``BaseTuner.inject_adapter``. ``layers``: the class of all layers of peft, each kind of which has an
    ``update_layer`` of its own that makes an adapter."""

    def wrap(inject: Callable[..., Any]) -> Callable[..., Any]:
        def inject_adapter(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            for kind in _kinds(layers):
                if kind not in _hooked and "update_layer" in vars(kind):
                    _hooked.add(kind)
                    hook_method(kind, "update_layer", _in_high_precision)
            with roundings.block([]) as found:
                out = inject(self, model, *args, **kwargs)
            if found:
                names = {id(layer): name for name, layer in model.named_modules()}
                worst = max(found, key=lambda one: one.lost)
                formats = ", ".join(sorted({one.format for one in found}))
                warnings.warn(
                    f"peft: {len(found)} weights are in {formats}, and the initialization of the adapters took a part "
                    "out of them: the rest was rounded again. The rounding has "
                    f"{sum(one.lost for one in found) / len(found):.2g} of the norm of that part, {worst.lost:.2g} in "
                    f"{names.get(id(worst.layer))}. To lose nothing, use init_lora_weights=True; or make the adapters "
                    "for the model in high precision, and quantize its base layers: quantize_(model, format, "
                    "lambda module, name: name.endswith('base_layer'))",
                    UserWarning,
                    stacklevel=3,
                )
            return out

        return inject_adapter

    return wrap


def _in_high_precision(update: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of ``update_layer`` of a layer."""

    def update_layer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_codes(self):
            return update(self, *args, **kwargs)
        with in_high_precision(self):
            return update(self, *args, **kwargs)

    return update_layer


def _with_values(usual: Callable[..., Any]) -> Callable[..., Any]:
    def get_base_weight(self: Any) -> Any:
        weight = usual(self)
        return weight.dequantize() if isinstance(weight, MXTensor) else weight

    return get_base_weight

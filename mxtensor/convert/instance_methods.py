"""What ``quantize_`` changes in how a module describes itself: ``print(model)`` and transformers' memory footprint.

A module keeps torch's class, so that its methods are replaced on the instance.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from ..core.local import local_of
from ..tensor.mxtensor import MXTensor
from ..training.training_weight import TrainingWeight


class InstanceMethod:
    """``function(module, ...)`` as an attribute of ``module``. A copy of the module has one of its own.

    It does not hold the module, which would else be freed by the garbage collector only, long after its last use.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self.function, self._module = function, weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None:  # a shallow copy is left of it
            raise RuntimeError(
                f"{self.function.__name__}: the module is gone that quantize_ converted; copy modules by copy.deepcopy"
            )
        return self.function(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> InstanceMethod:
        module: Any = self._module()
        return InstanceMethod(self.function, memo.get(id(module), module))

    def __reduce__(self) -> Any:
        return InstanceMethod, (self.function, self._module())


def describe_weights(module: nn.Module) -> str:
    """``extra_repr`` of the module's class, then the format or the recipe of each weight that has one."""
    texts, activations = [], []
    for name, parameter in module._parameters.items():
        weight: Any = local_of(parameter)
        if isinstance(weight, MXTensor):
            texts.append(f"{name}={weight.format}")
            activations.append(weight.recipe.activation)
        elif isinstance(weight, TrainingWeight):
            texts.append(f"{name}={weight.linear_recipe}")
    formats = {str(cast.format) for cast in activations if cast is not None}
    texts += [f"activation={format}" for format in sorted(formats)]
    return ", ".join(text for text in (type(module).extra_repr(module), *texts) if text)


def footprint(module: nn.Module, return_buffers: bool = True) -> int:
    """transformers' ``get_memory_footprint()``, in which a quantized weight counts its codes and scales."""
    nbytes: int = type(module).get_memory_footprint(module, return_buffers)  # type: ignore[attr-defined]
    for weight in map(local_of, module.parameters()):
        if isinstance(weight, MXTensor):  # torch counts its outer dtype
            nbytes += weight.nbytes - weight.numel() * weight.element_size()
    return nbytes


def show_format(module: nn.Module) -> None:
    """Let ``print`` show the formats of the module's weights."""
    module.__dict__["extra_repr"] = InstanceMethod(describe_weights, module)


def count_codes(model: nn.Module) -> None:
    """Let ``get_memory_footprint`` of ``model`` and of the models in it count codes, if they are of transformers."""
    for module in model.modules():
        if callable(getattr(type(module), "get_memory_footprint", None)):
            module.__dict__["get_memory_footprint"] = InstanceMethod(footprint, module)

"""``track_delayed_scaling``: the amax histories of a model that trains under ``autocast`` become part of it.

``autocast`` changes no model: the histories of its layers are attributes of their weights, which state dicts and
``copy.deepcopy`` leave out. Layers that ``quantize_`` has converted, and those of ``mxtensor.nn``, need no call.
"""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

from torch import nn

from .histories import delayed_states
from .state_dict import register_state_dict_hooks
from .training_weight import TrainingWeight

ModuleT = TypeVar("ModuleT", bound=nn.Module)
ATTRIBUTE = "_mxtensor_histories"
"""The attribute of a module that copies its histories."""


class _Histories:
    """Copies the histories of a module's plain parameters, which torch copies without attributes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Histories:
        module: Any = self._module()
        for parameter in module._parameters.values() if module is not None else ():
            copied = memo.get(id(parameter))  # torch has copied the parameters before, as they come first in a module
            if copied is not None and not isinstance(parameter, TrainingWeight):
                for name, state in delayed_states(parameter).items():
                    setattr(copied, name, state.to(state.history.device))
        return _Histories(memo.get(id(module), module))

    def __reduce__(self) -> Any:
        return _Histories, (self._module(),)


def track_delayed_scaling(model: ModuleT) -> ModuleT:
    """Save, load and copy the amax histories of a model that trains under ``autocast`` with delayed scaling.

    Call it once after the model is made, in the run that saves and in the one that loads. Each layer that has run then
    has an ``_extra_state`` in ``model.state_dict()``; a state dict without them is complete. Other models load such a
    state dict with ``strict=False``. Returns ``model``. Raises TypeError for an object that is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"track_delayed_scaling takes a module, not a {type(model).__name__}; pass the model that trains"
        )
    for module in model.modules():
        if module._parameters and type(module).set_extra_state is nn.Module.set_extra_state:
            register_state_dict_hooks(module)
            module.__dict__[ATTRIBUTE] = _Histories(module)
    return model

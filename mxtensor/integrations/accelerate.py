"""accelerate: weights that it offloads, or loads from a checkpoint, keep their recipe and their amax histories.
Imported when accelerate's hooks are.

accelerate makes a parameter of the class of the old one and of a value, which it takes from a state dict or a file. The
value of a training weight is plain there: the recipe is in the old parameter alone, which is on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..core.compat_hooks import around, hook_function
from ..tensor.mxtensor import MXTensor
from ..training.delayed_scaling import LOADED, STATE, DelayedState
from ..training.state_dict import EXTRA_STATE, with_recipe
from ..training.training_weight import TrainingWeight

MODULES = ("accelerate.utils.modeling", "accelerate.utils", "accelerate.hooks")
"""Where ``set_module_tensor_to_device`` is defined, and where it is imported by name."""
FSDP_MODULES = ("accelerate.utils.fsdp_utils", "accelerate.utils")
"""The same for ``fsdp2_load_full_state_dict``."""


def install(hooks: Any) -> None:
    """Let ``set_module_tensor_to_device`` make training weights of plain values, and move histories."""
    hook_function(MODULES, "set_module_tensor_to_device", around(_set_tensor))
    hook_function(FSDP_MODULES, "fsdp2_load_full_state_dict", around(_load_full_state_dict))


def _set_tensor(
    usual: Callable[..., Any],
    module: nn.Module,
    tensor_name: str,
    device: Any,
    value: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """``set_module_tensor_to_device``."""
    path, _, leaf = tensor_name.rpartition(".")
    parameters = module.get_submodule(path)._parameters
    if leaf == EXTRA_STATE and any(isinstance(p, TrainingWeight) for p in parameters.values()):
        raise NotImplementedError(
            f"{tensor_name} of this checkpoint has the amax histories of delayed scaling, and accelerate puts only "
            "parameters and buffers on the devices of a device_map: call load_checkpoint_in_model(model, "
            "checkpoint) without one, and then dispatch_model(model, device_map)"
        )
    old = parameters.get(leaf)
    if isinstance(old, TrainingWeight):
        value = with_recipe(value, old)
    usual(module, tensor_name, device, value, *args, **kwargs)
    new = parameters.get(leaf)
    for name, history in (_histories(old) | _histories(new)).items():
        setattr(new, name, history)


def _load_full_state_dict(
    usual: Callable[..., Any], accelerator: Any, model: nn.Module, full_sd: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """``fsdp2_load_full_state_dict``, by which rank 0 sends the whole tensors of a model to the others: they would wait
    for values where it sends codes."""
    for name, value in full_sd.items():
        if isinstance(value, MXTensor):
            raise NotImplementedError(
                f"cpu_ram_efficient_loading sends values from rank 0 to the others, and {name} is an MXTensor in "
                f"{value.format}; set cpu_ram_efficient_loading=False (fsdp_cpu_ram_efficient_loading: false), and "
                "load the quantized model on every rank"
            )
    return usual(accelerator, model, full_sd, *args, **kwargs)


def _histories(p: Tensor | None) -> dict[str, Any]:
    """The histories of a parameter that have values. A parameter on the meta device keeps them elsewhere: a history
    moves to the device of its weight when the layer runs."""
    found = {} if p is None else {name: value for name, value in vars(p).items() if name.startswith((STATE, LOADED))}
    return {name: x for name, x in found.items() if not (isinstance(x, DelayedState) and x.history.is_meta)}

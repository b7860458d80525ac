"""State dicts of modules with quantized parameters: one hook saves, one hook loads.

    register_state_dict_hooks(module)

A TrainingWeight is saved as an ordinary tensor over the same memory. At loading, values take the format or the recipe
that the module's parameter has; ``load_state_dict(assign=True)`` would otherwise replace the parameter by a plain one.
The amax histories of delayed scaling are saved as torch's extra state of the module. A state dict without them is
complete; the module then continues with those it has.
"""

from __future__ import annotations

import json
import math
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.arguments import described, quantized_by
from ..core.compat import local_of, sharded_like
from ..core.compat_hooks import hook_model_state_dicts
from ..core.when_imported import after_import
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from .delayed_scaling import DELAYED, LOADED, STATE, DelayedState, delayed_states, owner_of
from .prepared_linear import take_scale
from .training_weight import TrainingWeight

SLICES = ("query, key and value", "query", "key and value", "query", "key", "value")
"""The layers that torch's attention makes of its one input weight: one, two or three of them."""
BYTES_OF_NAMES = 256
"""More than the names and shapes of one history take."""
EXTRA_STATE = "_extra_state"
"""torch's key for the extra state of a module."""


def register_state_dict_hooks(module: nn.Module) -> None:
    """Save the module's TrainingWeights as plain tensors, and load values in the format or recipe of its parameters."""
    if any(hook is save_plain for hook in module._state_dict_hooks.values()):
        return
    module.register_state_dict_post_hook(save_plain)
    module.register_load_state_dict_pre_hook(load_as_parameters)


def save_plain(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Replace each TrainingWeight in a new state dict by its high-precision values."""
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        weight = local_of(value)
        if isinstance(weight, TrainingWeight):
            state_dict[prefix + name] = sharded_like(value, weight.high_precision)
        elif isinstance(module, nn.Linear) and name == "weight" and type(local_of(parameter)) is Tensor:
            warnings.warn(  # a plain weight, which track_delayed_scaling has given these hooks, in a DTensor
                f"the state dict lacks the amax histories of {prefix.removesuffix('.') or 'the model'}: under autocast "
                "they belong to the weight that FSDP2 gathers, not to the shard; call quantize_(model, recipe) before "
                "fully_shard instead of track_delayed_scaling(model)",
                stacklevel=2,
            )
    histories = {key: value for name, state in _states(module).items() for key, value in _named(name, state).items()}
    for name, parameter in module._parameters.items():
        for attribute, tensors in ({} if parameter is None else vars(parameter)).items():
            if attribute.startswith(LOADED):  # loaded, and not used yet
                stem = f"{name}{attribute.removeprefix(LOADED)}"
                histories |= {f"{stem}.{key}": value for key, value in tensors.items()}
    if histories and prefix + EXTRA_STATE not in state_dict:
        state_dict[prefix + EXTRA_STATE] = packed(histories, _capacity(module))


def _capacity(module: nn.Module) -> int:
    """The bytes that hold all histories which the module may get: torch.distributed.checkpoint loads into tensors of
    the size that was saved, and an attention that has not run does not know which slices of its weight are layers."""
    weight = local_of(module._parameters.get("in_proj_weight"))
    delayed = weight.linear_recipe.delayed if isinstance(weight, TrainingWeight) else None
    if delayed is None or not isinstance(module, nn.MultiheadAttention):
        return 0
    return len(SLICES) * (12 * (delayed.history_len + 2) + BYTES_OF_NAMES)


def _states(module: nn.Module) -> dict[tuple[str, str], DelayedState]:
    """(name of a parameter, name of its attribute) -> the state of delayed scaling.

    A shard that has not run has none yet (``to_empty``, ``ExpertParallel``), and gets one: torch.distributed.checkpoint
    loads only what the state dict of the model has.
    """
    found = {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            weight = owner_of(local_of(parameter))
            recipe = weight.linear_recipe if isinstance(weight, TrainingWeight) else None
            if recipe is not None and recipe.delayed is not None and not (weight.is_meta or delayed_states(weight)):
                setattr(weight, STATE, DelayedState(recipe, weight.device))
            for attribute, state in delayed_states(weight).items():
                if not state.history.is_meta:
                    found[name, attribute] = state
    return found


def _named(name: tuple[str, str], state: DelayedState) -> dict[str, Tensor]:
    """``weight.history``, ``weight.record`` and ``weight.amax``; of a slice of a weight ``in_proj_weight_0_64.history``
    and so on."""
    parameter, attribute = name
    return {f"{parameter}{attribute.removeprefix(STATE)}.{key}": value for key, value in state.state_dict().items()}


def load_as_parameters(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
    missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
) -> None:  # fmt: skip
    """Give each value of a state dict the format or the recipe of the parameter that it is loaded into.

    Adds to ``error_msgs`` if a value is quantized in another format than the parameter: quantizing it again would lose
    precision silently. (torch passes ``strict=True`` to every hook, whatever ``load_state_dict`` was called with.)
    """
    assign = bool(local_metadata.get("assign_to_params_buffers"))
    take_scale(module, state_dict, prefix)
    histories = None if _has_extra_state(module) else state_dict.pop(prefix + EXTRA_STATE, None)
    for name, parameter in module._parameters.items():
        key = prefix + name
        value = state_dict.get(key)
        if parameter is None or value is None:
            continue
        if isinstance(parameter, (MXTensor, TrainingWeight)) and (codes := quantized_by(local_of(value))):
            error_msgs.append(
                f"{key} of the state dict is quantized already, by {codes}; load the original values, or those of its "
                "dequantize()"
            )
            state_dict[key] = parameter.detach()
            continue
        if isinstance(parameter, MXTensor):
            if isinstance(value, MXTensor) and value.format != parameter.format:
                error_msgs.append(
                    f"format mismatch for {key}: the checkpoint holds {value.format}, the model "
                    f"{parameter.format}; quantize the model in that format, or load the values' dequantize()"
                )
                state_dict[key] = parameter.detach()  # the parameter stays; torch raises the error at the end
            elif assign and not isinstance(value, MXTensor) and value.shape == parameter.shape:
                new = quantize_as(value, parameter.recipe, parameter.copies)
                state_dict[key] = nn.Parameter(new, requires_grad=parameter.requires_grad)
        elif assign and isinstance(local_of(parameter), TrainingWeight):
            state_dict[key] = with_recipe(value, parameter)
    if histories is not None:
        _load_states(module, state_dict, prefix, assign, histories, error_msgs)


def has_histories(module: nn.Module) -> bool:
    """Whether the extra state of the module is its amax histories."""
    return any(hook is save_plain for hook in module._state_dict_hooks.values()) and not _has_extra_state(module)


def load_histories(module: nn.Module, key: str, histories: Any, error_msgs: list[str]) -> None:
    """Load the extra state of the module, which a state dict has under ``key``, into its parameters."""
    _load_states(module, {}, key.removesuffix(EXTRA_STATE), False, histories, error_msgs)


def _has_extra_state(module: nn.Module) -> bool:
    """Whether the class of the module has an extra state of its own, such as the modules of ``mxtensor.te``."""
    return type(module).set_extra_state is not nn.Module.set_extra_state


def _load_states(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, assign: bool, histories: Any, error_msgs: list[str]
) -> None:
    """Load the histories of a state dict into the parameters that have them, in place, or into those that will replace
    them. Histories of another recipe are of no use and are dropped."""
    try:
        tensors = unpacked(histories)
        for name, parameter in module._parameters.items():
            replacement = state_dict.get(prefix + name) if assign else None
            if type(replacement) is Tensor and parameter is not None:  # torch would make a parameter without attributes
                replacement = state_dict[prefix + name] = nn.Parameter(replacement, parameter.requires_grad)
            for weight in map(local_of, (parameter, replacement)):
                if isinstance(weight, (nn.Parameter, TrainingWeight)) and not isinstance(weight, MXTensor):
                    _load_weight(weight, name, tensors)
    except ValueError as error:
        error_msgs.append(f"{prefix}{EXTRA_STATE}: {error}")


def _load_weight(weight: Tensor, name: str, tensors: dict[str, Tensor]) -> None:
    """A weight without a state gets one from its recipe, or, if it has none, from that of ``autocast`` in the next
    step."""
    recipe = weight.linear_recipe if isinstance(weight, TrainingWeight) else None
    if weight.is_meta or (recipe is not None and recipe.delayed is None):
        return
    pattern = re.compile(rf"{re.escape(name)}((?:_\d+_\d+)?)\.history")
    for match in filter(None, map(pattern.fullmatch, tensors)):
        stem, attribute = match.string.removesuffix(".history"), STATE + match[1]
        loaded = {key: tensors[f"{stem}.{key}"] for key in DELAYED if f"{stem}.{key}" in tensors}
        state: Any = getattr(weight, attribute, None)
        if recipe is None and state is None:
            setattr(weight, LOADED + match[1], loaded)
            continue
        if recipe is not None and (
            state is None or (state.linear_recipe, state.history.device) != (recipe, weight.device)
        ):
            state = DelayedState(recipe, weight.device)
        state.load_state_dict(loaded)
        setattr(weight, attribute, state)


def with_recipe(value: Any, parameter: nn.Parameter) -> Any:
    """``value`` as a parameter with the recipe and the histories of ``parameter``; ``value`` itself if it has a recipe
    already."""
    weight, values = local_of(parameter), local_of(value)
    if not isinstance(values, Tensor) or isinstance(values, TrainingWeight):
        return value
    if values is not value:  # a DTensor, loaded into a sharded parameter
        local = TrainingWeight(values.detach(), weight.linear_recipe, weight.shard)
        return nn.Parameter(sharded_like(value, local), parameter.requires_grad)
    if isinstance(value, MXTensor):  # from a model for inference
        value = value.dequantize()
    out = nn.Parameter(TrainingWeight(value.detach(), weight.linear_recipe), weight.requires_grad)
    for name, state in delayed_states(weight).items():
        setattr(out, name, state if state.history.device == value.device else state.to(value.device))
    return out


# ----------------------------------------------------------------------------------------- torch.distributed.checkpoint

# ``set_model_state_dict`` and ``set_state_dict`` of ``torch.distributed.checkpoint`` pass on what the classes of
# modules save. The histories of a layer that ``quantize_`` has converted are the extra state of one module: they are
# loaded here, from the state dict of each rank, or from that of rank 0 (``broadcast_from_rank0``).


def _modules(model: nn.Module, name_of: Callable[[str], str]) -> Iterator[tuple[str, nn.Module]]:
    """The name of an extra state in a state dict, and its module."""
    for fqn, module in model.named_modules():
        if has_histories(module):
            yield name_of(f"{fqn}.{EXTRA_STATE}" if fqn else EXTRA_STATE), module


def _load(
    usual: Callable[[dict[str, Any]], Any], model: nn.Module, state_dict: dict[str, Any], broadcast: bool,
    name_of: Callable[[str], str],
) -> Any:  # fmt: skip
    modules = dict(_modules(model, name_of))
    found = {name: state_dict[name] for name in modules if name in state_dict}
    rest = {key: value for key, value in state_dict.items() if key not in found} if found else state_dict
    done = usual(rest)
    if broadcast and modules:
        said = [found]
        dist.broadcast_object_list(said, src=0)
        found = said[0]
    errors: list[str] = []
    for name, histories in found.items():
        load_histories(modules[name], name, histories, errors)
    if errors:
        raise RuntimeError(f"the amax histories of this state dict cannot be loaded: {'; '.join(errors)}")
    return done


# --------------------------------------------------------------------------------------------- histories under autocast

# ``autocast`` changes no model: the histories of its layers are attributes of their weights, which state dicts and
# ``copy.deepcopy`` leave out. Layers that ``quantize_`` has converted, and those of ``mxtensor.te``, need no call.

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


# ---------------------------------------------------------------------------------------------- histories as bytes

# The amax histories of a module are one tensor of bytes in its state dict. A state dict holds tensors only, so that
# safetensors, torch.distributed.checkpoint and ``torch.load(weights_only=True)`` take it; no cast of a state dict to
# another dtype changes bytes.

MAGIC = b"mxtensor delayed scaling 1\n"
LENGTH = 8
"""Bytes of the length of the header, which follows MAGIC: JSON, [name, shape] of each float32 tensor in order."""


def packed(tensors: dict[str, Tensor], size: int = 0) -> Tensor:
    """Float32 tensors by name as uint8 (bytes,) on the CPU, with zeros up to ``size`` bytes."""
    header = json.dumps([[name, list(t.shape)] for name, t in tensors.items()]).encode()
    start = MAGIC + len(header).to_bytes(LENGTH, "little") + header
    values = [t.detach().to("cpu").reshape(-1).contiguous().view(torch.uint8) for t in tensors.values()]
    data = torch.cat([torch.tensor(list(start), dtype=torch.uint8, device="cpu"), *values])
    return torch.nn.functional.pad(data, (0, max(size - data.numel(), 0)))


def unpacked(data: Tensor) -> dict[str, Tensor]:
    """The tensors of ``packed``. Raises ValueError for other bytes."""
    if not isinstance(data, Tensor) or data.dtype is not torch.uint8 or data.dim() != 1 or data.is_meta:
        raise ValueError(f"amax histories are 1-D uint8, not {described(data)}; remove the key to load the rest")
    raw = data.cpu().numpy().tobytes()
    if not raw.startswith(MAGIC):
        raise ValueError("these bytes are not amax histories of mxtensor; remove the key to load the rest")
    start = len(MAGIC) + LENGTH
    size = int.from_bytes(raw[len(MAGIC) : start], "little")
    try:
        entries = [(str(name), tuple(map(int, shape))) for name, shape in json.loads(raw[start : start + size])]
    except (ValueError, TypeError) as error:
        raise ValueError(f"the header of these amax histories is damaged ({error})") from error
    at, found = start + size, {}
    for name, shape in entries:
        length = 4 * math.prod(shape)
        if min(shape, default=0) < 0 or at + length > len(raw):
            raise ValueError(f"the amax histories end before {name} {shape}: {len(raw)} bytes")
        if length:
            found[name] = torch.frombuffer(bytearray(raw[at : at + length]), dtype=torch.float32).reshape(shape)
        at += length
    return found


after_import("torch.distributed.checkpoint.state_dict", lambda: hook_model_state_dicts(_load))

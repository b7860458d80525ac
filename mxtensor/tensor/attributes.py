"""Attributes that users set on a tensor (``main_grad``, ``tensor_model_parallel``): where torch keeps those of a plain
parameter, a quantized one keeps them too.

    module.to(), .half(), .cpu() ...    stay: the parameter is the same object
    pickle, torch.save                  saved
    copy.deepcopy                       copied for a tensor, dropped for a parameter
    MXTensor(parameter, requires_grad)  set, where a library passes them
    detach, clone, results of ops       dropped
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.compat import is_swapped_by_module
from ..core.peer_names import Elsewhere

INTERNAL = frozenset({
    "_rowwise", "_columnwise", "_dtype", "_link", "recipe", "_shard", "_rotated", "_quantizer", "_is_param",
    "_mx_stands_for", "high_precision", "linear_recipe", "shard", "agreement", "in_dtensor",
    "fsdp_pre_all_gather",
})  # fmt: skip
"""Attributes of the tensor itself: another tensor has its own, and no file can set them."""
PRESERVED = frozenset({
    "_high_precision_init_val", "get_high_precision_init_val", "clear_high_precision_init_val",
})  # fmt: skip
"""Attributes of ``quantized_model_init``. They stay with a parameter, and are not saved."""
OURS = "_mxtensor_"
"""The beginning of the names of other attributes that the package sets, such as the histories of delayed scaling."""

T = TypeVar("T", bound=Tensor)
_dict: Any = vars(Tensor)["__dict__"]


def user_attributes(t: Tensor) -> dict[str, Any]:
    """The attributes that the user has set on ``t``; without bound methods of ``t``, which are of no use elsewhere."""
    return {
        name: value
        for name, value in _dict.__get__(t).items()
        if _is_users(name) and getattr(value, "__self__", None) is not t
    }


def set_attributes(t: Any, attributes: dict[str, Any]) -> Any:
    """Set attributes of ``user_attributes`` on ``t``, and return it; others, which a made-up file may have, are not."""
    _dict.__get__(t).update((name, value) for name, value in attributes.items() if _is_users(name))
    return t


def parameter_of(t: T, requires_grad: bool, attributes: dict[str, Any]) -> T:
    """What the class of a quantized parameter gives if it is called as ``nn.Parameter(t, requires_grad)`` is.

    Libraries make a parameter of the class of the one that it replaces: accelerate does so for one that it has moved.
    Under its ``init_empty_weights``, it also passes everything in the ``__dict__`` of the old one.
    """
    return set_attributes(torch.nn.Parameter(t.detach(), requires_grad), attributes)  # type: ignore[no-any-return]


def refuse_attributes(kind: str, attributes: dict[str, Any]) -> None:
    """Raise TypeError for the first of these arguments: the class accepts them only if its value is a parameter."""
    raise TypeError(f"{kind}() got an unexpected keyword argument {next(iter(attributes))!r}")


def _is_users(name: str) -> bool:
    return name not in INTERNAL and name not in PRESERVED and not name.startswith(OURS)


class KeepsAttributes(Tensor):
    """A tensor subclass whose parameters keep their attributes when a module converts them, also while they are in use.

    ``nn.Module._apply`` sets ``param.data`` of a plain parameter, which stays the same object with its attributes. Of a
    wrapper subclass it exchanges everything, by ``torch.utils.swap_tensors``, with a new parameter that has none. No
    hook is called there, but ``__dict__`` is set.
    """

    def _use_count(self) -> int:
        """Asked by ``torch.utils.swap_tensors``, which refuses a tensor that a graph has saved.

        A frozen one may be exchanged all the same: what the graph has saved stays what it was, as the values that a
        plain parameter had before its ``.data`` was set. RuntimeError names the way out for one that trains.
        """
        count = super()._use_count()  # type: ignore[misc]
        if not is_swapped_by_module():
            return count  # type: ignore[no-any-return]
        if self.requires_grad and count > 2:
            raise RuntimeError(
                f"a weight {tuple(self.shape)} that trains is saved in the graph of a result; run its backward pass or "
                "delete the result before the module is converted, or compute it under torch.no_grad()"
            )
        return count if self.requires_grad else 1

    @property
    def __dict__(self) -> dict[str, Any]:
        return _dict.__get__(self)  # type: ignore[no-any-return]

    @__dict__.setter
    def __dict__(self, new: dict[str, Any]) -> None:
        if is_swapped_by_module():
            new = {name: value for name, value in _dict.__get__(self).items() if name not in INTERNAL} | new
        _dict.__set__(self, new)


# ---------------------------------------------------------------------------------------------- torchao attributes

# Errors for the attributes of torchao's tensors, whose codes may be stored otherwise. They name ours.


class TorchAOAttributes(Tensor):
    """The part of MXTensor that refuses what code written for torchao's quantized tensors reads."""

    qdata = Elsewhere("tensor.rowwise.data")
    scale = Elsewhere("tensor.rowwise.scale")
    per_tensor_scale = Elsewhere("tensor.rowwise.global_scale")
    act_quant_kwargs = Elsewhere("tensor.recipe.activation")
    elem_dtype = Elsewhere("tensor.format.element")
    block_size = Elsewhere("tensor.format.block")
    orig_dtype = Elsewhere("tensor.dtype")
    is_swizzled_scales = Elsewhere("tensor.rowwise.scale, which is never swizzled")
    from_qdata_and_scales = Elsewhere("mx.MXTensor.from_components")
    to_nvfp4 = Elsewhere("mx.quantize(x, 'nvfp4')")
    from_hp = Elsewhere("mx.quantize(x, 'float8_row')")
    get_hp_scales = Elsewhere("tensor.rowwise.scale and tensor.rowwise.global_scale")

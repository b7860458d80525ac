"""A converted parameter that ``nn.Module`` assigns to ``.data`` of the one before, instead of exchanging the two.

``Module._apply`` exchanges parameters that are wrapper subclasses (``torch.utils.swap_tensors``), which raises
``RuntimeError`` while a weak reference to one lives: ``torch.export`` leaves some, and averages of weights and caches
keep others. A plain parameter is assigned its new ``.data``, which weak references do not hinder, and so can an
MXTensor and a TrainingWeight be: each stays the same object with the same attributes. torch chooses by whether the new
tensor can be flattened.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ..core.compat_hooks import can_be_data
from .mxtensor import MXTensor


class Hidden:
    """A class attribute that ``hasattr`` does not find."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        raise AttributeError


class Assigned(MXTensor):
    """An MXTensor for ``nn.Module._apply`` alone, which reads its operands and drops it."""

    __tensor_unflatten__ = Hidden()


def must_be_assigned(parameter: Any, converted: Any) -> bool:
    """Whether ``nn.Module._apply`` could not exchange the two, and may assign ``converted``."""
    return (
        bool(weakref.getweakrefs(parameter))
        and type(parameter) is type(converted)
        and can_be_data(parameter, converted)
        and not torch.__future__.get_swap_module_params_on_conversion()
    )


def for_module(parameter: Any, converted: Any) -> Tensor:
    """What ``nn.Module._apply`` gets as the conversion of ``parameter``: the converted tensor, or an Assigned of it."""
    if type(parameter) is not MXTensor or not must_be_assigned(parameter, converted):
        return converted  # type: ignore[no-any-return]
    w, (row, column) = converted, (converted._rowwise, converted._columnwise)
    out = Assigned(row, column, w.recipe, w.dtype, tuple(w.shape), w.stride(), checked=True, rotated=w._rotated)
    out._link, out._shard = w._link, w._shard
    return out

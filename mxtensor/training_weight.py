"""TrainingWeight: a high-precision parameter that carries the roles of its linear layer.

To optimizers, hooks, clipping and initialization it is an ordinary parameter: every op runs on the tensor inside, and
what is not a view or a copy of it comes out plain. Only functions that multiply by a weight are seen first, through
WEIGHT_FUNCTIONS, and run quantized.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from .dispatch import forced_kernel
from .fingerprint import fingerprint
from .roles import Roles

aten = torch.ops.aten

WEIGHT_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""torch function -> rule(func, args, kwargs), entered by ``interception.py``."""

STATE = "_mxtensor_delayed_state"
"""The attribute of a weight that holds the DelayedState of its layer."""
KEEPING = {
    aten.clone.default, aten.copy_.default, aten.empty_like.default, aten.new_empty.default, aten.new_zeros.default,
    aten._pin_memory.default, aten._to_copy.default,
}  # fmt: skip
"""Ops whose results are weights still, as those of all views: what modules, FSDP2 and hooks do to a parameter without
computing with it."""
SAME = {aten.alias.default, aten.detach.default}
COPIES = {aten.clone.default, aten._to_copy.default}
"""Ops whose results take the amax history of delayed scaling along."""
INSIDE = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__format__}
"""Functions that torch refuses to run on a wrapper."""


class TrainingWeight(Tensor):
    """``high_precision``, the tensor inside, whose shape, strides, dtype and device this has, and its ``roles``."""

    high_precision: Tensor
    roles: Roles

    @staticmethod
    def __new__(cls, high_precision: Tensor, roles: Roles) -> TrainingWeight:
        self: TrainingWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            high_precision.size(),
            strides=high_precision.stride(),
            storage_offset=high_precision.storage_offset(),
            dtype=high_precision.dtype,
            layout=high_precision.layout,
            device=high_precision.device,
            pin_memory=high_precision.is_pinned(),
            requires_grad=high_precision.requires_grad,
        )
        # Under torch.compile a needless detach would hide from AOTAutograd that an optimizer writes into its input.
        self.high_precision = high_precision.detach() if high_precision.requires_grad else high_precision
        self.roles = roles
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"TrainingWeight({self.roles}, {self.high_precision!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Roles]:
        return ["high_precision"], self.roles

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], roles: Roles, size: Any, stride: Any) -> TrainingWeight:
        return TrainingWeight(inner["high_precision"], roles)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = WEIGHT_FUNCTIONS.get(func)
        if rule is not None:
            return rule(func, args, kwargs or {})
        if func in INSIDE and isinstance(args[0], TrainingWeight):
            return func(args[0].high_precision, *args[1:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weights: list[TrainingWeight] = []

        def inside(weight: TrainingWeight) -> Tensor:
            weights.append(weight)
            return weight.high_precision

        def outside(values: Tensor) -> TrainingWeight:
            return _with_state(TrainingWeight(values, weights[0].roles), weights[0], func)  # type: ignore[no-any-return]

        plain_args, plain_kwargs = tree_map_only(TrainingWeight, inside, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func in KEEPING or func.is_view:
            out = tree_map_only(Tensor, outside, out)
        return return_and_correct_aliasing(func, args, kwargs or {}, out)

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainingWeight:
        if id(self) not in memo:
            copied = _rebuild(self.high_precision.clone(), self.roles, self.requires_grad, is_parameter(self))
            memo[id(self)] = _with_state(copied, self, aten.clone.default)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = self.__dict__.get(STATE)
        return _rebuild, (self.high_precision, self.roles, self.requires_grad, is_parameter(self), state)

    def _stable_hash_for_caching(self) -> str:
        facade = (self.dtype, tuple(self.shape), self.stride(), str(self.device), self.requires_grad)
        key = (fingerprint(), forced_kernel(), self.roles.key, facade)
        return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()

    def fsdp_pre_all_gather(self, *arguments: Any) -> Any:
        """FSDP2 asks for this; what it gathered otherwise would be plain, and run in high precision without a word."""
        raise NotImplementedError(
            "FSDP2 of weights that carry a recipe is not there yet; leave quantize_ away, and call the sharded model "
            "inside mx.autocast(recipe=...)"
        )

    fsdp_post_all_gather = fsdp_pre_all_gather

    def share_memory_(self) -> TrainingWeight:
        """Move the values to shared memory (torch's own looks for a storage, and a wrapper has none)."""
        self.high_precision.share_memory_()
        return self

    def is_shared(self) -> bool:
        return bool(self.high_precision.is_shared())


def values_of(weight: Tensor) -> Tensor:
    """The high-precision values of a weight that wraps them; any other weight itself."""
    return weight.high_precision if isinstance(weight, TrainingWeight) else weight


def is_parameter(t: Tensor) -> bool:
    """Whether a module would register ``t``."""
    return isinstance(t, torch.nn.Parameter)


def _rebuild(values: Tensor, roles: Roles, requires_grad: bool, parameter: bool, state: Any = None) -> Tensor:
    out: Tensor = TrainingWeight(values, roles)
    out = torch.nn.Parameter(out, requires_grad) if parameter else out.requires_grad_(requires_grad)
    if state is not None:
        setattr(out, STATE, state)
    return out


def _with_state(out: Tensor, weight: TrainingWeight, func: Any) -> Any:
    """``out``, the result of ``func``, with the amax history of ``weight`` if it stands for the same weight."""
    state = weight.__dict__.get(STATE)
    if state is not None and (func in SAME or func in COPIES):
        setattr(out, STATE, state if func in SAME else state.to(out.device))
    return out


def _set_data(func: Any, args: Any, kwargs: Any) -> None:
    """``weight.data = values``: torch exchanges what is outside, and the values inside have to follow."""
    weight, value = args
    values = getattr(value, "high_precision", value).detach()
    with torch._C.DisableTorchFunctionSubclass():
        func(weight, TrainingWeight(values, weight.roles))
    weight.high_precision = values


WEIGHT_FUNCTIONS[Tensor.data.__set__] = _set_data  # type: ignore[attr-defined]

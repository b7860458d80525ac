"""What the modules with quantized products share: the recipe around them, their state, their parameters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.torch_autocast import autocast_dtype, torch_autocasts
from ..recipe.linear_recipe import HIGH_PRECISION, LinearRecipe
from ..recipe.training_recipes import Recipe
from ..te.quantizers import quantizers_of
from ..training.autocast import autocast_state
from ..training.interception import check_recipe
from ..training.linear import Options, linear
from ..training.model_init import init_recipe, preserve, preserves, weight_parameter
from ..training.operands import Scales
from ..training.state_dict import register_state_dict_hooks
from .slot import Operands, Slot
from .weight_shards import misfit, owner, remember, spread

Init = Callable[[Tensor], Any]
WeightShards = Sequence[Tensor]
"""The parameters whose rows, one below the other, are the weight of one product."""

NO_PARALLELISM: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (False,),
    "tp_group": (None,),
    "tp_size": (1,),
    "get_rng_state_tracker": (None,),
    "rng_tracker_name": (None,),
    "parallel_mode": (None, "row", "column"),
    "set_parallel_mode": (False, True),
}
"""Argument -> the values that ask for no parallelism; the last two do nothing on one rank."""


def check_parallelism(owner: str, **given: Any) -> None:
    """Raise NotImplementedError for an argument that asks for tensor parallelism."""
    for name, value in given.items():
        if value not in NO_PARALLELISM[name]:
            raise NotImplementedError(
                f"{owner}: {name}={value!r} is not available: modules hold whole weights; shard them with "
                "torch.distributed (FSDP2's fully_shard, or DTensor's parallelize_module)"
            )


def kaiming(weight: Tensor) -> None:
    """What torch.nn.Linear starts from, so that a drop-in replacement starts the same."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


class Active(NamedTuple):
    """What the recipe around a forward pass says."""

    linear_recipe: LinearRecipe
    group: Any = None
    """The process group that shares delayed scaling's amax."""


def result_dtype(x: Tensor) -> torch.dtype:
    """torch.autocast's dtype inside it; else the input's, whatever the weight's is."""
    return autocast_dtype(x) or x.dtype


class QuantizedModule(nn.Module):
    """A module with one or more products by weights, which run quantized inside ``mxtensor.autocast``.

    A forward pass calls ``prepare`` once, and ``product`` for each weight. ``quantizers["scaling_fwd"]`` holds the
    quantizers of input and weight of every product, ``quantizers["scaling_bwd"]`` those of the gradients; the first
    forward pass under a recipe makes them. With delayed scaling each product has histories of its own, which go into
    the state dict.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        super().__init__()
        self._sharded: dict[str, Any] = {}
        """Name -> the parameter that FSDP2 has sharded."""
        self.name = name
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input
        self.quantizers: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        self._made_for: tuple[str, LinearRecipe, torch.device, list[Any]] | None = None
        """Type of the recipe, roles, device and delayed states that the quantizers were made for."""
        self._init_recipe = init_recipe()
        self._inits: dict[str, Init] = {}
        self._slots: list[Slot] = []
        register_state_dict_hooks(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            remember(name, value, self._sharded)
        super().__setattr__(name, value)

    @property
    def label(self) -> str:
        """What messages call this module."""
        return self.name or type(self).__name__

    # ---------------------------------------------------------------------------------------- parameters

    def add_parameter(
        self, name: str, shape: tuple[int, ...], init: Init, device: Any, dtype: torch.dtype | None
    ) -> None:
        """Register a parameter that ``init`` fills; with two dimensions, quantized if ``quantized_model_init`` says."""
        values = torch.empty(shape, device=device, dtype=dtype)
        with torch.no_grad():
            init(values)
        self._inits[name] = init
        self.register_parameter(name, weight_parameter(values) if len(shape) == 2 else nn.Parameter(values))

    def add_linear(
        self, prefix: str, shape: tuple[int, int], init: Init | None, bias: bool, device: Any,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        """Register a weight (N, K) and its bias (N,) or None: by ``init`` and zero, or as torch.nn.Linear starts."""
        self.add_parameter(f"{prefix}weight", shape, init or kaiming, device, dtype)
        self.add_bias(f"{prefix}bias", shape, init, bias, device, dtype)

    def add_bias(
        self, name: str, shape: tuple[int, int], init: Init | None, bias: bool, device: Any,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        """Register the bias (N,) of a weight (N, K) that ``init`` fills, or None: zero, or as torch.nn.Linear."""
        if not bias:
            self.register_parameter(name, None)
            return
        bound = 1 / math.sqrt(shape[1]) if shape[1] > 0 else 0.0
        start: Init = partial(nn.init.uniform_, a=-bound, b=bound) if init is None else nn.init.zeros_
        self.add_parameter(name, shape[:1], start, device, dtype)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill all parameters anew, in place: after ``to_empty()``, say; shards with what the first rank draws."""
        for name, init in self._inits.items():
            parameter = getattr(self, name)
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            init(values)
            parameter.copy_(spread(values, parameter))
            if preserves(parameter):
                preserve(parameter, values)

    # ---------------------------------------------------------------------------------------- one forward pass

    def prepare(self, x: Tensor, weights: Sequence[WeightShards]) -> Active | None:
        """What the recipe around this pass says for products of these weights, the first of which ``x`` enters.

        None outside ``autocast`` and where it is disabled. Raises, with nothing changed: TypeError and ValueError for
        an input that does not fit, RuntimeError for a quantized weight of another recipe, or a ``main_grad`` that is
        needed and missing.
        """
        self._check(x, weights)
        around = autocast_state()
        if around is None or around.recipe is None:
            return None
        linear_recipe = around.recipe.linear_recipe()
        for components in weights:
            for weight in components:
                check_recipe(weight, linear_recipe, self.label, self._init_recipe)
        if not torch.compiler.is_dynamo_compiling():
            self._update(around.recipe, linear_recipe, len(weights), x.device)
        elif linear_recipe.delayed is not None:
            _init_state_eagerly(self, around.recipe, linear_recipe, len(weights), x.device)
        return Active(linear_recipe, around.group)

    def _check(self, x: Tensor, weights: Sequence[WeightShards]) -> None:
        label, weight = self.label, weights[0][0]
        if not x.dtype.is_floating_point:
            raise TypeError(f"{label}: the input is {str(x.dtype).removeprefix('torch.')}; convert it to a float dtype")
        if x.device != weight.device:
            raise ValueError(f"{label}: the input is on {x.device}, the weight on {weight.device}; move one with .to()")
        if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"{label}: input {tuple(x.shape)} does not fit: its last dimension is in_features, {weight.shape[1]}"
            )
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            for part in (part for components in weights for part in components if part.requires_grad):
                has = misfit(owner(part))
                if has is not None:
                    raise RuntimeError(
                        f"{label}: fuse_wgrad_accumulation adds to weight.main_grad, and a weight of shape "
                        f"{tuple(part.shape)} has {has}; give it one: weight.main_grad = "
                        "torch.zeros_like(weight, dtype=torch.float32)"
                    )

    def product(
        self,
        index: int,
        x: Tensor,
        components: WeightShards,
        bias: Tensor | None,
        active: Active | None,
        first: bool | None,
    ) -> Tensor:
        """Product ``index`` of this pass: x (..., K) by the weight (N, K) that ``components`` make up; (..., N)."""
        hooked = self.fuse_wgrad_accumulation or self.delay_wgrad_compute
        if active is None and not hooked:
            return _plain(x, joined(components), bias)
        if not torch.compiler.is_dynamo_compiling():
            return self._quantized(index, x, components, bias, active, first)
        if hooked or (active is not None and active.linear_recipe.delayed is not None):
            return _run_eagerly(self, index, x, components, bias, active, first)  # type: ignore[no-any-return]
        assert active is not None
        return linear(
            x, joined(components), bias, Options(active.linear_recipe, result_dtype(x), self.save_original_input)
        )

    def _quantized(
        self,
        index: int,
        x: Tensor,
        components: WeightShards,
        bias: Tensor | None,
        active: Active | None,
        first: bool | None,
    ) -> Tensor:
        weight = joined(components)
        return linear(x, weight, bias, *self.arguments(index, x, weight, components, active, first))

    def arguments(
        self, index: int, x: Tensor, weight: Tensor, components: WeightShards, active: Active | None, first: bool | None
    ) -> tuple[Options, Scales | None, Operands | None]:
        """How product ``index`` of this pass is to be computed: the last arguments of ``linear``. Eager code only."""
        slot, dtype = self._slot(index), result_dtype(x)
        linear_recipe = HIGH_PRECISION if active is None else active.linear_recipe
        hook = slot.on_wgrad(components, dtype, self.fuse_wgrad_accumulation, self.delay_wgrad_compute)
        scales = None if active is None else slot.scales(active.group)
        options = Options(linear_recipe, dtype, self.save_original_input, hook)
        return options, scales, slot.operands(weight, components, linear_recipe, scales, first)

    def backward_dw(self) -> None:
        """With ``delay_wgrad_compute``: make the weight gradients that backward passes have left, and add them up."""
        for slot in self._slots:
            slot.backward_dw()

    # ---------------------------------------------------------------------------------------- state

    def _slot(self, index: int) -> Slot:
        while len(self._slots) <= index:
            self._slots.append(Slot())
        return self._slots[index]

    def _update(self, recipe: Recipe, linear_recipe: LinearRecipe, products: int, device: torch.device) -> None:
        """Let quantizers and delayed states follow the recipe."""
        slots = [self._slot(index) for index in range(products)]
        for slot in slots:
            slot.init_state(linear_recipe, device)
        before, now = self._made_for, (type(recipe).__name__, linear_recipe, device, [slot.state for slot in slots])
        if before == now:
            return
        made = [quantizers_of(recipe, device, slot.state) for slot in slots]
        self.quantizers = {key: [q for lists in made for q in lists[key]] for key in ("scaling_fwd", "scaling_bwd")}
        self._made_for = now
        if before is not None and before[0] != now[0]:
            warnings.warn(
                f"Recipe type changed from {before[0]} to {now[0]} for {self.label}: its "
                "quantizers are replaced, what delayed scaling had recorded is gone",
                UserWarning,
                stacklevel=4,
            )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        cached: dict[str, Any] = {name: p for name, p in self._parameters.items() if p is not None and preserves(p)}
        preserved = {name: parameter.get_high_precision_init_val() for name, parameter in cached.items()}
        out = super()._apply(fn, recurse)
        for name, values in preserved.items():  # torch swaps the whole tensor, attributes too
            preserve(self._parameters[name], values)
        device = next(self.parameters()).device
        for slot in self._slots:
            if slot.state is not None and slot.state.amax.device != device:
                slot.move(device)
        return out

    def get_extra_state(self) -> dict[str, Tensor] | None:
        """The delayed states; None where there are none."""
        saved = {
            f"{index}.{name}": value
            for index, slot in enumerate(self._slots)
            for name, value in (slot.state.state_dict() if slot.state is not None else slot.loaded or {}).items()
        }
        return saved or None

    def set_extra_state(self, state: dict[str, Tensor] | None) -> None:
        """Take the delayed states of a checkpoint; the next forward pass uses them."""
        for key, value in (state or {}).items():
            index, _, name = key.partition(".")
            slot = self._slot(int(index))
            slot.state, slot.loaded = None, (slot.loaded or {}) | {name: value.clone()}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if destination[prefix + EXTRA_STATE] is None:
            del destination[prefix + EXTRA_STATE]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """torch's, except that a state dict without delayed states, such as torch's own module's, lacks nothing."""
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if prefix + EXTRA_STATE in missing_keys:
            missing_keys.remove(prefix + EXTRA_STATE)


EXTRA_STATE = "_extra_state"
"""torch's key."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_eagerly(module: QuantizedModule, *arguments: Any) -> Tensor:
    """Hooks of the backward pass and histories are for eager code: a compiled model breaks its graph here."""
    return module._quantized(*arguments)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _init_state_eagerly(module: QuantizedModule, *arguments: Any) -> None:
    module._update(*arguments)


def joined(components: WeightShards) -> Tensor:
    """The weight that ``components`` make up."""
    return components[0] if len(components) == 1 else torch.cat(list(components))


def cast_bias(bias: Tensor | None, out: Tensor) -> Tensor | None:
    """A bias that is returned, in the dtype of the result that it is to be added to."""
    return None if bias is None else bias.to(out.dtype)


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's linear layer in the input's dtype; torch.autocast sees to dtypes itself."""
    if not torch_autocasts(x.device):
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return F.linear(x, weight, bias)

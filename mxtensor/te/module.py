"""QuantizedModule: one forward pass of a module whose products run quantized under the active recipe.

A forward pass calls ``prepare`` once, then ``product`` or ``parallel_product`` for each weight. After these come the
parameters, then the quantizers and states with their place in the state dict; ``product_state.py`` has the state of one
product.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.arguments import DENSE, FLAG, check, optional
from ..core.autograd import autocast_dtype, torch_autocasts
from ..core.compat import is_sharded
from ..core.names import dtype_name
from ..core.shapes import as_matrix
from ..recipe import Recipe
from ..recipe.linear_recipe import HIGH_PRECISION, LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..training.autocast import autocast_state
from ..training.interception import check_recipe
from ..training.linear import SHARDS, linear
from ..training.passes import Options
from ..training.state_dict import register_state_dict_hooks
from .contexts import model_init, preserve, weight_parameter
from .extra_state import EXTRA_STATE, product_states
from .product_state import (
    STANDS_FOR,
    Fp8Meta,
    ProductState,
    WeightShards,
    main_grad_misfit,
    owner,
    share_loaded,
)
from .quantizers import quantizers_of
from .tensor_parallel import Init, Parallel, SplitModule


class Pass(NamedTuple):
    """What all products of one forward pass share."""

    linear_recipe: LinearRecipe | None
    """None outside ``autocast`` and where it is disabled."""
    group: Any
    """The process group that shares delayed scaling's amax."""
    first: bool | None
    """TransformerEngine's ``is_first_microbatch``."""


class QuantizedModule(SplitModule):
    """A module with one or more products by weights, which run quantized inside ``mxtensor.autocast``.

    ``quantized_model_init`` may quantize its weights, and FSDP2 may shard them. Each product has a ProductState.
    ``quantizers["scaling_fwd"]`` has the quantizers of input and weight of every product, ``quantizers["scaling_bwd"]``
    those of the gradients; the first forward pass under a recipe makes them. With delayed scaling each product has its
    own histories, which the state dict contains.
    """

    has_recipe_of_autocast = True
    """For ``quantize_``, which leaves such a module as it is, and says so."""

    def __init__(
        self,
        name: str | None = None,
        *,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input
        self.part_of: str | None = None
        """The module that this one is a part of, which a style must not split alone."""
        self._sharded: dict[str, Any] = {}
        """Name -> the parameter that FSDP2 has sharded."""
        self._init_recipe = model_init().linear_recipe
        self._inits: dict[str, Init] = {}
        self._grad_placements: dict[str, Any] = {}
        """Name -> the placements of the gradient of its local part, for parameters that a style has split."""
        self.quantizers: dict[str, list[Any]] = {"scaling_fwd": [], "scaling_bwd": []}
        self._made_for: tuple[str, LinearRecipe, torch.device, list[Any]] | None = None
        """Recipe class, casts, device and delayed states that the quantizers were made for."""
        self._products: list[ProductState] = []
        self._last_pass: tuple[Recipe, Any, int] | None = None
        """Recipe, group of autocast and number of products of the last forward pass under a recipe, in eager code."""
        register_state_dict_hooks(self)

    @property
    def label(self) -> str:
        """The name of this module in messages."""
        return self.name or type(self).__name__

    def prepare(self, x: Tensor, weights: Sequence[WeightShards], first: bool | None) -> Pass:
        """The start of a pass of products by these weights; ``x`` is the input of the first product.

        Raises, with nothing changed: TypeError and ValueError for arguments that do not fit; RuntimeError for a
        quantized weight of another recipe, or for a ``main_grad`` that is needed and missing.
        """
        self._check(x, weights)
        if first is not None and first is not True and first is not False:
            check(self.label, "is_first_microbatch", first, optional(FLAG))
        state = autocast_state()
        if state is None or state.recipe is None:
            return Pass(None, None, first)
        linear_recipe = state.recipe.linear_recipe()
        for shards in weights:
            for weight in shards:
                check_recipe(weight, linear_recipe, self.label, self._init_recipe)
        if not torch.compiler.is_dynamo_compiling():
            self._update(state.recipe, linear_recipe, len(weights), x.device, state.group)
        elif linear_recipe.delayed is not None:
            _run_eagerly(self, "_update", state.recipe, linear_recipe, len(weights), x.device, state.group)
        return Pass(linear_recipe, state.group, first)

    def _check(self, x: Tensor, weights: Sequence[WeightShards]) -> None:
        label, weight = self.label, weights[0][0]
        check(label, "the input", x, DENSE)
        if is_sharded(x):
            raise NotImplementedError(
                f"{label}: the input is a DTensor; split the module with mx.parallel.ColwiseParallel or "
                "RowwiseParallel, or make it with tp_group and pass the part of this rank, x.to_local()"
            )
        if not x.dtype.is_floating_point:
            raise TypeError(f"{label}: the input is {dtype_name(x.dtype)}; convert it to a float dtype")
        if x.device != weight.device:
            raise ValueError(f"{label}: the input is on {x.device}, the weight on {weight.device}; move one with .to()")
        if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"{label}: input {tuple(x.shape)} does not fit: its last dimension is in_features, {weight.shape[1]}"
            )
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            for shard in (shard for shards in weights for shard in shards if shard.requires_grad):
                has = main_grad_misfit(owner(shard))
                if has is not None:
                    raise RuntimeError(
                        f"{label}: fuse_wgrad_accumulation adds to weight.main_grad, and a weight of shape "
                        f"{tuple(shard.shape)} has {has}; give it one: weight.main_grad = "
                        "torch.zeros_like(weight, dtype=torch.float32)"
                    )

    @property
    def _accumulates(self) -> bool:
        """Whether this module accumulates weight gradients itself."""
        return self.fuse_wgrad_accumulation or self.delay_wgrad_compute

    def product(self, index: int, x: Tensor, shards: WeightShards, bias: Tensor | None, now: Pass) -> Tensor:
        """Product ``index`` of this pass: x (..., K) by the weight (N, K) that consists of ``shards``; (..., N)."""
        recipe = now.linear_recipe
        if recipe is None and not self._accumulates:
            weight = joined(shards)
            if not torch_autocasts(x.device):  # inside torch.autocast, torch chooses the dtype, else it is the input's
                weight = weight.with_dtype(x.dtype) if isinstance(weight, MXTensor) else weight.to(x.dtype)
                bias = None if bias is None else bias.to(x.dtype)
            return F.linear(x, weight, bias)
        needs_eager = self._accumulates or (recipe is not None and recipe.delayed is not None)
        if needs_eager and torch.compiler.is_dynamo_compiling():
            return _run_eagerly(self, "_quantized", index, x, shards, bias, now)  # type: ignore[no-any-return]
        return self._quantized(index, x, shards, bias, now)

    def _quantized(self, index: int, x: Tensor, shards: WeightShards, bias: Tensor | None, now: Pass) -> Tensor:
        """``product`` by the autograd function of a linear layer, with the state of this product in eager code."""
        weight, dtype, linear_recipe = joined(shards), result_dtype(x), now.linear_recipe or HIGH_PRECISION
        if torch.compiler.is_dynamo_compiling():
            return linear(x, weight, bias, Options(linear_recipe, dtype, self.save_original_input))
        state = self._state(index)
        hook = state.on_wgrad(shards, dtype, self.fuse_wgrad_accumulation, self.delay_wgrad_compute)
        delayed = None if now.linear_recipe is None else state.delayed
        scales = None if delayed is None else delayed.step(now.group)  # one step of the history
        options = Options(linear_recipe, dtype, self.save_original_input, hook)
        return linear(
            x, weight, bias, options, scales, state.operands(weight, shards, linear_recipe, scales, now.first)
        )

    def parallel_product(
        self, index: int, x: Tensor, shards: WeightShards, bias: Tensor | None, now: Pass, parallel: Parallel
    ) -> Tensor:
        """``product`` of a weight of which this rank has a part (``tensor_parallel.py``): with the sums and gathers
        around it. An input that is gathered is sent as codes and scales if the recipe allows it."""
        if parallel.mode is None:
            return self.product(index, x, shards, bias, now)
        from ..distributed.split_linear import gathered_linear, reason_for_values, split_linear

        recipe, dtype, by_rows = now.linear_recipe, result_dtype(x), parallel.mode == "row"
        group = parallel.mesh_of(x.device).get_group()
        if parallel.sequence and not by_rows and recipe is not None:
            why, rows = None, as_matrix(x)
            if self._accumulates or self.save_original_input:
                why = f"{self.label} accumulates wgrad itself, or saves its input"
            elif now.first is not None:
                why = "is_first_microbatch caches the weight"
            if reason_for_values(rows, recipe, dtype, why) is None:
                y = gathered_linear(rows, joined(shards), bias, recipe, group, dtype)
                return y.view(parallel.size * x.shape[0], *x.shape[1:-1], y.shape[-1])
        before, after = (None, bias) if by_rows else (bias, None)
        x = parallel.into(x)
        plain = not any(isinstance(shard, MXTensor) for shard in shards)
        if recipe is not None and recipe.has_tensor_scales and plain and not self._accumulates and now.first is None:
            # The ranks cast their parts with the scales of the whole tensors.
            y = split_linear(x, joined(shards), before, recipe, group, by_rows, dtype)
        else:
            y = self.product(index, x, shards, before, now)
        return parallel.out_of(y, after)

    # ------------------------------------------------------------------------------------------ weight gradients

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for ``backward_dw()``."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """With ``delay_wgrad_compute``: compute and accumulate the weight gradients that backward passes left out."""
        for state in self._products:
            state.backward_dw()

    # ------------------------------------------------------------------------------------------ parameters

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            if is_sharded(value):
                self._sharded[name] = value
            elif name in self._sharded:  # FSDP2 has gathered it
                setattr(value, STANDS_FOR, self._sharded[name])
        super().__setattr__(name, value)

    def local(self, name: str) -> Any:
        """Parameter ``name`` as a product takes it: of one that a style has split, the part of this rank."""
        parameter = getattr(self, name)
        placements = self._grad_placements.get(name)
        if placements is None or parameter is None:
            return parameter
        part = parameter.to_local(grad_placements=placements)
        if not torch.compiler.is_dynamo_compiling():
            setattr(part, STANDS_FOR, parameter)
        return part

    def add_parameter(
        self, name: str, shape: tuple[int, ...], init: Init, device: Any, dtype: torch.dtype | None
    ) -> None:
        """Register a parameter that ``init`` fills. Inside ``quantized_model_init``, quantize it if it has two dims."""
        values = torch.empty(shape, device=device, dtype=dtype)
        with torch.no_grad():
            init(values)
        self._inits[name] = init
        self.register_parameter(name, weight_parameter(values) if len(shape) == 2 else nn.Parameter(values))

    def add_linear(
        self, prefix: str, shape: tuple[int, int], init: Init | None, bias: bool, device: Any,
        dtype: torch.dtype | None, parallel: Parallel, pieces: Sequence[int] = (), suffix: str = "",
    ) -> None:  # fmt: skip
        """Register the parts of this rank of a weight (N, K) and of its bias (N,), or None. ``pieces``: rows that are
        split one by one; () for all at once.

        ``init`` fills the weight and the bias starts at zero. Without ``init`` both start as in torch.nn.Linear.
        """
        bound = 1 / math.sqrt(shape[1]) if shape[1] > 0 else 0.0
        start: Init = partial(nn.init.uniform_, a=-bound, b=bound) if init is None else nn.init.zeros_
        # That of torch.nn.Linear, so that a drop-in replacement starts with the same values.
        kaiming = partial(nn.init.kaiming_uniform_, a=math.sqrt(5))
        weight_name, bias_name = f"{prefix}weight{suffix}", f"{prefix}bias{suffix}"
        fill = parallel.initialize(init or kaiming, pieces or shape[:1], True)
        self.add_parameter(weight_name, parallel.shape(shape), fill, device, dtype)
        if bias:
            fill = parallel.initialize(start, pieces or shape[:1], False)
            self.add_parameter(bias_name, parallel.shape(shape[:1]), fill, device, dtype)
        else:
            self.register_parameter(bias_name, None)
        parallel.mark(getattr(self, weight_name), getattr(self, bias_name))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize all parameters again, in place: after ``to_empty()``, for example. Sharded parameters take the
        values that the first rank draws."""
        for name, init in self._inits.items():
            parameter = getattr(self, name)
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            init(values)
            whole = values
            if is_sharded(parameter):
                from torch.distributed.tensor import distribute_tensor

                whole = distribute_tensor(values, parameter.device_mesh, parameter.placements)
            parameter.copy_(whole)
            if hasattr(parameter, "get_high_precision_init_val"):
                preserve(parameter, values)

    # ------------------------------------------------------------------------------------------ quantizers and states

    @property
    def fp8_meta(self) -> Fp8Meta:
        """TransformerEngine's dictionary of recipe and scaling state, to read (:class:`Fp8Meta`)."""
        return Fp8Meta(self)

    def _state(self, index: int) -> ProductState:
        """The state of product ``index``."""
        while len(self._products) <= index:
            self._products.append(ProductState())
        return self._products[index]

    def _update(
        self, recipe: Recipe, linear_recipe: LinearRecipe, products: int, device: torch.device, group: Any
    ) -> None:
        """Make the quantizers and delayed states that the recipe needs, if they are not the present ones."""
        self._last_pass = recipe, group, products
        states = [self._state(index) for index in range(products)]
        share_loaded(self._products, products)
        for state in states:
            state.init_state(linear_recipe, device)
        before, now = self._made_for, (type(recipe).__name__, linear_recipe, device, [s.delayed for s in states])
        if before == now:
            return
        made = [quantizers_of(recipe, device, state.delayed) for state in states]
        self.quantizers = {key: [q for lists in made for q in lists[key]] for key in ("scaling_fwd", "scaling_bwd")}
        self._made_for = now
        if before is not None and before[0] != now[0]:
            warnings.warn(
                f"Recipe type changed from {before[0]} to {now[0]} for {self.label}: its quantizers are replaced and "
                "the amax histories of delayed scaling are lost",
                UserWarning,
                stacklevel=4,
            )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        out = super()._apply(fn, recurse)
        device = next(self.parameters()).device
        for state in self._products:
            if state.delayed is not None and state.delayed.amax.device != device:
                state.delayed = state.delayed.to(device)
        return out

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no last pass: its process group cannot be copied."""
        return self.__dict__ | {"_last_pass": None}

    # ------------------------------------------------------------------------------------------ state dict

    def get_extra_state(self) -> dict[str, Tensor] | None:
        """The delayed states as ``"PRODUCT.TENSOR"`` -> tensor; None without delayed scaling."""
        saved = {
            f"{index}.{name}": value
            for index, state in enumerate(self._products)
            for name, value in (state.delayed.state_dict() if state.delayed is not None else state.loaded or {}).items()
        }
        return saved or None

    def set_extra_state(self, state: dict[str, Tensor] | Tensor | None) -> None:
        """Store the delayed states of a checkpoint, also of TransformerEngine, for the next forward pass.

        Raises ValueError for a state of another module."""
        if state is None:
            return
        for key, value in (state if isinstance(state, dict) else product_states(self.label, state)).items():
            index, _, name = key.partition(".")
            if not re.fullmatch(r"[0-9]{1,3}", index) or not isinstance(value, Tensor):
                raise ValueError(
                    f"{self.label} has no extra state {key!r:.80} of {type(value).__name__}; its keys are "
                    "PRODUCT.TENSOR, its values tensors"
                )
            product = self._state(int(index))
            product.delayed, product.loaded = None, (product.loaded or {}) | {name: value.clone()}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if destination[prefix + EXTRA_STATE] is None:
            del destination[prefix + EXTRA_STATE]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """As in torch, but a state dict without delayed states, such as that of torch's own module, is complete."""
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if prefix + EXTRA_STATE in missing_keys:
            missing_keys.remove(prefix + EXTRA_STATE)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_eagerly(module: QuantizedModule, method: str, *arguments: Any) -> Any:
    """Hooks of the backward pass and amax histories need eager code: a compiled model has a graph break here."""
    return getattr(module, method)(*arguments)


def joined(shards: WeightShards) -> Tensor:
    """The weight that consists of ``shards``; one of several knows them (``SHARDS``)."""
    if len(shards) == 1:
        return shards[0]
    whole = torch.cat(list(shards))
    if not torch.compiler.is_dynamo_compiling():
        setattr(whole, SHARDS, tuple(shards))
    return whole


def result_dtype(x: Tensor) -> torch.dtype:
    """The dtype of torch.autocast inside it, else that of the input, whatever dtype the weight has."""
    return autocast_dtype(x) or x.dtype


def cast_bias(bias: Tensor | None, out: Tensor) -> Tensor | None:
    """A bias that is returned with ``out``, in the dtype of ``out``."""
    return None if bias is None else bias.to(out.dtype)

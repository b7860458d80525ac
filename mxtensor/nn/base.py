"""QuantizedModule: one forward pass of a module whose products run quantized under the active recipe.

Its parameters are in ``parameters.py``, its quantizers, states and state dict in ``module_state.py``, the state of one
product in ``product_state.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.arguments import DENSE, FLAG, check, optional
from ..core.local import is_sharded
from ..core.names import dtype_name
from ..core.torch_autocast import autocast_dtype, torch_autocasts
from ..recipe.linear_recipe import HIGH_PRECISION, LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..training.autocast import autocast_state
from ..training.interception import check_recipe
from ..training.linear import linear
from ..training.observe import SHARDS
from ..training.operands import Scales
from ..training.passes import Options
from .module_state import StatefulModule
from .product_state import CachedOperands, WeightShards
from .styles import refuse
from .tensor_parallel import Parallel, set_group_of_modules
from .weight_shards import main_grad_misfit, owner


class Active(NamedTuple):
    """The recipe of one forward pass."""

    linear_recipe: LinearRecipe
    group: Any = None
    """The process group that shares delayed scaling's amax."""


class QuantizedModule(StatefulModule):
    """A module with one or more products by weights, which run quantized inside ``mxtensor.autocast``.

    A forward pass calls ``prepare`` once, then ``product`` for each weight.
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
        super().__init__(name)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.save_original_input = save_original_input

    def prepare(self, x: Tensor, weights: Sequence[WeightShards]) -> Active | None:
        """The recipe of this pass for products by these weights; ``x`` is the input of the first product.

        None outside ``autocast`` and where it is disabled. Raises, with nothing changed: TypeError and ValueError for
        an input that does not fit; RuntimeError for a quantized weight of another recipe, or for a ``main_grad`` that
        is needed and missing.
        """
        self._check(x, weights)
        state = autocast_state()
        if state is None or state.recipe is None:
            return None
        linear_recipe = state.recipe.linear_recipe()
        for shards in weights:
            for weight in shards:
                check_recipe(weight, linear_recipe, self.label, self._init_recipe)
        if not torch.compiler.is_dynamo_compiling():
            self._update(state.recipe, linear_recipe, len(weights), x.device, state.group)
        elif linear_recipe.delayed is not None:
            _update_eagerly(self, state.recipe, linear_recipe, len(weights), x.device, state.group)
        return Active(linear_recipe, state.group)

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

    def product(
        self, index: int, x: Tensor, shards: WeightShards, bias: Tensor | None, active: Active | None,
        first: bool | None,
    ) -> Tensor:  # fmt: skip
        """Product ``index`` of this pass: x (..., K) by the weight (N, K) that consists of ``shards``; (..., N).

        ``first`` is TransformerEngine's ``is_first_microbatch``.
        """
        if first is not None and first is not True and first is not False:
            check(self.label, "is_first_microbatch", first, optional(FLAG))
        hooked = self.fuse_wgrad_accumulation or self.delay_wgrad_compute
        if active is None and not hooked:
            return _high_precision(x, joined(shards), bias)
        if not torch.compiler.is_dynamo_compiling():
            return self._quantized(index, x, shards, bias, active, first)
        if hooked or (active is not None and active.linear_recipe.delayed is not None):
            return _run_eagerly(self, index, x, shards, bias, active, first)  # type: ignore[no-any-return]
        assert active is not None
        options = Options(active.linear_recipe, result_dtype(x), self.save_original_input)
        return linear(x, joined(shards), bias, options)

    def parallel_product(
        self, index: int, x: Tensor, shards: WeightShards, bias: Tensor | None, active: Active | None,
        first: bool | None, parallel: Parallel,
    ) -> Tensor:  # fmt: skip
        """``product`` of a weight of which this rank has a part (``tensor_parallel.py``): with the sums and gathers
        around it. An input that is gathered is sent as codes and scales if the recipe allows it."""
        if parallel.sequence and parallel.mode == "column" and active is not None:
            y = self._gathered(x, shards, bias, active, first, parallel)
            if y is not None:
                return y
        by_rows = parallel.mode == "row"
        before, after = (None, bias) if by_rows else (bias, None)
        x = parallel.into(x)
        if parallel.mode is not None and active is not None and self._shares_scales(shards, active, first):
            from ..distributed.shared_scale import split_linear

            group = parallel.mesh_of(x.device).get_group()
            y = split_linear(x, joined(shards), before, active.linear_recipe, group, by_rows, result_dtype(x))
        else:
            y = self.product(index, x, shards, before, active, first)
        return parallel.out_of(y, after)

    def _shares_scales(self, shards: WeightShards, active: Active, first: bool | None) -> bool:
        """Whether the ranks cast their parts with the scales of the whole tensors."""

        plain = not any(isinstance(shard, MXTensor) for shard in shards)
        alone = self.fuse_wgrad_accumulation or self.delay_wgrad_compute or first is not None
        return plain and not alone and active.linear_recipe.has_tensor_scales

    def _gathered(
        self, x: Tensor, shards: WeightShards, bias: Tensor | None, active: Active, first: bool | None,
        parallel: Parallel,
    ) -> Tensor | None:  # fmt: skip
        """The columns of this rank for the rows of all ranks, gathered as codes; None if values are gathered."""
        from ..distributed.all_gather_linear import gathered_linear, reason_for_values

        dtype, rows = result_dtype(x), x.reshape(-1, x.shape[-1])
        why = None
        if self.fuse_wgrad_accumulation or self.delay_wgrad_compute or self.save_original_input:
            why = f"{self.label} accumulates wgrad itself, or saves its input"
        elif first is not None:
            why = "is_first_microbatch caches the weight"
        if reason_for_values(rows, active.linear_recipe, dtype, why) is not None:
            return None
        group = parallel.mesh_of(x.device).get_group()
        y = gathered_linear(rows, joined(shards), bias, active.linear_recipe, group, dtype)
        return y.view(parallel.size * x.shape[0], *x.shape[1:-1], y.shape[-1])

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """The process group of a module that was made with ``tp_size`` and without ``tp_group``.

        Raises TypeError for another object, ValueError for a group of another size.
        """
        set_group_of_modules(self, tp_group)

    def split_by_style(self, style: Any, mode: str, mesh: Any) -> Any:
        """Called by the styles of ``mx.parallel``: raises NotImplementedError for a module of several products."""
        arguments = f"parallel_mode='{mode}'" if hasattr(self, "parallel") else "set_parallel_mode=True"
        refuse(style, self, self.label, "it has several weights, and a style is for one", arguments)

    def _quantized(
        self, index: int, x: Tensor, shards: WeightShards, bias: Tensor | None, active: Active | None,
        first: bool | None,
    ) -> Tensor:  # fmt: skip
        weight = joined(shards)
        return linear(x, weight, bias, *self.arguments(index, x, weight, shards, active, first))

    def arguments(
        self, index: int, x: Tensor, weight: Tensor, shards: WeightShards, active: Active | None, first: bool | None
    ) -> tuple[Options, Scales | None, CachedOperands | None]:
        """The last arguments of ``linear`` for product ``index`` of this pass. Eager code only."""
        state, dtype = self._state(index), result_dtype(x)
        linear_recipe = HIGH_PRECISION if active is None else active.linear_recipe
        hook = state.on_wgrad(shards, dtype, self.fuse_wgrad_accumulation, self.delay_wgrad_compute)
        scales = None if active is None else state.scales(active.group)
        options = Options(linear_recipe, dtype, self.save_original_input, hook)
        return options, scales, state.operands(weight, shards, linear_recipe, scales, first)

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for ``backward_dw()``."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """With ``delay_wgrad_compute``: compute and accumulate the weight gradients that backward passes left out."""
        for state in self._products:
            state.backward_dw()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_eagerly(module: QuantizedModule, *arguments: Any) -> Tensor:
    """Hooks of the backward pass and amax histories need eager code: a compiled model has a graph break here."""
    return module._quantized(*arguments)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _update_eagerly(module: QuantizedModule, *arguments: Any) -> None:
    module._update(*arguments)


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


def _high_precision(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's linear layer in the dtype of the input. Inside torch.autocast, torch chooses the dtype."""
    if not torch_autocasts(x.device):
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    return F.linear(x, weight, bias)

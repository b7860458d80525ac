"""ProductState: what one product of a module stores between calls.

Amax histories of delayed scaling, the quantized weight of several microbatches, and weight gradients to be computed.

Weights may be in shards. Inside a forward pass FSDP2 replaces the sharded parameter by the gathered weight. It reduces
only gradients that autograd computes, so not those of ``fuse_wgrad_accumulation`` and ``delay_wgrad_compute``.
Therefore the gathered weight stores the parameter it stands for, and such a gradient is averaged over the ranks into
the parameter's shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.autograd import without_autocast
from ..core.compat import is_sharded, local_of
from ..core.select import dispatch_context, restore_context
from ..numerics.operand import Operand
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..training.casts import weight_copies
from ..training.delayed_scaling import DelayedState, Scales
from ..training.passes import WgradHook
from ..training.recompute import restore_later

WeightShards = Sequence[Tensor]
"""The parameters whose rows, one below the other, are the weight of one product."""
CachedOperands = tuple[Operand | None, Operand | None]
"""The rowwise and the columnwise operand of a weight."""
Wgrad = Callable[[torch.dtype], Tensor]
"""Computes the weight gradient in the given dtype."""


class ProductState:
    """The state of one product of a module."""

    def __init__(self) -> None:
        self.delayed: DelayedState | None = None
        self.loaded: dict[str, Tensor] | None = None
        """A delayed state from a checkpoint, until the first forward pass shows which recipe it belongs to."""
        self._cached_weight: tuple[Any, CachedOperands] | None = None
        """The operands of the weight for several microbatches, and what they were made from."""
        self._pending: list[Callable[[], None]] = []

    # ---------------------------------------------------------------------------------------- delayed scaling

    def init_state(self, linear_recipe: LinearRecipe, device: torch.device) -> None:
        """Create the delayed state that ``linear_recipe`` needs, or continue that of another recipe of delayed scaling;
        without delayed scaling it is dropped.

        Raises ValueError if the history of a checkpoint has another length than the recipe's.
        """
        if linear_recipe.delayed is None:
            self.delayed = None
        elif self.delayed is not None and self.delayed.linear_recipe != linear_recipe:
            restore_later(self, "delayed")
            self.delayed = self.delayed.under(linear_recipe, device)
        elif self.delayed is None:
            state = DelayedState(linear_recipe, device)
            if self.loaded is not None:
                state.load_state_dict(self.loaded)
            self.delayed, self.loaded = state, None
        elif self.delayed.amax.device != device:
            self.delayed = self.delayed.to(device)

    # ---------------------------------------------------------------------------------------- cached operands

    def operands(
        self, weight: Tensor, shards: WeightShards, linear_recipe: LinearRecipe, scales: Scales | None,
        first: bool | None,
    ) -> CachedOperands | None:  # fmt: skip
        """The operands of ``weight``, which consists of ``shards``, for this microbatch; None: the product casts it.

        ``first`` (TransformerEngine's ``is_first_microbatch``): True makes and caches them; False uses the cached ones,
        unless the weight or its casts have changed; None caches nothing.
        """
        if first is None or isinstance(weight, MXTensor) or linear_recipe.weight.rowwise is None:
            return None
        # Identity, version and memory of each parameter. Every in-place write, such as an optimizer step, changes the
        # version; parameter.data = values changes the memory.
        # A write to a local shard does not change the version of its DTensor.
        parameters = [(p, local_of(p)) for p in map(owner, shards)]
        versions = [
            (id(p), local.data_ptr(), *(-1 if t.is_inference() else t._version for t in (p, local)))
            for p, local in parameters
        ]
        made_from = linear_recipe.weight, versions
        if first or self._cached_weight is None or self._cached_weight[0] != made_from:
            with torch.inference_mode(False):
                self._cached_weight = made_from, weight_copies(weight, linear_recipe, scales)
        return self._cached_weight[1]

    # ---------------------------------------------------------------------------------------- weight gradients

    def on_wgrad(self, shards: WeightShards, dtype: torch.dtype, fused: bool, delayed: bool) -> WgradHook | None:
        """What the backward pass does with the gradient of the weight that consists of ``shards``; None: as torch does.

        ``fused`` adds it, in float32, to ``main_grad``; ``delayed`` leaves it to ``backward_dw``. ``dtype``: the dtype
        of the product without ``fused``.
        """
        if not fused and not delayed:
            return None

        def add(wgrad: Wgrad) -> None:
            dw = wgrad(torch.float32 if fused else dtype)
            for shard, rows in zip(shards, dw.split([shard.shape[0] for shard in shards]), strict=True):
                if shard.requires_grad:
                    add_gradient(owner(shard), rows, fused, len(shards) > 1)

        def hook(wgrad: Wgrad) -> Tensor | None:
            if not delayed:
                add(wgrad)
                return stand_in(shards) if fused else None
            context, device = dispatch_context(), shards[0].device

            def run() -> None:
                with torch.no_grad(), without_autocast(device), restore_context(*context):
                    add(wgrad)

            self._pending.append(run)
            return None

        return hook

    def backward_dw(self) -> None:
        """Compute and accumulate the weight gradients of all backward passes since the last call."""
        while self._pending:
            self._pending.pop(0)()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the histories, but neither cached operands nor pending gradients: they belong to the original."""
        return self.__dict__ | {"_cached_weight": None, "_pending": []}


def share_loaded(states: Sequence[ProductState], products: int) -> None:
    """Give ``products`` products the delayed states of a checkpoint that has another number of them.

    A weight that consists of several parameters is one product, or one for each parameter if they are quantized: each
    gets the largest amaxes of all.
    """
    found = [state.loaded for state in states if state.loaded is not None]
    if len(found) in (0, products):
        return
    merged = {}
    for name, value in found[0].items():
        values = [loaded[name] for loaded in found if name in loaded and loaded[name].shape == value.shape]
        merged[name] = torch.stack(values).amax(0)
    for index, state in enumerate(states):
        state.loaded = dict(merged) if index < products else None


# ---------------------------------------------------------------------------------------------- weights in shards

STANDS_FOR = "_mx_stands_for"
ADDED = "grad_added_to_main_grad"
"""Megatron's attribute of a parameter: set to True when its gradient has been added to ``main_grad``."""


def owner(weight: Tensor) -> Tensor:
    """The parameter that an optimizer steps for ``weight``: the sharded one that it stands for, or itself."""
    return getattr(weight, STANDS_FOR, weight)


def main_grad_misfit(parameter: Any) -> str | None:
    """What is wrong with ``parameter.main_grad``; None if gradients can be added to it."""
    main = getattr(parameter, "main_grad", None)
    if main is None:
        return "no main_grad"
    if main.shape != parameter.shape:
        return f"a main_grad of shape {tuple(main.shape)}"
    if is_sharded(parameter) and not (is_sharded(main) and main.placements == parameter.placements):
        return "a main_grad that is not sharded like the weight"
    return None


def add_gradient(parameter: Any, dw: Tensor, to_main_grad: bool, copy: bool) -> None:
    """Add ``dw``, the gradient of the whole weight, to ``main_grad`` or ``grad``.

    For a sharded parameter, this rank's shard of the mean over all ranks is added, computed in float32; every rank must
    call this. ``copy``: ``dw`` itself must not become ``grad``.
    """
    if to_main_grad and hasattr(parameter, ADDED):
        setattr(parameter, ADDED, True)
    overwrites = to_main_grad and getattr(parameter, "overwrite_main_grad", False)
    if not is_sharded(parameter):
        if to_main_grad:
            (parameter.main_grad.copy_ if overwrites else parameter.main_grad.add_)(dw)
        elif parameter.grad is None:
            parameter.grad = dw.to(parameter.dtype, copy=copy)
        else:
            parameter.grad.add_(dw.to(parameter.dtype))
        return
    from torch.distributed.tensor import DTensor, Partial

    mesh = parameter.device_mesh
    partial = DTensor.from_local(dw.float() / mesh.size(), mesh, [Partial()] * mesh.ndim, run_check=False)
    shard = local_of(partial.redistribute(placements=parameter.placements))
    if not to_main_grad and parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    target = local_of(parameter.main_grad if to_main_grad else parameter.grad)
    shard = shard.to(target.device, target.dtype)  # the gradient may be offloaded to another device
    (target.copy_ if overwrites else target.add_)(shard)


def stand_in(shards: Sequence[Tensor]) -> Tensor | None:
    """The gradient (N, K), all zeros, that autograd gets for a weight whose gradient is in ``main_grad``; None without.

    Megatron's hooks wait for ``weight.grad``, and skip it where ``grad_added_to_main_grad`` is set. As in
    TransformerEngine, a parameter that has this attribute gets one.
    """
    if not all(hasattr(owner(shard), ADDED) for shard in shards):
        return None
    first, rows = shards[0], sum(shard.shape[0] for shard in shards)
    return torch.zeros(rows, first.shape[1], dtype=first.dtype, device=first.device)


# ---------------------------------------------------------------------------- the state as TransformerEngine shows it

# The state of delayed scaling as TransformerEngine shows it (``module.fp8_meta``) and as it saved it (extra states).
#
# The order of scales and amaxes is that of TransformerEngine's ``FP8FwdTensors`` (input, weight, output of each
# product) and ``FP8BwdTensors`` (gradient of the output, gradient of the input). This package does not cast outputs and
# gradients of inputs: in ``fp8_meta`` their scale is 1, their amax 0.

COLUMNS = {"scaling_fwd": (0, 1, None), "scaling_bwd": (2, None)}
"""The columns of a DelayedState (input, weight, gradient) for each product; None for a tensor that is not cast."""


class ScalingState:
    """Delayed scaling of the forward or of the backward tensors of a module; n of them."""

    def __init__(self, states: Sequence[DelayedState], columns: Sequence[int | None]) -> None:
        self._states, self._columns = states, columns

    def _columns_of(self, values: Sequence[Tensor], other: float) -> Tensor:
        """The columns of (..., 3) tensors, one after the other; ``other`` for those that are not cast."""
        columns = [
            torch.full_like(value[..., 0], other) if column is None else value[..., column]
            for value in values
            for column in self._columns
        ]
        return torch.stack(columns, -1)

    @property
    def scale(self) -> Tensor:
        """float32 (n,): the numbers by which the last pass multiplied values before it rounded them."""
        return self._columns_of([state.scale for state in self._states], 1.0)

    @property
    def scale_inv(self) -> Tensor:
        """float32 (n,): the reciprocals of ``scale``."""
        return 1 / self.scale

    @property
    def amax_history(self) -> Tensor:
        """float32 (amax_history_len, n): the amaxes that the next scale is computed from, those of the last pass in
        row 0, and then from the newest to the oldest."""
        rows = [torch.cat([state.record.unsqueeze(0), state.history[:-1]]) for state in self._states]
        return self._columns_of(rows, 0.0)


class Fp8Meta(Mapping[str, Any]):
    """What ``module.fp8_meta`` has: ``fp8_checkpoint`` and ``fp8_group`` at any time; ``recipe`` and ``num_gemms``
    after the first pass under a recipe; ``scaling_fwd`` and ``scaling_bwd`` (ScalingState) with delayed scaling."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def _entries(self) -> dict[str, Any]:
        """The keys that the mapping has now, with their values."""
        recipe, group, products = self._module._last_pass or (None, None, 0)
        found: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": group}
        if recipe is None:
            return found
        states = [state.delayed for state in self._module._products[:products]]
        found |= {"recipe": recipe, "num_gemms": products}
        delayed = [state for state in states if state is not None]
        if delayed:
            found |= {key: ScalingState(delayed, columns) for key, columns in COLUMNS.items()}
        return found

    def __getitem__(self, key: str) -> Any:
        found = self._entries()
        if key in found:
            return found[key]
        label, recipe = self._module.label, type(found.get("recipe")).__name__
        if "recipe" not in found:
            raise KeyError(f"fp8_meta of {label} has no {key!r} before its first pass under a recipe: {sorted(found)}")
        if key in COLUMNS:
            raise KeyError(
                f"fp8_meta of {label} has no {key!r} with {recipe}, whose scales belong to single tensors; read the "
                f"cast from module.quantizers[{key!r}]"
            )
        raise KeyError(f"fp8_meta of {label} has no {key!r}; it has {', '.join(sorted(found))}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._entries()})"

"""ProductState: what one product of a module stores between calls.

Amax histories of delayed scaling, the quantized weight of several microbatches, and weight gradients to be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.local import local_of
from ..core.select import dispatch_context, restore_context
from ..core.torch_autocast import without_autocast
from ..numerics.operand import Operand
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..training.delayed_scaling import DelayedState
from ..training.operands import Scales, weight_copies
from ..training.passes import WgradHook
from ..training.recompute import restore_later
from .weight_shards import add_gradient, owner, stand_in, version

WeightShards = Sequence[Tensor]
"""The parameters whose rows, one below the other, are the weight of one product."""
CachedOperands = tuple[Operand | None, Operand | None]
"""The rowwise and the columnwise operand of a weight."""
Wgrad = Callable[[torch.dtype], Tensor]
"""Computes the weight gradient in the given dtype."""


Versions = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class _CachedWeight:
    """The operands of a weight for several microbatches, with the recipe and the versions they were made from."""

    operands: CachedOperands
    linear_recipe: LinearRecipe
    versions: Versions


def _versions(shards: WeightShards) -> Versions:
    """Identity, version and memory of each parameter. Every in-place write, such as an optimizer step, changes the
    version; ``parameter.data = values`` changes the memory."""
    return tuple((id(shard), version(shard), local_of(shard).data_ptr()) for shard in map(owner, shards))


class ProductState:
    """The state of one product of a module."""

    def __init__(self) -> None:
        self.delayed: DelayedState | None = None
        self.loaded: dict[str, Tensor] | None = None
        """A delayed state from a checkpoint, until the first forward pass shows which recipe it belongs to."""
        self._cached_weight: _CachedWeight | None = None
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
            self.move(device)

    def move(self, device: torch.device) -> None:
        """Move the delayed state to ``device``."""
        if self.delayed is not None:
            self.delayed = self.delayed.to(device)

    def scales(self, group: Any) -> Scales | None:
        """The scales of this forward pass, which is one step of the history; None without delayed scaling."""
        return None if self.delayed is None else self.delayed.step(group)

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
        versions, cached = _versions(shards), self._cached_weight
        if (
            first
            or cached is None
            or cached.linear_recipe.weight != linear_recipe.weight
            or cached.versions != versions
        ):
            with torch.inference_mode(False):
                cached = _CachedWeight(weight_copies(weight, linear_recipe, scales), linear_recipe, versions)
                self._cached_weight = cached
        return cached.operands

    # ---------------------------------------------------------------------------------------- weight gradients

    def on_wgrad(self, shards: WeightShards, dtype: torch.dtype, fused: bool, delayed: bool) -> WgradHook | None:
        """What the backward pass does with the gradient of the weight that consists of ``shards``; None: as torch does.

        ``fused`` adds it, in float32, to ``main_grad``; ``delayed`` leaves it to ``backward_dw``. ``dtype``: the dtype
        of the product without ``fused``.
        """
        if not fused and not delayed:
            return None

        def add(wgrad: Wgrad) -> None:
            accumulate(shards, wgrad(torch.float32 if fused else dtype), fused)

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


def accumulate(shards: WeightShards, dw: Tensor, fused: bool) -> None:
    """Add the gradient (N, K) to ``main_grad`` or ``grad`` of the parameters whose rows make up the weight."""
    for shard, rows in zip(shards, dw.split([shard.shape[0] for shard in shards]), strict=True):
        if shard.requires_grad:
            add_gradient(owner(shard), rows, fused, len(shards) > 1)

"""What one product of a module keeps from one call to the next: amax histories, a quantized weight, wgrads to come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.select import dispatch_context, restore_context
from ..core.torch_autocast import without_autocast
from ..numerics.operand import Operand
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..training.delayed_scaling import DelayedState
from ..training.linear import WgradHook
from ..training.operands import Scales, weight_copies
from .weight_shards import add_gradient, owner, version

Operands = tuple[Operand | None, Operand | None]
"""The rowwise and the columnwise copy of a weight."""
Compute = Callable[[torch.dtype], Tensor]


@dataclass(frozen=True)
class _Kept:
    """A weight quantized for several microbatches, and what it was made of."""

    operands: Operands
    linear_recipe: LinearRecipe
    versions: tuple[tuple[int, int], ...]


def _versions(components: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """Identity and version of each parameter: every write in place, an optimizer's step too, makes another version."""
    return tuple((id(part), version(part)) for part in map(owner, components))


class Slot:
    """The state of one product of a module."""

    def __init__(self) -> None:
        self.state: DelayedState | None = None
        self.loaded: dict[str, Tensor] | None = None
        """A delayed state from a checkpoint, until a recipe says what it is for."""
        self._kept: _Kept | None = None
        self._pending: list[Callable[[], None]] = []

    # ---------------------------------------------------------------------------------------- delayed scaling

    def init_state(self, linear_recipe: LinearRecipe, device: torch.device) -> None:
        """Make the delayed state that ``linear_recipe`` ask for; a state of other roles goes.

        Raises ValueError where a checkpoint's history has another length than the recipe's.
        """
        if linear_recipe.delayed is None:
            self.state = None
        elif self.state is None or self.state.linear_recipe != linear_recipe:
            state = DelayedState(linear_recipe, device)
            if self.loaded is not None:
                state.load_state_dict(self.loaded)
            self.state, self.loaded = state, None
        elif self.state.amax.device != device:
            self.move(device)

    def move(self, device: torch.device) -> None:
        """The delayed state on another device."""
        if self.state is not None:
            self.state = self.state.to(device)

    def scales(self, group: Any) -> Scales | None:
        """The scales of this forward pass, which becomes a step of the history."""
        return None if self.state is None else self.state.step(group)

    # ---------------------------------------------------------------------------------------- weights kept

    def operands(
        self,
        weight: Tensor,
        components: Sequence[Tensor],
        linear_recipe: LinearRecipe,
        scales: Scales | None,
        first: bool | None,
    ) -> Operands | None:
        """The quantized copies of ``weight``, made of ``components``, for this microbatch; None: it is to be cast there.

        ``first`` True makes them and keeps them, False takes those kept unless the weight or its roles have changed
        since, None keeps none.
        """
        if first is None or isinstance(weight, MXTensor) or linear_recipe.weight.rowwise is None:
            return None
        versions, saved = _versions(components), self._kept
        if first or saved is None or saved.linear_recipe.weight != linear_recipe.weight or saved.versions != versions:
            with torch.inference_mode(False):
                saved = self._kept = _Kept(weight_copies(weight, linear_recipe, scales), linear_recipe, versions)
        return saved.operands

    # ---------------------------------------------------------------------------------------- weight gradients

    def on_wgrad(self, components: Sequence[Any], dtype: torch.dtype, fused: bool, later: bool) -> WgradHook | None:
        """What the backward pass is to do with the gradient of the weight made of ``components``; None: as torch does.

        ``fused`` adds it, in float32, to ``main_grad``; ``later`` leaves it to ``backward_dw``. ``dtype``: in which
        the product would be made otherwise.
        """
        if not fused and not later:
            return None

        def add(compute: Compute) -> None:
            accumulate(components, compute(torch.float32 if fused else dtype), fused)

        def hook(compute: Compute) -> None:
            if not later:
                return add(compute)
            there, device = dispatch_context(), components[0].device

            def run() -> None:
                with torch.no_grad(), without_autocast(device), restore_context(*there):
                    add(compute)

            self._pending.append(run)

        return hook

    def backward_dw(self) -> None:
        """Make the weight gradients of all backward passes since the last call, and add them up."""
        while self._pending:
            self._pending.pop(0)()

    def __getstate__(self) -> dict[str, Any]:
        """For copies: they keep the histories; weights kept and gradients to come are of the original's parameters."""
        return self.__dict__ | {"_kept": None, "_pending": []}


def accumulate(components: Sequence[Any], dw: Tensor, fused: bool) -> None:
    """Add the gradient (N, K) to ``main_grad`` or ``grad`` of the parameters whose rows make up the weight."""
    for part, rows in zip(components, dw.split([part.shape[0] for part in components]), strict=True):
        if part.requires_grad:
            add_gradient(owner(part), rows, fused, len(components) > 1)

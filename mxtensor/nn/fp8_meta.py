"""``module.fp8_meta``, which users of TransformerEngine read: a read-only view of a module's recipe and scaling state.

Every read computes its result from the present state; the tensors are copies. The order of scales and amaxes is that
of TransformerEngine's ``FP8FwdTensors`` (input, weight, output of each product) and ``FP8BwdTensors`` (gradient of the
output, gradient of the input). This package does not cast outputs and gradients of inputs: their scale is 1, their
amax 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..training.delayed_scaling import DelayedState

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

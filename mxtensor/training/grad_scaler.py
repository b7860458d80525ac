"""``MXFP8GradientScaler``: torch's GradScaler with a count of the skipped steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ..core.arguments import DEVICE, FLAG, NUMBER, POSITIVE, SIZE, check, described, optional
from ..recipe import Recipe

OPTIONS = {
    "init_scale": POSITIVE, "growth_factor": NUMBER, "backoff_factor": NUMBER, "growth_interval": SIZE, "enabled": FLAG
}  # fmt: skip
"""The arguments of torch.amp.GradScaler, which checks them further."""


class MXFP8GradientScaler(GradScaler):
    """A ``torch.amp.GradScaler``: scales the loss, and skips and counts steps with gradients that are not finite.

    MXFP8 needs no loss scaling: every block of a gradient has its own scale, over the whole range of float32, and the
    scaler's powers of two change these scales and no codes. Loss scaling helps gradients that pass through float16. In
    bfloat16 and float32 the scaler is optional; it still skips steps.

    ``config``: the MXFP8Config or other recipe of the model, stored as ``config``. ``device``: the device of the
    gradients (default: cuda if available, else cpu). The other arguments are those of torch.amp.GradScaler. Raises
    TypeError for a ``config`` that is not a recipe.
    """

    def __init__(self, config: Recipe | None = None, device: str | None = None, **kwargs: Any) -> None:
        if config is not None and not isinstance(config, Recipe):
            raise TypeError(
                f"MXFP8GradientScaler: {described(config)} is not a recipe; pass an MXFP8Config as config, and the "
                "device as device="
            )
        check("MXFP8GradientScaler", "device", device, optional(DEVICE))
        for name in OPTIONS.keys() & kwargs.keys():
            check("MXFP8GradientScaler", name, kwargs[name], OPTIONS[name])
        super().__init__(device or ("cuda" if torch.cuda.is_available() else "cpu"), **kwargs)
        self.config = config
        self.total_steps = 0
        """The number of calls of ``step``."""
        self._skipped: Tensor | int = 0

    @property
    def skipped_steps(self) -> int:
        """The number of ``total_steps`` that were skipped. Synchronizes with the device."""
        return int(self._skipped)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """``optimizer.step()``, unless a gradient has an infinity or a NaN, as in torch.amp.GradScaler."""
        result = super().step(optimizer, *args, **kwargs)
        self.total_steps += 1
        if self._enabled:
            found = list(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
            # Summed on the device: a fused optimizer skips there and does not tell the host.
            self._skipped = self._skipped + (sum(f.to(found[0].device) for f in found) > 0).long()
        return result

    def state_dict(self) -> dict[str, Any]:
        """The state of torch.amp.GradScaler with ``skipped_steps`` and ``total_steps``; empty if not enabled."""
        state = super().state_dict()
        return {**state, "skipped_steps": self.skipped_steps, "total_steps": self.total_steps} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of ``state_dict``, or the state of a torch.amp.GradScaler, whose counts are 0."""
        super().load_state_dict(state_dict)
        if self._enabled:
            self._skipped, self.total_steps = (state_dict.get(name, 0) for name in ("skipped_steps", "total_steps"))

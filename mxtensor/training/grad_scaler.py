"""``MXFP8GradientScaler``: torch's GradScaler that counts the steps it skipped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ..recipe import Recipe


class MXFP8GradientScaler(GradScaler):
    """A ``torch.amp.GradScaler``: scales the loss, and skips, and counts, steps whose gradients are not all finite.

    MXFP8 needs no loss scale: every block of a gradient has its own, over the whole range of float32, and the scaler's
    powers of two go into those without changing a code. What gains by one is a gradient that passes through float16 on
    its way. In bfloat16 and float32 the scaler may stay in the loop, for its skipping, or out of it.

    ``config``: the MXFP8Config or other recipe of the model, kept as ``config``. ``device``: of the gradients (default:
    cuda where there is a device, else cpu). Other arguments as torch.amp.GradScaler's. Raises TypeError for a
    ``config`` that is no recipe.
    """

    def __init__(self, config: Recipe | None = None, device: str | None = None, **kwargs: Any) -> None:
        if config is not None and not isinstance(config, Recipe):
            raise TypeError(
                f"MXFP8GradientScaler: {config!r} is no recipe; pass an MXFP8Config as config, and the device by name"
            )
        super().__init__(device or ("cuda" if torch.cuda.is_available() else "cpu"), **kwargs)
        self.config = config
        self.total_steps = 0
        """Calls of ``step``."""
        self._skipped: Tensor | int = 0

    @property
    def skipped_steps(self) -> int:
        """How many of the ``total_steps`` were skipped. Waits for the device."""
        return int(self._skipped)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """``optimizer.step()``, unless a gradient holds an infinity or a NaN; as torch.amp.GradScaler has it."""
        result = super().step(optimizer, *args, **kwargs)
        self.total_steps += 1
        if self._enabled:
            found = list(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
            # Added up where it was found: a fused optimizer skips on the device, without a word to the host.
            self._skipped = self._skipped + (sum(f.to(found[0].device) for f in found) > 0).long()
        return result

    def state_dict(self) -> dict[str, Any]:
        """As torch.amp.GradScaler's, with ``skipped_steps`` and ``total_steps``; empty where it is not enabled."""
        state = super().state_dict()
        return {**state, "skipped_steps": self.skipped_steps, "total_steps": self.total_steps} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, or the state of a torch.amp.GradScaler, which has counted nothing."""
        super().load_state_dict(state_dict)
        if self._enabled:
            self._skipped, self.total_steps = (state_dict.get(name, 0) for name in ("skipped_steps", "total_steps"))

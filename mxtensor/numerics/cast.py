"""How one tensor is cast: the format, the scale rule and the rounding. Frozen and hashable."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .formats import Format, Rounding, ScaleCalculationMode, get_format


@dataclass(frozen=True)
class Cast:
    """How high-precision values become an operand."""

    format: Format
    scaling: ScaleCalculationMode = ScaleCalculationMode.RCEIL
    """For power-of-two scales; NVFP4 and float32 scales have one rule each."""
    rounding: Rounding = Rounding.NEAREST
    """Stochastic rounding draws from torch's generator of the tensor's device, or from ``seed``."""
    seed: int | None = None
    """With one, stochastic rounding gives the same bits on every kernel and device, and the same at every call."""

    @classmethod
    def of(
        cls,
        format: Format | str | torch.dtype | Cast,
        scaling: ScaleCalculationMode | str = ScaleCalculationMode.RCEIL,
        rounding: Rounding | str = Rounding.NEAREST,
        seed: int | None = None,
    ) -> Cast:
        """A cast from words. Raises ValueError for one it does not know."""
        if isinstance(format, Cast):
            return format
        return cls(get_format(format), ScaleCalculationMode.of(scaling), Rounding.of(rounding), seed)

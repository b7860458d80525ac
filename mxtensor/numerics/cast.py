"""Cast: the format, the scale rule and the rounding by which one tensor is quantized."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.arguments import INTEGER, check, instance, optional
from .formats import Format, Rounding, ScaleCalculationMode, get_format

FORMAT = instance(Format, "a Format, or use Cast.of, which takes names")
SCALING = instance(ScaleCalculationMode, "a ScaleCalculationMode, or use Cast.of, which takes names")
ROUNDING = instance(Rounding, "a Rounding, or use Cast.of, which takes names")
SEED = optional(INTEGER)


@dataclass(frozen=True)
class Cast:
    """How high-precision values become an operand. Frozen and hashable."""

    format: Format
    scaling: ScaleCalculationMode = ScaleCalculationMode.RCEIL
    """The rule for power-of-two scales; NVFP4 and float32 scales have one rule each."""
    rounding: Rounding = Rounding.NEAREST
    """Stochastic rounding draws from torch's generator for the tensor's device, or from ``seed``."""
    seed: int | None = None
    """With a seed, stochastic rounding gives the same bits in every kernel, on every device and at every call."""

    def __post_init__(self) -> None:
        check("Cast", "format", self.format, FORMAT)
        check("Cast", "scaling", self.scaling, SCALING)
        check("Cast", "rounding", self.rounding, ROUNDING)
        check("Cast", "seed", self.seed, SEED)

    @classmethod
    def of(
        cls,
        format: Format | str | torch.dtype | Cast,
        scaling: ScaleCalculationMode | str = ScaleCalculationMode.RCEIL,
        rounding: Rounding | str = Rounding.NEAREST,
        seed: int | None = None,
    ) -> Cast:
        """A cast by names; a Cast itself is returned unchanged.

        Raises ValueError for an unknown name, TypeError for other objects.
        """
        if isinstance(format, Cast):
            return format
        return cls(get_format(format), ScaleCalculationMode.of(scaling), Rounding.of(rounding), seed)

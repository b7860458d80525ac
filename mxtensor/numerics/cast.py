"""Cast: the format, the scale rule and the rounding by which one tensor is quantized."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.arguments import INTEGER, NUMBER, Kind, check, instance, optional
from ..core.tracing import make_constant
from .formats import Format, Rounding, ScaleCalculationMode, get_format

FLT_MAX = torch.finfo(torch.float32).max

FORMAT = instance(Format, "a Format, or use Cast.of, which takes names")
SCALING = instance(ScaleCalculationMode, "a ScaleCalculationMode, or use Cast.of, which takes names")
ROUNDING = instance(Rounding, "a Rounding, or use Cast.of, which takes names")
SEED = optional(INTEGER)
EPSILON = Kind("a number from 0 to the largest float32", NUMBER.accepts, lambda value: 0 <= value <= FLT_MAX)


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
    amax_epsilon: float = 0.0
    """A smaller amax counts as this number, in float32 scales (TransformerEngine); other scales have no such floor."""

    def __post_init__(self) -> None:
        if not make_constant(self, "seed", "amax_epsilon"):
            return
        check("Cast", "format", self.format, FORMAT)
        check("Cast", "scaling", self.scaling, SCALING)
        check("Cast", "rounding", self.rounding, ROUNDING)
        check("Cast", "seed", self.seed, SEED)
        check("Cast", "amax_epsilon", self.amax_epsilon, EPSILON)
        if self.amax_epsilon and self.format.scale.dtype is not torch.float32:
            raise ValueError(
                f"Cast: amax_epsilon={self.amax_epsilon} is for float32 scales, and {self.format} has "
                f"{self.format.scale.name} scales; use a float8 format, or amax_epsilon=0"
            )

    @classmethod
    def of(
        cls,
        format: Format | str | torch.dtype | Cast,
        scaling: ScaleCalculationMode | str = ScaleCalculationMode.RCEIL,
        rounding: Rounding | str = Rounding.NEAREST,
        seed: int | None = None,
        amax_epsilon: float = 0.0,
    ) -> Cast:
        """A cast by names; a Cast itself is returned unchanged.

        Raises ValueError for an unknown name, TypeError for other objects.
        """
        if isinstance(format, Cast):
            return format
        return cls(get_format(format), ScaleCalculationMode.of(scaling), Rounding.of(rounding), seed, amax_epsilon)

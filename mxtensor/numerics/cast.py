"""Cast: the format, the scale rule and the rounding by which one tensor is quantized."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.arguments import INTEGER, NUMBER, Kind, check, instance, optional
from ..core.tracing import make_constant
from .choices import FourOverSix, Rounding, ScaleCalculationMode
from .formats import UE4M3, Format, get_format

FLT_MAX = torch.finfo(torch.float32).max

FORMAT = instance(Format, "a Format, or use Cast.of, which takes names")
SCALING = instance(ScaleCalculationMode, "a ScaleCalculationMode, or use Cast.of, which takes names")
FOUR_OVER_SIX = optional(instance(FourOverSix, "a FourOverSix, or use Cast.of, which takes names"))
ROUNDING = instance(Rounding, "a Rounding, or use Cast.of, which takes names")
SEED = optional(INTEGER)
EPSILON = Kind("a number from 0 to the largest float32", NUMBER.accepts, lambda value: 0 <= value <= FLT_MAX)


@dataclass(frozen=True)
class Cast:
    """How a tensor is quantized: format, scale rule and rounding. Frozen and hashable."""

    format: Format
    scaling: ScaleCalculationMode = ScaleCalculationMode.RCEIL
    """The rule for power-of-two scales; NVFP4 and float32 scales have one rule each."""
    rounding: Rounding = Rounding.NEAREST
    """Stochastic rounding draws from torch's generator for the tensor's device, or from ``seed``."""
    seed: int | None = None
    """With a seed, stochastic rounding gives the same bits in every kernel, on every device and at every call."""
    amax_epsilon: float = 0.0
    """A smaller amax counts as this number, in float32 scales (TransformerEngine); other scales have no such floor."""
    four_over_six: FourOverSix | None = None
    """How NVFP4 chooses whether the amax of a block becomes 6 or 4; None: always 6."""

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
        check("Cast", "four_over_six", self.four_over_six, FOUR_OVER_SIX)
        if self.four_over_six is None:
            return
        if self.format.scale is not UE4M3 or not self.format.global_scale:
            raise ValueError(
                f"Cast: four_over_six={self.four_over_six.value!r} is for NVFP4 with a global scale, not for "
                f"{self.format}; use nvfp4, or four_over_six=None"
            )
        if self.rounding is not Rounding.NEAREST:
            raise ValueError(
                f"Cast: four_over_six={self.four_over_six.value!r} compares errors of rounding to nearest; use "
                "rounding='nearest', or four_over_six=None"
            )

    @property
    def label(self) -> str:
        """The format, and how its block scales are chosen: ``nvfp4 four over six (mae)``."""
        four = self.four_over_six
        return str(self.format) if four is None else f"{self.format} four over six ({four.value})"

    @property
    def why_not_plain(self) -> str | None:
        """The reason for a refusal by kernels that support one scale per block and one per tensor only; else None."""
        if self.four_over_six is not None:
            return "computes one scale for a block, and four over six compares two"
        return "has one global scale, not one for each row" if self.format.row_scaled else None

    @classmethod
    def of(
        cls,
        format: Format | str | torch.dtype | Cast,
        scaling: ScaleCalculationMode | str = ScaleCalculationMode.RCEIL,
        rounding: Rounding | str = Rounding.NEAREST,
        seed: int | None = None,
        amax_epsilon: float = 0.0,
        four_over_six: FourOverSix | str | None = None,
    ) -> Cast:
        """A cast by names; a Cast itself is returned unchanged.

        Raises ValueError for an unknown name, TypeError for other objects.
        """
        if isinstance(format, Cast):
            return format
        four = None if four_over_six is None else FourOverSix.of(four_over_six)
        names = get_format(format), ScaleCalculationMode.of(scaling), Rounding.of(rounding)
        return cls(*names, seed, amax_epsilon, four)

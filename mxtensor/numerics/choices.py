"""Options of a cast, by name: orientation, scale rule, rounding, and how NVFP4 chooses its block scales."""

from __future__ import annotations

from enum import Enum, Flag
from typing import TypeVar

from ..core import names
from ..core.arguments import described


class Orientation(Flag):
    """Which operands a tensor stores: blocks along the last dimension, along the one before it, or both."""

    ROWWISE = 1
    COLUMNWISE = 2
    BOTH = 3

    @classmethod
    def of(cls, value: Orientation | str) -> Orientation:
        """The member named by ``value`` ("rowwise", "columnwise" or "both")."""
        if isinstance(value, Orientation) and value:
            return value
        try:
            return cls[names.key(value).upper() if isinstance(value, str) else ""]
        except KeyError:
            raise ValueError(
                f"unknown orientation {described(value)}; choose 'rowwise' (blocks along the last dimension), "
                "'columnwise' (along the one before it) or 'both'"
            ) from None

    @property
    def label(self) -> str:
        return {1: "rowwise", 2: "columnwise", 3: "both"}[self.value]


Choice = TypeVar("Choice", bound=Enum)


def member(kind: type[Choice], what: str, value: object) -> Choice:
    """The member of ``kind`` with this value; for an enum member of another package, with its value.

    Raises ValueError that names the choices.
    """
    text = getattr(value, "value", value)
    try:
        return kind(text)  # first, because Dynamo of torch 2.11 cannot trace what follows
    except ValueError:
        found = names.find(text, [m.value for m in kind]) if isinstance(text, str) else None
    if found is None:
        choices = ", ".join(m.value for m in kind)
        raise ValueError(f"unknown {what} {described(value)}; choose one of {choices}")
    return kind(found)


class ScaleCalculationMode(Enum):
    """How the largest magnitude of a block becomes a power-of-two scale (names and values are torchao's)."""

    FLOOR = "floor"
    """floor(log2 amax) - emax: the OCP rule; the largest elements of a block may saturate."""
    RCEIL = "rceil"
    """the smallest power of two with amax <= max * scale: nothing saturates; NVIDIA's pre-training paper, cuBLAS."""
    CEIL = "ceil"
    """ceil(log2 amax) - emax: nothing saturates, up to one bit of range unused."""
    EVEN = "even"
    """amax rounded half up to the element's mantissa width, then FLOOR."""

    @classmethod
    def of(cls, value: ScaleCalculationMode | str) -> ScaleCalculationMode:
        """The member named by ``value``; torchao's own enum members are accepted by their value."""
        return member(cls, "scaling", value)


class Rounding(Enum):
    """How a value is rounded to one of its two neighbouring elements."""

    NEAREST = "nearest"
    """to the nearer one, ties to even"""
    STOCHASTIC = "stochastic"
    """to either one, with probabilities that make the mean right: small updates of a parameter need this"""

    @classmethod
    def of(cls, value: Rounding | str) -> Rounding:
        """The member named by ``value``."""
        return member(cls, "rounding", value)


class FourOverSix(Enum):
    """How a cast to NVFP4 chooses for each block whether its amax becomes 6 or 4, the two largest elements.

    There is no element between 4 and 6, so that many blocks have a smaller error with the larger scale, which maps the
    amax to 4. A member names the error that is compared, and the largest block scale that maps an amax to 6: with 256,
    the scale for 4, which is 1.5 times as large, is still an E4M3 number; with 448 the blocks with the largest values
    have no such scale (TransformerEngine's ``nvfp4_4over6_err_mode`` and ``nvfp4_4over6_e4m3_use_256``).
    """

    MAE = "mae"
    """the sum of absolute errors; 256"""
    MSE = "mse"
    """the sum of squared errors; 256"""
    MAE_448 = "mae_448"
    """the sum of absolute errors; 448"""
    MSE_448 = "mse_448"
    """the sum of squared errors; 448"""

    @property
    def squares(self) -> bool:
        """Whether errors are squared."""
        return self.value.startswith("mse")

    @property
    def largest_scale(self) -> float:
        """The scale of a block whose amax is that of the tensor, if its amax becomes 6."""
        return 448.0 if self.value.endswith("448") else 256.0

    @classmethod
    def of(cls, value: FourOverSix | str) -> FourOverSix:
        """The member named by ``value``."""
        return member(cls, "four_over_six", value)

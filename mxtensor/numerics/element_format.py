"""What one element is, and what one scale is: the fields of their rows in ``formats``."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from ..core.tracing import constants_of, make_constant

PACKINGS = {(1, 1): 8, (4, 3): 6, (2, 1): 4}
"""(values, bytes) -> bits of an element: the packings that ``elements.pack`` and the kernels know."""


def _packings() -> str:
    return ", ".join(f"{packing} for {bits} bits" for packing, bits in PACKINGS.items())


@dataclass(frozen=True, init=False)
class ElementFormat:
    """One element: sign, exponent and mantissa, or a two's-complement fixed-point number (``exponent_bits == 0``)."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_ratio: tuple[int, int]
    """``max`` as a fraction, because torch.compile may make a float field an argument of the graph."""
    dtype: torch.dtype
    """The dtype of ``Operand.data``: the torch dtype of one code, or uint8 for packed codes."""
    packing: tuple[int, int]
    """(values, bytes): this many values share this many bytes."""
    nan_code: int
    """The code stored throughout a block whose scale is NaN; 0 if the element has no NaN."""

    def __init__(
        self, name: str, exponent_bits: int, mantissa_bits: int, bias: int, max: float | tuple[int, int] | None = None,
        dtype: torch.dtype = torch.uint8, packing: tuple[int, int] = (1, 1), nan_code: int = 0,
        max_ratio: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """``max``: the largest finite value; larger values saturate to it. ``max_ratio`` is for torch.compile, which
        calls this with the fields; ``dataclasses.replace`` gives both, and ``max`` counts. Raises ValueError for an
        element that the casts cannot make."""
        given_max = max_ratio or (0, 1) if max is None else max
        ratio = given_max if isinstance(given_max, tuple) else float(given_max).as_integer_ratio()
        given = (name, exponent_bits, mantissa_bits, bias, ratio, dtype, packing, nan_code)
        constants = constants_of(given)
        for field, value in zip(fields(self), constants or given, strict=True):
            object.__setattr__(self, field.name, value)
        why = self._why_impossible() if constants else None
        if why is not None:
            raise ValueError(f"{self.name}: {why}")

    @property
    def max(self) -> float:
        """The largest finite value; larger values saturate to it."""
        return self.max_ratio[0] / self.max_ratio[1]

    def _why_impossible(self) -> str | None:
        """Why the casts cannot make this element."""
        e, m = self.exponent_bits, self.mantissa_bits
        if self.is_integer:
            return "an integer element has 8 bits, because only floats are packed" if self.packed else None
        if self.packing not in PACKINGS:
            return f"packing {self.packing} is not available; choose {_packings()}"
        if 1 + e + m != self.bits:
            return (
                f"a sign, {e} exponent bits and {m} mantissa bits are {1 + e + m} bits, and packing {self.packing} "
                f"stores {self.bits}; choose {_packings()}"
            )
        if not 0 < self.emax + self.bias < 1 << e:
            return f"max {self.max} has exponent {self.emax}, which {e} exponent bits with bias {self.bias} cannot hold"
        if not math.ldexp(self.max, m - self.emax).is_integer():
            return f"max {self.max} needs more than {m} mantissa bits"
        if m == 0 and self.bias % 2 == 0:
            return f"without mantissa bits the bias must be odd, so that ties round to even codes; it is {self.bias}"
        return None

    def __hash__(self) -> int:
        return hash(self.name)  # fast: every cast looks up rows by their format

    @property
    def bits(self) -> int:
        return 8 * self.packing[1] // self.packing[0]

    @property
    def significant_bits(self) -> int:
        return self.mantissa_bits + 1

    @property
    def emax(self) -> int:
        """The exponent of the largest power of two among the elements."""
        return math.frexp(self.max)[1] - 1

    @property
    def is_integer(self) -> bool:
        return self.exponent_bits == 0

    @property
    def packed(self) -> bool:
        return self.packing != (1, 1)

    def data_cols(self, cols: int) -> int:
        """The number of entries of ``data`` that hold ``cols`` values."""
        values, size = self.packing
        return -(-cols // values) * size


@dataclass(frozen=True)
class ScaleFormat:
    """One scale: how it is stored and viewed."""

    name: str
    dtype: torch.dtype
    """The storage dtype: formats of one byte are stored as uint8, which every backend and serializer knows."""
    view_dtype: torch.dtype
    """The torch dtype of the same bytes, for ``Operand.scale_view``."""
    significant_bits: int
    """The significant bits of a scale's value; a power of two has 1."""

    def __post_init__(self) -> None:
        make_constant(self, "significant_bits")

    @property
    def bits(self) -> int:
        return 8 * self.dtype.itemsize

"""One element at a time: rounding values to codes, decoding codes to values, and packing codes of less than a byte.

Part of the definition, like ``reference.py``. Source: OCP Microscaling Formats (MX) v1.0, section 5.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..core.tracing import constants_of, make_constant

# ---------------------------------------------------------------------------------------------- element formats

# What one element is, and what one scale is: the fields of their rows in ``formats``.

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


# ---------------------------------------------------------------------------------------------- elements


def encode_elements(y: Tensor, element: ElementFormat) -> Tensor:
    """Round float32 values, already divided by their scale, to codes: nearest, ties to even, saturating.

    Overwrites ``y``. Returns codes of ``element.dtype``, one entry a value (``pack`` comes after this).
    """
    if element.is_integer:
        steps = float(1 << element.mantissa_bits)
        return y.mul_(steps).round_().clamp_(-element.max * steps, element.max * steps).to(element.dtype)
    y.clamp_(-element.max, element.max)
    if not element.packed:
        return y.to(element.dtype)
    # Normal codes: round the float32 bits to the width of the mantissa and change the exponent's bias. Subnormal codes:
    # add a power of two whose last bit has the weight of one code step, so that the float adder rounds. Below the
    # smallest normal value the first result is too small, above twice that value the second is too large. A clamp and a
    # minimum select the right one, faster than torch.where.
    mantissa = element.mantissa_bits
    shift = 23 - mantissa
    magnitude = y.abs()
    magic = 2.0 ** (23 + 1 - element.bias - mantissa)
    small = (magnitude + magic).view(torch.int32)
    small -= (23 + 1 - element.bias - mantissa + 127) << 23
    bits = magnitude.view(torch.int32)
    code = bits >> shift
    code &= 1
    code += bits
    code += (1 << (shift - 1)) - 1 - ((127 - element.bias) << 23)
    code >>= shift
    code = torch.minimum(small, code.clamp_(min=1 << mantissa))
    sign = y.view(torch.int32) >> (32 - element.bits)
    sign &= 1 << (element.bits - 1)
    code |= sign
    return code.to(torch.uint8)


def random_words(seed: int, index: Tensor) -> Tensor:
    """Four random numbers in 0 .. 2^32 - 1 (int64) for each int64 index, in a new last dimension: Philox 4x32-10,
    counter ``index``, key ``seed``.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011).
    """
    mask = 0xFFFFFFFF
    key = (seed & mask, (seed >> 32) & mask)
    c0, c1, c2, c3 = index & mask, (index >> 32) & mask, torch.zeros_like(index), torch.zeros_like(index)
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # the high words survive the sign of int64
        c0, c1 = ((second >> 32) & mask) ^ c1 ^ key[0], second & mask
        c2, c3 = ((first >> 32) & mask) ^ c3 ^ key[1], first & mask
        key = ((key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask)
    return torch.stack((c0, c1, c2, c3), -1)


def uniform(seed: int, like: Tensor) -> Tensor:
    """float32 multiples of 2^-24 in [0, 1); each is determined by ``seed`` and by its row and column in ``like``.

    Value c of row r is word c % 4 of counter r * ceil(columns / 4) + c // 4: one counter serves four neighbours.
    """
    cols = like.shape[-1] if like.dim() else 1
    fours = -(-cols // 4)
    rows = like.numel() // max(cols, 1)
    words = random_words(seed, torch.arange(rows * fours, dtype=torch.int64, device=like.device))
    noise = (words.view(rows, 4 * fours).narrow(1, 0, cols) >> 8).to(torch.float32) * 2.0**-24
    return noise.view(like.shape)


def round_stochastically(y: Tensor, element: ElementFormat, noise: Tensor | None = None) -> Tensor:
    """Round each float32 value to one of its two neighbouring element values.

    The probability of the upper one is the distance from the lower one, in steps. ``noise``: uniform in [0, 1), of the
    shape of ``y``; None draws from torch's generator.
    """
    if element.is_integer:
        step = torch.full_like(y, 2.0**-element.mantissa_bits)
    else:
        exponent = ((y.view(torch.int32) >> 23) & 0xFF).clamp(min=128 - element.bias)
        step = ((exponent - element.mantissa_bits) << 23).view(torch.float32)
    return torch.floor(y / step + (torch.rand_like(y) if noise is None else noise)) * step


def decode_elements(codes: Tensor, element: ElementFormat) -> Tensor:
    """Decode codes, one entry a value, to float32. Exact."""
    if element.is_integer:
        return codes.to(torch.float32) * (1.0 / (1 << element.mantissa_bits))
    if not element.packed:
        return codes.to(torch.float32)
    mantissa = element.mantissa_bits
    code = codes.to(torch.int32)
    magnitude = code & ((1 << (element.bits - 1)) - 1)
    normal = ((magnitude << (23 - mantissa)) + ((127 - element.bias) << 23)).view(torch.float32)
    small = magnitude.to(torch.float32) * 2.0 ** (1 - element.bias - mantissa)
    value = torch.where(magnitude < (1 << mantissa), small, normal)
    return torch.where(code >= (1 << (element.bits - 1)), -value, value)


def _words(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """View groups of entries as one entry, or one as a group. Flat first: ``view(dtype)`` checks size-1 strides."""
    return codes.contiguous().flatten().view(dtype).view(*codes.shape[:-1], -1)


def pack(codes: Tensor, element: ElementFormat) -> Tensor:
    """Pack uint8 codes (..., K), K a multiple of the group, into bytes (..., K * bits / 8); 8-bit codes do not change.

    4 bits: the even index is in the low nibble. 6 bits: v0 | v1 << 6 | v2 << 12 | v3 << 18, little endian.
    """
    if element.packing == (2, 1):
        pair = _words(codes, torch.int16)
        return (pair | (pair >> 4)).to(torch.uint8)
    if element.packing == (4, 3):
        four = _words(codes, torch.int32)
        word = (four & 0x3F) | ((four >> 2) & 0xFC0) | ((four >> 4) & 0x3F000) | ((four >> 6) & 0xFC0000)
        return torch.stack([word & 0xFF, (word >> 8) & 0xFF, word >> 16], -1).to(torch.uint8).flatten(-2)
    return codes


def unpack(data: Tensor, element: ElementFormat) -> tuple[Tensor, ...]:
    """The codes in packed bytes by position in the group: (even, odd), or four tensors. The inverse of ``pack``."""
    if element.packing == (2, 1):
        return data & 0xF, data >> 4
    b0, b1, b2 = data.unflatten(-1, (-1, 3)).unbind(-1)
    return b0 & 0x3F, (b0 >> 6) | ((b1 & 0xF) << 2), (b1 >> 4) | ((b2 & 0x3) << 4), b2 >> 2


def decode_packed(data: Tensor, element: ElementFormat) -> Tensor:
    """Decode packed bytes to bfloat16 values in order. Exact.

    A value has at most 4 significant bits, so the upper half of its float32 contains it. The halves of a group are
    combined in one integer, because inductor stores integers in vectors but interleaves values in a scalar loop.
    """
    word: Tensor | None = None
    wide = torch.int32 if element.packing[0] == 2 else torch.int64
    for place, codes in enumerate(unpack(data, element)):
        half = (decode_elements(codes, element).view(torch.int32) >> 16) & 0xFFFF
        part = half.to(wide) << (16 * place)
        word = part if word is None else word | part
    assert word is not None
    return _words(word, torch.bfloat16)

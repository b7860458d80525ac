"""The definitions in exact arithmetic, for the tests: slow, simple, and without code of the package.

An element format is the table of its values, built from fractions; rounding is "the nearest entry, on a tie the even
code". The tables of the published elements are written here; another element has the widths and the bias of its row.
Products with powers of two are taken in float64, where every float32 (24 bits, exponents -149 to 127) times every scale
(2^-127 to 2^127) is exact, so comparisons and floors are exact too. Where a definition names float32 operations (RCEIL,
NVFP4, float32 scales), they are numpy's, one rounding each. torch only carries tensors in here.

Sources: OCP Microscaling Formats (MX) v1.0, sections 5 and 6.3; NVIDIA's MXFP8 pre-training paper (RCEIL) and NVFP4.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property

import numpy as np
import torch

FLT_MAX = np.float32(np.finfo(np.float32).max)
MODES = ("floor", "rceil", "ceil", "even")


# ---------------------------------------------------------------------------------------------- elements


@dataclass(frozen=True, eq=False)
class Element:
    """``magnitudes[i]`` is the value of code i with the sign bit clear; specials are not in it."""

    name: str
    bits: int
    mantissa_bits: int
    magnitudes: np.ndarray
    specials: dict
    """Code without its sign bit -> nan or inf."""
    nan_code: int = 0
    """The code stored throughout a block whose scale is NaN; 0 if no code is NaN."""

    @property
    def max(self):
        return float(self.magnitudes[-1])

    @cached_property
    def emax(self):
        """Exponent of the largest power of two not above ``max``."""
        return max(e for e in range(-8, 20) if 2.0**e <= self.max)


def _floating(name, exponent_bits, mantissa_bits, bias, specials=None, nan_code=0):
    specials = specials or {}
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        fraction = Fraction(mantissa, 2**mantissa_bits)
        if exponent == 0:
            values.append(fraction * Fraction(2) ** (1 - bias))
        else:
            values.append((1 + fraction) * Fraction(2) ** (exponent - bias))
    finite = np.array([float(v) for code, v in enumerate(values) if code not in specials])
    return Element(name, 1 + exponent_bits + mantissa_bits, mantissa_bits, finite, specials, nan_code)


E5M2_SPECIALS = {0x7C: np.inf, 0x7D: np.nan, 0x7E: np.nan, 0x7F: np.nan}
ELEMENTS = {
    "e4m3": _floating("e4m3", 4, 3, 7, {0x7F: np.nan}, nan_code=0x7F),
    "e5m2": _floating("e5m2", 5, 2, 15, E5M2_SPECIALS, nan_code=0x7F),
    "e3m2": _floating("e3m2", 3, 2, 3),
    "e2m3": _floating("e2m3", 2, 3, 1),
    "e2m1": _floating("e2m1", 2, 1, 1),
    "int8": Element("int8", 8, 6, np.array([float(Fraction(i, 64)) for i in range(128)]), {}),
}


@cache
def element_of(row):
    """The table of an element: written above if it is published, otherwise built from the fields of its row.

    NaN and infinities of an element that is not published are those of its torch dtype.
    """
    if row.name in ELEMENTS:
        return ELEMENTS[row.name]
    specials = {}
    if row.dtype.is_floating_point:
        values = torch.arange(128).to(torch.uint8).view(row.dtype).float().tolist()
        specials = {code: value for code, value in enumerate(values) if not np.isfinite(value)}
    return _floating(row.name, row.exponent_bits, row.mantissa_bits, row.bias, specials, row.nan_code)


def element_codes(values, element):
    """Round finite or infinite values to codes (uint8): nearest, ties to the even code, saturating, with the sign."""
    assert not np.isnan(values).any()
    magnitude, negative = np.abs(np.asarray(values, np.float64)), np.signbit(values)
    halfway = (element.magnitudes[:-1] + element.magnitudes[1:]) / 2
    below, above = np.searchsorted(halfway, magnitude, "left"), np.searchsorted(halfway, magnitude, "right")
    index = np.where(below % 2 == 0, below, above)  # they differ on a tie only, and then by one
    if element.name == "int8":
        return np.where(negative, -index, index).astype(np.int8).view(np.uint8)
    return (index + negative * 2 ** (element.bits - 1)).astype(np.uint8)


@cache
def element_values(element):
    """The value of every code, as float64: 256, 64 or 16 of them."""
    if element.name == "int8":
        return np.array([(c - 256 if c > 127 else c) / 64 for c in range(256)])
    half = np.empty(2 ** (element.bits - 1))
    half[: len(element.magnitudes)] = element.magnitudes
    for code, value in element.specials.items():
        half[code] = value
    return np.concatenate([half, -half])


def pack(codes, element):
    """Pack codes (..., K): 2 in 1 byte (even index low), 4 in 3 bytes (v0 | v1<<6 | v2<<12 | v3<<18); others stay."""
    if element.bits == 8:
        return codes
    group = 2 if element.bits == 4 else 4
    pad = [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % group)]
    c = np.pad(codes, pad).astype(np.int64)
    if element.bits == 4:
        return (c[..., 0::2] + 16 * c[..., 1::2]).astype(np.uint8)
    word = sum(c[..., i::4] * 64**i for i in range(4))
    data = np.stack([word % 256, word // 256 % 256, word // 65536], -1)
    return data.reshape(*codes.shape[:-1], -1).astype(np.uint8)


def unpack(data, element, cols):
    """The inverse of ``pack``, cut to ``cols`` values."""
    if element.bits == 8:
        return data
    d = data.astype(np.int64)
    if element.bits == 4:
        codes = np.stack([d % 16, d // 16], -1)
    else:
        word = d[..., 0::3] + 256 * d[..., 1::3] + 65536 * d[..., 2::3]
        codes = np.stack([word // 64**i % 64 for i in range(4)], -1)
    return codes.reshape(*data.shape[:-1], -1)[..., :cols].astype(np.uint8)


# ---------------------------------------------------------------------------------------------- scales


def _floor_log2(x):
    """Exact for positive finite float64: frexp reads the exponent."""
    return np.frexp(x)[1].astype(np.int64) - 1


def _ceil_log2(x):
    fraction, exponent = np.frexp(x)
    return exponent.astype(np.int64) - (fraction == 0.5)


def scale_exponents(amax, element, mode):
    """The exponent of each block's power-of-two scale from its positive finite float32 amax, unclamped."""
    exact = amax.astype(np.float64)
    if mode == "floor":
        return _floor_log2(exact) - element.emax
    if mode == "ceil":
        return _ceil_log2(exact) - element.emax
    if mode == "even":
        # amax as a float32 with the element's mantissa: below 2^-126 the step no longer shrinks.
        step = np.ldexp(1.0, np.maximum(_floor_log2(exact), -126) - element.mantissa_bits)
        return _floor_log2(np.maximum(np.floor(exact / step + 0.5) * step, 2.0**-149)) - element.emax
    assert mode == "rceil"
    ratio = (amax * np.float32(1 / element.max)).astype(np.float64)
    return _ceil_log2(np.maximum(ratio, 2.0**-149))


def scale_bytes(amax, element, mode):
    """E8M0 bytes (uint8) of any float32 amax: 0 for zero, 255 for NaN and Inf."""
    ordinary = np.isfinite(amax) & (amax > 0)
    exponent = scale_exponents(np.where(ordinary, amax, np.float32(1)), element, mode)
    byte = np.where(amax == 0, 0, np.clip(exponent, -127, 127) + 127)
    return np.where(np.isfinite(amax), byte, 255).astype(np.uint8)


@cache
def e8m0_values():
    """The value of every scale byte, as float64."""
    return np.array([float(Fraction(2) ** (byte - 127)) for byte in range(255)] + [np.nan])


# ---------------------------------------------------------------------------------------------- operands


@dataclass(frozen=True)
class Encoded:
    data: np.ndarray
    """uint8, packed."""
    scale: np.ndarray
    """uint8, or float32 for formats with float32 scales."""
    global_scale: np.float32 | None = None


def _blocked_axes(shape, block):
    """(axis, size) of each dimension that a block covers; -1 covers all of it, and as rows every leading one too."""
    rows, cols = block
    axes = [(len(shape) - 1, shape[-1] if cols == -1 else cols)]
    if rows == -1:
        axes += [(axis, size) for axis, size in enumerate(shape[:-1])]
    elif rows > 1 and len(shape) > 1:
        axes.append((len(shape) - 2, rows))
    return axes


def block_amax(x, block):
    """max |x| of each block; a shorter last block counts its own values only. NaN if any value is NaN."""
    amax = np.abs(x)
    for axis, size in _blocked_axes(x.shape, block):
        amax = np.maximum.reduceat(amax, np.arange(0, x.shape[axis], size), axis=axis)
    return amax


def spread(per_block, shape, block):
    """Expand one value per block to one value per element."""
    for axis, size in _blocked_axes(shape, block):
        per_block = np.repeat(per_block, size, axis=axis).take(np.arange(shape[axis]), axis=axis)
    return per_block


@np.errstate(all="ignore")
def encode(x, format, mode="rceil"):
    """Quantize the non-empty float32 array ``x`` into ``format`` (read for its names and block only)."""
    assert x.dtype == np.float32 and x.size
    if format.scales_matrices and x.ndim > 2:  # each matrix of a stack by itself
        pieces = [encode(matrix, format, mode) for matrix in x.reshape(-1, *x.shape[-2:])]
        data, scale, one = (
            np.stack([getattr(piece, name) for piece in pieces]) for name in ("data", "scale", "global_scale")
        )
        lead = x.shape[:-2]
        data, scale = (t.reshape(*lead, *t.shape[1:]) for t in (data, scale))
        return Encoded(data, scale, one.reshape(*lead, 1, 1))
    element = element_of(format.element)
    amax = block_amax(x, format.block)
    scale, divided, global_scale = RULES[format.scale.name](x, amax, element, format, mode)
    finite = spread(np.isfinite(amax), x.shape, format.block)
    codes = np.full(x.shape, element.nan_code, np.uint8)
    codes[finite] = element_codes(divided[finite], element)
    return Encoded(pack(codes, element), scale, global_scale)


def _encode_e8m0(x, amax, element, format, mode):
    byte = scale_bytes(amax, element, mode)
    exponent = spread(np.where(byte == 255, 0, byte.astype(np.int64) - 127), x.shape, format.block)
    return byte, np.ldexp(x.astype(np.float64), -exponent), None


def nvfp4_encode_scale(amax, largest):
    """S_enc of the tensor's amax: 448 * largest / amax, at most FLT_MAX; 1 for zero, NaN and Inf."""
    s_enc = np.minimum(np.float32(448 * largest) / amax, FLT_MAX)
    return s_enc if np.isfinite(amax) and amax > 0 and s_enc > 0 else np.float32(1)


def _encode_ue4m3(x, amax, element, format, mode):
    s_enc, global_scale, e4m3 = np.float32(1), None, ELEMENTS["e4m3"]
    if format.global_scale:
        s_enc = nvfp4_encode_scale(amax.max(), element.max)
        usable = np.isfinite(amax.max()) and amax.max() > 0
        global_scale = amax.max() / np.float32(448 * element.max) if usable else np.float32(1)
    wanted = np.clip(amax * (s_enc * np.float32(1 / element.max)), np.float32(-448), np.float32(448))
    code = np.full(amax.shape, e4m3.nan_code, np.uint8)
    code[np.isfinite(amax)] = element_codes(wanted[np.isfinite(amax)], e4m3)
    scale = element_values(e4m3)[code].astype(np.float32)
    multiplier = np.minimum(np.float32(1) / (scale * (np.float32(1) / s_enc)), FLT_MAX)
    divided = x * spread(multiplier, x.shape, format.block)
    if format.name.startswith("nvfp4") and format.global_scale:  # TransformerEngine's reference: -0.0 has code 0
        divided = np.where(divided == 0, np.float32(0), divided)
    return code, divided, global_scale


def _encode_float32(x, amax, element, format, mode):
    multiplier = np.where(amax == 0, np.float32(1), np.minimum(np.float32(element.max) / amax, FLT_MAX))
    scale = np.where(np.isfinite(amax), np.float32(1) / multiplier, np.float32(np.nan))
    return scale, x * spread(multiplier, x.shape, format.block), None


def _encode_float32_pow2(x, amax, element, format, mode):
    ordinary = np.isfinite(amax) & (amax > 0)
    exponent = np.clip(scale_exponents(np.where(ordinary, amax, np.float32(1)), element, mode), -127, 126)
    exponent = np.where(ordinary, exponent, 0)
    scale = np.where(np.isfinite(amax), np.ldexp(1.0, exponent), np.nan).astype(np.float32)
    return scale, np.ldexp(x.astype(np.float64), -spread(exponent, x.shape, format.block)), None


RULES = {
    "e8m0": _encode_e8m0,
    "ue4m3": _encode_ue4m3,
    "float32": _encode_float32,
    "float32_pow2": _encode_float32_pow2,
}


@np.errstate(all="ignore")
def decode(encoded, format, shape):
    """float32(element * scale), then times the global scale: a float32 array of ``shape``."""
    element = element_of(format.element)
    scale = {
        "e8m0": lambda s: e8m0_values()[s],
        "ue4m3": lambda s: element_values(ELEMENTS["e4m3"])[s],
        "float32": lambda s: s.astype(np.float64),
        "float32_pow2": lambda s: s.astype(np.float64),
    }[format.scale.name](encoded.scale)
    values = element_values(element)[unpack(encoded.data, element, shape[-1])]
    out = (values * spread(scale, shape, format.block)).astype(np.float32)
    return out if encoded.global_scale is None else out * np.asarray(encoded.global_scale, np.float32)


# ---------------------------------------------------------------------------------------------- comparing


@np.errstate(all="ignore")
def as_float32(x):
    """A torch tensor in float32, as it is quantized: float64 is rounded, other dtypes are exact."""
    return np.ascontiguousarray(x.double().numpy().astype(np.float32))


def every_16_bit_value(dtype):
    """All 65,536 values of bfloat16 or float16, NaNs included."""
    return torch.arange(65536).to(torch.uint16).view(dtype)


def as_bytes(t):
    return t.contiguous().view(torch.uint8).numpy()


def same_floats(actual, expected):
    """Whether float32 arrays are bitwise equal; all NaNs count as equal."""
    both_nan = np.isnan(actual) & np.isnan(expected)
    return actual.shape == expected.shape and bool(
        ((actual.view(np.uint32) == expected.view(np.uint32)) | both_nan).all()
    )


def check(operand, x, mode="rceil"):
    """Compare every tensor of ``operand`` with the oracle's encoding of ``x``; return the decoded values."""
    format, shape = operand.format, tuple(x.shape)
    assert operand.shape == shape
    assert (operand.data.dtype, operand.data.shape) == (format.element.dtype, format.data_shape(shape))
    assert (operand.scale.dtype, operand.scale.shape) == (format.scale.dtype, format.scale_shape(shape))
    assert operand.data.is_contiguous() and operand.scale.is_contiguous()
    expected = encode(as_float32(x), format, mode)
    np.testing.assert_array_equal(as_bytes(operand.data), expected.data)
    np.testing.assert_array_equal(operand.scale.numpy(), expected.scale)
    if format.global_scale:
        wanted = torch.float32, format.global_scale_shape(shape)
        assert (operand.global_scale.dtype, operand.global_scale.shape) == wanted
        np.testing.assert_array_equal(operand.global_scale.numpy(), np.asarray(expected.global_scale, np.float32))
    else:
        assert operand.global_scale is None
    return decode(expected, format, shape)

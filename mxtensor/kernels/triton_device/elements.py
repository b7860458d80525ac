"""Scales and elements in Triton: the arithmetic of ``numerics/reference.py`` and ``numerics/elements.py``.

``C`` is a ``CastCode``, the compile-time constants of a cast. All arithmetic is integer or exact float32, so that it is
right on every device and in Triton's interpreter; sm_89 and later round to float8 in one instruction.
"""

import triton
import triton.language as tl

FLT_MAX = tl.constexpr(3.4028234663852886e38)
INFINITY_BITS = tl.constexpr(0x7F800000)
TO_INTEGER = tl.constexpr(12582912.0)
"""1.5 * 2^23: added to a float32 below 2^22, it leaves the nearest integer, ties to even, in the low bits."""

E4M3_WORD = tl.constexpr("""{
.reg .b16 lo, hi;
cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3;
mov.b32 $0, {lo, hi};
}""")
"""PTX: four float32 to a word of their codes, the first in the low byte."""
E5M2_WORD = tl.constexpr(E4M3_WORD.value.replace("e4m3", "e5m2"))


@triton.jit
def bits_of(x):
    """float32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """int32 as float32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widened(x):
    """x in float32. bfloat16 is converted by its bits: otherwise Triton's interpreter (3.7) loses subnormals."""
    if x.dtype == tl.bfloat16:
        return float_of(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def magnitude_bits(x):
    """The bits of |x|, which order as the magnitudes do: infinity above finite values, NaN above infinity.

    bfloat16 stays in 16 bits, so that registers need not hold a float32 of every value until the rounding.
    ``amax_bits`` converts the largest of them to float32 bits.
    """
    if x.dtype == tl.bfloat16:
        return x.to(tl.uint16, bitcast=True) & 0x7FFF
    else:
        return bits_of(widened(x)) & 0x7FFFFFFF


@triton.jit
def amax_bits(largest, x):
    """The bits of a float32 amax from the largest of ``magnitude_bits`` of x."""
    if x.dtype == tl.bfloat16:
        return largest.to(tl.int32) << 16
    else:
        return largest


# ---------------------------------------------------------------------------------------------- scales


@triton.jit
def exponent_up(bits):
    """Biased exponent of the smallest power of two that is at least the float32 with these bits."""
    return (bits + tl.where(bits < 0x800000, 0x3FFFFF, 0x7FFFFF)) >> 23


@triton.jit
def power_of_two(byte):
    """2^(byte - 127) for bytes 0 to 254; byte 0 is a subnormal."""
    return float_of(tl.where(byte == 0, 0x00400000, byte << 23))


@triton.jit
def e8m0_byte(amax_bits, C: tl.constexpr):
    """The scale byte of blocks with this amax; any byte if the amax is not finite."""
    if C.mode == "rceil":
        byte = exponent_up(bits_of(float_of(amax_bits) * C.inverse_max))
        return tl.minimum(byte, 254) if C.emax < 1 else byte
    elif C.mode == "ceil":
        byte = exponent_up(amax_bits) - C.emax
    elif C.mode == "even":
        byte = ((amax_bits + (1 << (22 - C.mantissa_bits))) >> 23) - C.emax
    else:
        byte = (amax_bits >> 23) - C.emax
    return tl.minimum(tl.maximum(byte, 0), 254)


@triton.jit
def global_encode(tensor_amax, C: tl.constexpr):
    """(encode scale S_enc of NVFP4, global scale that inverts it) of a tensor with this amax."""
    largest = 448.0 * C.max
    wanted = tl.minimum(tl.div_rn(tl.full(tensor_amax.shape, largest, tl.float32), tensor_amax), FLT_MAX)
    usable = (tensor_amax > 0) & (wanted > 0)
    inverse = tl.div_rn(tensor_amax, tl.full(tensor_amax.shape, largest, tl.float32))
    return tl.where(usable, wanted, 1.0), tl.where(usable, inverse, 1.0)


@triton.jit
def scales_of(amax_bits, encode, C: tl.constexpr):
    """(stored scale, multiplier of the values, value of the scale, whether finite) of blocks with this amax."""
    if C.amax_floor > 0:
        amax_bits = tl.maximum(amax_bits, C.amax_floor)
    finite = amax_bits < INFINITY_BITS
    amax = float_of(amax_bits)
    nan = float("nan")
    if C.scale == "e8m0":
        byte = e8m0_byte(amax_bits, C)
        stored = tl.where(finite, byte, 255).to(tl.uint8)
        # Byte 254 has a subnormal reciprocal; elements whose largest value is 4 or more never get byte 254.
        multiplier = power_of_two(254 - byte) if C.emax < 2 else float_of((254 - byte) << 23)
        value = power_of_two(byte)
    elif C.scale == "ue4m3":
        scaled = tl.minimum(amax * (encode * C.inverse_max), 448.0)
        byte = round_float(scaled, 4, 3, 7, 448.0)
        stored = tl.where(finite, byte, 0x7F).to(tl.uint8)
        value = float_from_code(byte, 4, 3, 7)
        one = tl.full(value.shape, 1.0, tl.float32)
        inverse = tl.div_rn(tl.full(encode.shape, 1.0, tl.float32), encode)
        multiplier = tl.minimum(tl.div_rn(one, value * inverse), FLT_MAX)
    elif C.scale == "float32_pow2":
        byte = tl.where(amax_bits > 0, tl.minimum(e8m0_byte(amax_bits, C), 253), 127)
        value = power_of_two(byte)
        stored = tl.where(finite, value, nan)
        multiplier = float_of((254 - byte) << 23)
    else:
        multiplier = tl.minimum(tl.div_rn(tl.full(amax.shape, C.max, tl.float32), amax), FLT_MAX)
        multiplier = tl.where(amax > 0, multiplier, 1.0)
        value = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), multiplier)
        stored = tl.where(finite, value, nan)
    return stored, multiplier, tl.where(finite, value, nan), finite


@triton.jit
def scale_value(stored, C: tl.constexpr):
    """Stored scales as float32, NaN included."""
    if C.scale == "e8m0":
        byte = stored.to(tl.int32)
        return tl.where(byte == 255, float("nan"), power_of_two(byte))
    elif C.scale == "ue4m3":
        byte = stored.to(tl.int32)
        value = float_from_code(byte & 0x7F, 4, 3, 7)
        value = tl.where((byte & 0x7F) == 0x7F, float("nan"), value)
        return tl.where(byte > 127, -value, value)
    else:
        return stored


# ---------------------------------------------------------------------------------------------- elements


@triton.jit
def round_float(a, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr):
    """Magnitudes to codes without sign: nearest, ties to even, saturating. The code of a NaN is arbitrary."""
    if EXPONENT == 2:
        # In each binade the code is a linear function of the value, half as steep as in the binade below; the code is
        # the minimum of these lines. Adding TO_INTEGER rounds; rounding is monotonic, so it can precede the minimum.
        first: tl.constexpr = 2.0 ** (MANTISSA - 1 + BIAS)
        step: tl.constexpr = 2.0**MANTISSA
        limit: tl.constexpr = TO_INTEGER + MAX * (first / 4) + 2 * step
        # Positive floats order as their bits; the device has an integer minimum of three in one instruction.
        code = tl.minimum(bits_of(tl.fma(a, first, TO_INTEGER)), bits_of(tl.fma(a, first / 2, TO_INTEGER + step)))
        code = tl.minimum(code, bits_of(tl.fma(a, first / 4, TO_INTEGER + 2 * step)))
        return tl.minimum(code, bits_of(tl.full(a.shape, limit, tl.float32))) & ((4 << MANTISSA) - 1)
    else:
        shift: tl.constexpr = 23 - MANTISSA
        magic: tl.constexpr = 2.0 ** (shift + 1 - BIAS)
        a = tl.minimum(a, MAX)
        bits = bits_of(a)
        small = bits_of(a + magic) - ((shift + 1 - BIAS + 127) << 23)
        code = (bits + ((bits >> shift) & 1) + ((1 << (shift - 1)) - 1 - ((127 - BIAS) << 23))) >> shift
        return tl.minimum(small, tl.maximum(code, 1 << MANTISSA))


@triton.jit
def float_from_code(magnitude, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Codes without sign to float32, exactly: the product normalizes the subnormal float of a subnormal code."""
    return float_of(magnitude << (23 - MANTISSA)) * (2.0 ** (127 - BIAS))


@triton.jit
def dither(y, random, C: tl.constexpr):
    """One of the two neighbouring element values of each y, by stochastic rounding; ``random`` is uint32."""
    y = tl.minimum(tl.maximum(y, -FLT_MAX), FLT_MAX)  # an infinity from a scale of zero saturates later
    if C.exponent_bits == 0:
        step = tl.full(y.shape, 2.0**-C.mantissa_bits, tl.float32)
        inverse = tl.full(y.shape, 2.0**C.mantissa_bits, tl.float32)
    else:
        exponent = tl.maximum((bits_of(y) >> 23) & 0xFF, 128 - C.bias) - C.mantissa_bits
        step = float_of(exponent << 23)
        inverse = float_of((254 - exponent) << 23)
    uniform = (random >> 8).to(tl.int32).to(tl.float32) * (2.0**-24)
    return tl.floor(y * inverse + uniform) * step


@triton.jit
def signed(y, C: tl.constexpr):
    """y, with the sign of a zero only if the format keeps it. A sum with 0.0 could be contracted, a select cannot."""
    if C.signed_zero:
        return y
    else:
        return tl.where(y == 0.0, 0.0, y)


@triton.jit
def to_codes(y, C: tl.constexpr):
    """Scaled values to codes of one byte with sign (uint8). A NaN gets its code from float8 instructions only."""
    y = signed(y, C)
    if C.float8 == "e4m3":
        return tl.inline_asm_elementwise(E4M3_WORD, "=r,r,r,r,r", [y], dtype=tl.uint8, is_pure=True, pack=4)
    elif C.float8 == "e5m2":
        return tl.inline_asm_elementwise(E5M2_WORD, "=r,r,r,r,r", [y], dtype=tl.uint8, is_pure=True, pack=4)
    elif C.exponent_bits == 0:
        top: tl.constexpr = C.max * 2.0**C.mantissa_bits
        steps = tl.minimum(tl.maximum(y * (2.0**C.mantissa_bits), -top), top)
        return (bits_of(steps + TO_INTEGER) & 0xFF).to(tl.uint8)
    else:
        magnitude = round_float(tl.abs(y), C.exponent_bits, C.mantissa_bits, C.bias, C.max)
        sign = (bits_of(y) >> (32 - C.bits)) & (1 << (C.bits - 1))
        return (magnitude | sign).to(tl.uint8)


@triton.jit
def from_codes(code, C: tl.constexpr):
    """Codes of one byte (uint8) to float32, exactly, also NaN and infinity."""
    if C.exponent_bits == 0:
        return code.to(tl.int8, bitcast=True).to(tl.float32) * (2.0**-C.mantissa_bits)
    elif C.float8 == "e4m3":
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif C.float8 == "e5m2":
        return code.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        wide = code.to(tl.int32)
        magnitude = wide & ((1 << (C.bits - 1)) - 1)
        value = float_from_code(magnitude, C.exponent_bits, C.mantissa_bits, C.bias)
        if C.bits == 8 and C.mantissa_bits == 3:
            value = tl.where(magnitude == 0x7F, float("nan"), value)
        if C.bits == 8 and C.mantissa_bits == 2:
            value = tl.where(magnitude > 0x7C, float("nan"), tl.where(magnitude == 0x7C, float("inf"), value))
        return float_of(bits_of(value) | ((wide << (32 - C.bits)) & -0x80000000))

// Casts of eight neighbouring values to MX elements (power-of-two scales for 32 values) or to NVFP4, bit for bit as
// mxtensor/numerics/reference.py defines them.

enum { FLOOR, RCEIL, CEIL, EVEN };

DEVICE float power(int exponent) { return float_of_bits(exponent > -127 ? u32(exponent + 127) << 23 : 0x00400000); }

constexpr float LARGEST = 3.40282346638528859812e+38f;

DEVICE u32 largest(u32 value, u32 lanes) {  // over ``lanes`` neighbouring threads
    for (u32 mask = 1; mask < lanes; mask *= 2) {
        u32 other = from_lane_xor(value, mask);
        value = other > value ? other : value;
    }
    return value;
}

enum { NO_CAST, POWER_OF_TWO, TWO_LEVELS };

#if CAST
constexpr bool NEEDS_TENSOR_AMAX = CAST_GLOBAL;  // needs the largest magnitude of the tensor
// Whether a scaled value may round to more than the largest element. A scale that is rounded up prevents it.
constexpr bool EXCEEDS = CAST == TWO_LEVELS || CAST_RULE == FLOOR || CAST_RULE == EVEN || CAST_EMAX == 0;

// Rounds to MANTISSA mantissa bits and least exponent EMIN, ties to even: adds and subtracts a power of two whose
// lowest bit is one rounding step (times 1.5, so that it stays the larger operand). Not for values near the end of
// float32.
template <int MANTISSA, int EMIN> DEVICE float nearest(float value) {
    u32 exponent = bits_of_float(value) & 0x7F800000, least = u32(EMIN + 127) << 23;
    float step = float_of_bits((exponent > least ? exponent : least) + ((23 - MANTISSA) << 23) + 0x400000);
    return (value + step) - step;
}

// Rounds two values to elements of the cast.
DEVICE void round_two(float& a, float& b) {
    if constexpr (CONVERTS && CAST_MANTISSA == 3 && CAST_EMIN == -6) floats_of_halves(a, b, nearest_e4m3(a, b));
    else if constexpr (CONVERTS && CAST_MANTISSA == 2 && CAST_EMIN == -14) floats_of_halves(a, b, nearest_e5m2(a, b));
    else {
        if (EXCEEDS) a = larger(smaller(a, CAST_MAX), -CAST_MAX), b = larger(smaller(b, CAST_MAX), -CAST_MAX);
        a = nearest<CAST_MANTISSA, CAST_EMIN>(a), b = nearest<CAST_MANTISSA, CAST_EMIN>(b);
    }
}

// The power-of-two scale of 32 values from the bits of their amax, as 2^(byte - 127), by the four rules of
// ScaleCalculationMode.
DEVICE int exponent_up(u32 bits) {
    u32 e = bits >> 23, m = bits & 0x7FFFFF;
    return e + (e > 0 ? m > 0 : m > 0x400000);
}
DEVICE int scale_byte(u32 amax) {
    int byte;
    if constexpr (CAST_RULE == RCEIL) byte = exponent_up(bits_of_float(float_of_bits(amax) * CAST_INVERSE_MAX));
    else if constexpr (CAST_RULE == CEIL) byte = exponent_up(amax) - CAST_EMAX;
    else if constexpr (CAST_RULE == EVEN) byte = int((amax + (1u << (22 - CAST_MANTISSA))) >> 23) - CAST_EMAX;
    else byte = int(amax >> 23) - CAST_EMAX;
    return byte < 0 ? 0 : byte > 254 ? 254 : byte;
}

// NVFP4: the global encode scale of a tensor with this largest magnitude.
DEVICE bool has_global_scale(u32 amax) { return CAST_GLOBAL && amax > 0 && amax < 0x7F800000; }
DEVICE float encoding(u32 amax) {
    return has_global_scale(amax) ? smaller(448 * CAST_MAX / float_of_bits(amax), LARGEST) : 1.0f;
}

struct Level {  // the global encode scale of a tensor, and its reciprocal
    float encode, decode;
};
DEVICE Level level_of(u32 amax) {
    if constexpr (CAST != TWO_LEVELS) return {};
    float encode = encoding(amax);
    return {encode, 1.0f / encode};
}

// Casts eight values of a block of 32 (four neighbouring threads) or 16 (two, NVFP4) and multiplies them by ``scale``.
// ``amax``: bits of the largest magnitude of the eight.
DEVICE void cast_eight(float (&x)[8], u32 amax, const Level& level, float scale) {
    amax = largest(amax, CAST == TWO_LEVELS ? 2 : 4);
    float down, up;
    if constexpr (CAST == TWO_LEVELS) {
        up = nearest<3, -6>(smaller(float_of_bits(amax) * (level.encode * CAST_INVERSE_MAX), 448.0f));
        down = smaller(1.0f / (up * level.decode), LARGEST);
    } else {
        int exponent = scale_byte(amax) - 127;
        down = power(-exponent), up = power(exponent);
    }
    up = amax < 0x7F800000 ? up * scale : float_of_bits(0x7FFFFFFF);  // a block with an infinity or a NaN becomes NaN
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= down;
#pragma unroll
    for (int i = 0; i < 8; i += 2) round_two(x[i], x[i + 1]);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= up;
}
#else
constexpr bool NEEDS_TENSOR_AMAX = false;
struct Level {};
DEVICE Level level_of(u32) { return {}; }
#endif

// Codes of 16 neighbouring values of a block, scaled, rounded and packed, bit for bit as mxtensor/numerics/reference.py
// defines them. CONVERSIONS: whether the device has the instructions that round to float8 (sm_89).

constexpr int CODE_WORDS = BITS / 2;  // words of 16 codes

// The instruction that rounds to this element. Six bits are those of float8 with as many mantissa bits, where the
// exponent of a subnormal is FLOAT8_SHIFT lower.
constexpr bool AS_E4M3 = CONVERSIONS && (ELEMENT == E4M3 || ELEMENT == E2M3);
constexpr bool AS_E5M2 = CONVERSIONS && (ELEMENT == E5M2 || ELEMENT == E3M2);
constexpr bool AS_FLOAT8 = AS_E4M3 || AS_E5M2;
constexpr float FLOAT8_SHIFT = BITS == 8 || !AS_FLOAT8 ? 1.0f : ELEMENT == E2M3 ? 1.0f / 64 : 1.0f / 4096;
constexpr bool HAS_NAN = ELEMENT == E4M3 || ELEMENT == E5M2;

// ---------------------------------------------------------------------------------------------- scales

struct BlockScale {
    u32 stored;  // one byte
    float multiplier;  // of the values
    bool finite;
    bool exceeds;  // of two levels: whether the largest scaled value may round to more than the largest element
};

// The scale of a block from the bits of its amax.
DEVICE BlockScale scale_of(u32 amax, const Level& level) {
    bool finite = amax < 0x7F800000;
    if constexpr (CAST == TWO_LEVELS) {
        float scaled = smaller(rounded_product(float_of_bits(amax), rounded_product(level.encode, CAST_INVERSE_MAX)), 448.0f);
        float value = nearest<3, -6>(scaled);
        // 2^-120 moves the exponent of e4m3 to that of float32, subnormals included
        u32 stored = bits_of_float(value * 7.52316384526264e-37f) >> 20;
        float multiplier = smaller(1.0f / rounded_product(value, level.decode), LARGEST);
        bool exceeds = rounded_product(float_of_bits(amax), multiplier) > CAST_MAX;
        return {finite ? stored : 0x7F, multiplier, finite, exceeds};
    } else {
        int byte = scale_byte(amax);
        float multiplier = power(127 - byte) * FLOAT8_SHIFT;
        if (AS_FLOAT8 && HAS_NAN && !finite) multiplier = float_of_bits(0x7FFFFFFF);
        return {finite ? u32(byte) : 255, multiplier, finite, EXCEEDS};
    }
}

// ---------------------------------------------------------------------------------------------- one code a byte

constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: added to a value, it leaves the nearest integer in the low bits

DEVICE float limited(float y) {
    return EXCEEDS ? larger(smaller(y, CAST_MAX * FLOAT8_SHIFT), -CAST_MAX * FLOAT8_SHIFT) : y;
}

// The code of a scaled value, by integer arithmetic; any code for a NaN.
DEVICE u32 code_by_integers(float y) {
    float magnitude = nearest<CAST_MANTISSA, CAST_EMIN>(limited(y));
    u32 bits = bits_of_float(magnitude * float_of_bits((1 - CAST_EMIN) << 23)) & 0x7FFFFFFF;
    return bits >> (23 - CAST_MANTISSA) | bits_of_float(y) >> 31 << (BITS - 1);
}

// Codes of four scaled values of 8 or 6 bits.
DEVICE u32 four_codes(float a, float b, float c, float d) {
    if constexpr (ELEMENT == INT8) {
        constexpr float steps = 1 << CAST_MANTISSA;
        u32 low = bytes_of(bits_of_float(fused(limited(a), steps, TO_INTEGER)),
                           bits_of_float(fused(limited(b), steps, TO_INTEGER)), 0x0040);
        u32 high = bytes_of(bits_of_float(fused(limited(c), steps, TO_INTEGER)),
                            bits_of_float(fused(limited(d), steps, TO_INTEGER)), 0x0040);
        return bytes_of(low, high, 0x5410);
    } else if constexpr (AS_FLOAT8) {
        if (BITS == 6) a = limited(a), b = limited(b), c = limited(c), d = limited(d);  // float8 saturates by itself
        u32 codes = AS_E4M3 ? codes_of_e4m3(a, b, c, d) : codes_of_e5m2(a, b, c, d);
        return BITS == 8 ? codes : (codes & 0x1F1F1F1F) | (codes >> 2 & 0x20202020);
    } else {
        return code_by_integers(a) | code_by_integers(b) << 8 | code_by_integers(c) << 16 | code_by_integers(d) << 24;
    }
}

// Four codes of 6 bits, one a byte, in the low 24 bits.
DEVICE u32 packed_sixes(u32 codes) {
    u32 pairs = (codes & 0x003F003F) | (codes >> 2 & 0x0FC00FC0);
    return (pairs & 0xFFF) | (pairs >> 4 & 0xFFF000);
}

// ---------------------------------------------------------------------------------------------- codes of four bits

// The magnitude of an e2m1 code is the smallest of three linear functions of the value: 2y, y + 2 and y / 2 + 4. Each is
// rounded by the addition of a large number. Rounding is monotonic, so that it may come before the minimum.
DEVICE u32 shifted_e2m1(float y) {  // of a value that is not negative: the bits of TO_INTEGER plus the code
    u32 first = bits_of_float(fused(y, 2.0f, TO_INTEGER)), second = bits_of_float(y + (TO_INTEGER + 2));
    u32 third = bits_of_float(fused(y, 0.5f, TO_INTEGER + 4));
    return smaller(smaller(first, second), third);
}

// Codes of eight scaled magnitudes of e2m1 up to 6.
DEVICE u32 eight_magnitudes(const float* y) {
    u32 codes = shifted_e2m1(y[7]);
#pragma unroll
    for (int i = 6; i >= 0; i--) codes = codes * 16 + shifted_e2m1(y[i]);
    return codes - bits_of_float(TO_INTEGER) * 0x11111111;
}

// The bits of the signs in codes of 4 bits. Of eight floats; or of four words, those of the low values in the low half,
// those of the high values in the high half.
DEVICE u32 eight_signs(const u32* x) {
    u32 signs = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) signs = signs >> 4 | (x[i] & 0x80000000);
    return signs;
}
DEVICE u32 four_signs(u32 a, u32 b, u32 c, u32 d) {
    return (a >> 12 & 0x00080008) | (b >> 8 & 0x00800080) | (c >> 4 & 0x08000800) | (d & 0x80008000);
}

// Signs of eight codes where a scaled value of zero has none; ``y`` are the scaled magnitudes.
DEVICE u32 signs_unless_zero(u32 signs, const float* y) {
#pragma unroll
    for (int i = 0; i < 8; i++) signs &= bits_of_float(y[i]) == 0 ? ~(8u << 4 * i) : ~0u;
    return signs;
}

// The codes of 16 magnitudes of e2m1 with these signs; ``least``: the smallest magnitude.
DEVICE void encode_e2m1(u32 (&codes)[CODE_WORDS], float (&x)[16], float least, const u32* signs, const BlockScale& scale) {
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = rounded_product(x[i], scale.multiplier);
    if (EXCEEDS && scale.exceeds) {
#pragma unroll
        for (int i = 0; i < 16; i++) x[i] = smaller(x[i], CAST_MAX);
    }
    codes[0] = eight_magnitudes(x), codes[1] = eight_magnitudes(x + 8);
    if (!CAST_SIGNED_ZERO && rounded_product(least, scale.multiplier) == 0.0f)
        codes[0] |= signs_unless_zero(signs[0], x), codes[1] |= signs_unless_zero(signs[1], x + 8);
    else codes[0] |= signs[0], codes[1] |= signs[1];
}

// ---------------------------------------------------------------------------------------------- words of two bfloat16

// For power-of-two scales: the multiplication by the scale is part of the functions. Results are multiples of a code's
// step next to a power of two, so that the code is in the low bits.
constexpr bool IN_PAIRS = X == BFLOAT16 && CAST == POWER_OF_TWO && (ELEMENT == E2M1 || ELEMENT == INT8);

struct PairScale {  // the multiplier of the low and of the high value, its half and its quarter
    u32 whole, half, quarter;
};
DEVICE u32 pair_of(float low, float high) { return bytes_of(bits_of_float(low), bits_of_float(high), 0x7632); }
DEVICE PairScale pair_scale(float low, float high) {
    return {pair_of(low, high), pair_of(low * 0.5f, high * 0.5f), pair_of(low * 0.25f, high * 0.25f)};
}

// Values of blocks that are not finite would spoil those of the other half of a word: their codes are zero.
template <u32 N> DEVICE void zero_unless_finite(u32 (&words)[N], bool low, bool high) {
    if (low && high) return;
    u32 mask = (low ? 0xFFFF : 0) | (high ? 0xFFFF0000 : 0);
#pragma unroll
    for (u32 i = 0; i < N; i++) words[i] &= mask;
}

constexpr u32 SHIFT_OF_PAIRS = ELEMENT == INT8 ? 0x40004000 : 0x42804280;  // 2; 64

DEVICE u32 shifted_pair(u32 word, const PairScale& scale) {
    u32 magnitude = word & 0x7FFF7FFF, code = fused_bfloat16s(magnitude, scale.whole, SHIFT_OF_PAIRS);
    if constexpr (ELEMENT == INT8) return smaller_bfloat16s(code, SHIFT_OF_PAIRS + 0x007F007F);
    code = smaller_bfloat16s(code, fused_bfloat16s(magnitude, scale.half, SHIFT_OF_PAIRS + 0x00020002));
    code = smaller_bfloat16s(code, fused_bfloat16s(magnitude, scale.quarter, SHIFT_OF_PAIRS + 0x00040004));
    return EXCEEDS ? smaller_bfloat16s(code, SHIFT_OF_PAIRS + 0x00070007) : code;
}

// Codes of 4 bits of four words: those of the low values in the low half, those of the high values in the high half.
DEVICE u32 four_pairs(u32 a, u32 b, u32 c, u32 d, const PairScale& scale) {
    u32 codes = ((shifted_pair(d, scale) * 16 + shifted_pair(c, scale)) * 16 + shifted_pair(b, scale)) * 16 +
                shifted_pair(a, scale) - SHIFT_OF_PAIRS * 0x1111;
    return codes | four_signs(a, b, c, d);
}

// Two's complement in each byte: ``magnitudes`` up to 127, and bytes of ones where the value is negative.
DEVICE u32 with_signs(u32 magnitudes, u32 negative) {
    return (((magnitudes ^ negative) & 0x7F7F7F7F) + (negative & 0x01010101)) ^ (negative & 0x80808080);
}

// The codes of 16 neighbouring values of a block, two in a word.
DEVICE void encode_pairs(u32 (&codes)[CODE_WORDS], const u32* w, const PairScale& scale) {
    if constexpr (ELEMENT == INT8) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 a = w[2 * j], b = w[2 * j + 1];
            codes[j] = with_signs(bytes_of(shifted_pair(a, scale), shifted_pair(b, scale), 0x6420), signs_of_bytes(a, b, 0xFDB9));
        }
    } else {
#pragma unroll
        for (u32 j = 0; j < 2; j++) {  // values 0 and 4, 1 and 5, 2 and 6, 3 and 7 in one word
            const u32* v = w + 4 * j;
            codes[j] = four_pairs(bytes_of(v[0], v[2], 0x5410), bytes_of(v[0], v[2], 0x7632),
                                  bytes_of(v[1], v[3], 0x5410), bytes_of(v[1], v[3], 0x7632), scale);
        }
    }
}

// The codes of 16 rows of two columns, one row in a word.
DEVICE void encode_columns(u32 (&low)[CODE_WORDS], u32 (&high)[CODE_WORDS], const u32* w, const PairScale& scale) {
    if constexpr (ELEMENT == INT8) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const u32* v = w + 4 * j;
            u32 upper = bytes_of(shifted_pair(v[0], scale), shifted_pair(v[1], scale), 0x6240);
            u32 lower = bytes_of(shifted_pair(v[2], scale), shifted_pair(v[3], scale), 0x6240);
            u32 upper_signs = signs_of_bytes(v[0], v[1], 0xFBD9), lower_signs = signs_of_bytes(v[2], v[3], 0xFBD9);
            low[j] = with_signs(bytes_of(upper, lower, 0x5410), bytes_of(upper_signs, lower_signs, 0x5410));
            high[j] = with_signs(bytes_of(upper, lower, 0x7632), bytes_of(upper_signs, lower_signs, 0x7632));
        }
    } else {
#pragma unroll
        for (u32 j = 0; j < 2; j++) {
            const u32* v = w + 8 * j;
            u32 upper = four_pairs(v[0], v[1], v[2], v[3], scale), lower = four_pairs(v[4], v[5], v[6], v[7], scale);
            low[j] = bytes_of(upper, lower, 0x5410), high[j] = bytes_of(upper, lower, 0x7632);
        }
    }
}

// ---------------------------------------------------------------------------------------------- 16 values

// The codes of 16 values of a block, of 8 or 6 bits, packed, in order.
DEVICE void encode(u32 (&codes)[CODE_WORDS], float (&x)[16], const BlockScale& scale) {
    u32 fours[4];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        x[i] = rounded_product(x[i], scale.multiplier);
        if (!CAST_SIGNED_ZERO) x[i] += 0.0f;  // -0 becomes 0
    }
#pragma unroll
    for (int i = 0; i < 4; i++) fours[i] = four_codes(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    if constexpr (BITS == 8) {
#pragma unroll
        for (int i = 0; i < 4; i++) codes[i] = fours[i];
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) fours[i] = packed_sixes(fours[i]);
        codes[0] = fours[0] | fours[1] << 24;
        codes[1] = fours[1] >> 8 | fours[2] << 16;
        codes[2] = fours[2] >> 16 | fours[3] << 8;
    }
}

// Codes of a block that is not finite: NaN where the element has one, else zero.
DEVICE void finish(u32 (&codes)[CODE_WORDS], bool finite) {
    if constexpr (!IN_PAIRS && !(AS_FLOAT8 && HAS_NAN)) {
#pragma unroll
        for (int i = 0; i < CODE_WORDS; i++) codes[i] = finite ? codes[i] : HAS_NAN ? 0x7F7F7F7F : 0;
    }
}

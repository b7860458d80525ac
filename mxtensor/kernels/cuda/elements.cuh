// Elements and scales: decodes eight consecutive codes of a row to four words of two float16, exactly.
//
// Every element is exact in float16 up to a power of two, 2^ELEMENT_EXPONENT, which the result is multiplied by at the
// end: signs and magnitudes of 4 and 6 bits are moved to their positions in float16. Which two codes share a word is
// free, as long as ``in_order`` puts x in the same order.

enum { E4M3, E5M2, E3M2, E2M3, E2M1, INT8 };
enum { AT_THE_END, E8M0, UE4M3, FLOAT32 };  // when a scale is applied: to the result of a row, or per block
enum { BFLOAT16, FLOAT16, FLOAT };  // dtypes of inputs and results

constexpr int BITS = ELEMENT == E2M1 ? 4 : ELEMENT == E3M2 || ELEMENT == E2M3 ? 6 : 8;
constexpr int ELEMENT_EXPONENT =
    ELEMENT == INT8 ? -6 : ELEMENT == E2M1 ? 14 : ELEMENT == E3M2 ? 12 : ELEMENT == E2M3 ? 14 : 0;

// ---------------------------------------------------------------------------------------------- elements

// Four 8-bit codes as two words of two float16.
DEVICE void widen(u32& low, u32& high, u32 bytes) {
    if constexpr (ELEMENT == E4M3) {
        halves_of_e4m3(low, high, bytes);
    // a byte with its sign bit flipped is the value + 128; as mantissa bits of 1024 it is + 1152
    } else if constexpr (ELEMENT == INT8) {
        low = add_half(bytes_of(bytes ^ 0x80808080, 0x64646464, 0x4140), 0xE480E480);
        high = add_half(bytes_of(bytes ^ 0x80808080, 0x64646464, 0x4342), 0xE480E480);
    } else {
        low = bytes_of(bytes, 0, 0x1404), high = bytes_of(bytes, 0, 0x3424);
    }
}

// The 6-bit code at bit AT of each half of a word, as float16.
template <int AT> DEVICE u32 pair_of_six(u32 codes) {
    constexpr int place = ELEMENT == E3M2 ? 8 : 7;  // where float16 has the five bits of the magnitude
    u32 magnitude = AT > place ? codes >> (AT > place ? AT - place : 0) : codes << (AT > place ? 0 : place - AT);
    return (magnitude & (0x001F001F << place)) | ((codes << (10 - AT)) & 0x80008000);
}

constexpr u32 UPPER = 0x2222;  // added to a byte selector: two bytes further

// Decodes eight codes from ``codes`` on. For 6-bit codes ``odd`` is UPPER if they begin in the upper half of a word: a
// selector, because the compiler would duplicate all following code for a branch.
DEVICE void decode_eight(u32* out, const u32* codes, u32 odd = 0) {
    if constexpr (BITS == 8) {
        widen(out[0], out[1], codes[0]), widen(out[2], out[3], codes[1]);
    } else if constexpr (BITS == 4) {
        u32 signs = codes[0] & opaque(0x88888888);  // opaque, or the compiler would mask the signs of both words again
        u32 even = select_bits(0x0E0E0E0E, codes[0] << 1, signs << 4);  // codes 0 2 4 6 as e5m2 bytes
        u32 odds = select_bits(0x0E0E0E0E, codes[0] >> 3, signs);
        widen(out[0], out[1], even), widen(out[2], out[3], odds);
    } else {  // 48 bits from an even byte on: 0 1 | 4 5, and 2 3 | 6 7 in the upper 12 bits of a half
        u32 first = bytes_of(codes[0], codes[1], 0x4310 + odd), second = bytes_of(codes[0], codes[1], 0x5421 + odd);
        out[0] = pair_of_six<0>(first), out[1] = pair_of_six<6>(first);
        out[2] = pair_of_six<4>(second), out[3] = pair_of_six<10>(second);
    }
}

// Decodes the eight codes (BITS bytes) of thread ``t`` of four in a slab of a row in shared memory. Byte addresses in
// the row are xor'ed with ``swizzle``, a multiple of 16.
DEVICE void decode(u32 (&out)[4], const u8* row, u32 slab, u32 t, u32 swizzle) {
    u32 at = slab * (4 * BITS) + (BITS == 6 ? t * 6 & ~3 : t * BITS), words[2];
    if constexpr (BITS == 8) {
        uint2 codes = *reinterpret_cast<const uint2*>(row + (at ^ swizzle));
        words[0] = codes.x, words[1] = codes.y;
    } else {
        words[0] = *reinterpret_cast<const u32*>(row + (at ^ swizzle));
        if constexpr (BITS == 6) words[1] = *reinterpret_cast<const u32*>(row + ((at + 4) ^ swizzle));
    }
    decode_eight(out, words, BITS == 6 ? (t & 1) * UPPER : 0);
}

// Puts eight activations, two of which will share a word, in the order of ``decode``.
DEVICE void in_order(float (&x)[8]) {
    constexpr u32 order = BITS == 4 ? 0x75316420 : BITS == 6 ? 0x73625140 : 0x76543210;
    float values[8];
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] = x[i];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = values[order >> 4 * i & 7];
}

// ---------------------------------------------------------------------------------------------- scales

// Byte I of a word as 2^(byte - 127). 255 means NaN and gives infinity here; ``with_nans`` makes it NaN at the end.
template <int I> DEVICE float power_of_two(u32 bytes) {
    u32 bits = (I < 3 ? bytes << (I < 3 ? 23 - 8 * I : 0) : bytes >> 1) & 0x7F800000;
    return larger(float_of_bits(bits), float_of_bits(0x00400000));
}

// Bytes 0 and 2 of a word, e4m3 without sign, each twice in a word of float16.
DEVICE void pairs_of_ue4m3(u32& first, u32& second, u32 bytes) {
    halves_of_e4m3(first, second, bytes_of(bytes, 0, 0x2200));
}

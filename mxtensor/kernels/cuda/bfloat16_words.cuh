// Words of two bfloat16 for the wgmma kernels that read bfloat16 activations as they are (DIRECT). A piece is sixteen
// consecutive codes of a row; word g of it has code g in its lower half and code g + 8 in its upper half, the order in
// which ``store_transposed`` leaves x (direct_tiles.cuh).
//
// Sign and magnitude of a code are moved to their positions in bfloat16, so that a word is 2^-PLACED times its values.
// One multiplication by a power of two makes it 2^-LOWERED times the values and their scale, exactly. LOWERED
// moves the window of scales up, to scales above 1; the result is multiplied by 2^LOWERED at the end.

constexpr int PLACED = ELEMENT == E4M3 ? 120 : ELEMENT == E5M2 ? 112 : ELEMENT == E3M2 ? 124 : ELEMENT == INT8 ? -6 : 126;
constexpr int LOWERED = 8;
constexpr u32 ONE_OCTAVE = 0x00010001 << 7;  // in both halves of a word
constexpr u32 UNSCALED = (127 + PLACED - LOWERED) * ONE_OCTAVE;  // the multiplier of words without a scale
// Codes of infinities and NaNs would become numbers: their magnitudes, where ``words_of_bytes`` puts them, are at least
// this. No other element has them.
constexpr bool HAS_SPECIALS = ELEMENT == E4M3 || ELEMENT == E5M2;
constexpr u32 LEAST_SPECIAL = ELEMENT == E4M3 ? 0x7F << 4 : 0x7C << 5;

// Four 8-bit codes as words of codes 0 and 2, and of codes 1 and 3; raises ``largest`` to their magnitudes.
DEVICE void words_of_bytes(u32& even, u32& odd, u32 bytes, u32& largest) {
    if constexpr (ELEMENT == INT8) {
        // The lower seven bits are mantissa bits of 128. The sign bit makes the 128 that is subtracted 256.
        u32 low = bytes_of(bytes, 0x43434343, 0x4240), high = bytes_of(bytes, 0x43434343, 0x4341);
        even = subtract_bfloat16(low & 0xFF7FFF7F, low & 0xFF80FF80);
        odd = subtract_bfloat16(high & 0xFF7FFF7F, high & 0xFF80FF80);
    } else {
        constexpr int left = ELEMENT == E4M3 ? 4 : 5;
        constexpr u32 magnitude = 0x007F007F << left;
        even = bytes << left & magnitude, odd = bytes >> (8 - left) & magnitude;
        largest = larger_halves(largest, larger_halves(even, odd));
        even |= bytes << 8 & 0x80008000, odd |= bytes & 0x80008000;
    }
}

// The 4-bit code at bit AT of each half of a word.
template <int AT> DEVICE u32 word_of_four(u32 codes) {
    u32 magnitude = AT > 6 ? codes >> (AT > 6 ? AT - 6 : 0) : codes << (AT > 6 ? 0 : 6 - AT);
    return (magnitude & 0x01C001C0) | ((codes << (12 - AT)) & 0x80008000);
}
// The 6-bit code at bit AT of each half of a word.
template <int AT> DEVICE u32 word_of_six(u32 codes) {
    constexpr int place = ELEMENT == E3M2 ? 5 : 4;  // of the five bits of the magnitude
    u32 magnitude = AT > place ? codes >> (AT > place ? AT - place : 0) : codes << (AT > place ? 0 : place - AT);
    return (magnitude & (0x001F001F << place)) | ((codes << (10 - AT)) & 0x80008000);
}

DEVICE void place_piece(u32 (&words)[8], const u32* codes, u32& largest) {
    if constexpr (BITS == 8) {
#pragma unroll
        for (int i = 0; i < 4; i++) {  // two codes of each half of the piece
            u32 bytes = bytes_of(codes[i / 2], codes[i / 2 + 2], i % 2 ? 0x7632 : 0x5410);
            words_of_bytes(words[2 * i], words[2 * i + 1], bytes, largest);
        }
    } else if constexpr (BITS == 4) {
        u32 first = bytes_of(codes[0], codes[1], 0x5410), second = bytes_of(codes[0], codes[1], 0x7632);
        words[0] = word_of_four<0>(first), words[1] = word_of_four<4>(first);
        words[2] = word_of_four<8>(first), words[3] = word_of_four<12>(first);
        words[4] = word_of_four<0>(second), words[5] = word_of_four<4>(second);
        words[6] = word_of_four<8>(second), words[7] = word_of_four<12>(second);
    } else {  // halves of the piece: bytes 0 to 5 and 6 to 11
        u32 middle = bytes_of(codes[1], codes[2], 0x5432);  // bytes 6 to 9
        u32 first = bytes_of(codes[0], middle, 0x5410), second = bytes_of(codes[0], middle, 0x6521);
        u32 three = bytes_of(codes[0], codes[1], 0x0043);  // bytes 3 and 4
        u32 third = bytes_of(three, codes[2], 0x6510);  // with bytes 9 and 10
        u32 fourth = bytes_of(codes[1], codes[2], 0x7610);  // bytes 4 and 5, 10 and 11
        words[0] = word_of_six<0>(first), words[1] = word_of_six<6>(first);
        words[2] = word_of_six<4>(second), words[3] = word_of_six<10>(second);
        words[4] = word_of_six<0>(third), words[5] = word_of_six<6>(third);
        words[6] = word_of_six<4>(fourth), words[7] = word_of_six<10>(fourth);
    }
}

// Words 2 j and 2 j + 1 of a piece, times ``scale``, to half a fragment of each step j of four, as ``decode_piece``.
// Raises ``largest`` to the magnitudes of its codes, if some are special.
DEVICE void decode_bfloat16(u32 (&a)[16], int half, const u32* codes, u32 scale, u32& largest) {
    u32 words[8];
    place_piece(words, codes, largest);
#pragma unroll
    for (int i = 0; i < 8; i++) a[i / 2 * 4 + i % 2 * 2 + half] = multiply_bfloat16(words[i], scale);
}
DEVICE bool has_special(u32 largest) {
    return HAS_SPECIALS && ((largest & 0xFFFF) >= LEAST_SPECIAL || largest >> 16 >= LEAST_SPECIAL);
}

// The same for all codes, infinities and NaNs too, without a scale.
DEVICE void decode_any_bfloat16(u32 (&a)[16], int half, const u32* codes) {
    if constexpr (HAS_SPECIALS) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 words[2];
            float x[4];
            widen(words[0], words[1], bytes_of(codes[i / 2], codes[i / 2 + 2], i % 2 ? 0x7632 : 0x5410));
            floats_of_halves(x[0], x[1], words[0]), floats_of_halves(x[2], x[3], words[1]);
#pragma unroll
            for (int e = 0; e < 4; e++) x[e] *= power(-LOWERED);
            a[4 * i + half] = bfloat16_of(x[0]) | u32(bfloat16_of(x[2])) << 16;
            a[4 * i + 2 + half] = bfloat16_of(x[1]) | u32(bfloat16_of(x[3])) << 16;
        }
    } else {
        u32 none = 0;
        decode_bfloat16(a, half, codes, UNSCALED, none);
    }
}

// The multipliers of two pieces whose scales are bytes 0 and 1 of a word, e4m3.
DEVICE void multipliers_of_e4m3(u32 (&out)[2], u32 scales) {
    u32 low, high;
    float scale[2];
    halves_of_e4m3(low, high, scales);
    floats_of_halves(scale[0], scale[1], low);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 bits = bits_of_float(scale[h] * power(PLACED - LOWERED));
        out[h] = bytes_of(bits, 0, 0x3232);
    }
}

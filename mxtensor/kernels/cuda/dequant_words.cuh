// Dequantized words of a wgmma kernel: sixteen consecutive codes of a row, a piece, as eight words of two float16, or
// of two bfloat16 if x is read as it is (BRAIN), multiplied by the scale of their block.
//
// A power-of-two scale is taken relative to the window of its row: a range of octaves around the row's first scales in
// which 16 bits hold every product exactly. If any scale of a block of rows is outside its window, the block computes
// its sums again with ``multiply_any_scales``, which scales sums instead of words. NVFP4 scales always fit.
//
// The bits of a code at their place in a bfloat16 are 2^-BRAIN_EXPONENT times its value, subnormal ones included.
// Words are always multiplied, by a scale or by EXACT: sums of the bits alone would be too small for float32.

// bytes of a thread's scales in 128 columns
constexpr int SCALE_BYTES = SCALE == E8M0 ? (BITS == 8 ? 4 : 1) : SCALE == UE4M3 ? 2 : 0;
constexpr int SCALES_PER_CHUNK = SCALE == E8M0 ? 4 : SCALE == UE4M3 ? 8 : 0;  // of a row

// Of 128 columns: the first whose codes thread ``t`` of four reads, and the byte of its first scale.
DEVICE constexpr u32 column_of(u32 t) { return BITS == 8 ? 16 * t : 32 * t; }
DEVICE constexpr u32 place_of_scales(u32 t) { return BITS == 8 ? 0 : SCALE == UE4M3 ? 2 * t : t; }

// ---------------------------------------------------------------------------------------------- bfloat16

constexpr int BRAIN_EXPONENT = ELEMENT == E4M3 ? 120 : ELEMENT == E3M2 ? 124 : 126;
DEVICE constexpr u32 brain_power(int exponent) { return 0x00010001 * (u32(exponent + 127) << 7); }  // twice in a word
constexpr u32 EXACT = brain_power(BRAIN_EXPONENT), OF_E4M3 = brain_power(120);

// Four e4m3 bytes as two words of two bfloat16, 2^-120 times their value; 0x7F is NaN.
DEVICE void brains_of_e4m3(u32& low, u32& high, u32 bytes) {
    u32 nans = ((bytes & 0x7F7F7F7F) + 0x01010101) & 0x80808080;
    low = bytes_of(bytes, 0, 0x1404), high = bytes_of(bytes, 0, 0x3424);
    low = (low & 0x80008000) | (low >> 4 & 0x07F007F0) | bytes_of(nans, 0, 0x9988);
    high = (high & 0x80008000) | (high >> 4 & 0x07F007F0) | bytes_of(nans, 0, 0xBBAA);
}

// The 6-bit code at bit AT of each half of a word.
template <int AT> DEVICE u32 brains_of_six(u32 codes) {
    constexpr int place = ELEMENT == E3M2 ? 5 : 4, up = AT > place ? 0 : place - AT, down = AT > place ? AT - place : 0;
    return (codes << up >> down & (0x001F001F << place)) | ((codes << (10 - AT)) & 0x80008000);
}

// Decodes eight codes, as ``decode_eight`` does. For 4 bits codes i and i + 4 share a word.
DEVICE void decode_eight_brains(u32* out, const u32* codes, u32 odd = 0) {
    if constexpr (BITS == 8) {
        brains_of_e4m3(out[0], out[1], codes[0]), brains_of_e4m3(out[2], out[3], codes[1]);
    } else if constexpr (BITS == 4) {
        out[0] = (codes[0] << 6 & 0x01C001C0) | (codes[0] << 12 & 0x80008000);
        out[1] = (codes[0] << 2 & 0x01C001C0) | (codes[0] << 8 & 0x80008000);
        out[2] = (codes[0] >> 2 & 0x01C001C0) | (codes[0] << 4 & 0x80008000);
        out[3] = (codes[0] >> 6 & 0x01C001C0) | (codes[0] & 0x80008000);
    } else {
        u32 first = bytes_of(codes[0], codes[1], 0x4310 + odd), second = bytes_of(codes[0], codes[1], 0x5421 + odd);
        out[0] = brains_of_six<0>(first), out[1] = brains_of_six<6>(first);
        out[2] = brains_of_six<4>(second), out[3] = brains_of_six<10>(second);
    }
}

// ---------------------------------------------------------------------------------------------- windows

// octaves of a window, and how many of them are above the row's first scales
constexpr u32 OCTAVES = BRAIN ? 32 : ELEMENT == E5M2 ? 8 : 16, ABOVE = OCTAVES / 4;
// The biased exponent (BIAS) of the largest scale in a window. float16: 2^(TOP - 15); bfloat16: the largest E4M3 value
// becomes about 1, so that no sum is larger than it would be with the scales themselves.
constexpr u32 EXPONENT_BIAS = BRAIN ? 127 : 15, EXPONENT_AT = BRAIN ? 7 : 10;
constexpr u32 TOP = BRAIN ? BRAIN_EXPONENT + 118
                    : ELEMENT == E4M3 ? 22 : ELEMENT == E5M2 ? 15 : ELEMENT == INT8 ? 23 : 30;
constexpr u32 LEAST = TOP - OCTAVES + 1, NAN_SCALE = 255, EACH = BITS == 8 ? 0x01010101 : 1;
constexpr u32 BOTH = 0x00010001 << EXPONENT_AT;  // one octave in both halves of a word

DEVICE u32 largest_byte(u32 word) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 8) most = larger(most, word >> i & 255);
    return most;
}

// The least scale of a row's window, repeated in each byte. The window is around the largest scale of the row's first
// 128 columns. All threads of a warp call it.
DEVICE u32 window_around(u32 scales) {
    u32 most = largest_byte(scales);
    if constexpr (SCALE_BYTES == 1) most = largest(most, 4);
    u32 least = most + ABOVE < OCTAVES ? 0 : most + ABOVE + 1 - OCTAVES;
    least = least + OCTAVES > NAN_SCALE ? NAN_SCALE - OCTAVES : least;  // keeps 255 outside, and 0 too, modulo 256
    return least * EACH;
}

// Of (scale - least scale of the window): these bits are zero if the scale is inside.
constexpr u32 OUTSIDE = BITS == 8 ? ~((OCTAVES - 1) * EACH) : ~(OCTAVES - 1);

// Multiplies the sum of a row by what brings it back from its window; the power may be too large for one float.
DEVICE float from_window(float sum, u32 window) {
    int exponent = int((window & 255) + EXPONENT_BIAS - LEAST) - 127 + (BRAIN ? BRAIN_EXPONENT : 0);
    if constexpr (!BRAIN) return sum * power(exponent);
    return sum * power(exponent / 2) * power(exponent - exponent / 2);
}

// ---------------------------------------------------------------------------------------------- scales

// What the words of pieces 0 and 1 are multiplied by; ``scales`` minus the least of their window.
DEVICE void word_scales(u32 (&out)[2], u32 scales, u32 t) {
    if constexpr (SCALE == UE4M3) {
        u32 bytes = bytes_of(scales, 0, 0x1100);
        if constexpr (BRAIN) {
            brains_of_e4m3(out[0], out[1], bytes);
            out[0] = multiply_brain(out[0], OF_E4M3), out[1] = multiply_brain(out[1], OF_E4M3);
        } else {
            halves_of_e4m3(out[0], out[1], bytes);
        }
    } else if constexpr (BITS == 8) {
#pragma unroll
        for (int h = 0; h < 2; h++) out[h] = bytes_of(scales, 0, 0x4440 + 2 * h + t / 2) * BOTH + LEAST * BOTH;
    } else {
        out[0] = out[1] = scales * BOTH + LEAST * BOTH;
    }
}

// The value of an e8m0 scale.
DEVICE float power_of_scale(u32 scale) {
    return scale == NAN_SCALE ? float_of_bits(0x7FFFFFFF) : power(int(scale) - 127);
}

// ---------------------------------------------------------------------------------------------- both

template <bool SCALED> DEVICE u32 scaled_word(u32 word, u32 scale) {
    if constexpr (BRAIN) {
        if (!SCALED || SCALE == UE4M3) word = multiply_brain(word, EXACT);
        return SCALED ? multiply_brain(word, scale) : word;
    }
    return SCALED ? multiply_half(word, scale) : word;
}

// Decodes a piece to words 2 j and 2 j + 1 of half a fragment of each step j of four: a[4 j + half] and two further.
template <bool SCALED> DEVICE void decode_piece(u32 (&a)[16], int half, const u32* codes, u32 scale) {
    u32 words[8], odd = BITS == 6 ? UPPER : 0;
    if constexpr (BRAIN) decode_eight_brains(words, codes), decode_eight_brains(words + 4, codes + BITS / 4, odd);
    else decode_eight(words, codes), decode_eight(words + 4, codes + BITS / 4, odd);
#pragma unroll
    for (int i = 0; i < 8; i++) a[i / 2 * 4 + i % 2 * 2 + half] = scaled_word<SCALED>(words[i], scale);
}

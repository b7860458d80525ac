// Dequantized words of a wgmma kernel: sixteen consecutive codes of a row, a piece, as eight words of two float16,
// multiplied by the scale of their block.
//
// A power-of-two scale is taken relative to the window of its row: a range of octaves around the row's first scales in
// which float16 holds every product exactly. If any scale of a block of rows is outside its window, the block computes
// its sums again with ``multiply_any_scales``, which scales sums instead of words. NVFP4 scales always fit. DIRECT words
// are bfloat16 instead (bfloat16_words.cuh), with one window for all rows.

// bytes of a thread's scales in 128 columns
constexpr int SCALE_BYTES = SCALE == E8M0 ? (BITS == 8 || DIRECT ? 4 : 1) : SCALE == UE4M3 ? (DIRECT ? 8 : 2) : 0;
constexpr int SCALE_WORDS = SCALE_BYTES == 8 ? 2 : 1;
constexpr int SCALES_PER_CHUNK = SCALE == E8M0 ? 4 : SCALE == UE4M3 ? 8 : 0;  // of a row

// Of 128 columns: the first whose codes thread ``t`` of four reads, and the byte of its first scale.
DEVICE constexpr u32 column_of(u32 t) { return BITS == 8 ? 16 * t : 32 * t; }
DEVICE constexpr u32 place_of_scales(u32 t) { return BITS == 8 || DIRECT ? 0 : SCALE == UE4M3 ? 2 * t : t; }

// ---------------------------------------------------------------------------------------------- windows

// octaves of a window, and how many of them are above the row's first scales
constexpr u32 OCTAVES = DIRECT ? 64 : ELEMENT == E5M2 ? 8 : 16, ABOVE = OCTAVES / 4;
// The biased float16 exponent of the largest scale in a window: 2^(TOP - 15).
constexpr u32 TOP = ELEMENT == E4M3 ? 22 : ELEMENT == E5M2 ? 15 : ELEMENT == INT8 ? 23 : 30;
constexpr u32 NAN_SCALE = 255, EACH = SCALE_BYTES == 4 ? 0x01010101 : 1;
// the biased exponent of the smallest scale in a window; one octave in both halves of a word
constexpr u32 LEAST = TOP - OCTAVES + 1, BOTH = 0x00010001 << 10;

DEVICE u32 largest_byte(u32 word) {
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < 32; i += 8) most = larger(most, word >> i & 255);
    return most;
}

// The least scale of a row's window, repeated in each byte. The window is around the largest scale of the row's first
// 128 columns. All threads of a warp call it.
DEVICE u32 window_around(u32 scales) {
    if constexpr (DIRECT) return WINDOW * EACH;
    u32 most = largest_byte(scales);
    if constexpr (SCALE_BYTES == 1) most = largest(most, 4);
    u32 least = most + ABOVE < OCTAVES ? 0 : most + ABOVE + 1 - OCTAVES;
    least = least + OCTAVES > NAN_SCALE ? NAN_SCALE - OCTAVES : least;  // keeps 255 outside, and 0 too, modulo 256
    return least * EACH;
}

// Of (scale - least scale of the window): these bits are zero if the scale is inside.
constexpr u32 OUTSIDE = ~((OCTAVES - 1) * EACH);

// What the sums of a row are multiplied by at the end.
DEVICE float power_of(u32 window) { return power(int((window & 255) + 15 - LEAST) - 127); }

// ---------------------------------------------------------------------------------------------- scales

// What the words of pieces 0 and 1 are multiplied by; ``scales`` minus the least of their window.
DEVICE void word_scales(u32 (&out)[2], u32 scales, u32 t) {
    if constexpr (SCALE == UE4M3) {
        halves_of_e4m3(out[0], out[1], bytes_of(scales, 0, 0x1100));
    } else if constexpr (BITS == 8) {
#pragma unroll
        for (int h = 0; h < 2; h++) out[h] = bytes_of(scales, 0, 0x4440 + 2 * h + t / 2) * BOTH + LEAST * BOTH;
    } else {
        out[0] = out[1] = scales * BOTH + LEAST * BOTH;
    }
}

// The value of an e8m0 scale.
DEVICE float power_of_scale(u32 scale) {
    if constexpr (SCALE != E8M0) return 1;
    return scale == NAN_SCALE ? float_of_bits(0x7FFFFFFF) : power(int(scale) - 127);
}

// ---------------------------------------------------------------------------------------------- both

// Decodes a piece to words 2 j and 2 j + 1 of half a fragment of each step j of four: a[4 j + half] and two further.
template <bool SCALED> DEVICE void decode_piece(u32 (&a)[16], int half, const u32* codes, u32 scale) {
    u32 words[8];
    decode_eight(words, codes), decode_eight(words + 4, codes + BITS / 4, BITS == 6 ? UPPER : 0);
#pragma unroll
    for (int i = 0; i < 8; i++) a[i / 2 * 4 + i % 2 * 2 + half] = SCALED ? multiply_half(words[i], scale) : words[i];
}

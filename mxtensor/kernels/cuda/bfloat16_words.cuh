// Words of two bfloat16 for the wgmma kernels that read bfloat16 activations as they are (DIRECT).
//
// The columns of a tile of x are in their order, sixteen for each step of the matrix instruction, and thread t of four
// needs codes 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 of the sixteen of a step. But each thread has loaded consecutive codes. So
// the four threads exchange their codes first: a thread gets four codes of each step, packed in one word, or in half a
// word if they have 4 bits.
//
// Sign and magnitude of a code are moved to their positions in bfloat16, so that a word is 2^-PLACED times its values.
// One multiplication by a power of two makes it 2^-LOWERED times the values and their scale, exactly. LOWERED
// moves the window of scales up, to scales above 1; the result is multiplied by 2^LOWERED at the end.

constexpr int PLACED = ELEMENT == E4M3 ? 120 : ELEMENT == E5M2 ? 112 : ELEMENT == E3M2 ? 124 : ELEMENT == INT8 ? -6 : 126;
constexpr int LOWERED = 8;
constexpr u32 ONE_OCTAVE = 0x00010001 << 7;  // in both halves of a word
// The scales whose multipliers bfloat16 has are a window of 64 octaves, the same for all rows, from this scale on: it
// ends at bfloat16's largest power of two.
constexpr u32 WINDOW = 191 - (ELEMENT == INT8 ? 112 : PLACED - LOWERED);
constexpr u32 LEAST_MULTIPLIER = (WINDOW + PLACED - LOWERED) * ONE_OCTAVE;
constexpr u32 UNSCALED = (127 + PLACED - LOWERED) * ONE_OCTAVE;  // the multiplier of words without a scale
// Codes of infinities and NaNs would become numbers: their magnitudes, where ``words_of_bytes`` puts them, are at least
// this. No other element has them.
constexpr bool HAS_SPECIALS = ELEMENT == E4M3 || ELEMENT == E5M2;
constexpr u32 LEAST_SPECIAL = ELEMENT == E4M3 ? 0x7F << 4 : 0x7C << 5;

// ---------------------------------------------------------------------------------------------- the exchange

// ``to[r]`` goes to thread t ^ r of four; ``from[j]`` comes from thread j.
DEVICE void exchange(u32 (&from)[4], const u32 (&to)[4], u32 t) {
    bool odd = t & 1, upper = t & 2;
    u32 one = from_lane_xor(to[1], 1), two = from_lane_xor(to[2], 2), three = from_lane_xor(to[3], 3);
    u32 even_near = odd ? one : to[0], odd_near = odd ? to[0] : one;
    u32 even_far = odd ? three : two, odd_far = odd ? two : three;
    from[0] = upper ? even_far : even_near, from[1] = upper ? odd_far : odd_near;
    from[2] = upper ? even_near : even_far, from[3] = upper ? odd_near : odd_far;
}

// 8 bits: the codes of thread d in one word, in the order 2 d, 2 d + 8, 2 d + 1, 2 d + 9.
DEVICE void exchange_bytes(u32 (&words)[4], const u32* codes, u32 t) {
    bool odd = t & 1, upper = t & 2;
    u32 even = odd ? 0x7362 : 0x5140, odds = odd ? 0x5140 : 0x7362, to[4];
    u32 low = upper ? codes[1] : codes[0], high = upper ? codes[3] : codes[2];
    u32 other_low = upper ? codes[0] : codes[1], other_high = upper ? codes[2] : codes[3];
    to[0] = bytes_of(low, high, even), to[1] = bytes_of(low, high, odds);
    to[2] = bytes_of(other_low, other_high, even), to[3] = bytes_of(other_low, other_high, odds);
    exchange(words, to, t);
}

// 4 bits: byte d of four words, which are both pieces of a chunk. 6 bits: two bytes that begin at byte ``d + d / 2`` of
// words 0 and 1, and the same two of the second half of the piece.
DEVICE void exchange_fields(u32 (&words)[4], const u32* codes, u32 t) {
    u32 to[4];
#pragma unroll
    for (u32 far = 0; far < 4; far += 2) {
        u32 a = t ^ far, b = t ^ far ^ 1;
        u32 selector = BITS == 4 ? a * 0x11 + b * 0x1100 + 0x4040 : (a + a / 2) * 0x11 + (b + b / 2) * 0x1100 + 0x1010;
        u32 first = bytes_of(codes[0], codes[1], selector);
        u32 second = BITS == 4 ? bytes_of(codes[2], codes[3], selector) : bytes_of(codes[1], codes[2], selector + 0x2222);
        to[far] = bytes_of(first, second, 0x5410), to[far + 1] = bytes_of(first, second, 0x7632);
    }
    exchange(words, to, t);
}

// The words of the steps of tile H of a chunk. 4-bit codes of both tiles are exchanged with the first, in place; a word
// has two steps.
template <int H> DEVICE void exchange_tile(u32 (&words)[4], u32 (&codes)[BITS], u32 t) {
    if constexpr (BITS == 8) {
        exchange_bytes(words, codes + 4 * H, t);
    } else if constexpr (BITS == 6) {
        exchange_fields(words, codes + 3 * H, t);
#pragma unroll
        for (int j = 0; j < 4; j++) words[j] >>= 4 * (t & 1);
    } else {
        if constexpr (H == 0) {
            exchange_fields(words, codes, t);
#pragma unroll
            for (int j = 0; j < 4; j++) codes[j] = words[j];
        }
#pragma unroll
        for (int j = 0; j < 4; j++) words[j] = codes[2 * H + j / 2];
    }
}

// ---------------------------------------------------------------------------------------------- words

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

// The 4-bit code in the upper four bits of each half of a word.
DEVICE u32 word_of_four(u32 codes) { return (codes >> 6 & 0x01C001C0) | (codes & 0x80008000); }
// The 6-bit code in the lower six bits of each half of a word.
DEVICE u32 word_of_six(u32 codes) {
    constexpr int place = ELEMENT == E3M2 ? 5 : 4;  // of the five bits of the magnitude
    return (codes << place & (0x001F001F << place)) | (codes << 10 & 0x80008000);
}

// The four codes of a thread in step ``j`` of a tile as words of codes 2 t and 2 t + 1, and of codes 2 t + 8 and 2 t + 9.
DEVICE void two_words(u32& low, u32& high, u32 codes, int j, u32& largest) {
    if constexpr (BITS == 8) {
        words_of_bytes(low, high, codes, largest);
    } else if constexpr (BITS == 4) {
        u32 even = codes << 4;  // has code 2 t where ``codes`` has code 2 t + 1
        low = word_of_four(bytes_of(even, codes, j % 2 ? 0x6622 : 0x4400));
        high = word_of_four(bytes_of(even, codes, j % 2 ? 0x7733 : 0x5511));
    } else {
        low = word_of_six(bytes_of(codes, codes >> 6, 0x5410)), high = word_of_six(bytes_of(codes, codes >> 6, 0x7632));
    }
}

// ---------------------------------------------------------------------------------------------- scales

// The block of 32 columns that step ``j`` of tile H of a chunk belongs to.
template <int H> DEVICE constexpr u32 block_of_step(int j) { return BITS == 6 ? j : 2 * H + j / 2; }

// What the words of each step are multiplied by, for tile H of a chunk; ``scales``: those of the chunk, minus the least
// of their window.
template <int H> DEVICE void multipliers_of(u32 (&out)[4], const u32* scales) {
    if constexpr (SCALE == UE4M3) {
        u32 low, high;
        float scale[4];
        halves_of_e4m3(low, high, scales[H]);
        floats_of_halves(scale[0], scale[1], low), floats_of_halves(scale[2], scale[3], high);
#pragma unroll
        for (int j = 0; j < 4; j++) out[j] = bytes_of(bits_of_float(scale[j] * power(PLACED - LOWERED)), 0, 0x3232);
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++)
            out[j] = SCALE != E8M0 ? UNSCALED
                                   : bytes_of(scales[0], 0, 0x4440 + block_of_step<H>(j)) * ONE_OCTAVE + LEAST_MULTIPLIER;
    }
}

// ---------------------------------------------------------------------------------------------- both

// Decodes tile H of a chunk of a row to half a fragment of each step. Raises ``largest`` to the magnitudes of its codes, if some
// are special.
template <int H>
DEVICE void decode_bfloat16(u32 (&a)[16], int half, u32 (&codes)[BITS], const u32* scales, u32 t, u32& largest) {
    u32 words[4], multiplier[4];
    exchange_tile<H>(words, codes, t);
    multipliers_of<H>(multiplier, scales);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 low, high;
        two_words(low, high, words[j], j, largest);
        a[4 * j + half] = multiply_bfloat16(low, multiplier[j]);
        a[4 * j + 2 + half] = multiply_bfloat16(high, multiplier[j]);
    }
}
DEVICE bool has_special(u32 largest) {
    return HAS_SPECIALS && ((largest & 0xFFFF) >= LEAST_SPECIAL || largest >> 16 >= LEAST_SPECIAL);
}

// The same for all codes, infinities and NaNs too, without a scale.
template <int H> DEVICE void decode_any_bfloat16(u32 (&a)[16], int half, u32 (&codes)[BITS], u32 t) {
    u32 words[4], none = 0;
    exchange_tile<H>(words, codes, t);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 &low = a[4 * j + half], &high = a[4 * j + 2 + half];
        if constexpr (HAS_SPECIALS) {
            float x[4];
            u32 halves[2];
            widen(halves[0], halves[1], words[j]);  // codes 2 t and 2 t + 8, codes 2 t + 1 and 2 t + 9
            floats_of_halves(x[0], x[1], halves[0]), floats_of_halves(x[2], x[3], halves[1]);
#pragma unroll
            for (int e = 0; e < 4; e++) x[e] *= power(-LOWERED);
            low = bfloat16_of(x[0]) | u32(bfloat16_of(x[2])) << 16;
            high = bfloat16_of(x[1]) | u32(bfloat16_of(x[3])) << 16;
        } else {
            two_words(low, high, words[j], j, none);
            low = multiply_bfloat16(low, UNSCALED), high = multiply_bfloat16(high, UNSCALED);
        }
    }
}

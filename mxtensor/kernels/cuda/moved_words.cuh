// Words of a wgmma_fp8 kernel: the codes of a row as E4M3 codes under the largest scale of the row, eight consecutive
// codes in two words. mxtensor/numerics/row_scaled.py is the definition: a code is multiplied by 2^UP, and by two to
// the power of minus the distance of its block's scale from the largest one.

// The largest distance at which the definition moves a code without more loss than it allows.
constexpr u32 OCTAVES_BELOW = ELEMENT == E4M3 ? 12 : ELEMENT == E2M1 ? 14 : ELEMENT == E2M3 ? 11 : 9;
constexpr u32 BOTH_ONES = 0x00010001 << 10;  // one octave in both halves of a word of float16
// Words of six bits are float16 below their value: they are first multiplied by 2^15, then by 2^(MORE - distance).
constexpr u32 MORE = ELEMENT == E2M3 ? 4 : ELEMENT == E3M2 ? 1 : 0;

// 2^(MORE - distance) as two float16. Only blocks of zeros, and rows that are multiplied block by block, are further.
DEVICE u32 factor_of(u32 scale, u32 top) {
    u32 distance = top - scale;
    return (15 + MORE - (distance < 14 ? distance : 14)) * BOTH_ONES;
}

// The factors of pieces 0 and 1 of a chunk.
DEVICE void factors_of(u32 (&out)[2], u32 scales, u32 top, u32 t) {
    if constexpr (BITS == 8) {
#pragma unroll
        for (int h = 0; h < 2; h++) out[h] = factor_of(bytes_of(scales, 0, 0x4440 + 2 * h + t / 2), top);
    } else {
        out[0] = out[1] = factor_of(scales, top);
    }
}

struct Table {  // E2M1: the E4M3 codes of the eight magnitudes times 2^UP and a factor
    u32 low, high;
};
DEVICE Table table_of(u32 factor) {
    if constexpr (BITS != 4) return {};
    u32 low = e4m3_of_halves(multiply_half(0x50000000, factor), multiply_half(0x56005400, factor));
    return {low, e4m3_of_halves(multiply_half(0x5A005800, factor), multiply_half(0x5E005C00, factor))};
}

// Four E2M1 codes, ``which`` two bytes of a word, as a word.
DEVICE u32 four_of_table(u32 index, u32 codes, u32 which, const Table& table) {
    u32 twice = bytes_of(codes, 0, which), signs = select_bits(0xFF00FF00, twice, twice << 4);
    return select_bits(0x80808080, signs, bytes_of(table.low, table.high, index));
}

DEVICE u32 move_six(u32 low, u32 high, u32 factor) {
    constexpr u32 two_to_15 = 0x78007800;
    low = multiply_half(multiply_half(low, two_to_15), factor);
    return e4m3_of_halves(low, multiply_half(multiply_half(high, two_to_15), factor));
}

// Eight codes from ``codes`` on, as two words.
DEVICE void move_eight(u32 (&out)[2], const u32* codes, u32 odd, u32 factor, const Table& table) {
    if constexpr (BITS == 4) {
        u32 index = codes[0] & 0x77777777;
        out[0] = four_of_table(index, codes[0], 0x1100, table);
        out[1] = four_of_table(index >> 16, codes[0], 0x3322, table);
    } else {
        u32 words[4];
        decode_eight(words, codes, odd);
#pragma unroll
        for (int i = 0; i < 2; i++)
            out[i] = BITS == 6 ? move_six(words[2 * i], words[2 * i + 1], factor)
                               : e4m3_of_halves(multiply_half(words[2 * i], factor), multiply_half(words[2 * i + 1], factor));
    }
}

// A piece of row ``half`` (0, or 1 for eight rows below) to two fragments of the matrix instruction.
DEVICE void move_piece(u32* a, int half, const u32* codes, u32 factor, const Table& table) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 words[2];
        move_eight(words, codes + i * (BITS / 4), BITS == 6 ? i * UPPER : 0, factor, table);
        a[4 * i + half] = words[0], a[4 * i + 2 + half] = words[1];
    }
}

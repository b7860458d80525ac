// Sums: adds the products of a stage's codes and activations, for pipelined.cu and persistent.cu.

using Sums = float[MT][NT][4];
constexpr bool SCALES_SUMS = SCALE == E8M0 || SCALE == FLOAT32;

struct Lane {  // the position of a thread in a fragment: row g of 8, group t of 8 columns
    u32 g, t, row, slab;
    const u8* stage;
    const u8* x;
    u32 columns[NT];  // bytes from x to what this thread reads: row g, g + 8, ...
};

// Puts the words of eight values of a row in half a fragment: row g or g + 8.
DEVICE void place_half(u32 (&a)[8], int half, const u32 (&words)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) a[j / 2 * 4 + j % 2 * 2 + half] = words[j];
}

// The same from the codes of a slab of ``row`` in a stage; ``scale`` multiplies the words (ue4m3 scales only).
DEVICE void decode_half(u32 (&a)[8], int half, const u8* row, u32 slab, const Lane& l, u32 scale) {
    u32 words[4];
    decode(words, row, slab, l.t, swizzle_of(l.g));
#pragma unroll
    for (int j = 0; SCALE == UE4M3 && j < 4; j++) words[j] = multiply_half(words[j], scale);
    place_half(a, half, words);
}

// ``scales`` of the rows of this thread: float32 bits, or for ue4m3 scales two float16.
DEVICE void multiply_slab(Sums& sums, const Lane& l, u32 slab, const u32 (&scales)[2 * MT]) {
    u32 a[MT][8];
    float scale[2 * MT];
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        const u8* row = l.stage + CODES_AT + (l.row + 8 * i) * CODES;
        decode_half(a[i / 2], i % 2, row, slab, l, SCALE == UE4M3 ? scales[i] : 0);
        scale[i] = float_of_bits(scales[i]);
    }
    constexpr int independent = NT < 4 ? NT : 4 / MT;  // instructions that do not depend on each other
#pragma unroll
    for (int j0 = 0; j0 < NT; j0 += independent) {
        uint4 b[independent];
        float sum[MT][independent][4];
#pragma unroll
        for (int j = 0; j < independent; j++)
            b[j] = *reinterpret_cast<const uint4*>(l.x + l.columns[j0 + j] + slab * 64);
#pragma unroll
        for (int j = 0; j < independent; j++)
#pragma unroll
            for (int i = 0; i < MT; i++)
                if constexpr (SCALES_SUMS) multiply(sum[i][j], a[i], b[j].x, b[j].y);
                else multiply_add(sums[i][j0 + j], a[i], b[j].x, b[j].y, sums[i][j0 + j]);
#pragma unroll
        for (int j = 0; j < independent; j++)
#pragma unroll
            for (int i = 0; i < MT; i++)
                if constexpr (SCALES_SUMS) multiply_add(sum[i][j], a[i] + 4, b[j].z, b[j].w, sum[i][j]);
                else multiply_add(sums[i][j0 + j], a[i] + 4, b[j].z, b[j].w, sums[i][j0 + j]);
        if constexpr (SCALES_SUMS)
#pragma unroll
            for (int j = 0; j < independent; j++)
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) sums[i][j0 + j][e] += scale[2 * i + e / 2] * sum[i][j][e];
    }
}

// Slabs whose scales share one word: four of e8m0, two of ue4m3.
constexpr int SLABS_PER_WORD = SCALE == UE4M3 ? 2 : 4;
constexpr int UNROLL = MT * NT > 2 ? 1 : SLABS / SLABS_PER_WORD;

// Reads the scales of those slabs for row i of this thread; ``word`` is counted from its first slab.
DEVICE void read_scales(u32 (&scales)[SLABS_PER_WORD][2 * MT], int i, const Lane& l, int word) {
    u32 at = (l.row + 8 * i) * SCALES_STRIDE + l.slab * (SCALE == UE4M3 ? 2 : 1) + 4 * word, bytes = 0;
    if constexpr (SCALES > 0) bytes = *reinterpret_cast<const u32*>(l.stage + SCALES_AT + at);
    if constexpr (SCALE == UE4M3) {
        pairs_of_ue4m3(scales[0][i], scales[1][i], bytes >> l.t / 2 * 8);
    } else if constexpr (SCALE == E8M0) {
        scales[0][i] = bits_of_float(power_of_two<0>(bytes)), scales[1][i] = bits_of_float(power_of_two<1>(bytes));
        scales[2][i] = bits_of_float(power_of_two<2>(bytes)), scales[3][i] = bits_of_float(power_of_two<3>(bytes));
    } else {
#pragma unroll
        for (int q = 0; q < SLABS_PER_WORD; q++) scales[q][i] = bytes;
    }
}

DEVICE void multiply_stage(Sums& sums, Lane& l, const u8* stage, const u8* x) {
    l.stage = stage, l.x = x;
#pragma unroll UNROLL
    for (int word = 0; word < SLABS / SLABS_PER_WORD; word++) {
        u32 scales[SLABS_PER_WORD][2 * MT];
#pragma unroll
        for (int i = 0; i < 2 * MT; i++) read_scales(scales, i, l, word);
#pragma unroll
        for (int q = 0; q < SLABS_PER_WORD; q++) multiply_slab(sums, l, l.slab + word * SLABS_PER_WORD + q, scales[q]);
    }
}

// Products of at most four rows of x: several weight blocks share one matrix instruction.
//
// The instruction has eight columns and X_ROWS rows of x leave some free. With CLASSES > 1 each column holds a row of x
// with only every CLASSES-th block of 16 or 32 values, and zeros elsewhere. So the blocks of a group (CLASSES blocks)
// are summed by the same instructions, each in a column of its own, and each sum is scaled once. A thread may then read
// more consecutive codes of a row, RUN.

#if CLASSES == 1
constexpr int ZEROS = 0;
#else
constexpr int X_ROWS = 8 / CLASSES;  // columns of one class; the columns of the next class follow
constexpr int BLOCK = SCALE == UE4M3 ? 16 : 32;  // columns of w that share a scale
constexpr int GROUP = BLOCK * CLASSES;  // columns of w that are summed before they are scaled
constexpr int RUN = GROUP < 128 ? GROUP / 4 : 32;  // consecutive codes of a thread
constexpr int RUNS = GROUP / (4 * RUN), EIGHTS = RUN / 8;
// chains of dependent instructions: one chain of sixteen was slower than two of eight
constexpr int CHAINS = GROUP > 128 ? 2 : 1;
constexpr int HALVES = CLASSES == 8 ? 2 : 1;  // blocks that the codes of a thread in a group belong to
constexpr int ZEROS = 2 * BK + 16;  // bytes of zeros, read in place of x where a column is zero

struct SmallMColumns {  // where a thread reads x for each half of its codes, and the distance between stages
    const u8* x[HALVES];
    u32 step[HALVES];
};

// For column g: x if its class is that of the first block of the half, else zeros.
DEVICE SmallMColumns small_m_columns_of(const Lane& l, const u8* x, u32 x_stride, u32 rows, const u8* zeros, u32 step) {
    SmallMColumns columns;
    u32 row = l.g % X_ROWS;
#pragma unroll
    for (u32 h = 0; h < HALVES; h++) {
        bool mine = l.g / X_ROWS == l.t * RUN / BLOCK + (SCALE == UE4M3 ? h : 4 * h) && row < rows;
        columns.x[h] = mine ? x + row * x_stride + l.t * RUN * 2 : zeros + 16;  // other banks than rows of x
        columns.step[h] = mine ? step : 0;
    }
    return columns;
}

constexpr int WORDS = RUN * BITS / 32;  // words of codes of a thread and row

// Loads codes from byte ``at`` of a row on; addresses are xor'ed with ``swizzle``.
DEVICE void load_run(u32 (&codes)[WORDS], const u8* row, u32 at, u32 swizzle) {
#pragma unroll
    for (int i = 0; i < WORDS;) {
        const u8* from = row + ((at + 4 * i) ^ swizzle);
        if constexpr (WORDS % 4 == 0) {
            uint4 loaded = *reinterpret_cast<const uint4*>(from);
            codes[i] = loaded.x, codes[i + 1] = loaded.y, codes[i + 2] = loaded.z, codes[i + 3] = loaded.w, i += 4;
        } else if constexpr (WORDS % 2 == 0) {
            uint2 loaded = *reinterpret_cast<const uint2*>(from);
            codes[i] = loaded.x, codes[i + 1] = loaded.y, i += 2;
        } else {
            codes[i] = *reinterpret_cast<const u32*>(from), i++;
        }
    }
}

// The scales of columns 2 t and 2 t + 1: of two neighbouring blocks, or of one block if the columns are of one class.
DEVICE void two_scales(float (&scale)[2], const u8* scales, u32 t) {
    u32 bytes = X_ROWS > 1 ? scales[2 * t / X_ROWS] : *reinterpret_cast<const u16*>(scales + 2 * t);
    if constexpr (SCALE == UE4M3) {
        u32 low, high;
        halves_of_e4m3(low, high, bytes);
        floats_of_halves(scale[0], scale[1], low);
    } else {
        scale[0] = power_of_two<0>(bytes), scale[1] = power_of_two<1>(bytes);
    }
    if (X_ROWS > 1) scale[1] = scale[0];
}

using SmallMSums = float[MT][4];  // sums of rows g and g + 8 of w, columns 2 t and 2 t + 1

DEVICE void multiply_small_m(SmallMSums& sums, const Lane& l, const u8* stage, const SmallMColumns& columns) {
#pragma unroll
    for (int group = 0; group < BK / GROUP; group++) {
        SmallMSums partial[CHAINS] = {};
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            u32 codes[2 * MT][WORDS], at = group * GROUP + run * 4 * RUN;  // first column of the four threads
#pragma unroll
            for (int i = 0; i < 2 * MT; i++)
                load_run(codes[i], stage + CODES_AT + (l.row + 8 * i) * CODES, (at + l.t * RUN) * BITS / 8,
                         swizzle_of(l.g));
#pragma unroll
            for (int q = 0; q < EIGHTS; q++) {
                int h = HALVES == 1 ? 0 : SCALE == UE4M3 ? q / (EIGHTS / 2) : run;
                uint4 x = *reinterpret_cast<const uint4*>(columns.x[h] + at * 2 + q * 16);
#pragma unroll
                for (int i = 0; i < MT; i++) {
                    u32 a[8];
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        u32 words[4];
                        decode_eight(words, codes[2 * i + half] + q * BITS / 4, BITS == 6 && q % 2 ? UPPER : 0);
                        place_half(a, half, words);
                    }
                    multiply_add(partial[0][i], a, x.x, x.y, partial[0][i]);
                    multiply_add(partial[CHAINS - 1][i], a + 4, x.z, x.w, partial[CHAINS - 1][i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * MT; i++) {
            float scale[2];
            two_scales(scale, stage + SCALES_AT + (l.row + 8 * i) * SCALES_STRIDE + group * CLASSES, l.t);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int at = i % 2 * 2 + e;
                float sum = partial[0][i / 2][at];
                if (CHAINS > 1) sum += partial[CHAINS - 1][i / 2][at];
                sums[i / 2][at] += scale[e] * sum;
            }
        }
    }
}

// Adds the classes for row g + 8 i of w, for as many rows of x as a thread has columns. All threads of a warp call it.
constexpr int THREAD_X_ROWS = X_ROWS > 1 ? 2 : 1;
DEVICE void sum_of_classes(float (&sum)[THREAD_X_ROWS], const SmallMSums& sums, int i) {
    const float* of_columns = sums[i / 2] + i % 2 * 2;
    sum[0] = THREAD_X_ROWS > 1 ? of_columns[0] : of_columns[0] + of_columns[1];
    if constexpr (THREAD_X_ROWS > 1) sum[1] = of_columns[1];
#pragma unroll
    for (int e = 0; e < THREAD_X_ROWS; e++)
#pragma unroll
        for (u32 mask = X_ROWS > 2 ? 2 : 1; mask < 4; mask *= 2)
            sum[e] += float_of_bits(from_lane_xor(bits_of_float(sum[e]), mask));
}
#endif

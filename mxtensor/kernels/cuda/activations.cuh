// Activations as the product kernels read them: in float16, after the cast to an MX format or NVFP4 if there is one.
// Each row is multiplied by a power of two that brings its largest magnitude to 2^13. So values within 2^30 of the
// largest are exact (float16 input: 2^27), and smaller ones are off by less than 2^-38 of it. Sums are larger by the
// same power: they overflow from 2^115 on where a row of x is about 1. In warp_activations.cuh the same holds for the
// columns of one warp instead of a row.
// With TILE_ROWS, for wgmma.cu, the result is tiles of TILE_ROWS rows and 64 of each 128 columns, with each word at the
// address where the matrix instruction reads it.

struct Rows {  // activations: ``count`` columns from ``first`` on; zeros from column ``k`` on
    const u16* x;
    u32 stride, k, rows, first, count;
};

struct Eight {  // eight neighbouring values of a row, two in a word
    u32 words[4];
};

DEVICE Eight load_eight(const Rows& r, u32 row, u32 at) {
    const u16* x = r.x + u64(row) * r.stride + at;
    Eight out;
    if constexpr (X_COPY == 16) {  // k is a multiple of eight
        uint4 loaded = {0, 0, 0, 0};
        if (at < r.k) loaded = load_fresh(reinterpret_cast<const uint4*>(x));
        out = {loaded.x, loaded.y, loaded.z, loaded.w};
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 low = at + 2 * i < r.k ? load_fresh(x + 2 * i) : 0;
            u32 high = at + 2 * i + 1 < r.k ? load_fresh(x + 2 * i + 1) : 0;
            out.words[i] = low | high << 16;
        }
    }
    return out;
}
DEVICE float value_of(const Eight& x, int i) {
    u32 bits = x.words[i / 2] >> (16 * (i % 2)) & 0xFFFF;
    return X == FLOAT16 ? float_of_half(bits) : float_of_bits(bits << 16);
}
DEVICE void values_of(float (&x)[8], const Eight& values) {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = value_of(values, i);
}
DEVICE u32 amax_of(const Eight& values) {  // without the sign, bits compare as magnitudes do; two at a time
    u32 most = values.words[0] & 0x7FFF7FFF;
#pragma unroll
    for (int i = 1; i < 4; i++) most = larger_halves(most, values.words[i] & 0x7FFF7FFF);
    most = larger_halves(most, bytes_of(most, 0, 0x1032));
    return X == FLOAT16 ? bits_of_float(float_of_half(most)) : most << 16;
}

// i / n from ``inverse`` = 1.0f / n, with fewer instructions than a division, where that is exact.
DEVICE u32 quotient(u32 i, u32 n, float inverse) { return i < 1 << 21 ? u32((float(i) + 0.5f) * inverse) : i / n; }

DEVICE void raise_by_warp(u32* shared, u32 value) {  // raises ``shared`` to the largest value of the warp
    value = largest_of_warp(value);
    if (thread() % 32 == 0) raise_to(shared, value);
}

// The largest of the maxima of these rows.
DEVICE u32 largest_of(const u32* maxima, u32 rows) {
    u32 amax = 0;
    for (u32 i = 0; i < rows; i++) amax = larger(amax, maxima[i]);
    return amax;
}

// The exponent of the row scale: 2^-exponent brings a row with this amax (bits) to 2^13. NVFP4 values need none.
DEVICE int exponent_of(u32 amax) {
    if constexpr (CAST == TWO_LEVELS) return 0;
    int exponent = int(amax >> 23) - 127 - 13;
    return exponent > -126 ? exponent : -126;
}

// Writes the bits of the largest magnitude of each row to ``maxima``, which must be zero. All threads of a block call
// it.
DEVICE void find_maxima(u32* maxima, const Rows& r) {
    for (u32 row = 0; row < r.rows; row++) {
        u32 amax = 0;
#pragma unroll 4
        for (u32 i = thread(); i < r.count / 8; i += threads()) {
            amax = larger(amax, amax_of(load_eight(r, row, r.first + 8 * i)));
        }
        raise_by_warp(maxima + row, amax);
    }
}

// The scale of a row of float16 values; ``maxima``: those of all rows.
DEVICE float scale_of_row(const u32* maxima, u32 row, u32 rows) {
#if CAST == 2
    u32 amax = largest_of(maxima, rows);
    return has_global_scale(amax) ? float_of_bits(amax) / (448 * CAST_MAX) : 1.0f;
#else
    return power(exponent_of(maxima[row]));
#endif
}

// Transposes 4x4 words among four threads: word i of thread j and word j of thread i change places. The lanes of the
// four differ in BIT and 2 BIT.
template <u32 BIT> DEVICE void transpose_words(u32 (&words)[4], u32 j) {
#pragma unroll
    for (int b = 1; b < 3; b++) {
        bool mine = j & b;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & b) continue;
            u32 other = from_lane_xor(mine ? words[i] : words[i | b], b * BIT);
            if (mine) words[i] = other;
            else words[i | b] = other;
        }
    }
}

// the thread that decodes column ``at``
DEVICE u32 thread_of_four(u32 at) { return BITS == 8 ? at / 16 % 4 : at % 128 / 32; }
// The byte address in the tiles for the words at column ``at`` of a row. A piece of 16 bytes of a tile has one word of
// each of four threads; ``in_pieces`` exchanges them.
DEVICE u32 place_in_tile(u32 row, u32 at) {
    u32 in = at % 128, h = BITS == 8 ? in / 64 : in / 16 % 2, second = in / 8 % 2;
    return (at / 128 * 2 + h) * (TILE_ROWS * 128) + row * 128 + ((4 * second + thread_of_four(at)) ^ row % 8) * 16;
}
DEVICE void in_pieces(u32 (&words)[4], u32 at) { transpose_words<BITS == 8 ? 2 : 4>(words, thread_of_four(at)); }

// Casts eight values to float16 in the order of ``decode``. ``eight_amax``: their largest magnitude; ``amax``: the
// largest of all values that share their scale.
DEVICE void words_of(u32 (&words)[4], const Eight& values, u32 eight_amax, u32 amax, const Level& level) {
    float x[8], scale = power(-exponent_of(amax));
    values_of(x, values);
#if CAST
    cast_eight(x, eight_amax, level, scale);
#else
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= scale;
#endif
    in_order(x);
#pragma unroll
    for (int j = 0; j < 4; j++) words[j] = pair_of_halves(x[2 * j], x[2 * j + 1]);
}

DEVICE void store_words(u8* to, const u32 (&words)[4]) {
    *reinterpret_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
}

DEVICE void write_eight(u8* to, const Eight& values, u32 eight_amax, u32 amax, const Level& level) {
    u32 words[4];
    words_of(words, values, eight_amax, amax, level);
    store_words(to, words);
}

constexpr int CACHED = 4;  // ``Eight``s of a thread that stay in registers between the two passes

// Writes rows at a distance of ``stride`` bytes, and their largest magnitudes to ``maxima``, which must be zero. NVFP4
// needs those of ``all`` rows and columns. ONE row: no division.
template <bool ONE> DEVICE void convert(u8* to, u32 stride, const Rows& r, const Rows& all, u32* maxima) {
    u32 across = r.count / 8, count = r.rows * across;
    float inverse = 1.0f / across;
    auto row_of = [&](u32 i) { return ONE ? 0 : quotient(i, across, inverse); };
    auto column_in = [&](u32 i) { return (i - row_of(i) * across) * 8; };
    bool is_all = r.first == 0 && r.count >= all.count && r.rows == all.rows;
    if (count <= CACHED * threads() && (CAST != TWO_LEVELS || is_all)) {
        Eight cached[CACHED];
        u32 eight_amax[CACHED], most = 0;
#pragma unroll
        for (int h = 0; h < CACHED; h++) {
            u32 i = thread() + h * threads();
            if (i < count) cached[h] = load_eight(r, row_of(i), r.first + column_in(i));
        }
#pragma unroll
        // all threads of a warp have the same row, because ``across`` is a multiple of 32
        for (int h = 0; h < CACHED; h++) {
            u32 i = thread() + h * threads();
            if (i >= count) continue;
            eight_amax[h] = amax_of(cached[h]);
            most = larger(most, eight_amax[h]);
            if (!ONE || h + 1 == CACHED || i + threads() >= count) raise_by_warp(maxima + row_of(i), most), most = 0;
        }
        sync_block();
        Level level = level_of(CAST == TWO_LEVELS ? largest_of(maxima, r.rows) : 0);
#pragma unroll
        for (int h = 0; h < CACHED; h++) {
            u32 i = thread() + h * threads(), row = row_of(i);
            if (i < count)
                write_eight(to + row * stride + 2 * column_in(i), cached[h], eight_amax[h], maxima[row], level);
        }
        return;
    }
    find_maxima(maxima, CAST == TWO_LEVELS ? all : r);
    sync_block();
    Level level = level_of(CAST == TWO_LEVELS ? largest_of(maxima, all.rows) : 0);
#pragma unroll 4
    for (u32 i = thread(); i < count; i += threads()) {
        u32 row = row_of(i), at = column_in(i);
        Eight values = load_eight(r, row, r.first + at);
        write_eight(to + row * stride + 2 * at, values, amax_of(values), maxima[row], level);
    }
}

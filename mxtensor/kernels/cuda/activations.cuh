// Activations as the products multiply them, cast on the way to a format with power-of-two scales for 32 values, or to
// nvfp4, if that is wanted. As float16: each row times a power of two that brings its largest magnitude to 2^13, so that
// what is within 2^30 of it is exact (of float16, 2^27), and the rest off by less than 2^-38 of it. (Sums are that much
// larger, too: where a row of x is about 1, they overflow from 2^115 on. In own.cuh all of this is said of the columns of
// a warp, not of a row.) With TILES, for together.cu, in tiles of so many
// rows and 64 of each 128 columns, in which every word lies where the matrix instruction reads it.

struct Rows {  // of activations, from column ``first`` on ``count`` of them; zeros after column ``k``
    const u16* x;
    u32 stride, k, rows, first, count;
    u32 above = 0;  // as many rows of the matrix
};

struct Eight {  // neighbours of a row, two in a word
    u32 words[4];
};

DEVICE Eight load_eight(const Rows& r, u32 row, u32 at) {
    const u16* x = r.x + u64(row) * r.stride + at;
    Eight out;
    if constexpr (X_COPY == 16) {  // then there are whole eights
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
DEVICE u32 amax_of(const Eight& values) {
    float x[8];
    values_of(x, values);
    return amax_of(x);
}

// i / n, from ``inverse`` = 1.0f / n in fewer instructions than a division has, where that is exact.
DEVICE u32 quotient(u32 i, u32 n, float inverse) { return i < 1 << 21 ? u32((float(i) + 0.5f) * inverse) : i / n; }

DEVICE void raise_by_warp(u32* shared, u32 value) {  // to the largest of a warp's
    value = largest_of_warp(value);
    if (thread() % 32 == 0) raise_to(shared, value);
}

// The largest of the maxima of some rows.
DEVICE u32 largest_of(const u32* maxima, u32 rows) {
    u32 amax = 0;
    for (u32 i = 0; i < rows; i++) amax = maxima[i] > amax ? maxima[i] : amax;
    return amax;
}

// The exponent that brings a row with this largest magnitude, its bits, to 2^13; values of nvfp4 fit as they are.
DEVICE int exponent_of(u32 amax) {
    if constexpr (CAST == TWO_LEVELS) return 0;
    int exponent = int(amax >> 23) - 127 - 13;
    return exponent > -126 ? exponent : -126;
}

// The bits of the largest magnitude of each row, into zeroed ``maxima``; all threads of a block.
DEVICE void find_maxima(u32* maxima, const Rows& r) {
    for (u32 row = 0; row < r.rows; row++) {
        u32 amax = 0;
#pragma unroll 4
        for (u32 i = thread(); i < r.count / 8; i += threads()) {
            u32 bits = amax_of(load_eight(r, row, r.first + 8 * i));
            amax = bits > amax ? bits : amax;
        }
        raise_by_warp(maxima + row, amax);
    }
}

// What a row of float16 is to be multiplied by; ``maxima`` of all rows.
DEVICE float scale_of_row(const u32* maxima, u32 row, u32 rows) {
#if CAST == 2
    u32 amax = largest_of(maxima, rows);
    return has_global_scale(amax) ? float_of_bits(amax) / (448 * CAST_MAX) : 1.0f;
#else
    return power(exponent_of(maxima[row]));
#endif
}

// Word i of this thread and word j of the i-th of four threads, of which it is the j-th, change places; the lanes of
// those four differ in BIT and 2 BIT.
template <u32 BIT> DEVICE void turn(u32 (&words)[4], u32 j) {
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

// Four words at column ``at`` of row ``row`` of the tiles at ``to``, whose columns end at ``k``; all threads of a warp, with
// neighbouring columns. In a piece of 16 bytes a tile has one word of each of four threads.
DEVICE void write_in_tile(u8* to, u32 row, u32 at, u32 k, u32 (&words)[4]) {
    u32 in = at % 128, h = BITS == 8 ? in / 64 : in / 16 % 2, t = BITS == 8 ? in / 16 % 4 : in / 32, second = in / 8 % 2;
    turn<BITS == 8 ? 2 : 4>(words, t);
    u8* line = to + ((u64(row / TILES) * (k / 128) + at / 128) * 2 + h) * (TILES * 128) + row % TILES * 128;
    if (at < k) *reinterpret_cast<uint4*>(line + ((4 * second + t) ^ row % 8) * 16) = {words[0], words[1], words[2], words[3]};
}

// Eight values as float16, in the order of ``decode``; ``own``: their largest magnitude, ``amax`` that of what is scaled
// with them.
DEVICE void words_of(u32 (&words)[4], const Eight& values, u32 own, u32 amax, const Level& level) {
    float x[8], factor = power(-exponent_of(amax));
    values_of(x, values);
#if CAST
    cast_eight(x, own, level, factor);
#else
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= factor;
#endif
    in_order(x);
#pragma unroll
    for (int j = 0; j < 4; j++) words[j] = pair_of_halves(x[2 * j], x[2 * j + 1]);
}

// Those at column ``at`` of a row, of which ``to`` has the first, or of the tiles there.
DEVICE void write_eight(
    u8* to, const Rows& r, u32 row, u32 at, const Eight& values, u32 own, u32 amax, const Level& level) {
    u32 words[4];
    words_of(words, values, own, amax, level);
    if constexpr (TILES == 0) *reinterpret_cast<uint4*>(to + 2 * at) = {words[0], words[1], words[2], words[3]};
    else write_in_tile(to, r.above + row, at, r.k, words);
}

constexpr int HELD = 4;  // of Eight, a thread: what is read once where that is all

// Rows, ``stride`` bytes apart, and their largest magnitudes into zeroed ``maxima``; nvfp4 looks at those of ``all``. ONE
// row: nothing is divided.
template <bool ONE> DEVICE void convert(u8* to, u32 stride, const Rows& r, const Rows& all, u32* maxima) {
    u32 across = r.count / 8, count = r.rows * across;
    float inverse = 1.0f / across;
    auto row_of = [&](u32 i) { return ONE ? 0 : quotient(i, across, inverse); };
    auto column_in = [&](u32 i) { return (i - row_of(i) * across) * 8; };
    bool is_all = r.first == 0 && r.count >= all.count && r.rows == all.rows;
    if (count <= HELD * threads() && (CAST != TWO_LEVELS || is_all)) {
        Eight held[HELD];
        u32 own[HELD], most = 0;
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            u32 i = thread() + h * threads();
            if (i < count) held[h] = load_eight(r, row_of(i), r.first + column_in(i));
        }
#pragma unroll
        for (int h = 0; h < HELD; h++) {  // a warp has one row: ``across`` is a multiple of 32
            u32 i = thread() + h * threads();
            if (i >= count) continue;
            own[h] = amax_of(held[h]);
            most = own[h] > most ? own[h] : most;
            if (!ONE || h + 1 == HELD || i + threads() >= count) raise_by_warp(maxima + row_of(i), most), most = 0;
        }
        sync_block();
        Level level = level_of(CAST == TWO_LEVELS ? largest_of(maxima, r.rows) : 0);
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            u32 i = thread() + h * threads(), row = row_of(i);
            if (i < count) write_eight(to + row * stride, r, row, column_in(i), held[h], own[h], maxima[row], level);
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
        write_eight(to + row * stride, r, row, at, values, amax_of(values), maxima[row], level);
    }
}

struct ActivationArguments {
    const u16* x;
    u16* out;       // (rows, width): k rounded up, to 256 at least; or tiles
    float* scale;   // of each row
    u32* counters;  // to be zeroed, so many
    u32* maxima;    // of each block of ``maxima``, where the cast wants the largest magnitude of the tensor
    u32 k, width, x_stride, rows, counted, blocks;
};

DEVICE void raise_by_block(u32* shared, u32 value) {  // to the largest of a block's
    raise_by_warp(shared, value);
    sync_block();
}

// The largest magnitude of every ``step``-th eight of all rows, from the ``first``, into zeroed ``shared``; all threads of a block.
DEVICE void find_largest(u32* shared, const Rows& r, u32 first, u32 step) {
    u32 across = (r.k + 7) / 8, count = r.rows * across, amax = 0;
    float inverse = 1.0f / across;
#pragma unroll 8
    for (u32 i = first; i < count; i += step) {
        u32 row = quotient(i, across, inverse), bits = amax_of(load_eight(r, row, (i - row * across) * 8));
        amax = bits > amax ? bits : amax;
    }
    raise_by_block(shared, amax);
}

// The largest magnitude of each block's share.
KERNEL void BOUNDS(256, 1) maxima(const ActivationArguments a) {
    let_next_start();
    u32* shared = reinterpret_cast<u32*>(shared_memory());
    if (thread() == 0) *shared = 0;
    sync_block();
    wait_for_previous();
    find_largest(shared, {a.x, a.x_stride, a.k, a.rows, 0, a.k}, block_x() * threads() + thread(), blocks_x() * threads());
    if (thread() == 0) a.maxima[block_x()] = *shared;
}

// The largest of those into zeroed ``shared``, or of all rows where nobody has looked; all threads of a block.
DEVICE void take_maxima(u32* shared, const ActivationArguments& a) {
    u32 amax = 0;
    if (a.blocks == 0) return find_largest(shared, {a.x, a.x_stride, a.k, a.rows, 0, a.k}, thread(), threads());
    for (u32 i = thread(); i < a.blocks; i += threads()) amax = a.maxima[i] > amax ? a.maxima[i] : amax;
    raise_by_block(shared, amax);
}
DEVICE void zero_counters(const ActivationArguments& a) {
    for (u32 i = block_x() * threads() + thread(); i < a.counted; i += blocks_x() * threads()) a.counters[i] = 0;
}

// Eight columns a thread, and as many blocks a row as that takes, each of which looks at all of it.
KERNEL void BOUNDS(512, 1) activations(const ActivationArguments a) {
    let_next_start();
    u32 parts = blocks_x() / a.rows, row = block_x() / parts, part = block_x() % parts, of_part = threads() * 8;
    u32 *amax = reinterpret_cast<u32*>(shared_memory()), in = thread() * 8, at = part * of_part + in, own = 0;
    u8* to = reinterpret_cast<u8*>(TILES ? a.out : a.out + u64(row) * a.width);
    Rows mine = {a.x + u64(row) * a.x_stride, a.x_stride, a.k, 1, 0, a.width, row};
    if (thread() == 0) *amax = 0;
    sync_block();
    wait_for_previous();
    Eight values;
    if (at < a.width) values = load_eight(mine, 0, at);
    if constexpr (CAST == TWO_LEVELS) {
        take_maxima(amax, a);
        if (at < a.width) own = amax_of(values);
    } else {
        u32 most = 0;
#pragma unroll 4
        for (u32 other = 1; other < parts; other++) {
            u32 column = (part + other < parts ? part + other : part + other - parts) * of_part + in;
            u32 bits = column < a.width ? amax_of(load_eight(mine, 0, column)) : 0;
            most = bits > most ? bits : most;
        }
        if (at < a.width) own = amax_of(values);
        raise_by_block(amax, own > most ? own : most);
    }
    if (at < a.width) write_eight(to, mine, 0, at, values, own, *amax, level_of(*amax));
    if (part == 0 && thread() == 0) a.scale[row] = scale_of_row(amax, 0, 1);
    zero_counters(a);
}

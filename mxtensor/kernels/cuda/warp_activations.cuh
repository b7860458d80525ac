// Each warp of a persistent kernel reads and casts the activations of the columns that only it multiplies, so that no
// warp waits for another. Unless the cast is NVFP4, the warp scales each row of its columns to about 2^13 by a power of
// two, and multiplies its sums by the inverse.

// NVFP4 first needs the largest magnitude of the whole tensor, found by the whole block
constexpr bool NEEDS_BLOCK_AMAX = CAST == 2;
constexpr bool WARP_READS_X = WHOLE_X && WR == 1 && !(NEEDS_BLOCK_AMAX && SPLIT > 1),
               WARP_SCALES_X = WARP_READS_X && !NEEDS_BLOCK_AMAX;
constexpr bool ONE_ROW = CLASSES == 8;
constexpr u32 EIGHTS_PER_STAGE = BK / 8, MOST_CACHED = ONE_ROW ? 4 : 16;

// the columns of a warp: ``stages`` stages at a distance of WK; the first is ``place`` after the block's
struct WarpActivations {
    u32 first, place, stages, lane;
    u32 across;  // groups of eight columns of a row that each lane reads
};
DEVICE WarpActivations warp_activations_of(u32 first, u32 end, u32 place, u32 lane) {
    u32 stages = (end - first + WK - 1 - place) / WK;
    return {first, place, stages, lane, (stages * EIGHTS_PER_STAGE + 31) / 32};
}
DEVICE u32 stage_of(const WarpActivations& warp, u32 i) {
    return i * 32 / EIGHTS_PER_STAGE + (EIGHTS_PER_STAGE < 32 ? warp.lane / EIGHTS_PER_STAGE : 0);
}
DEVICE bool has(const WarpActivations& warp, u32 i) { return stage_of(warp, i) < warp.stages; }
DEVICE u32 column_of(const WarpActivations& warp, u32 i) {  // counted from the block's first column
    u32 in = i * 32 % EIGHTS_PER_STAGE + (EIGHTS_PER_STAGE < 32 ? warp.lane % EIGHTS_PER_STAGE : warp.lane);
    return (warp.place + stage_of(warp, i) * WK) * BK + in * 8;
}
DEVICE Eight load_warp_activations(const Arguments& a, const WarpActivations& warp, u32 row, u32 i) {
    Rows all = {a.x, a.x_stride, a.k, a.m, 0, 0};
    return load_eight(all, row, has(warp, i) ? warp.first * BK + column_of(warp, i) : a.k);
}
DEVICE void store_warp_activations(
    u8* to, const WarpActivations& warp, u32 i, const Eight& values, u32 amax_of_eight, u32 amax, const Level& level) {
    u32 words[4];
    words_of(words, values, amax_of_eight, amax, level);
    if (has(warp, i)) store_words(to + 2 * column_of(warp, i), words);
}

DEVICE u32 rows_of(const Arguments& a) { return ONE_ROW ? 1 : a.m; }
DEVICE bool is_cached(const Arguments& a, const WarpActivations& warp) {
    return rows_of(a) * warp.across <= MOST_CACHED;
}
DEVICE void next_of(const WarpActivations& warp, u32& row, u32& i) {
    if (++i == warp.across && !ONE_ROW) i = 0, row++;
}

// Starts the loads of all rows, if they fit in registers.
using Cached = Eight[MOST_CACHED];
DEVICE void begin_warp_activations(Cached& cached, const Arguments& a, const WarpActivations& warp) {
    u32 count = rows_of(a) * warp.across;
#pragma unroll
    for (u32 h = 0, row = 0, i = 0; h < MOST_CACHED; h++, next_of(warp, row, i)) {
        if (h >= count || !is_cached(a, warp)) break;
        cached[h] = load_warp_activations(a, warp, row, i);
    }
}

// The NVFP4 scales of the tensor, from the largest magnitude of each warp, through ``block_amax``, which must be zero.
DEVICE Level level_of_all(u32* block_amax, const WarpActivations& warp, u32 most) {
    if constexpr (!NEEDS_BLOCK_AMAX) return {};
    if (warp.lane == 0) raise_to(block_amax, most);
    sync_block();
    return level_of(*block_amax);
}

// Writes rows of ``stride`` bytes to ``to``, and the bits of the largest magnitude of each row to ``maxima``, which
// must be zero because a warp may have no columns.
DEVICE void finish_warp_activations(
    const Cached& cached, const Arguments& a, const WarpActivations& warp, u8* to, u32 stride, u32* maxima,
    u32* block_amax) {
    const u32 rows = rows_of(a), count = rows * warp.across;
    if (is_cached(a, warp)) {
        // of each cached eight; and of the row, or of all rows where maxima are not per row
        u32 amax[MOST_CACHED], most = 0;
#pragma unroll
        for (u32 h = 0, row = 0, i = 0; h < MOST_CACHED; h++, next_of(warp, row, i)) {
            if (h >= count) break;
            amax[h] = amax_of(cached[h]);
            most = larger(most, amax[h]);
            if (ONE_ROW || NEEDS_BLOCK_AMAX || i + 1 < warp.across) continue;
            most = largest_of_warp(most);
            if (warp.lane == 0) maxima[row] = most;
            most = 0;
        }
        if (ONE_ROW || NEEDS_BLOCK_AMAX) most = largest_of_warp(most);
        if (ONE_ROW && warp.lane == 0) maxima[0] = most;
        if (!ONE_ROW) sync_warp();
        Level level = level_of_all(block_amax, warp, most);
#pragma unroll
        for (u32 h = 0, row = 0, i = 0; h < MOST_CACHED; h++, next_of(warp, row, i)) {
            if (h >= count) break;
            store_warp_activations(to + row * stride, warp, i, cached[h], amax[h], ONE_ROW ? most : maxima[row], level);
        }
    } else {
        u32 of_rows = 0;
        for (u32 row = 0; row < rows; row++) {
            u32 most = 0;
#pragma unroll 4
            for (u32 i = 0; i < warp.across; i++) {
                most = larger(most, amax_of(load_warp_activations(a, warp, row, i)));
            }
            most = largest_of_warp(most);
            of_rows = larger(of_rows, most);
            if (warp.lane == 0) maxima[row] = most;
        }
        sync_warp();
        Level level = level_of_all(block_amax, warp, of_rows);
        for (u32 row = 0; row < rows; row++)
#pragma unroll 2
            for (u32 i = 0; i < warp.across; i++) {
                Eight values = load_warp_activations(a, warp, row, i);
                store_warp_activations(to + row * stride, warp, i, values, amax_of(values), maxima[row], level);
            }
    }
    sync_warp();
}

// Activations that a warp reads for itself: those of the columns that it alone multiplies, so that no warp waits for
// another. Each of their rows is brought near 2^13, unless they are cast to nvfp4, by a power of two of its own, which
// multiplies what the warp sums.

constexpr bool OF_ALL = CAST == 2;  // nvfp4 wants the largest magnitude of all of them first, that of the block
constexpr bool OWN_X = WHOLE_X && WR == 1 && !(OF_ALL && SPLIT > 1), OWN_SCALES = OWN_X && !OF_ALL;
constexpr bool ONE_ROW = CLASSES == 8;
constexpr u32 IN_A_STAGE = BK / 8, FIRST_HELD = ONE_ROW ? 4 : 16;

struct Own {  // of a warp: the columns of ``stages``, WK apart, the first of them ``place`` after the block's first stage
    u32 first, place, stages, lane;
    u32 across;  // eight columns a lane, so many times in a row
};
DEVICE Own own_of(u32 first, u32 last, u32 place, u32 lane) {
    u32 stages = (last - first + WK - 1 - place) / WK;
    return {first, place, stages, lane, (stages * IN_A_STAGE + 31) / 32};
}
DEVICE u32 stage_of(const Own& own, u32 i) { return i * 32 / IN_A_STAGE + (IN_A_STAGE < 32 ? own.lane / IN_A_STAGE : 0); }
DEVICE bool has(const Own& own, u32 i) { return stage_of(own, i) < own.stages; }
DEVICE u32 column_of(const Own& own, u32 i) {  // from the block's first on
    u32 in = i * 32 % IN_A_STAGE + (IN_A_STAGE < 32 ? own.lane % IN_A_STAGE : own.lane);
    return (own.place + stage_of(own, i) * WK) * BK + in * 8;
}
DEVICE Eight load_own(const Arguments& a, const Own& own, u32 row, u32 i) {
    Rows all = {a.x, a.x_stride, a.k, a.m, 0, 0};
    return load_eight(all, row, has(own, i) ? own.first * BK + column_of(own, i) : a.k);
}
DEVICE void write_own(
    u8* to, const Own& own, u32 i, const Eight& values, u32 amax_of_eight, u32 amax, const Level& level) {
    u32 words[4];
    words_of(words, values, amax_of_eight, amax, level);
    if (has(own, i)) store_words(to + 2 * column_of(own, i), words);
}

DEVICE u32 rows_of(const Arguments& a) { return ONE_ROW ? 1 : a.m; }
DEVICE bool is_held(const Arguments& a, const Own& own) { return rows_of(a) * own.across <= FIRST_HELD; }
DEVICE void next_of(const Own& own, u32& row, u32& i) {
    if (++i == own.across && !ONE_ROW) i = 0, row++;
}

// Ask for what can be held: all columns of all rows, if they are so few.
using Held = Eight[FIRST_HELD];
DEVICE void begin_own(Held& held, const Arguments& a, const Own& own) {
    u32 count = rows_of(a) * own.across;
#pragma unroll
    for (u32 h = 0, row = 0, i = 0; h < FIRST_HELD; h++, next_of(own, row, i)) {
        if (h >= count || !is_held(a, own)) break;
        held[h] = load_own(a, own, row, i);
    }
}

// The level of the tensor, where that is wanted, from the largest magnitude of each warp, into zeroed ``of_all``.
DEVICE Level level_of_all(u32* of_all, const Own& own, u32 most) {
    if constexpr (!OF_ALL) return {};
    if (own.lane == 0) raise_to(of_all, most);
    sync_block();
    return level_of(*of_all);
}

// Into rows of ``stride`` bytes at ``to``; the bits of the largest magnitude of each row into zeroed ``maxima``: there may
// be no columns.
DEVICE void finish_own(
    const Held& held, const Arguments& a, const Own& own, u8* to, u32 stride, u32* maxima, u32* of_all) {
    const u32 rows = rows_of(a), count = rows * own.across;
    if (is_held(a, own)) {
        u32 amax[FIRST_HELD], most = 0;  // of what is held, and of all of it, or where maxima are of rows, of a row
#pragma unroll
        for (u32 h = 0, row = 0, i = 0; h < FIRST_HELD; h++, next_of(own, row, i)) {
            if (h >= count) break;
            amax[h] = amax_of(held[h]);
            most = larger(most, amax[h]);
            if (ONE_ROW || OF_ALL || i + 1 < own.across) continue;
            most = largest_of_warp(most);
            if (own.lane == 0) maxima[row] = most;
            most = 0;
        }
        if (ONE_ROW || OF_ALL) most = largest_of_warp(most);
        if (ONE_ROW && own.lane == 0) maxima[0] = most;
        if (!ONE_ROW) sync_warp();
        Level level = level_of_all(of_all, own, most);
#pragma unroll
        for (u32 h = 0, row = 0, i = 0; h < FIRST_HELD; h++, next_of(own, row, i)) {
            if (h >= count) break;
            write_own(to + row * stride, own, i, held[h], amax[h], ONE_ROW ? most : maxima[row], level);
        }
    } else {
        u32 of_rows = 0;
        for (u32 row = 0; row < rows; row++) {
            u32 most = 0;
#pragma unroll 4
            for (u32 i = 0; i < own.across; i++) {
                most = larger(most, amax_of(load_own(a, own, row, i)));
            }
            most = largest_of_warp(most);
            of_rows = larger(of_rows, most);
            if (own.lane == 0) maxima[row] = most;
        }
        sync_warp();
        Level level = level_of_all(of_all, own, of_rows);
        for (u32 row = 0; row < rows; row++)
#pragma unroll 2
            for (u32 i = 0; i < own.across; i++) {
                Eight values = load_own(a, own, row, i);
                write_own(to + row * stride, own, i, values, amax_of(values), maxima[row], level);
            }
    }
    sync_warp();
}

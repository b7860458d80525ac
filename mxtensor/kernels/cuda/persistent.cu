// The persistent kernel: y (M, N) = x (M, K) w (N, K)^T for the fewest rows of x, which stay in shared memory.
//
// Each block has an equal share of the tiles (ROWS rows of w). Its WR rows of warps process them in turn. Each of the
// WK warps in a row has its own columns: a stage of BK columns, then the stage WK further. It copies their codes and
// scales itself, and with WR = 1 also their columns of x. So once x is loaded no warp waits for another until the sums
// of ``round`` tiles, a multiple of WR, are added. Blocks of a cluster have the same tiles and each a part of the
// columns. The code before the first request for codes is short, because every instruction there delays the whole
// kernel.

constexpr int SLOT = ROWS + 4;  // float32 of the sums of one warp, tile and row of x
constexpr int RING = STAGES * STAGE;
constexpr int X_AT = WR * WK * RING;  // aligned to 128 bytes, which makes the copy faster
// Global scales of the weights; scales of rows of x; and maxima of rows of x, over all columns or those of each warp.
constexpr int HEAD = 16 + WHOLE_HEAD + (WHOLE_X ? 4 * COLS * WK : 0);
// Stages that are requested before x, which arrives after them.
constexpr int REQUESTED_FIRST = (WARP_READS_X || !WHOLE_X) && AHEAD > 0 && AHEAD < STAGES ? AHEAD : STAGES - 1;
// threads hold the scales of rows of x until the end
constexpr bool HAS_SCALES = !WHOLE_X || (WARP_READS_X && NEEDS_BLOCK_AMAX);
static_assert(WEIGHTS <= 4, "space for four global scales");
static_assert(ZEROS <= 16 * THREADS, "threads for the zeros");

struct Share {  // the work of a block
    u32 begin, end;              // tiles of w
    u32 stage_begin, stage_end;  // along K
    u32 x_stride;                // bytes of a row of x
    u8* x;
    u32 lane, row_of_warps, place;  // of this thread; its warp is the place-th of its row of warps
};

struct Walk {  // an iterator over the stages of a warp, tile by tile: the next one to copy
    u32 tile, stage, weight;
};
DEVICE Walk first_of(const Arguments& a, const Share& s) {
    u32 stage = s.stage_begin + s.place, tile = stage < s.stage_end ? s.begin + s.row_of_warps : s.end;
    return {tile, stage, weight_of(a, tile)};
}
DEVICE bool is_left(const Walk& w, const Share& s) { return w.tile < s.end; }
DEVICE void step(const Arguments& a, Walk& w, const Share& s) {
    w.stage += WK;
    if (w.stage >= s.stage_end) w.stage = s.stage_begin + s.place, w.tile += WR, w.weight = weight_of(a, w.tile);
}

DEVICE void fetch_codes(const Arguments& a, const Share& s, const Walk& w, u8* stage) {
    const Weight& weight = a.weights[w.weight];
    BlockWork p = {weight.codes, weight.scales, a.x, (w.tile - weight.first) * ROWS};
    p.rows = weight.n - p.row;
    fetch_weights(a, p, stage, w.stage, s.lane);
}
// Copies ``count`` columns of x from stage ``first`` on; this thread is ``fetcher`` of ``fetchers``.
DEVICE void fetch_x(const Arguments& a, const Share& s, u32 first, u32 count, u32 fetcher, u32 fetchers) {
    u32 pieces = count / 8;  // of 16 bytes
    u8* to = s.x + (first - s.stage_begin) * 2 * BK;
    for (u32 i = fetcher; i < a.m * pieces; i += fetchers)
        copy<16>(to + i / pieces * s.x_stride + i % pieces * 16,
                 a.x + i / pieces * u64(a.x_stride) + first * BK + i % pieces * 8, true);
}
DEVICE void fetch_columns(const Arguments& a, const Share& s, const Walk& w) {
    if (!WHOLE_X && WR == 1 && w.tile == s.begin) fetch_x(a, s, w.stage, BK, s.lane, 32);
}

// The sums of a warp for a tile, the address in x of the next stage's columns, and storing the sums: with or without
// classes.
#if CLASSES > 1
constexpr int MY_ROWS = THREAD_X_ROWS;  // rows of x that a thread has sums of
using RowScales = float[MY_ROWS];
using Partial = SmallMSums;
using Columns = SmallMColumns;
DEVICE Columns columns_of(const Lane& l, const Share& s, u32 rows, const u8* zeros) {
    return small_m_columns_of(l, s.x + s.place * 2 * BK, s.x_stride, rows, zeros, WK * 2 * BK);
}
DEVICE void multiply_columns(Partial& sums, Lane& l, const u8* stage, Columns& x) {
    multiply_small_m(sums, l, stage, x);
#pragma unroll
    for (int h = 0; h < HALVES; h++) x.x[h] += x.step[h];
}
DEVICE constexpr u32 row_of(const Lane& l, int e) { return THREAD_X_ROWS * l.t + e; }
DEVICE void store_sums(float* slot, const Partial& sums, const RowScales& row_scales, const Lane& l, u32 m) {
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        float sum[THREAD_X_ROWS];
        sum_of_classes(sum, sums, i);
#pragma unroll
        for (int e = 0; e < THREAD_X_ROWS; e++)
            if (THREAD_X_ROWS * l.t < X_ROWS && row_of(l, e) < m)
                slot[row_of(l, e) * SLOT + l.g + 8 * i] = sum[e] * row_scales[e];
    }
}
#else
constexpr int MY_ROWS = 2 * NT;
using RowScales = float[MY_ROWS];
using Partial = Sums;
using Columns = const u8*;
DEVICE Columns columns_of(const Lane&, const Share& s, u32, const u8*) { return s.x + s.place * 2 * BK; }
DEVICE void multiply_columns(Partial& sums, Lane& l, const u8* stage, Columns& x) {
    multiply_stage(sums, l, stage, x);
    x += WK * 2 * BK;
}
DEVICE constexpr u32 row_of(const Lane& l, int e) { return 8 * (e / 2) + 2 * l.t + e % 2; }
DEVICE void store_sums(float* slot, const Partial& sums, const RowScales& row_scales, const Lane& l, u32 m) {
#pragma unroll
    for (int e = 0; e < 2 * NT; e++)
        if (row_of(l, e) < m)
#pragma unroll
            for (int i = 0; i < 2 * MT; i++)
                slot[row_of(l, e) * SLOT + l.g + 8 * i] = sums[i / 2][e / 2][i % 2 * 2 + e % 2] * row_scales[e];
}
#endif

// The scales of the rows of x that this thread has sums of, if its warp has read them; ``maxima``: of those rows.
DEVICE void row_scales_of(RowScales& row_scales, const Lane& l, const u32* maxima, u32 m) {
#pragma unroll
    for (int e = 0; e < MY_ROWS; e++)
        row_scales[e] = WARP_SCALES_X && row_of(l, e) < m ? power(exponent_of(maxima[row_of(l, e)])) : 1;
}

// Writes ``tiles`` tiles from ``first`` on: adds the sums of the warps, then of the blocks of a cluster, in their
// order.
DEVICE void write_tiles(
    const Arguments& a, u32 first, u32 tiles, float* slots, const float* x_scale, const float* globals) {
    const u32 m = rows_of(a);
    u32 count = tiles * m * ROWS, span = (count + SPLIT - 1) / SPLIT, begin = 0, end = count;
    sync_block();
    for (int pass = 0; pass < (SPLIT > 1 ? 2 : 1); pass++) {
        for (u32 i = begin + thread(); i < end; i += THREADS) {
            u32 row = i % ROWS, col = i / ROWS % m, tile = i / ROWS / m, of = weight_of(a, first + tile);
            const Weight& weight = a.weights[of];
            u32 n = (first + tile - weight.first) * ROWS + row;
            float *slot = slots + (tile * WK * m + col) * SLOT + row, sum = 0;
            if (pass == 0) {
#pragma unroll
                for (u32 w = 0; w < WK; w++) sum += slot[w * m * SLOT];
                if constexpr (!WARP_SCALES_X) sum *= x_scale[col];
            } else {
#pragma unroll
                for (u32 r = 0; r < SPLIT; r++) sum += read_of_block(slot, r);
            }
            if (SPLIT > 1 && pass == 0) *slot = sum;
            else if (n < weight.n) {
                float tensor_scale = tensor_scale_of<ELEMENT_EXPONENT>(a, globals[of]);
                float bias = bias_at(weight, col, n);
                finish(a, weight, weight.scales, col, n, with_nans(a, weight.scales, n, sum), tensor_scale, bias);
            }
        }
        if (SPLIT == 1) sync_block();
        else sync_cluster();
        begin = block_z() * span, end = begin + span < count ? begin + span : count;
    }
}

DEVICE Share share_of(const Arguments& a, u8* x, u32 warp, u32 lane) {
    u32 others = blocks_x() / PERSISTENT, block = block_x();  // blocks of one multiprocessor have neighbouring tiles
    if (PERSISTENT > 1 && block < others * PERSISTENT) block = block % others * PERSISTENT + block / others;
    u32 begin = block * a.tiles + (block < a.more ? block : a.more), stages = (a.k + BK - 1) / BK;
    Share s = {begin, begin + a.tiles + (block < a.more), 0, stages, 2 * a.x_width + 64, x, lane, warp / WK, warp % WK};
    if constexpr (SPLIT > 1) s.stage_begin = block_z() * stages / SPLIT, s.stage_end = (block_z() + 1) * stages / SPLIT;
    return s;
}

KERNEL void BOUNDS(THREADS, BLOCKS) persistent(const Arguments a) {
    u32 warp = warp_of_block(), lane = lane_of_warp();
    u8 *shared = shared_memory(), *ring = shared + warp * RING;
    Share s = share_of(a, shared + X_AT, warp, lane);
    Walk next = first_of(a, s), ahead = next;
#pragma unroll
    for (int i = 0; i < REQUESTED_FIRST; i++) {  // weights do not depend on the previous kernel
        if (is_left(ahead, s)) fetch_codes(a, s, ahead, ring + i * STAGE), step(a, ahead, s);
        if (WHOLE_X) end_of_stage();
    }
    if (!WHOLE_X) let_next_start();
    // loads in flight
    float global_scale = thread() < WEIGHTS ? global_scale_of(a.weights[thread()]) : 0, thread_scale = 0;
    u8* zeros = s.x + a.m * s.x_stride;
    if (thread() * 16 < ZEROS) *reinterpret_cast<uint4*>(zeros + thread() * 16) = {0, 0, 0, 0};
    float *globals = reinterpret_cast<float*>(zeros + ZEROS), *x_scale = globals + 4, *slots = globals + HEAD / 4;
    u32* maxima = reinterpret_cast<u32*>(x_scale + 2 * COLS) + s.place * COLS;
    if constexpr (WARP_READS_X) {
        u32* block_amax = reinterpret_cast<u32*>(x_scale + COLS);
        if (NEEDS_BLOCK_AMAX && thread() == 0) *block_amax = 0;
        for (u32 i = lane; !ONE_ROW && i < COLS; i += 32) maxima[i] = 0;
        sync_block();  // the zeros are written
        wait_for_previous();
        WarpActivations activations = warp_activations_of(s.stage_begin, s.stage_end, s.place, lane);
        Cached cached;
        begin_warp_activations(cached, a, activations);
#pragma unroll
        for (int i = REQUESTED_FIRST; i < STAGES - 1; i++) {
            if (is_left(ahead, s)) fetch_codes(a, s, ahead, ring + i * STAGE), step(a, ahead, s);
            end_of_stage();
        }
        finish_warp_activations(cached, a, activations, s.x, s.x_stride, maxima, block_amax);
        if (NEEDS_BLOCK_AMAX) thread_scale = scale_of_row(block_amax, 0, 1);
    } else if constexpr (WHOLE_X) {
        read_x(a, a.x, a.m, s.stage_begin * BK, a.x_width, s.x, s.x_stride, x_scale);
    } else {
        wait_for_previous();
        if constexpr (WR > 1) fetch_x(a, s, s.stage_begin, (s.stage_end - s.stage_begin) * BK, thread(), THREADS);
        if (thread() < a.m) thread_scale = load_fresh(a.x_scale + thread());
    }
#pragma unroll
    for (int i = 0; !WHOLE_X && i < STAGES - 1; i++) {
        if (i >= REQUESTED_FIRST && is_left(ahead, s)) fetch_codes(a, s, ahead, ring + i * STAGE), step(a, ahead, s);
        if (is_left(next, s)) fetch_columns(a, s, next), step(a, next, s);
        end_of_stage();
    }
    if (WHOLE_X) next = ahead;
    if constexpr (!WHOLE_X && WR > 1) wait_for_stage<0>();
    if constexpr (!WARP_READS_X && (WHOLE_X || WR > 1 || ZEROS > 0)) sync_block();
    if (WHOLE_X) let_next_start();  // only now: the next kernel's weights would be loaded before this kernel's x
    Lane l = {lane / 4, lane % 4, lane / 4, 0};
#pragma unroll
    for (int j = 0; j < NT; j++) l.columns[j] = (8 * j + l.g < a.m ? 8 * j + l.g : 0) * s.x_stride + l.t * 16;
    RowScales row_scales;
    row_scales_of(row_scales, l, maxima, a.m);
    u32 slot = 0;
    for (u32 round = s.begin; round < s.end; round += a.round) {
        u32 count = s.end - round < a.round ? s.end - round : a.round;
        for (u32 tile = s.row_of_warps; tile < count; tile += WR) {
            Partial sums = {};
            Columns x = columns_of(l, s, a.m, zeros);
            for (u32 stage = s.stage_begin + s.place; stage < s.stage_end; stage += WK) {
                wait_for_stage<STAGES - 2>();
                sync_warp();
                if (is_left(next, s)) {
                    fetch_codes(a, s, next, ring + (slot == 0 ? STAGES - 1 : slot - 1) * STAGE);
                    fetch_columns(a, s, next);
                    step(a, next, s);
                }
                end_of_stage();
                multiply_columns(sums, l, ring + slot * STAGE, x);
                slot = slot + 1 == STAGES ? 0 : slot + 1;
            }
            store_sums(slots + (tile * WK + s.place) * a.m * SLOT, sums, row_scales, l, a.m);
        }
        // not before: this would wait for the loads
        if (HAS_SCALES && thread() < a.m) x_scale[thread()] = thread_scale;
        if (thread() < WEIGHTS) globals[thread()] = global_scale;
        write_tiles(a, round, count, slots, x_scale, globals);
    }
    wait_for_stage<0>();
}

// The wgmma kernel: y (M, N) = x (M, K) w (N, K)^T by the warpgroup instruction of sm_90, which runs while the warps
// decode the next codes.
//
// A block computes 16 WR rows of w times COLS rows of x, over its share of the columns, a chunk of 128 at a time, in WK
// groups of warps. Each group has a part of the columns and its own tiles of x. Each thread loads the codes of its two
// rows from global memory to registers, AHEAD chunks ahead, and decodes them, with their scales, to its part of the
// left operand. x is in tiles with the layout that the instruction reads; for each group one thread of four additional
// warps has the copy engine load them, STAGES tiles at a time.
//
// With DIRECT no kernel converts x: it is bfloat16, the copy engine makes the tiles from its rows (x_tiles.cuh), and
// codes are decoded to bfloat16 (bfloat16_words.cuh).
//
// If K is not a multiple of 128, codes after the last column are zeros (chunks.cuh), and x is zero there too.

constexpr int ROUND = STAGES / 2;  // chunks until the ring of tiles repeats
constexpr int ALL_THREADS = THREADS + 128;  // with the four loading warps
constexpr bool CHECKED = SCALE == E8M0 || DIRECT && HAS_SPECIALS;  // whether multiply_any_scales may be needed
static_assert(STAGES % 2 == 0 && ROUND % AHEAD == 0, "the ring index of tiles and chunks is a constant in the loop");
static_assert(WK <= 4, "four loading warps, one per group");
static_assert(MT == 1 && WR % 4 == 0 && SLABS == 4, "four warps have 64 rows of w and one chunk");

struct Tiles {  // tiles of x of this group's columns
    u32 first, count;  // chunks; each has two tiles
    u8* ring;
    u64 *full, *empty;  // barriers, STAGES of each
};

struct Scales {  // of both rows of a chunk
    u32 bytes[2][SCALE_WORDS];  // minus the least of their window
    u32 of_words[2][2];  // what the words of each piece are multiplied by, unless DIRECT
};

// Decodes piece H of both rows to four fragments.
template <int H>
DEVICE void decode_both(u32 (&a)[16], Chunk& chunk, const Scales& scales, u32 t, u32& largest) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if constexpr (DIRECT) decode_bfloat16<H>(a, r, chunk.codes[r], scales.bytes[r], t, largest);
        else decode_piece<SCALED>(a, r, chunk.codes[r] + H * (BITS / 2), scales.of_words[r][H]);
    }
}

// Loads all tiles of this group, each after the tile before it in the ring has been read. One thread.
DEVICE void fetch_tiles(const Arguments& a, const Tiles& tiles) {
    for (u32 i = 0; i < 2 * tiles.count; i++) {
        u32 slot = i % STAGES, round = i / STAGES;
        if (round > 0) wait_at(tiles.empty + slot, round - 1);
        expect_bytes(tiles.full + slot, TILE);
        copy_tile(tiles.ring + slot * TILE, a, 2 * tiles.first + i, tiles.full + slot);
    }
}

struct Work {  // the state of a warp that multiplies
    Chunk ring[AHEAD];
    u32 a[2][16], windows[2], seen, round;
    u32 largest;  // DIRECT: of the magnitudes of codes, if some are special
    u64 descriptor;
    BarrierAddress barriers;
};

DEVICE void clear(Total& sums) {
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[j][e] = 0;
}

// Multiplies the four fragments of piece H by its columns in tiles SLOT and SLOT + 1 of a round. Then the fragments
// before, and the tiles that only they had to read, are free.
template <int SLOT, int H> DEVICE void multiply_piece(Total& sums, Work& work, const Tiles& tiles) {
    if (H == 0 || !BOTH_TILES) wait_at<SLOT + H>(work.barriers, work.round);
    if (H == 0 && BOTH_TILES) wait_at<SLOT + 1>(work.barriers, work.round);
    begin_wgmma(work.a[H]);
#pragma unroll
    for (int j = 0; j < 4; j++)
        multiply_warpgroup<DIRECT>(
            sums, work.a[H] + 4 * j, work.descriptor + descriptor_step(SLOT * TILE + place_of_step(H, j)));
    commit_wgmma();
    wait_for_wgmma<1>();
    constexpr int before = STAGES + (SLOT + STAGES - 1) % STAGES;  // the barrier of the second tile before
    if (H == 0 && (SLOT > 0 || work.round > 0)) {
        if (BOTH_TILES) arrive_at<before - 1>(work.barriers);
        arrive_at<before>(work.barriers);
    }
    if (H == 1 && !BOTH_TILES) arrive_at<STAGES + SLOT>(work.barriers);
}

// Multiplies chunk INDEX of a round and the chunks after it.
template <int INDEX> DEVICE void multiply_round(Total& sums, Work& work, ThreadRows& mine, const Tiles& tiles) {
    u32 index = work.round * ROUND + INDEX;
    if (index >= tiles.count) return;
    bool more = index + AHEAD < tiles.count;
    Chunk& chunk = work.ring[INDEX % AHEAD];
    Scales scales = {};
#pragma unroll
    for (int r = 0; SCALED && r < 2; r++) scales_of(scales.bytes[r], chunk, mine, r);
    if (is_short<INDEX>(mine)) replace_missing<INDEX>(chunk, scales.bytes, mine);
#pragma unroll
    for (int r = 0; SCALED && r < 2; r++) {
        if (SCALE == E8M0) scales.bytes[r][0] -= work.windows[r], work.seen |= scales.bytes[r][0];
        if constexpr (!DIRECT) word_scales(scales.of_words[r], scales.bytes[r][0], mine.t);
    }
    decode_both<0>(work.a[0], chunk, scales, mine.t, work.largest);
    if (more) load_codes<INDEX + AHEAD, 0>(chunk, mine), load_scales<INDEX + AHEAD>(chunk, mine);
    multiply_piece<2 * INDEX, 0>(sums, work, tiles);
    decode_both<1>(work.a[1], chunk, scales, mine.t, work.largest);
    if (more) load_codes<INDEX + AHEAD, 1>(chunk, mine);
    multiply_piece<2 * INDEX, 1>(sums, work, tiles);
    if constexpr (INDEX + 1 < ROUND) multiply_round<INDEX + 1>(sums, work, mine, tiles);
}

template <int INDEX> DEVICE void load_first(Work& work, ThreadRows& mine, const Tiles& tiles) {
    if (INDEX >= tiles.count) return;
    load_codes<INDEX, 0>(work.ring[INDEX], mine), load_codes<INDEX, 1>(work.ring[INDEX], mine);
    load_scales<INDEX>(work.ring[INDEX], mine);
    if constexpr (INDEX + 1 < AHEAD) load_first<INDEX + 1>(work, mine, tiles);
}

// Sums all chunks, the first of which are being loaded. Returns whether all scales were inside their windows and no
// code was special.
DEVICE bool multiply_all(Total& sums, Work& work, ThreadRows& mine, const Tiles& tiles) {
    work.seen = work.largest = 0, work.descriptor = matrix_descriptor(tiles.ring), work.barriers = barrier_address(tiles.full);
    clear(sums);
#pragma unroll
    for (int r = 0; SCALE == E8M0 && r < 2; r++) {
        u32 first[2][SCALE_WORDS];
        scales_of(first[r], work.ring[0], mine, r);
        if (is_short<0>(mine)) replace_missing<0>(work.ring[0], first, mine);
        work.windows[r] = window_around(first[r][0]);
    }
    work.round = 0;
    do {  // there is at least one: in a loop with none ptxas would serialize the wgmma instructions
        multiply_round<0>(sums, work, mine, tiles);
#pragma unroll
        for (int r = 0; r < 2; r++)
            mine.codes[r] += ROUND * CODES_PER_CHUNK, mine.scales[r] += ROUND * SCALES_PER_CHUNK;
        if (TAIL) mine.left -= ROUND * CHUNK;
    } while (++work.round * ROUND < tiles.count);
    wait_for_wgmma<0>();
    fence_sums(sums);
    if constexpr (SCALE == E8M0 && !DIRECT)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[j][e] *= power_of(work.windows[e / 2]);
    return (SCALE != E8M0 || (work.seen & OUTSIDE) == 0) && !(DIRECT && has_special(work.largest));
}

// ---------------------------------------------------------------------------------------------- any scales

// Multiplies piece H of a chunk by its columns once for each scale block, with the words of the other blocks zero. Each
// warp uses mma instructions: with more wgmma instructions here, ptxas would serialize those above.
template <int H> DEVICE void multiply_blocks(Total& sums, Chunk& chunk, const ThreadRows& m, const u8* tiles) {
    constexpr u32 blocks = BITS == 8 || DIRECT && BITS == 4 ? 2 : 4;
    u32 words[16], a[16], g = thread() % 32 / 4, mine = BITS == 8 ? m.t / 2 : m.t;
    const u8* lines[8];  // of the first row of x; eight rows further are 1024 bytes
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 place = place_of_step(H, i / 2), piece = place % 128 / 16 + i % 2;
        lines[i] = tiles + place / 128 * 128 + g * 128 + (piece ^ g) * 16 + 4 * m.t;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if constexpr (DIRECT) decode_any_bfloat16<H>(words, r, chunk.codes[r], m.t);
        else decode_piece<false>(words, r, chunk.codes[r] + H * (BITS / 2), 0);
    }
#pragma unroll 1
    for (u32 block = 0; block < blocks; block++) {
        float scale[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            scale[r] = 1;
            if constexpr (SCALE == E8M0)
                scale[r] = power_of_scale(scale_of_block(m.scales[r], m, (blocks == 2 ? 2 * H : 0) + int(block)));
        }
        // DIRECT: all threads have the same columns in a step, else a thread has all columns of a block
        auto inside = [&](int i) { return block == (DIRECT ? i * blocks / 16 : mine); };
#pragma unroll
        for (int i = 0; i < 16; i++) a[i] = inside(i) ? words[i] : 0;
#pragma unroll
        for (int j = 0; j < NT; j++) {
            float partial[4] = {};
#pragma unroll
            for (int i = 0; i < 4; i++) {  // x is zero elsewhere too, because it may be infinite
                u32 low = *reinterpret_cast<const u32*>(lines[2 * i] + 1024 * j);
                u32 high = *reinterpret_cast<const u32*>(lines[2 * i + 1] + 1024 * j);
                low = inside(4 * i) ? low : 0, high = inside(4 * i) ? high : 0;
                if constexpr (DIRECT) multiply_add_bfloat16(partial, a + 4 * i, low, high, partial);
                else multiply_add(partial, a + 4 * i, low, high, partial);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) sums[j][e] += scale[e / 2] * partial[e];
        }
    }
}

// The same sums for scales of any size and all codes; ``arrived``: a barrier for the two tiles of a chunk, ``first``:
// the group's first chunk.
DEVICE void multiply_any_scales(
    const Arguments& a, const Weight& w, Total& sums, const Tiles& tiles, u64* arrived, u32 group, u32 first) {
    ThreadRows mine = rows_of_thread(a, w, first);
    clear(sums);
    for (u32 i = 0; i < tiles.count; i++) {
        Chunk chunk;
        ThreadRows here = mine;
        u32 unused[2][SCALE_WORDS] = {};
        load_codes<0, 0>(chunk, here), load_codes<0, 1>(chunk, here);
        if (is_short<0>(mine)) replace_missing<0>(chunk, unused, mine);
        sync_some(group, GROUP_THREADS);  // the tiles are not read any more
        if (thread() % GROUP_THREADS == 0) {
            expect_bytes(arrived, 2 * TILE);
#pragma unroll
            for (u32 h = 0; h < 2; h++) copy_tile(tiles.ring + h * TILE, a, 2 * (first + i) + h, arrived);
        }
        wait_at(arrived, i);
        multiply_blocks<0>(sums, chunk, mine, tiles.ring);
        multiply_blocks<1>(sums, chunk, mine, tiles.ring);
#pragma unroll
        for (int r = 0; r < 2; r++) mine.codes[r] += CODES_PER_CHUNK, mine.scales[r] += SCALES_PER_CHUNK;
        if (TAIL) mine.left -= CHUNK;
    }
    sync_block();
}

// ---------------------------------------------------------------------------------------------- the kernel

DEVICE void sync_all() {  // and announce to the blocks of the cluster that the barriers exist
    if constexpr (REDUCE_DSMEM) arrive_in_cluster();
    sync_block();
}

// The barriers of tiles, one more per group for multiply_any_scales, and one for sums.
DEVICE void begin_barriers(u64* barriers) {
    if (thread() == 0)
        for (int i = 0; i < BARRIERS; i++) {
            bool of_tiles = i < TILE_BARRIERS, empty = i / STAGES % 2;
            begin_barrier(barriers + i, of_tiles && empty ? WR : 1);
        }
    publish_barriers();
}

KERNEL void BOUNDS(ALL_THREADS, BLOCKS) wgmma(const GRID_CONSTANT Arguments a) {
    let_next_start();
    u8* shared = shared_memory();
    u64* barriers = reinterpret_cast<u64*>(shared + RING);
    // the group that the warp multiplies or loads for
    u32 warp = warp_of_block(), group = warp < WR * WK ? warp / WR : (warp - WR * WK) % WK;
    u32 chunks = (a.k + CHUNK - 1) / CHUNK, share = block_z() * WK + group;
    u32 first = share * chunks / (SPLIT * WK), end = (share + 1) * chunks / (SPLIT * WK);
    u64* of_tiles = barriers + group * (2 * STAGES);
    Tiles tiles = {first, end - first, shared + group * (STAGES * TILE), of_tiles, of_tiles + STAGES};
    if (warp >= WR * WK) {
        if constexpr (REGISTERS_COMPUTE > REGISTERS_AT_START) give_registers<REGISTERS_LOAD>();
        sync_all();
        bool fetches = warp < WR * WK + WK && thread() % 32 == 0;
        if (fetches) prefetch_tiles(a);
        wait_for_previous();
        if (fetches) fetch_tiles(a, tiles);
        sync_warp();
        if constexpr (REDUCE_DSMEM) wait_for_cluster();
        return;
    }
    if constexpr (REGISTERS_COMPUTE > REGISTERS_AT_START) take_registers<REGISTERS_COMPUTE>();
    const Weight& w = a.weights[weight_of(a, block_x())];
    ThreadRows mine = rows_of_thread(a, w, first);
    Work work;
    load_first<0>(work, mine, tiles);  // weights do not depend on the previous kernel
    float* x_scale = reinterpret_cast<float*>(barriers + BARRIERS);
    float global_scale = thread() == 0 ? global_scale_of(w) : 0;  // load in flight
    begin_barriers(barriers);
    sync_all();
    wait_for_previous();
    for (u32 i = thread(), row = block_y() * COLS; i < COLS && !DIRECT; i += THREADS)
        x_scale[i] = row + i < a.m ? load_fresh(a.x_scale + row + i) : 0;
    if (thread() == 0) x_scale[COLS] = global_scale;
    Total sums;
    bool right = multiply_all(sums, work, mine, tiles);
    if constexpr (!CHECKED) sync_block();
    else if (any_of_block(!right))
        multiply_any_scales(a, w, sums, tiles, barriers + TILE_BARRIERS + group, group, first);
    if constexpr (WK > 1) add_groups(sums, reinterpret_cast<float*>(shared + SUM_BYTES), group);
    if (REDUCE_GLOBAL && !reduce_through_global(a, sums)) return;
    float* sums_at = reinterpret_cast<float*>(shared);
    if constexpr (REDUCE_DSMEM) write_result_through_dsmem(a, w, sums, x_scale, sums_at, barriers + TILE_BARRIERS + WK);
    else write_result(a, w, sums, x_scale, sums_at);
}

// The wgmma_fp8 kernel: the product of wgmma.cu with activations that were cast to E4M3 under a power of two for each
// row (activations_fp8.cu), by the warpgroup instruction for E4M3, at twice the rate of float16.
//
// The codes of w are moved under the largest scale of their row in this block's share of the columns, which each warp
// finds while the kernel before still runs. The sums of a chunk, 128 columns, are added in float32: inside the
// instruction sums have 13 bits behind the leading one.
//
// If a block of a row is too far below the largest, or a row of x is marked as beyond the bound, the block of threads
// computes its sums again block by block in float16, each under its own scales.

struct Work {  // the state of a warp that multiplies
    Chunk ring[AHEAD];
    u32 a[2][16], tops[2], round;
    u64 descriptor;
    BarrierAddress barriers;
};

// ---------------------------------------------------------------------------------------------- the largest scales

struct Extent {  // of the scales of a row
    u32 top, at, low;  // the largest, the last block that has it, and 255 minus the least that is not zero
    u32 zero;  // whether a zero is among them
};
DEVICE void take(Extent& e, u32 scale, u32 block) {
    if (scale >= e.top) e.top = scale, e.at = block;
    if (scale > 0) e.low = larger(e.low, 255 - scale);
    else e.zero = 1;
}

// The scales of a row from this group's first column on, seen by four threads.
DEVICE Extent extent_of(const u8* scales, u32 blocks, u32 t) {
    Extent e = {0, 0, 0, 0};
    if constexpr (TAIL) {
#pragma unroll 4
        for (u32 i = t; i < blocks; i += 4) take(e, scales[i], i);
    } else {
#pragma unroll 4
        for (u32 i = t; i < blocks / 4; i += 4) {
            u32 four = load_scale<4, 0>(scales + 4 * i);
#pragma unroll
            for (int j = 0; j < 4; j++) take(e, four >> 8 * j & 255, 4 * i + j);
        }
    }
    u32 key = largest(e.top << 20 | e.at, 4);
    return {key >> 20, key & 0xFFFFF, largest(e.low, 4), largest(e.zero, 4)};
}

// Whether a code of a block is not zero, by four threads.
DEVICE bool has_codes(const u8* codes, u32 t) {
    constexpr u32 bytes = 4 * BITS;
    u32 seen = 0;
    for (u32 i = t; i < bytes; i += 4) seen |= codes[i] & (BITS == 8 ? 0x7F : BITS == 4 ? 0x77 : 0xFF);
    return largest(seen, 4) > 0;
}

// Finds the largest scale of both rows; returns whether a block is too far below it to be moved.
DEVICE bool find_tops(u32 (&tops)[2], const ThreadRows& mine, u32 chunks) {
    bool far = false;
    u32 blocks = 4 * chunks;
    if (TAIL && int(blocks * 32) > mine.left) blocks = (mine.left + 31) / 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const u8 *scales = mine.scales[r] - place_of_scales(mine.t), *codes = mine.codes[r] - column_of(mine.t) * BITS / 8;
        Extent e = extent_of(scales, blocks, mine.t);
        u32 low = e.low > 0 ? 255 - e.low : e.top;
        tops[r] = e.top;
        far |= e.top - low > OCTAVES_BELOW;
        // a block of zeros has a scale that says nothing: as the largest one, and as a zero
        bool differ = e.top > low || (e.zero && e.top > 0);
        bool live = has_codes(codes + u64(differ ? e.at : 0) * (4 * BITS), mine.t);
        far |= BITS == 8 && differ && !live;
        bool suspect = e.zero && e.top > OCTAVES_BELOW;
        if (any_of_warp(suspect))
            for (u32 i = 0; i < blocks; i++) {
                bool found = has_codes(codes + u64(i) * (4 * BITS), mine.t);
                far |= suspect && found && scales[i] == 0;
            }
    }
    return far;
}

// ---------------------------------------------------------------------------------------------- loading warps

// Asks for chunk ``index`` of all rows of this block of threads, so that it is in the L2 cache when it is loaded: the
// registers hold too few chunks to hide the time of memory. One warp.
DEVICE void ask_for_chunk(const Arguments& a, const Weight& w, u32 first, u32 index, u32 count) {
    if (index >= count) return;
    const u8* codes = w.codes + u64(first + index) * CODES_PER_CHUNK;
    for (u32 i = thread() % 32, row = (block_x() - w.first) * ROWS; i < ROWS; i += 32)
        if (row + i < w.n) prefetch(codes + u64(row + i) * a.codes_stride);
}

// Loads all tiles of this group, each after the tile before it in the ring has been read. One warp.
DEVICE void load_tiles(const Tiles& tiles, const Arguments& a, const Weight& w, u32 first) {
    for (u32 i = 0; i < tiles.count; i++) {
        u32 slot = i % STAGES, round = i / STAGES;
        if (round > 0) wait_at(tiles.empty + slot, round - 1);
        if (thread() % 32 == 0) fetch(tiles.ring + slot * TILE, tiles.x + u64(i) * TILE, TILE, tiles.full + slot);
        ask_for_chunk(a, w, first, i + AHEAD + STAGES, tiles.count);
    }
}

// ---------------------------------------------------------------------------------------------- under one scale

// Moves the codes of a chunk to four fragments.
DEVICE void move_chunk(u32 (&a)[16], const Chunk& chunk, const u32 (&tops)[2], u32 t) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        u32 factors[2];
        factors_of(factors, chunk.scales[r], tops[r], t);
        Table table = table_of(factors[0]);
#pragma unroll
        for (int h = 0; h < 2; h++) move_piece(a + 8 * h, r, chunk.codes[r] + h * (BITS / 2), factors[h], table);
    }
}

// Adds the sums of the chunk in tile SLOT when they are complete. Then the tile and its fragments are free.
template <int SLOT> DEVICE void add_chunk(Total& sums, Total& part, const Work& work) {
    wait_for_wgmma<0>();
    fence_sums(part);
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[j][e] += part[j][e];
    if (SLOT < STAGES - 1 || work.round > 0) arrive_at<STAGES + SLOT>(work.barriers);
}

// Begins to multiply the fragments of a chunk by tile SLOT.
template <int SLOT> DEVICE void multiply_chunk(Total& part, Work& work) {
    wait_at<SLOT>(work.barriers, work.round);
    fence_sums(part);
    begin_wgmma(work.a[SLOT % 2]);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u64 x = work.descriptor + descriptor_step(SLOT * TILE + 32 * j);
        if (j == 0) multiply_warpgroup_first(part, work.a[SLOT % 2], x);
        else multiply_warpgroup(part, work.a[SLOT % 2] + 4 * j, x);
    }
    commit_wgmma();
}

// Multiplies chunk INDEX of a round and the chunks after it. While a chunk is multiplied, the next one is moved. Returns
// whether there may be another round: if the loop went on after a part of a round, fragments would be written that are
// being multiplied, as far as ptxas knows, and it would serialize the instructions.
template <int INDEX>
DEVICE bool multiply_round(Total& sums, Total& part, Work& work, const ThreadRows& mine, const Tiles& tiles) {
    u32 index = work.round * ROUND + INDEX;
    if (index >= tiles.count) return false;
    Chunk& chunk = work.ring[INDEX % AHEAD];
    move_chunk(work.a[INDEX % 2], chunk, work.tops, mine.t);
    if (index + AHEAD < tiles.count) {
        load_codes<INDEX + AHEAD, 0>(chunk, mine), load_codes<INDEX + AHEAD, 1>(chunk, mine);
        load_scales<INDEX + AHEAD>(chunk, mine);
    }
    add_chunk<(INDEX + STAGES - 1) % STAGES>(sums, part, work);
    multiply_chunk<INDEX>(part, work);
    if constexpr (INDEX + 1 < ROUND) return multiply_round<INDEX + 1>(sums, part, work, mine, tiles);
    return true;
}

template <int INDEX> DEVICE void load_first(Work& work, const ThreadRows& mine, const Tiles& tiles) {
    if (INDEX >= tiles.count) return;
    load_codes<INDEX, 0>(work.ring[INDEX], mine), load_codes<INDEX, 1>(work.ring[INDEX], mine);
    load_scales<INDEX>(work.ring[INDEX], mine);
    if constexpr (INDEX + 1 < AHEAD) load_first<INDEX + 1>(work, mine, tiles);
}

// Sums all chunks, the first of which are being loaded.
DEVICE void multiply_all(Total& sums, Work& work, ThreadRows mine, const Tiles& tiles) {
    Total part;
    work.descriptor = matrix_descriptor(tiles.ring), work.barriers = barrier_address(tiles.full);
    clear(sums), clear(part);
    work.round = 0;
    while (multiply_round<0>(sums, part, work, mine, tiles)) {
        work.round++;
#pragma unroll
        for (int r = 0; r < 2; r++)
            mine.codes[r] += ROUND * CODES_PER_CHUNK, mine.scales[r] += ROUND * SCALES_PER_CHUNK;
        if (TAIL) mine.left -= ROUND * CHUNK;
    }
    wait_for_wgmma<0>();
    fence_sums(part);
    float scale[2] = {power_of_scale(work.tops[0]), power_of_scale(work.tops[1])};
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[j][e] = (sums[j][e] + part[j][e]) * scale[e / 2];
}

// ---------------------------------------------------------------------------------------------- block by block

struct Marked {  // rows of x beyond the bound: their scale is -1, and their blocks have scales
    const float* scale;  // of the rows of this block of threads
    const u8* scales;
    u32 stride, first;  // scales of a row; the first block of 32 columns of this group
};
DEVICE float scale_of_marked(const Marked& m, u32 col, u32 block) {
    if (!(m.scale[col] < 0)) return 1;
    return power_of_scale(load_fresh(m.scales + u64(col) * m.stride + m.first + block));
}

// Multiplies piece H of a chunk by its tile once for each scale block, in float16, with the words of the other blocks
// zero. ``first``: the chunk's first block of 32 columns.
template <int H>
DEVICE void multiply_blocks(
    Total& sums, const Chunk& chunk, const ThreadRows& rows, const u8* tile, const Marked& marked, u32 first) {
    constexpr u32 blocks = BITS == 8 ? 2 : 4;
    u32 words[8], g = thread() % 32 / 4, mine = BITS == 8 ? rows.t / 2 : rows.t, one = factor_of(0, 0);
    Table table = table_of(one);
#pragma unroll
    for (int r = 0; r < 2; r++) move_piece(words, r, chunk.codes[r] + H * (BITS / 2), one, table);
#pragma unroll 1
    for (u32 block = 0; block < blocks; block++) {
        u32 number = (BITS == 8 ? 2 * H : 0) + block;
        float scale[2];
#pragma unroll
        for (int r = 0; r < 2; r++)
            scale[r] = power_of_scale(scale_of_block<0>(rows.scales[r], rows, int(number)));
        bool here = block == mine;  // x is zero elsewhere too, because it may be NaN
#pragma unroll
        for (u32 j = 0; j < NT; j++) {
            float partial[4] = {};
#pragma unroll
            for (u32 i = 0; i < 4; i++) {  // two fragments, two words of each row
                u32 x = *reinterpret_cast<const u32*>(tile + (8 * j + g) * 128 + ((4 * H + i) ^ g) * 16 + 4 * rows.t);
                u32 low, high, a[4], at = i / 2 * 4 + i % 2 * 2;
                halves_of_e4m3(a[0], a[2], here ? words[at] : 0);
                halves_of_e4m3(a[1], a[3], here ? words[at + 1] : 0);
                halves_of_e4m3(low, high, here ? x : 0);
                multiply_add(partial, a, low, high, partial);
            }
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                float of_x = scale_of_marked(marked, 8 * j + 2 * rows.t + e % 2, first + number);
                sums[j][e] += scale[e / 2] * partial[e] * of_x;
            }
        }
    }
}

// The same sums for scales of any size; ``arrived``: a barrier for the tile of a chunk.
DEVICE void multiply_any_scales(
    Total& sums, ThreadRows rows, const Tiles& tiles, u64* arrived, u32 group, const Marked& marked) {
    clear(sums);
    for (u32 i = 0; i < tiles.count; i++) {
        Chunk chunk;
        load_codes<0, 0>(chunk, rows), load_codes<0, 1>(chunk, rows);
        sync_some(group, GROUP_THREADS);  // the tile is not read any more
        if (thread() % GROUP_THREADS == 0) fetch(tiles.ring, tiles.x + u64(i) * TILE, TILE, arrived);
        wait_at(arrived, i);
        multiply_blocks<0>(sums, chunk, rows, tiles.ring, marked, 4 * i);
        multiply_blocks<1>(sums, chunk, rows, tiles.ring, marked, 4 * i);
#pragma unroll
        for (int r = 0; r < 2; r++) rows.codes[r] += CODES_PER_CHUNK, rows.scales[r] += SCALES_PER_CHUNK;
        if (TAIL) rows.left -= CHUNK;
    }
    sync_block();
}

// ---------------------------------------------------------------------------------------------- the kernel

KERNEL void BOUNDS(ALL_THREADS, BLOCKS) wgmma_fp8(const Arguments a) {
    let_next_start();
    u8* shared = shared_memory();
    u64* barriers = reinterpret_cast<u64*>(shared + RING);
    // the group that the warp multiplies or loads for
    u32 warp = warp_of_block(), group = warp < WR * WK ? warp / WR : (warp - WR * WK) % WK;
    u32 chunks = (a.k + CHUNK - 1) / CHUNK, share = block_z() * WK + group;
    u32 first = share * chunks / (SPLIT * WK), end = (share + 1) * chunks / (SPLIT * WK);
    const u8* x = reinterpret_cast<const u8*>(a.x) + (u64(block_y()) * chunks + first) * TILE;
    u64* of_tiles = barriers + group * (2 * STAGES);
    Tiles tiles = {x, end - first, shared + group * (STAGES * TILE), of_tiles, of_tiles + STAGES};
    if (warp >= WR * WK) {
        if constexpr (REGISTERS_COMPUTE > REGISTERS_AT_START) give_registers<LEAST_REGISTERS>();
        const Weight& w = a.weights[weight_of(a, block_x())];
        bool loads = warp < WR * WK + WK;
        for (u32 i = AHEAD; loads && i < AHEAD + STAGES; i++) ask_for_chunk(a, w, first, i, tiles.count);
        sync_all();
        wait_for_previous();
        if (loads) load_tiles(tiles, a, w, first);
        sync_warp();
        if constexpr (REDUCE_DSMEM) wait_for_cluster();
        return;
    }
    if constexpr (REGISTERS_COMPUTE > REGISTERS_AT_START) take_registers<REGISTERS_COMPUTE>();
    const Weight& w = a.weights[weight_of(a, block_x())];
    ThreadRows mine = rows_of_thread(a, w, first);
    Work work;
    load_first<0>(work, mine, tiles);  // weights do not depend on the previous kernel
    bool again = find_tops(work.tops, mine, tiles.count);
    float* x_scale = reinterpret_cast<float*>(barriers + BARRIERS);
    begin_barriers(barriers);
    sync_all();
    wait_for_previous();
    for (u32 i = thread(), row = block_y() * COLS; i < COLS; i += THREADS) {
        x_scale[i] = row + i < a.m ? load_fresh(a.x_scale + row + i) : 0;
        again |= x_scale[i] < 0;
    }
    if (thread() == 0) x_scale[COLS] = global_scale_of(w);
    Total sums;
    multiply_all(sums, work, mine, tiles);
    if (any_of_block(again)) {
        u32 stride = chunks * 4;
        const u8* scales = reinterpret_cast<const u8*>(a.x_scale + a.m) + u64(block_y()) * COLS * stride;
        multiply_any_scales(sums, mine, tiles, barriers + TILE_BARRIERS + group, group, {x_scale, scales, stride, 4 * first});
    }
    if constexpr (WK > 1) add_groups(sums, reinterpret_cast<float*>(shared + SUM_BYTES), group);
    if (REDUCE_GLOBAL && !reduce_through_global(a, sums)) return;
    float* sums_at = reinterpret_cast<float*>(shared);
    if constexpr (REDUCE_DSMEM) write_result_through_dsmem(a, w, sums, x_scale, sums_at, barriers + TILE_BARRIERS + WK);
    else write_result(a, w, sums, x_scale, sums_at);
}

// y (M, N) = x (M, K) w (N, K)^T by the matrix instructions of sm_90 that four warps issue together, beside which they
// decode what comes next.
//
// A block makes 16 WR rows of w times COLS rows of x, along its share of the columns, 128 at a time, a chunk. Each
// thread brings the codes of its two rows from memory into registers by itself, AHEAD chunks of them under way, and makes
// of them its part of the left factor, scales included. Of x there are tiles laid out as the instruction reads them: by
// ``tiles``, from which bulk copies bring them, STAGES at a time; or with WHOLE_X by this kernel itself, all that it needs
// before it begins. What blocks that share the columns have summed comes together within their cluster, or with APART,
// where they are none, in memory, by the block that is last.

constexpr int CHUNK = 128, CODES_A_CHUNK = 16 * BITS;  // columns of w at a time; bytes of a row of them
constexpr int TILE = COLS * 128;                      // bytes of x for half a chunk
constexpr int SUMS_APART = ROWS + 4;                  // float32, from one row of x to the next: free of conflicts
constexpr int RING = STAGES * TILE > 4 * COLS * SUMS_APART ? STAGES * TILE : 4 * COLS * SUMS_APART;  // bytes
constexpr int BARRIERS = 2 * STAGES;                  // for tiles that come and that have been read
constexpr int UNDER_WAY = STAGES - 2;                 // tiles: warps may be a tile apart and do not wait for each other
constexpr int ROUND = STAGES / 2;                     // chunks until tiles lie where others lay
static_assert(STAGES % 2 == 0 && ROUND % AHEAD == 0, "places of tiles and chunks are known in the loop");
static_assert(MT == 1 && WK == 1 && WR % 4 == 0, "four warps have 64 rows of w");

using Total = float[NT][4];
struct Mine {  // where this thread reads its two rows from, in this round
    const u8 *codes[2], *scales[2];
    u32 t;
};
struct Chunk {  // 32 codes of each row, BITS words, and what scales them
    u32 codes[2][BITS], scales[2];
};
struct Tiles {  // of x, and the part of them that this block multiplies
    const u8* x;
    u32 count;  // of chunks; there are two tiles for each
    u8* ring;
    u64 *full, *empty;
};

// From chunk ``first`` on. Of rows after the last one nobody writes the results.
DEVICE Mine rows_of_thread(const Arguments& a, u32 first) {
    u32 lane = thread() % 32;
    Mine mine = {{}, {}, lane % 4};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        u32 row = block_x() * ROWS + thread() / 32 * 16 + lane / 4 + 8 * r;
        row = row < a.n ? row : a.n - 1;
        mine.codes[r] = a.codes + u64(row) * a.codes_stride + first * CODES_A_CHUNK + column_of(0, mine.t) * BITS / 8;
        mine.scales[r] = a.scales + u64(row_of_scales(row)) * a.scales_stride + first * SCALES_A_CHUNK + place_of_scales(mine.t);
    }
    return mine;
}

// Piece H of both rows of chunk INDEX of a round; where codes have fewer than 8 bits, both pieces with the second.
template <int INDEX, int H> DEVICE void load_codes(Chunk& chunk, const Mine& mine) {
    if constexpr (BITS != 8 && H == 0) return;
    constexpr int at = INDEX * CODES_A_CHUNK + (BITS == 8 ? 64 * H : 0);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if constexpr (BITS == 6) {
            load_once<8, at>(chunk.codes[r], mine.codes[r]);
            load_once<8, at + 8>(chunk.codes[r] + 2, mine.codes[r]);
            load_once<8, at + 16>(chunk.codes[r] + 4, mine.codes[r]);
        } else {
            load_once<16, at>(chunk.codes[r] + (BITS == 8 ? 4 * H : 0), mine.codes[r]);
        }
    }
}
template <int INDEX> DEVICE void load_scales(Chunk& chunk, const Mine& mine) {
    if constexpr (SCALE_BYTES > 0)
#pragma unroll
        for (int r = 0; r < 2; r++)
            chunk.scales[r] = load_scale<SCALE_BYTES, INDEX * SCALES_A_CHUNK>(mine.scales[r]);
}

// Piece H of both rows as four fragments.
template <int H, bool CAREFUL>
DEVICE void decode_both(u32 (&a)[16], const Chunk& chunk, const u32 (&scales)[2], u32 t, Seen& seen) {
#pragma unroll
    for (int r = 0; r < 2; r++)
        decode_piece<CAREFUL>(a, r, chunk.codes[r] + H * (BITS / 2), scale_of_piece(scales[r], H, t), seen);
}

// Tile ``index`` of this block's, by one thread, once the one that lay there has been read.
DEVICE void fetch_tile(const Tiles& tiles, u32 index, int slot, u32 round) {
    if (index >= STAGES) wait_at(tiles.empty + slot, round - 1);
    expect_bytes(tiles.full + slot, TILE);
    copy_whole(tiles.ring + slot * TILE, tiles.x + u64(index) * TILE, TILE, tiles.full + slot);
}

struct Work {  // of a warp: what it holds, and which round it is
    Chunk ring[AHEAD];
    u32 a[2][16], round;
    Seen seen;
    u64 place;
};

// Four fragments times tile SLOT of a round; then the tile before, whose fragments are free as well, makes room.
template <int SLOT> DEVICE void multiply_tile(Total& sums, const Work& work, const Tiles& tiles) {
    constexpr int later = SLOT + UNDER_WAY;
    if constexpr (!WHOLE_X) wait_at(tiles.full + SLOT, work.round);
    begin_products();
#pragma unroll
    for (int j = 0; j < 4; j++)
        multiply_group(sums, work.a[SLOT % 2] + 4 * j, work.place + step_of(SLOT * TILE + 32 * j));
    end_products();
    wait_for_products<1>();
    if constexpr (WHOLE_X) return;
    if (SLOT > 0 || work.round > 0) arrive_at(tiles.empty + (SLOT + STAGES - 1) % STAGES);
    u32 next = work.round * STAGES + later;
    if (thread() == 0 && next < 2 * tiles.count)
        fetch_tile(tiles, next, later % STAGES, work.round + later / STAGES);
}

// Chunk INDEX of a round and those after it.
template <int INDEX, bool CAREFUL> DEVICE void multiply_round(Total& sums, Work& work, const Mine& mine, const Tiles& tiles) {
    u32 index = work.round * ROUND + INDEX;
    if (index >= tiles.count) return;
    bool more = index + AHEAD < tiles.count;
    Chunk& chunk = work.ring[INDEX % AHEAD];
    u32 scales[2] = {chunk.scales[0], chunk.scales[1]};
    if constexpr (SCALE_BYTES > 0 && !CAREFUL) work.seen.scales |= shown_by(scales[0]) | shown_by(scales[1]);
    decode_both<0, CAREFUL>(work.a[0], chunk, scales, mine.t, work.seen);
    if (more) load_codes<INDEX + AHEAD, 0>(chunk, mine);
    multiply_tile<2 * INDEX>(sums, work, tiles);
    decode_both<1, CAREFUL>(work.a[1], chunk, scales, mine.t, work.seen);
    if (more) load_codes<INDEX + AHEAD, 1>(chunk, mine), load_scales<INDEX + AHEAD>(chunk, mine);
    multiply_tile<2 * INDEX + 1>(sums, work, tiles);
    if constexpr (INDEX + 1 < ROUND) multiply_round<INDEX + 1, CAREFUL>(sums, work, mine, tiles);
}

template <int INDEX> DEVICE void load_first(Work& work, const Mine& mine, const Tiles& tiles) {
    if (INDEX >= tiles.count) return;
    load_codes<INDEX, 0>(work.ring[INDEX], mine), load_codes<INDEX, 1>(work.ring[INDEX], mine);
    load_scales<INDEX>(work.ring[INDEX], mine);
    if constexpr (INDEX + 1 < AHEAD) load_first<INDEX + 1>(work, mine, tiles);
}

// The sums of this block's chunks, of which the first are under way; whether it takes care to get them right.
template <bool CAREFUL> DEVICE bool multiply_chunks(Total& sums, Work& work, Mine mine, const Tiles& tiles) {
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[j][e] = 0;
    work.seen = {0, 0}, work.place = place_of(tiles.ring);
    if (!WHOLE_X && thread() == 0)
        for (int i = 0; i < UNDER_WAY && i < 2 * tiles.count; i++) fetch_tile(tiles, i, i, 0);
    for (work.round = 0; work.round * ROUND < tiles.count; work.round++) {
        multiply_round<0, CAREFUL>(sums, work, mine, tiles);
        if constexpr (WHOLE_X) work.place += step_of(STAGES * TILE);
#pragma unroll
        for (int r = 0; r < 2; r++) mine.codes[r] += ROUND * CODES_A_CHUNK, mine.scales[r] += ROUND * SCALES_A_CHUNK;
    }
    wait_for_products<0>();
    settle(sums);
    return any_of_block(is_special(work.seen));
}

// APART: leave what this block has summed, for the last of those that share its tile, which adds up all in their order.
// Whether it is that block.
DEVICE bool is_last_and_adds(const Arguments& a, Total& sums) {
    u32 tile = block_y() * blocks_x() + block_x(), apart = NT * THREADS * 4;
    float* part = a.parts + u64(tile * SPLIT + block_z()) * apart + thread() * 4;
#pragma unroll
    for (int j = 0; j < NT; j++) store_four(part + j * THREADS * 4, sums[j]);
    if (!is_last_of(a.counters + tile, SPLIT)) return false;
    part = a.parts + u64(tile * SPLIT) * apart + thread() * 4;
#pragma unroll
    for (int j = 0; j < NT; j++) load_four(sums[j], part + j * THREADS * 4);
    for (int r = 1; r < SPLIT; r++) {
#pragma unroll
        for (int j = 0; j < NT; j++) {
            float more[4];
            load_four(more, part + r * apart + j * THREADS * 4);
#pragma unroll
            for (int e = 0; e < 4; e++) sums[j][e] += more[e];
        }
    }
    return true;
}

// What the blocks of a cluster have summed, in that order, with what belongs at the end.
DEVICE void write(const Arguments& a, const Total& sums, float* shared) {
    constexpr int blocks = APART ? 1 : SPLIT;
    u32 lane = thread() % 32, first = thread() / 32 * 16 + lane / 4, x_row = block_y() * COLS;
    u32 rows = a.m - x_row < COLS ? a.m - x_row : COLS;
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            shared[(8 * j + 2 * (lane % 4) + e % 2) * SUMS_APART + first + e / 2 * 8] = sums[j][e];
    if constexpr (blocks > 1) sync_cluster();
    else sync_block();
    u32 count = ROWS / 4 * rows, span = (count + blocks - 1) / blocks, begin = blocks > 1 ? block_z() * span : 0;
    u32 end = begin + span < count ? begin + span : count;
    float factor = factor_of_all<ELEMENT == INT8 ? -6 : DOWN>(a);
#pragma unroll 2
    for (u32 i = begin + thread(); i < end; i += THREADS) {  // four rows of w at a time
        u32 row = i % (ROWS / 4) * 4, col = i / (ROWS / 4), n = block_x() * ROWS + row;
        float sum[4] = {}, scale = WHOLE_X ? 1.0f : a.x_scale[x_row + col];
#pragma unroll
        for (u32 r = 0; r < blocks; r++) add_four_of_block(sum, shared + col * SUMS_APART + row, r);
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (n + e < a.n) finish(a, a.scales, x_row + col, n + e, sum[e] * scale, factor);
    }
    if constexpr (blocks > 1) sync_cluster();  // nobody leaves while others read
}

// The tiles' barriers, twice: once more for careful blocks.
DEVICE void begin_barriers(u64* barriers) {
    if (thread() == 0)
        for (int i = 0; i < 2 * BARRIERS; i++) begin_barrier(barriers + i, i / STAGES % 2 ? WR : 1);
    show_barriers();
}

// All tiles of this block's chunks, by itself.
DEVICE void write_tiles(const Arguments& a, u32 first, u32 count, u8* to) {
    u32 x_row = block_y() * COLS, rows = a.m - x_row < COLS ? a.m - x_row : COLS, across = count * (CHUNK / 8);
    Rows r = {a.x + u64(x_row) * a.x_stride + first * CHUNK, a.x_stride, count * CHUNK, rows, 0, count * CHUNK};
#pragma unroll 2
    for (u32 i = thread(); i < (rows * across + 31) / 32 * 32; i += THREADS)  // whole warps, which cast together
        write_turn(to, r, i, load_turn(r, i), 0);
    show_to_products();
}

KERNEL void BOUNDS(THREADS, BLOCKS) together(const Arguments a) {
    let_next_start();
    u8* shared = shared_memory();
    u64* barriers = reinterpret_cast<u64*>(shared + RING);
    u32 chunks = a.k / CHUNK, first = block_z() * chunks / SPLIT, last = (block_z() + 1) * chunks / SPLIT;
    const u8* x = reinterpret_cast<const u8*>(a.x) + (u64(block_y()) * chunks + first) * (2 * TILE);
    Tiles tiles = {x, last - first, shared, barriers, barriers + STAGES};
    Mine mine = rows_of_thread(a, first);
    Work work;
    load_first<0>(work, mine, tiles);  // weights do not wait for the kernel before this one
    if constexpr (WHOLE_X) {
        wait_for_previous();
        write_tiles(a, first, tiles.count, shared);
        sync_block();
    } else {
        begin_barriers(barriers);
        sync_block();
        wait_for_previous();
    }
    Total sums;
    if (multiply_chunks<false>(sums, work, mine, tiles)) {
        load_first<0>(work, mine, tiles);
        tiles.full += BARRIERS, tiles.empty += BARRIERS;
        multiply_chunks<true>(sums, work, mine, tiles);
        constexpr float down = SCALE == E8M0 ? 1.0f / (1 << DOWN) : 1.0f;
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[j][e] *= down;
    }
    if (APART && !is_last_and_adds(a, sums)) return;
    write(a, sums, reinterpret_cast<float*>(shared));
}

// What the kernels with the warpgroup instruction share: where a thread reads its rows of w, the ring of codes in its
// registers, and the ring of tiles of x that additional warps have the copy engine load.
//
// A block computes 16 WR rows of w times COLS rows of x, over its share of the columns, a chunk of 128 at a time, in WK
// groups of warps. Each group has a part of the columns and its own tiles of x. Each thread loads the codes of its two
// rows from global memory to registers, AHEAD chunks ahead. x is in tiles with the layout that the instruction reads:
// 128 bytes of each row, which are TILES_PER_CHUNK to a chunk.
//
// If K is no multiple of 128 (TAIL), codes after the last column are zeros and no memory is read for them, x is zero
// there too, and a missing scale repeats the first one of its chunk.

constexpr int CHUNK = 128, CODES_PER_CHUNK = 16 * BITS;  // columns of w at a time; bytes of a row's codes in them
constexpr int TILES_PER_CHUNK = FLOAT8 ? 1 : 2;
constexpr int ROUND = STAGES / TILES_PER_CHUNK;  // chunks until the ring of tiles repeats
constexpr int ALL_THREADS = THREADS + 128;  // with the four loading warps
constexpr bool SCALED = SCALE_BYTES > 0;  // whether words are multiplied by scales
constexpr bool TAIL = !WHOLE_TILES;  // whether the last chunk may be short, or scales are not aligned
constexpr int SCALE_COLUMNS = SCALED ? CHUNK / SCALES_PER_CHUNK : CHUNK;  // columns that share a scale
static_assert(STAGES % 2 == 0 && ROUND % AHEAD == 0, "the ring index of tiles and chunks is a constant in the loop");
static_assert(WK <= 4, "four loading warps, one per group");
static_assert(MT == 1 && WR % 4 == 0 && SLABS == 4, "four warps have 64 rows of w and one chunk");

struct ThreadRows {  // where this thread reads its two rows of w
    const u8 *codes[2], *scales[2];
    u32 t;
    int left;  // TAIL: columns from here to the end of the row
};
struct Chunk {  // 32 codes of each row, BITS words, and their scales
    u32 codes[2][BITS], scales[2];
};
struct Tiles {  // tiles of x of this group's columns
    const u8* x;
    u32 count;  // chunks
    u8* ring;
    u64 *full, *empty;  // barriers, STAGES of each
};

// The rows of this thread from chunk ``first`` on. Rows after the last one repeat it; their results are not written.
DEVICE ThreadRows rows_of_thread(const Arguments& a, const Weight& w, u32 first) {
    u32 lane = thread() % 32;
    ThreadRows mine = {{}, {}, lane % 4, int(a.k) - int(first * CHUNK)};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        u32 row = (block_x() - w.first) * ROWS + thread() / 32 % WR * 16 + lane / 4 + 8 * r;
        row = row < w.n ? row : w.n - 1;
        u64 scales = u64(row_of_scales(row)) * a.scales_stride + first * SCALES_PER_CHUNK + place_of_scales(mine.t);
        mine.codes[r] = w.codes + u64(row) * a.codes_stride + first * CODES_PER_CHUNK + column_of(mine.t) * BITS / 8;
        mine.scales[r] = w.scales + scales;
    }
    return mine;
}

// Loads piece H of both rows of the INDEX-th chunk from here. Codes of fewer than 8 bits load both pieces with the
// second.
template <int INDEX, int H> DEVICE void load_codes(Chunk& chunk, const ThreadRows& mine) {
    if constexpr (BITS != 8 && H == 0) return;
    if (TAIL && INDEX * CHUNK + (BITS == 8 ? 64 * H : 0) + int(column_of(mine.t)) >= mine.left) {
#pragma unroll
        for (int i = 0; i < 2 * BITS; i++)
            if (BITS != 8 || i % BITS / 4 == H) chunk.codes[i / BITS][i % BITS] = 0;
        return;
    }
    constexpr int at = INDEX * CODES_PER_CHUNK + (BITS == 8 ? 64 * H : 0);
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
// The scale of block ``block`` of the INDEX-th chunk from here.
template <int INDEX> DEVICE u32 scale_of_block(const u8* scales, const ThreadRows& mine, int block) {
    bool inside = INDEX * CHUNK + block * SCALE_COLUMNS < mine.left;
    return *(scales - place_of_scales(mine.t) + INDEX * SCALES_PER_CHUNK + (TAIL && !inside ? 0 : block));
}
template <int INDEX> DEVICE void load_scales(Chunk& chunk, const ThreadRows& mine) {
    if constexpr (TAIL && SCALED) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            chunk.scales[r] = 0;
#pragma unroll
            for (int i = 0; i < SCALE_BYTES; i++) {
                u32 scale = scale_of_block<INDEX>(mine.scales[r], mine, int(place_of_scales(mine.t)) + i);
                chunk.scales[r] |= scale << 8 * i;
            }
        }
    } else if constexpr (SCALE_BYTES > 0)
#pragma unroll
        for (int r = 0; r < 2; r++)
            chunk.scales[r] = load_scale<SCALE_BYTES, INDEX * SCALES_PER_CHUNK>(mine.scales[r]);
}

DEVICE void fetch(u8* to, const u8* from, u32 bytes, u64* barrier) {
    expect_bytes(barrier, bytes);
    copy_bulk(to, from, bytes, barrier);
}

// Loads all tiles of this group, each after the tile before it in the ring has been read. One thread.
DEVICE void fetch_tiles(const Tiles& tiles) {
    for (u32 i = 0; i < TILES_PER_CHUNK * tiles.count; i++) {
        u32 slot = i % STAGES, round = i / STAGES;
        if (round > 0) wait_at(tiles.empty + slot, round - 1);
        fetch(tiles.ring + slot * TILE, tiles.x + u64(i) * TILE, TILE, tiles.full + slot);
    }
}

DEVICE void clear(Total& sums) {
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[j][e] = 0;
}

DEVICE void sync_all() {  // and announce to the blocks of the cluster that the barriers exist
    if constexpr (REDUCE_DSMEM) arrive_in_cluster();
    sync_block();
}

// The barriers of tiles, one more per group for multiply_any_scales, and one for sums.
DEVICE void begin_barriers(u64* barriers) {
    if (thread() == 0)
        for (int i = 0; i < BARRIERS; i++) begin_barrier(barriers + i, i < TILE_BARRIERS && i / STAGES % 2 ? WR : 1);
    publish_barriers();
}

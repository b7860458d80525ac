// Tiles of x for the wgmma kernel: 64 of each 128 columns of COLS rows, where the matrix instruction reads them.
//
// One thread has the copy engine load tiles that another kernel has written. With DIRECT the loading warps read x as it
// is and arrange it: the words of a piece belong to four threads, which decode the codes of those columns.

constexpr int CHUNK = 128, CODES_PER_CHUNK = 16 * BITS;  // columns of w at a time; bytes of a row's codes in them

struct Tiles {  // tiles of x of a group's columns
    const u8* x;
    u32 count;  // chunks; each has two tiles
    u8* ring;
    u64 *full, *empty;  // barriers, STAGES of each
    u32 first;  // chunk
};

DEVICE void fetch(u8* to, const u8* from, u32 bytes, u64* barrier) {
    expect_bytes(barrier, bytes);
    copy_bulk(to, from, bytes, barrier);
}

// Loads all tiles of this group, each after the tile before it in the ring has been read. One thread.
DEVICE void fetch_tiles(const Tiles& tiles) {
    for (u32 i = 0; i < 2 * tiles.count; i++) {
        u32 slot = i % STAGES, round = i / STAGES;
        if (round > 0) wait_at(tiles.empty + slot, round - 1);
        fetch(tiles.ring + slot * TILE, tiles.x + u64(i) * TILE, TILE, tiles.full + slot);
    }
}

// ---------------------------------------------------------------------------------------------- DIRECT

constexpr int LOADERS = 4 / WK;  // loading warps of a group
constexpr int BATCH = common(2 * NT, 8), BATCHES = 2 * NT / BATCH;  // a warp loads 4 BATCH rows of a tile at a time
using Pieces = u32[BATCH][4];

// Where a lane loads eight columns: of the four threads that share pieces, and which of two pieces.
DEVICE u32 lane_in_row() { return thread() % 8; }

// Loads batch ``batch`` of tile ``index``: eight columns of BATCH rows, four rows apart. Zeros where x has none.
DEVICE void load_pieces(Pieces& pieces, const Arguments& a, const Tiles& tiles, u32 index, u32 batch) {
    u32 t = lane_in_row() / 2, second = lane_in_row() % 2, half = index % 2;
    u32 column = (tiles.first + index / 2) * CHUNK + column_of(t) + (BITS == 8 ? 64 : 16) * half + 8 * second;
    u32 row = block_y() * COLS + batch * (4 * BATCH) + thread() % 32 / 8;
    const u16* from = a.x + u64(row) * a.x_stride + column;
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        uint4 loaded = {0, 0, 0, 0};
        if (row + 4 * i < a.m && column < a.k)
            loaded = load_fresh(reinterpret_cast<const uint4*>(from + u64(4 * i) * a.x_stride));
        pieces[i][0] = loaded.x, pieces[i][1] = loaded.y, pieces[i][2] = loaded.z, pieces[i][3] = loaded.w;
    }
}

// Puts eight values in the order of decoded codes.
DEVICE void in_code_order(u32 (&words)[4]) {
    if constexpr (BITS == 8) return;
    u32 w0 = words[0], w1 = words[1], w2 = words[2], w3 = words[3];
    if (BITS == 4 && !BRAIN) {  // 0 2 | 4 6 | 1 3 | 5 7
        words[0] = bytes_of(w0, w1, 0x5410), words[1] = bytes_of(w2, w3, 0x5410);
        words[2] = bytes_of(w0, w1, 0x7632), words[3] = bytes_of(w2, w3, 0x7632);
    } else {  // 0 4 | 1 5 | 2 6 | 3 7
        words[0] = bytes_of(w0, w2, 0x5410), words[1] = bytes_of(w0, w2, 0x7632);
        words[2] = bytes_of(w1, w3, 0x5410), words[3] = bytes_of(w1, w3, 0x7632);
    }
}

DEVICE void store_pieces(u8* tile, Pieces& pieces, u32 batch) {
    u32 t = lane_in_row() / 2, second = lane_in_row() % 2, row = batch * (4 * BATCH) + thread() % 32 / 8;
#pragma unroll
    for (int i = 0; i < BATCH; i++, row += 4) {
        in_code_order(pieces[i]);
        transpose_words<2>(pieces[i], t);
        store_words(tile + row * 128 + ((4 * second + t) ^ row % 8) * 16, pieces[i]);
    }
}

// Stores a batch in the ring: the first one of a tile after the tile before it has been read; the last one makes the
// tile full.
DEVICE void put_in_ring(const Tiles& tiles, Pieces& pieces, u32 index, u32 batch) {
    u32 slot = index % STAGES, round = index / STAGES;
    if (batch == 0 && round > 0) wait_at(tiles.empty + slot, round - 1);
    store_pieces(tiles.ring + slot * TILE, pieces, batch);
    if (batch + 1 < BATCHES) return;
    fence_for_copy_engine();  // the matrix instruction reads as the copy engine does
    sync_warp();
    arrive_at<0>(barrier_address(tiles.full + slot));
}

// Loads every LOADERS-th tile of this group. One warp; the next batch is being loaded while one is stored.
DEVICE void load_tiles(const Arguments& a, const Tiles& tiles, u32 loader) {
    Pieces here, next;
    u32 end = 2 * tiles.count, index = loader, batch = 0;
    auto advance = [&] {
        if (++batch == BATCHES) batch = 0, index += LOADERS;
        return index < end;
    };
    if (index < end) load_pieces(here, a, tiles, index, batch);
    while (index < end) {
        u32 at = index, part = batch;
        if (advance()) load_pieces(next, a, tiles, index, batch);
        put_in_ring(tiles, here, at, part);
        if (index >= end) return;
        at = index, part = batch;
        if (advance()) load_pieces(here, a, tiles, index, batch);
        put_in_ring(tiles, next, at, part);
    }
}

// Loads the two tiles of a chunk to the start of the ring, by all ``count`` warps of a group.
DEVICE void load_chunk(const Arguments& a, const Tiles& tiles, u32 chunk, u32 warp, u32 count) {
    Pieces pieces;
    for (u32 i = warp; i < 2 * BATCHES; i += count) {
        load_pieces(pieces, a, tiles, 2 * chunk + i / BATCHES, i % BATCHES);
        store_pieces(tiles.ring + i / BATCHES * TILE, pieces, i % BATCHES);
    }
}

// Tiles of x for the wgmma kernels that read bfloat16 activations as they are (DIRECT): loading warps copy them from
// the rows of x to shared memory, 16 bytes at a time, by asynchronous copies, and announce a tile when its copies have
// ended.

constexpr int LOADERS = WK > 2 ? 1 : WK == 2 ? 2 : 4;  // loading warps of each group
constexpr int ROWS_AT_A_TIME = 4 * LOADERS;  // rows that they copy at a time, eight threads a row
constexpr int PASSES = (COLS + ROWS_AT_A_TIME - 1) / ROWS_AT_A_TIME;
constexpr int IN_FLIGHT = STAGES / 2;  // tiles that are requested after one and before it is announced

struct RowsOfX {  // what this thread copies: a piece of 16 bytes of every ROWS_AT_A_TIME-th row
    const u8* x;  // in its first row
    u64 step;  // bytes to its next row
    u32 row;  // of the tile: its first
    int rows, left;  // of x: from its first row to the end; columns from its piece to the end of the row (TAIL)
};

// Columns from the first tile of the group to the INDEX-th one.
DEVICE u32 columns_before(u32 tile) { return BITS != 6 ? 64 * tile : tile / 2 * 128 + tile % 2 * 16; }
// The column of a piece in its tile. Tiles of 6-bit codes have every second sixteen columns of their chunk.
DEVICE u32 column_of_piece(u32 piece) { return BITS != 6 ? 8 * piece : piece / 2 * 32 + piece % 2 * 8; }

// What thread ``index`` of the loading warps of a group copies, from chunk ``first`` on.
DEVICE RowsOfX rows_of_x(const Arguments& a, u32 first, u32 index) {
    u32 row = index / 8, at = first * 128 + column_of_piece(index % 8), from = block_y() * COLS + row;
    const u8* x = reinterpret_cast<const u8*>(a.x + u64(from) * a.x_stride + at);
    return {x, u64(a.x_stride) * 2 * ROWS_AT_A_TIME, row, int(a.m) - int(from), int(a.k) - int(at)};
}
// Where it stores its first piece, in bytes from the start of a tile.
DEVICE u32 place_of_piece(u32 row, u32 piece) { return row * 128 + (piece ^ row % 8) * 16; }

// Requests tile ``tile`` of the group; ``to``: the place of this thread's first piece. Zeros stand for what x lacks.
DEVICE void request_tile(const RowsOfX& mine, u32 tile, u8* to) {
    u32 column = columns_before(tile);
    const u8* from = mine.x + 2 * column;
    bool inside = WHOLE_TILES || int(column) < mine.left;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        // rows that follow at a distance of four are swizzled differently
        u64 place = reinterpret_cast<u64>(to) ^ (ROWS_AT_A_TIME == 4 && pass % 2 ? 64 : 0);
        if (COLS % ROWS_AT_A_TIME == 0 || mine.row + pass * ROWS_AT_A_TIME < COLS)
            copy<16>(reinterpret_cast<u8*>(place) + pass * ROWS_AT_A_TIME * 128, from,
                     inside && pass * ROWS_AT_A_TIME < mine.rows);
        from += mine.step;
    }
    end_of_stage();
}

// Announces the tile after which LATER tiles were requested. All lanes of a loading warp call it.
template <int LATER> DEVICE void announce_tile(u64* full, u32 slot) {
    wait_for_stage<LATER>();
    fence_for_copy_engine();  // the matrix instruction reads as the copy engine does
    sync_warp();
    arrive_at<0>(barrier_address(full + slot));
}
// The same for the last tiles; LEFT of them are not announced, if there are so many.
template <int LEFT> DEVICE void announce_rest(u64* full, u32 count) {
    if constexpr (LEFT > 0) {
        if (count >= LEFT) announce_tile<LEFT - 1>(full, (count - LEFT) % STAGES);
        announce_rest<LEFT - 1>(full, count);
    }
}

// All ``count`` tiles of a group, by thread ``index`` of its loading warps.
DEVICE void load_tiles(const Arguments& a, u32 first, u8* ring, u64* full, u64* empty, u32 count, u32 index) {
    RowsOfX mine = rows_of_x(a, first, index);
    u8* to = ring + place_of_piece(mine.row, index % 8);
    u32 slot = 0, round = 0, ready = 0;
    for (u32 i = 0; i < count; i++) {
        if (round > 0) wait_at(empty + slot, round - 1);
        request_tile(mine, i, to + slot * TILE);
        if (i >= IN_FLIGHT) {
            announce_tile<IN_FLIGHT>(full, ready);
            if (++ready == STAGES) ready = 0;
        }
        if (++slot == STAGES) slot = 0, round++;
    }
    announce_rest<IN_FLIGHT>(full, count);
}

// Copies one tile by all threads of a group, which must wait for each other afterwards.
DEVICE void copy_tile(const Arguments& a, u32 first, u32 tile, u8* to) {
    u32 column = first * 128 + columns_before(tile);
    for (u32 i = thread() % GROUP_THREADS; i < COLS * 8; i += GROUP_THREADS) {
        u32 row = i / 8, at = column + column_of_piece(i % 8), from = block_y() * COLS + row;
        copy<16>(to + place_of_piece(row, i % 8), reinterpret_cast<const u8*>(a.x + u64(from) * a.x_stride + at),
                 from < a.m && (WHOLE_TILES || at < a.k));
    }
    end_of_stage();
    wait_for_stage<0>();
}

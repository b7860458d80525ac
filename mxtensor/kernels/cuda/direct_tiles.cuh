// Tiles of x for the wgmma kernels that read bfloat16 activations as they are (DIRECT): loading warps copy them from
// the rows of x to shared memory.
//
// A thread of wgmma multiplies two columns of each piece of 16 bytes (eight columns) of a tile, but it decodes sixteen
// consecutive codes. So the 8x8 values of each row of a tile, eight pieces of eight columns, are transposed on their
// way: piece g of the tile has column g of each piece of x, and word t of it the columns of two neighbouring pieces,
// which are codes g and g + 8 of the sixteen of thread t (bfloat16_words.cuh). A warp moves four rows at a time, a unit:
// one load of 16 bytes by each thread, and one instruction that stores transposed. The four rows are every second one of
// eight, so that the stores have no bank conflicts.

constexpr int UNITS = COLS / 4;  // of a tile
constexpr int LOADERS = WK > 2 ? 1 : WK == 2 || UNITS % 4 ? 2 : 4;  // loading warps of each group
constexpr int UNITS_PER_WARP = UNITS / LOADERS;
// tiles that a loading warp has in its registers
constexpr int IN_FLIGHT = UNITS_PER_WARP > 8 ? 1 : (11 + UNITS_PER_WARP) / UNITS_PER_WARP;

struct RowsOfX {  // what this thread loads
    const u8* x;  // row 0, from this thread's piece of the first tile on
    u32 stride;  // values
    u32 end_row;  // the final row of x; rows after it repeat it, and their results are not written
    int left;  // TAIL: columns from there to the end of the row
};

// Columns from the first tile of the group to the INDEX-th one.
DEVICE u32 columns_before(u32 tile) { return BITS == 8 ? 64 * tile : tile / 2 * 128 + tile % 2 * 16; }

// The rows of x that thread ``lane`` of a warp loads, from chunk ``first`` on.
DEVICE RowsOfX rows_of_x(const Arguments& a, u32 first, u32 lane) {
    u32 piece = lane / 4, at = first * 128 + (BITS == 8 ? 8 * piece : piece / 2 * 32 + piece % 2 * 8);
    return {reinterpret_cast<const u8*>(a.x + at), a.x_stride, a.m - 1, int(a.k) - int(at)};
}

// The row of a tile, ``which`` of four, of a unit.
DEVICE u32 row_of_unit(u32 unit, u32 which) { return unit / 2 * 8 + unit % 2 + 2 * which; }

// Where this thread stores one of its eight rows of 16 bytes of a unit, in bytes from the start of the tile.
DEVICE u32 place_of_unit(u32 unit, u32 lane) {
    u32 row = row_of_unit(unit, lane % 8 / 2);
    return row * 128 + ((lane / 8 * 2 + lane % 2) ^ row % 8) * 16;
}

// Loads 16 bytes of a row of x in tile ``tile`` of the group.
DEVICE void load_piece(u32 (&words)[4], const RowsOfX& mine, u32 row, u32 tile) {
    u32 column = columns_before(tile);
    uint4 loaded = {0, 0, 0, 0};
    row = row < mine.end_row ? row : mine.end_row;
    if (WHOLE_TILES || int(column) < mine.left)
        loaded = load_fresh(reinterpret_cast<const uint4*>(mine.x + 2 * column + u64(row) * mine.stride * 2));
    words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
}

// Copies a tile by ``warps`` warps, of which this one is number ``warp``.
DEVICE void copy_tile(const RowsOfX& mine, u32 tile, u8* to, u32 warp, u32 warps, u32 lane) {
    for (u32 unit = warp; unit < UNITS; unit += warps) {
        u32 words[4];
        load_piece(words, mine, block_y() * COLS + row_of_unit(unit, lane % 4), tile);
        store_transposed(shared_address(to) + place_of_unit(unit, lane), words);
    }
}

// A loading warp, number ``warp`` of LOADERS: all its units of all ``count`` tiles of the group, IN_FLIGHT tiles ahead.
// Each unit is requested again as soon as it has been stored.
DEVICE void load_tiles(const RowsOfX& mine, u8* ring, u64* full, u64* empty, u32 count, u32 warp, u32 lane) {
    u32 words[IN_FLIGHT][UNITS_PER_WARP][4], slot = 0, round = 0;
    u32 row = block_y() * COLS + row_of_unit(warp, lane % 4);
    SharedAddress even = shared_address(ring) + place_of_unit(warp, lane);
    SharedAddress odd = shared_address(ring) + place_of_unit(1, lane);  // of odd units, where one warp has all
    auto row_of = [&](int u) { return LOADERS > 1 ? row + 4 * LOADERS * u : row + u / 2 * 8 + u % 2; };
    auto place_of = [&](int u) {
        return LOADERS > 1 ? even + 512 * LOADERS * u : (u % 2 ? odd : even) + u / 2 * 1024;
    };
#pragma unroll
    for (int d = 0; d < IN_FLIGHT; d++)
#pragma unroll
        for (int u = 0; u < UNITS_PER_WARP; u++)
            if (d < count) load_piece(words[d][u], mine, row_of(u), d);
    for (u32 i = 0; i < count; i += IN_FLIGHT)
#pragma unroll
        for (int d = 0; d < IN_FLIGHT; d++) {
            if (i + d >= count) return;
            if (round > 0) wait_at(empty + slot, round - 1);
            row = volatile_copy(row);  // else the compiler would keep an address of each unit in registers
#pragma unroll
            for (int u = 0; u < UNITS_PER_WARP; u++) {
                store_transposed(place_of(u) + slot * TILE, words[d][u]);
                if (i + d + IN_FLIGHT < count) load_piece(words[d][u], mine, row_of(u), i + d + IN_FLIGHT);
            }
            fence_for_copy_engine();  // the matrix instruction reads as the copy engine does
            sync_warp();
            arrive_at<0>(barrier_address(full + slot));
            if (++slot == STAGES) slot = 0, round++;
        }
}

// Tiles of x for the wgmma kernel: 64 columns of COLS rows, 128 bytes a row, swizzled as the matrix instruction reads
// them. Two are a chunk of 128 columns. The copy engine copies each, for one thread.

// Asks for what copies need, ahead of the first one.
DEVICE void prefetch_tiles(const Arguments& a) {
#if DIRECT
    prefetch_map(a.x_map);
#endif
}

// Copies tile ``tile`` of all columns; ``barrier`` counts its bytes.
DEVICE void copy_tile(u8* to, const Arguments& a, u32 tile, u64* barrier) {
#if DIRECT  // from the rows of x, by a tensor map (small_m/launch.py); what x does not have is zero
    copy_box(to, a.x_map, int(64 * tile), int(block_y() * COLS), barrier);
#else  // as the kernel ``activations`` wrote them
    u64 tiles = (a.k + CHUNK - 1) / CHUNK * 2;
    copy_bulk(to, reinterpret_cast<const u8*>(a.x) + (block_y() * tiles + tile) * TILE, TILE, barrier);
#endif
}

// Where piece H of a chunk's codes finds its columns, sixteen in each of four steps: bytes from the chunk's first tile.
// Converted tiles have the columns of a piece in the order of the steps. DIRECT tiles have the columns of x in order;
// a piece of codes of 6 bits then has every second sixteen columns of both tiles.
constexpr bool BOTH_TILES = DIRECT && BITS == 6;
DEVICE constexpr u32 place_of_step(int H, int step) {
    return BOTH_TILES ? step / 2 * TILE + step % 2 * 64 + H * 32 : H * TILE + step * 32;
}

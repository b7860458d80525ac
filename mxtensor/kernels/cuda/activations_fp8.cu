// The kernel that prepares activations for wgmma_fp8.cu: casts them to an MX format, and moves the codes of each row
// under its largest scale, as E4M3. The result is that of triton_device/row_scaled.py, in tiles of TILE_ROWS rows and
// 128 columns, with each word at the address where the matrix instruction reads it. CAST_UP and CAST_OCTAVES are those of
// the element in mxtensor/numerics/row_scaled.py.
//
// The scale of a row is NaN if a block of it is, and -1 if the row is beyond the bound. Then its codes are those of the
// cast, and the scales of its blocks follow the scales of all rows: a byte for each 32 columns.

struct ActivationArguments {
    const u16* x;
    u8* out;
    float* scale;  // of each row, then the scales of blocks
    u32* counters;  // ``counted`` words to set to zero
    u32* unused;
    u32 k, width, x_stride, rows, counted, blocks;
    u32 blocks_per_row;  // blocks of threads that share a row
};

constexpr int FARTHEST = 63;  // row scales are 2^-63 to 2^63
constexpr float HALF_OF_LEAST = 1.0f / (1u << (1 + CAST_MANTISSA - CAST_EMIN));

struct RowFacts {  // of the blocks of a row that are not zero
    u32 top, low, nan;  // the largest scale byte plus 1, 300 minus the least one, and whether a block is not finite
};
DEVICE void note(RowFacts& facts, u32 amax) {  // a block of 32 values with this largest magnitude
    if (amax >= 0x7F800000) {
        facts.nan = 1;
        return;
    }
    int byte = scale_byte(amax);
    if (float_of_bits(amax) * power(127 - byte) > HALF_OF_LEAST)
        facts.top = larger(facts.top, u32(byte + 1)), facts.low = larger(facts.low, u32(300 - byte));
}

// Eight neighbouring values as codes of the cast, times 2^by.
DEVICE void codes_of(u32 (&words)[2], const Eight& values, u32 amax, int by) {
    float x[8], down = power(127 - scale_byte(amax)), up = power(by);
    values_of(x, values);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= down;
#pragma unroll
    for (int i = 0; i < 8; i += 2) round_two(x[i], x[i + 1]);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= up;
    in_order(x);
    words[0] = e4m3_of_floats(x[0], x[1], x[2], x[3]), words[1] = e4m3_of_floats(x[4], x[5], x[6], x[7]);
}

KERNEL void BOUNDS(512, 4) activations_fp8(const ActivationArguments a) {
    let_next_start();
    u32 row = block_x(), row_block = block_y(), block_columns = threads() * 8, in = thread() * 8,
        at = row_block * block_columns + in;
    u32* shared = reinterpret_cast<u32*>(shared_memory());
    Rows all = {a.x + u64(row) * a.x_stride, a.x_stride, a.k, 1, 0, a.width};
    if (thread() < 3) shared[thread()] = 0;
    sync_block();
    wait_for_previous();
    Eight values = load_eight(all, 0, at);
    u32 amax = largest(amax_of(values), 4);
    RowFacts facts = {0, 0, 0};
    note(facts, amax);
    for (u32 other = 1; other < a.blocks_per_row; other++) {
        u32 which = row_block + other < a.blocks_per_row ? row_block + other : row_block + other - a.blocks_per_row;
        note(facts, largest(amax_of(load_eight(all, 0, which * block_columns + in)), 4));
    }
    raise_by_warp(shared, facts.top), raise_by_warp(shared + 1, facts.low), raise_by_warp(shared + 2, facts.nan);
    sync_block();
    bool zero = shared[0] == 0, nan = shared[2] > 0;
    int top = int(shared[0]) - 1, low = 300 - int(shared[1]), least = 127 + CAST_UP - FARTHEST;
    top = top > least ? top : least;
    bool beyond = !zero && !nan && (top - low > CAST_OCTAVES || top - 127 - CAST_UP > FARTHEST);
    u32 words[2], byte = amax < 0x7F800000 ? scale_byte(amax) : 255;
    int by = beyond ? 0 : int(byte) - top + CAST_UP;
    codes_of(words, values, amax, by > -126 ? by : -126);
    if (at < a.width) {
        u32 second = at / 8 % 2, e = 2 * (BITS == 8 ? at % 128 / 64 : at % 32 / 16) + second;
        u8* to = a.out + u64(row / TILE_ROWS) * TILE_ROWS * a.width + u64(at / 128) * (TILE_ROWS * 128) +
                 row % TILE_ROWS * 128 + 4 * thread_of_four(at);
#pragma unroll
        for (u32 j = 0; j < 2; j++) *reinterpret_cast<u32*>(to + ((2 * e + j) ^ row % 8) * 16) = words[j];
        u8* scales = reinterpret_cast<u8*>(a.scale + a.rows) + u64(row) * (a.width / 32);
        if (beyond && at % 32 == 0) scales[at / 32] = byte;
    }
    if (row_block == 0 && thread() == 0)
        a.scale[row] = nan ? float_of_bits(0x7FFFFFFF) : beyond ? -1.0f : zero ? 1.0f : power(top - CAST_UP - 127);
    for (u32 i = block_x() * threads() + thread(); i < a.counted; i += blocks_x() * threads()) a.counters[i] = 0;
}

// Two kernels that convert activations before a product kernel: ``maxima`` finds the largest magnitude of each block's
// share; ``activations`` casts, scales and writes float16. See activations.cuh.

struct ActivationArguments {
    const u16* x;
    u16* out;  // (rows, width), where width is k rounded up to 256 or more; or tiles
    float* scale;  // scale of each row
    u32* counters;  // ``counted`` words to set to zero
    u32* maxima;  // one for each block of the kernel ``maxima``, if the cast needs the tensor's amax
    u32 k, width, x_stride, rows, counted, blocks;
    u32 blocks_per_row;  // blocks that share a row
};

DEVICE void raise_by_block(u32* shared, u32 value) {  // raises ``shared`` to the largest value of the block
    raise_by_warp(shared, value);
    sync_block();
}

// Raises ``shared``, which must be zero, to the largest magnitude of every ``step``-th eight values of all rows from
// ``first`` on. All threads of a block call it.
DEVICE void find_largest(u32* shared, const Rows& r, u32 first, u32 step) {
    u32 across = (r.k + 7) / 8, count = r.rows * across, amax = 0;
    float inverse = 1.0f / across;
#pragma unroll 8
    for (u32 i = first; i < count; i += step) {
        u32 row = quotient(i, across, inverse);
        amax = larger(amax, amax_of(load_eight(r, row, (i - row * across) * 8)));
    }
    raise_by_block(shared, amax);
}

// The largest magnitude of each block's share of the values.
KERNEL void BOUNDS(256, 1) maxima(const ActivationArguments a) {
    let_next_start();
    u32* shared = reinterpret_cast<u32*>(shared_memory());
    if (thread() == 0) *shared = 0;
    sync_block();
    wait_for_previous();
    find_largest(
        shared, {a.x, a.x_stride, a.k, a.rows, 0, a.k}, block_x() * threads() + thread(), blocks_x() * threads());
    if (thread() == 0) a.maxima[block_x()] = *shared;
}

// The largest of the blocks' maxima, or of all rows if that kernel did not run. All threads of a block call it;
// ``shared`` must be zero.
DEVICE u32 take_maxima(u32* shared, const ActivationArguments& a) {
    u32 amax = 0;
    for (u32 i = thread(); i < a.blocks; i += threads()) amax = larger(amax, load_fresh(a.maxima + i));
    if (a.blocks > 0) raise_by_block(shared, amax);
    else find_largest(shared, {a.x, a.x_stride, a.k, a.rows, 0, a.k}, thread(), threads());
    return *shared;
}
DEVICE void zero_counters(const ActivationArguments& a) {
    for (u32 i = block_x() * threads() + thread(); i < a.counted; i += blocks_x() * threads()) a.counters[i] = 0;
}

// Each thread writes eight columns; the blocks of one row each look at the whole row. Four blocks fit on a
// multiprocessor beside the previous kernel and start early: registers are few, so everything that needs no input is
// computed before the wait.
KERNEL void BOUNDS(512, 4) activations(const ActivationArguments a) {
    let_next_start();
    u32 row = block_x(), row_block = block_y(), block_columns = threads() * 8, in = thread() * 8,
        at = row_block * block_columns + in;
    u8* to = reinterpret_cast<u8*>(a.out) +
             (TILE_ROWS > 0 ? u64(row / TILE_ROWS) * TILE_ROWS : u64(row)) * a.width * 2;
    u32 place = TILE_ROWS > 0 ? place_in_tile(row % TILE_ROWS, at) : at * 2;
    u32 *shared = reinterpret_cast<u32*>(shared_memory()), amax = 0, words[4];
    Rows all = {a.x + u64(row) * a.x_stride, a.x_stride, a.k, 1, 0, a.width};
    if (thread() == 0) *shared = 0;
    sync_block();
    wait_for_previous();
    Eight values = load_eight(all, 0, at);
    u32 eight_amax = amax_of(values);
    if constexpr (CAST == TWO_LEVELS) {
        if (NEEDS_TENSOR_AMAX) amax = take_maxima(shared, a);
    } else {
        u32 most = eight_amax;
#pragma unroll 3
        for (u32 other = 1; other < a.blocks_per_row; other++) {
            u32 column = (row_block + other < a.blocks_per_row ? row_block + other : row_block + other - a.blocks_per_row) *
                             block_columns + in;
            most = larger(most, amax_of(load_eight(all, 0, column)));
        }
        raise_by_block(shared, most);
        amax = *shared;
    }
    words_of(words, values, eight_amax, amax, level_of(amax));
    if (TILE_ROWS > 0) in_pieces(words, at);
    if (at < a.width) store_words(to + place, words);
    if (row_block == 0 && thread() == 0) a.scale[row] = scale_of_row(&amax, 0, 1);
    zero_counters(a);
}

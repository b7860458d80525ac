// The kernels that prepare activations, which products wait for: see activations.cuh.

struct ActivationArguments {
    const u16* x;
    u16* out;       // (rows, width): k rounded up, to 256 at least; or tiles
    float* scale;   // of each row
    u32* counters;  // to be zeroed, so many
    u32* maxima;    // of each block of ``maxima``, where the cast wants the largest magnitude of the tensor
    u32 k, width, x_stride, rows, counted, blocks;
    u32 blocks_per_row;  // of a row, a block each
};

DEVICE void raise_by_block(u32* shared, u32 value) {  // to the largest of a block's
    raise_by_warp(shared, value);
    sync_block();
}

// The largest magnitude of every ``step``-th eight of all rows, from the ``first``, into zeroed ``shared``; all threads of a block.
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

// The largest magnitude of each block's share.
KERNEL void BOUNDS(256, 1) maxima(const ActivationArguments a) {
    let_next_start();
    u32* shared = reinterpret_cast<u32*>(shared_memory());
    if (thread() == 0) *shared = 0;
    sync_block();
    wait_for_previous();
    find_largest(shared, {a.x, a.x_stride, a.k, a.rows, 0, a.k}, block_x() * threads() + thread(), blocks_x() * threads());
    if (thread() == 0) a.maxima[block_x()] = *shared;
}

// The largest of those, or of all rows where nobody has looked; all threads of a block, which have zeroed ``shared``.
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

// Eight columns a thread, and as many blocks a row as that takes, each of which looks at all of it. Four of them find room
// where the kernel before has no block, and begin early: registers are few, and what is known then is worked out then.
KERNEL void BOUNDS(512, 4) activations(const ActivationArguments a) {
    let_next_start();
    u32 row = block_x(), row_block = block_y(), block_columns = threads() * 8, in = thread() * 8, at = row_block * block_columns + in;
    u8* to = reinterpret_cast<u8*>(a.out) + (TILE_ROWS > 0 ? u64(row / TILE_ROWS) * TILE_ROWS * a.k : u64(row) * a.width) * 2;
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
            u32 column = (row_block + other < a.blocks_per_row ? row_block + other : row_block + other - a.blocks_per_row) * block_columns + in;
            most = larger(most, amax_of(load_eight(all, 0, column)));
        }
        raise_by_block(shared, most);
        amax = *shared;
    }
    words_of(words, values, eight_amax, amax, level_of(amax));
    if (TILE_ROWS > 0) in_pieces(words, at);
    if (at < (TILE_ROWS > 0 ? a.k : a.width)) store_words(to + place, words);
    if (row_block == 0 && thread() == 0) a.scale[row] = scale_of_row(&amax, 0, 1);
    zero_counters(a);
}

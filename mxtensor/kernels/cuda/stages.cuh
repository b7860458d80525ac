// Stages: the arguments of a product kernel, what a block works on, and the copies of a stage to shared memory.

constexpr int THREADS = 32 * WR * WK;
// threads that copy a stage: a warp its own, or all threads of the block
constexpr int FETCHERS = PERSISTENT ? 32 : THREADS;
constexpr int ROWS = 16 * MT * (PERSISTENT ? 1 : WR), COLS = 8 * NT;
constexpr int BK = 32 * SLABS * (PERSISTENT ? 1 : WK);  // a warp multiplies SLABS slabs of a stage
constexpr int CODES = BK * BITS / 8;  // bytes of a row
constexpr int SCALES = SCALE == AT_THE_END ? 0 : SCALE == UE4M3 ? BK / 16 : BK / 32;  // bytes of a row and stage
constexpr int SCALES_STRIDE = PERSISTENT ? (SCALES + 3) / 4 * 4 : (SCALES + 15) / 16 * 16 + 16;
constexpr int X_STRIDE = 2 * BK + 64;
constexpr int X_BYTES = WHOLE_X || PERSISTENT ? 0 : COLS * X_STRIDE, SCALES_BYTES = SCALES ? ROWS * SCALES_STRIDE : 0;
constexpr int CODES_AT = X_BYTES, SCALES_AT = CODES_AT + ROWS * CODES;  // offsets in a stage
constexpr int STAGE = (SCALES_AT + SCALES_BYTES + 127) / 128 * 128;
constexpr int SUM_STRIDE = COLS + 2;  // float32 between columns of the sums that the warps of one row of warps add
constexpr int SUMS = 4 * WK * ROWS * SUM_STRIDE;  // bytes; they reuse the memory of the stages
constexpr int WHOLE_AT = STAGES * STAGE > SUMS ? STAGES * STAGE : SUMS;
constexpr int WHOLE_HEAD = 8 * COLS;  // before the rows of WHOLE_X: their scales and maxima
static_assert(!WHOLE_X || PERSISTENT || BK % 256 == 0, "a warp casts 256 columns at a time");

struct Weight {  // one w and its own arguments
    const u8* codes;
    const u8* scales;
    void* y;
    const float* global_scale;
    const void* bias;
    u32 n, first;  // rows; tiles (of ROWS) of the weights before it
    u32 bias_stride;  // stride between rows of y; 0: the same bias for all rows
};

struct Arguments {
#if DIRECT
    TensorMap x_map;  // of x
#endif
    Weight weights[WEIGHTS];  // each multiplies all rows of x; or
    const int* ends;  // one stack of w, a matrix for each group of rows of x, which ends at ends[group]; else null
    u64 codes_group, scales_group;  // bytes between the matrices of the stack
    const u16* x;
    const float* x_scale;  // of each row of x, if x is float16 from activations.cu
    const float* x_global_scale;
    float* partial_sums;  // REDUCE_GLOBAL: sums of all blocks, and
    u32* counters;  // how many blocks of each tile have stored theirs
    u32 codes_stride, scales_stride, x_stride;  // row strides: bytes, bytes, values
    u32 m, k;
    u32 groups;  // of rows of x, if there are ends
    u32 x_width, round;  // persistent: columns of x in a block, and tiles of w whose sums fit;
    u32 tiles, more;  // tiles of each block; the first ``more`` blocks have one more
    float alpha, beta;
};

// The weight of a tile; tiles are counted through all weights.
DEVICE u32 weight_of(const Arguments& a, u32 tile) {
    u32 found = 0;
#pragma unroll
    for (int i = 1; i < WEIGHTS; i++) found += tile >= a.weights[i].first;
    return found;
}

// ---------------------------------------------------------------------------------------------- what is fetched

struct BlockWork {  // the work of this block
    const u8* codes;
    const u8* scales;
    const u16* x;
    u32 row, rows;  // of w: the first, and their number
    u32 x_rows;  // of x, at most COLS
    u32 begin, end;  // stages along K
};

DEVICE u32 row_of_scales(u32 row) {
    if constexpr (BLOCK_ROWS == 0) return 0;  // one scale for the whole tensor
    else return row / BLOCK_ROWS;
}

DEVICE constexpr u32 common(u32 a, u32 b) { return b == 0 ? a : common(b, a % b); }

// Rows of codes have no padding, so that lines of 128 bytes are copied in one piece, which is faster. Instead their
// pieces of 16 bytes are swizzled: byte addresses in a row are xor'ed with this value, so that threads that read
// several rows at a time use different banks.
DEVICE u32 swizzle_of(u32 row) { return (row >> SWIZZLE_SHIFT & SWIZZLE_MASK) * (16 * SWIZZLE_PIECES); }

// Copies ``most`` rows of WIDTH bytes, COPY bytes at a time, of a matrix with ``stride`` bytes per row: rows from
// ``first`` on, bytes from ``begin`` on. Writes zeros past its last row (``rows``) and byte (``limit``), unless ALL
// says that everything exists. SHARED_ROWS rows of the copy are one row of the matrix. SWIZZLED: as codes are.
template <int WIDTH, int COPY, int STRIDE, int SHARED_ROWS, bool ALL, bool SWIZZLED = false>
DEVICE void fetch(
    u8* to, const u8* from, u32 first, u32 rows, u32 most, u64 stride, u32 begin, u32 limit, u32 fetcher) {
    constexpr u32 pieces = WIDTH / COPY, across = common(pieces, FETCHERS), down = FETCHERS / across;
    u32 row = fetcher / across, at = fetcher % across * COPY;
    to += row * STRIDE, from += begin + at;
    const u8* line = from + (first + row) * stride;
#pragma unroll 8
    for (u32 i = 0; i < most; i += down) {
        if constexpr (SHARED_ROWS != 1) line = from + row_of_scales(first + row + i) * stride;
#pragma unroll
        for (u32 j = 0; j < pieces / across; j++) {
            bool there = ALL || row + i < rows && begin + at + j * across * COPY < limit;
            u32 place = (at + j * across * COPY) ^ (SWIZZLED ? swizzle_of(row + i) : 0);
            if (most % down == 0 || row + i < most)
                copy<COPY>(to + i * STRIDE + place, line + j * across * COPY, there);
        }
        line += down * stride;
    }
}

// Copies codes and scales of a stage; ``fetcher`` is this thread's index among FETCHERS threads.
DEVICE void fetch_weights(const Arguments& a, const BlockWork& p, u8* stage, u32 index, u32 fetcher) {
    fetch<CODES, CODES_COPY, CODES, 1, WHOLE_TILES, true>(
        stage + CODES_AT, p.codes, p.row, p.rows, ROWS, a.codes_stride, index * CODES, a.codes_stride, fetcher);
    if constexpr (SCALES > 0)
        fetch<SCALES, SCALES_COPY, SCALES_STRIDE, BLOCK_ROWS, WHOLE_TILES>(
            stage + SCALES_AT, p.scales, p.row, p.rows, ROWS, a.scales_stride, index * SCALES, a.scales_stride,
            fetcher);
}

// Copies COLS rows even if x has fewer: the memory after x is readable, and those columns of the result are not used.
DEVICE void fetch_x(const Arguments& a, const BlockWork& p, u8* to, u32 index) {
    fetch<2 * BK, 16, X_STRIDE, 1, WHOLE_TILES>(
        to, reinterpret_cast<const u8*>(p.x), 0, COLS, COLS, 2 * a.x_stride, index * 2 * BK, 2 * a.x_stride, thread());
}

// Casts ``count`` columns of all rows from ``first`` on into shared memory. Writes the scale of each row, and after the
// scales their largest magnitudes.
DEVICE void read_x(const Arguments& a, const u16* x, u32 rows, u32 first, u32 count, u8* to, u32 stride, float* scale) {
    u32* maxima = reinterpret_cast<u32*>(scale + COLS);
    if (thread() < COLS) maxima[thread()] = 0;
    sync_block();
    wait_for_previous();
    Rows mine = {x, a.x_stride, a.k, rows, first, count};
    Rows all = {x, a.x_stride, a.k, rows, 0, (a.k + 255) / 256 * 256};
    if constexpr (CLASSES == 8) convert<true>(to, stride, mine, all, maxima);  // less code to load
    else if (rows == 1) convert<true>(to, stride, mine, all, maxima);
    else convert<false>(to, stride, mine, all, maxima);
    if (thread() < rows) scale[thread()] = scale_of_row(maxima, thread(), rows);
}

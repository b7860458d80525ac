// Reduction of a wgmma kernel: its shared memory, and how the sums of groups and blocks become results.
//
// Blocks that split K add their sums in one of three ways. In a cluster each block writes a part of x's rows: it reads
// the sums of the others, or with REDUCE_DSMEM they are sent to it by the copy engine. With REDUCE_GLOBAL there is no
// cluster: the blocks store their sums in global memory and the last one adds them.

constexpr int TILE = COLS * 128;  // bytes of a tile: x for half a chunk
constexpr int SUM_PITCH = ROWS + 4;  // float32 between rows of x; no bank conflicts
constexpr int GROUP_THREADS = 32 * WR;  // threads of one of the WK groups of warps along K
constexpr int SUM_BYTES = 4 * COLS * SUM_PITCH,
              ALL_SUM_BYTES = SUM_BYTES + (WK - 1) * NT * GROUP_THREADS * 16;  // with those of the other groups
constexpr int RING = WK * STAGES * TILE > ALL_SUM_BYTES ? WK * STAGES * TILE : ALL_SUM_BYTES;
constexpr int TILE_BARRIERS = 2 * STAGES * WK;  // barriers: tiles that are loaded and tiles that have been read,
constexpr int BARRIERS = TILE_BARRIERS + WK + 1;  // one more per group for multiply_any_scales, and one for sums
// rows of x that a block writes; float32 of their sums
constexpr int X_ROWS_PER_BLOCK = COLS / SPLIT, BLOCK_SUMS = X_ROWS_PER_BLOCK * SUM_PITCH;
// bytes to the sums received from other blocks
constexpr int RECEIVED_AT = (RING + 8 * BARRIERS + 4 * COLS + 4 + 15) / 16 * 16;

constexpr int SUM_EXPONENT = DIRECT ? LOWERED : ELEMENT_EXPONENT;  // sums are 2^-SUM_EXPONENT times their value

using Total = float[NT][4];

// Adds the sums of all groups in the first group; ``others``: shared memory for the sums of the other groups.
DEVICE void add_groups(Total& sums, float* others, u32 group) {
    float* mine = others + thread() % GROUP_THREADS * 4;
    if (group > 0)
#pragma unroll
        for (int j = 0; j < NT; j++) store_four(mine + ((group - 1) * NT + j) * (GROUP_THREADS * 4), sums[j]);
    sync_block();
    if (group > 0) return;
#pragma unroll
    for (int g = 1; g < WK; g++)
#pragma unroll
        for (int j = 0; j < NT; j++) {
            const float* from = mine + ((g - 1) * NT + j) * (GROUP_THREADS * 4);
#pragma unroll
            for (int e = 0; e < 4; e++) sums[j][e] += from[e];
        }
}
DEVICE bool has_sums() { return WK == 1 || thread() < GROUP_THREADS; }  // the first group

// REDUCE_GLOBAL: stores the sums of this block. The last block of a tile adds the sums of all in their order and
// returns true.
DEVICE bool reduce_through_global(const Arguments& a, Total& sums) {
    u32 tile = block_y() * blocks_x() + block_x(), block_floats = NT * GROUP_THREADS * 4;
    float* partial = a.partial_sums + u64(tile * SPLIT + block_z()) * block_floats + thread() * 4;
    if (has_sums())
#pragma unroll
        for (int j = 0; j < NT; j++) store_four(partial + j * GROUP_THREADS * 4, sums[j]);
    if (!is_final_block(a.counters + tile, SPLIT)) return false;
    if (!has_sums()) return true;
    partial = a.partial_sums + u64(tile * SPLIT) * block_floats + thread() * 4;
#pragma unroll
    for (int j = 0; j < NT; j++) load_four(sums[j], partial + j * GROUP_THREADS * 4);
    for (int r = 1; r < SPLIT; r++) {
#pragma unroll
        for (int j = 0; j < NT; j++) {
            float more[4];
            load_four(more, partial + r * block_floats + j * GROUP_THREADS * 4);
#pragma unroll
            for (int e = 0; e < 4; e++) sums[j][e] += more[e];
        }
    }
    return true;
}

// Stores the sums of this block, times the scales of its rows of x if they have some, in shared memory.
DEVICE void store_sums(const Total& sums, const float* x_scale, float* shared) {
    if (!has_sums()) return;
    u32 lane = thread() % 32, first = thread() / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            u32 col = 8 * j + 2 * (lane % 4) + e % 2;
            shared[col * SUM_PITCH + first + e / 2 * 8] = DIRECT ? sums[j][e] : sums[j][e] * x_scale[col];
        }
}

// Adds the sums of the blocks of a cluster, in their order, and writes results; ``x_scale``: scales of the block's rows
// of x, then the weight's global scale.
DEVICE void write_result(const Arguments& a, const Weight& w, const Total& sums, const float* x_scale, float* shared) {
    constexpr int blocks = REDUCE_GLOBAL ? 1 : SPLIT, batch = NT < 2 * blocks ? 1 : NT < 4 * blocks ? 2 : 4;
    u32 x_row = block_y() * COLS, rows = a.m - x_row < COLS ? a.m - x_row : COLS;
    u32 count = ROWS / 4 * rows, span = (count + blocks - 1) / blocks, begin = blocks > 1 ? block_z() * span : 0;
    u32 end = begin + span < count ? begin + span : count;
    store_sums(sums, x_scale, shared);
    u32 mine = (block_x() - w.first) * ROWS + (begin + thread()) % (ROWS / 4) * 4;  // rows of w, four, all the time
    float common[4];
    biases_at(common, w, 0, mine);
    if constexpr (blocks > 1) sync_cluster();
    else sync_block();
    float tensor_scale = tensor_scale_of<SUM_EXPONENT>(a, x_scale[COLS]);
    for (u32 i = begin + thread(); i < end; i += batch * THREADS) {  // four rows of w at a time
        float sum[batch][4] = {}, bias[batch][4];
#pragma unroll
        for (int b = 0; b < batch; b++) {
            u32 at = i + b * THREADS < end ? i + b * THREADS : i;
            biases_of(bias[b], w, x_row + at / (ROWS / 4), mine, common);
        }
#pragma unroll
        for (u32 r = 0; r < blocks; r++)
#pragma unroll
            for (int b = 0; b < batch; b++) {
                u32 at = i + b * THREADS < end ? i + b * THREADS : i;
                add_four_of_block(sum[b], shared + at / (ROWS / 4) * SUM_PITCH + at % (ROWS / 4) * 4, r);
            }
#pragma unroll
        for (int b = 0; b < batch; b++) {
            u32 at = i + b * THREADS;
            if (at < end) finish_four(a, w, x_row + at / (ROWS / 4), mine, sum[b], tensor_scale, bias[b]);
        }
    }
    if constexpr (blocks > 1) sync_cluster();  // no block may exit while others read its memory
}

// The same with REDUCE_DSMEM: the copy engine of each block copies its sums to the blocks that write them.
DEVICE void write_result_through_dsmem(
    const Arguments& a, const Weight& w, const Total& sums, const float* x_scale, float* shared, u64* arrived) {
    u32 rank = block_z(), x_row = block_y() * COLS + rank * X_ROWS_PER_BLOCK;
    u32 mine = (block_x() - w.first) * ROWS + thread() % (ROWS / 4) * 4;  // rows of w, four, all the time
    float* others = shared + RECEIVED_AT / 4;  // BLOCK_SUMS float32 of each, in their order
    store_sums(sums, x_scale, shared);
    fence_for_copy_engine();
    wait_for_cluster();  // until the barriers of the other blocks exist
    sync_block();
    if (thread() == 0) {
        expect_bytes(arrived, (SPLIT - 1) * BLOCK_SUMS * 4);
        for (u32 i = 1; i < SPLIT; i++) {
            u32 to = (rank + i) % SPLIT;
            copy_to_block(others + (rank < to ? rank : rank - 1) * BLOCK_SUMS, shared + to * BLOCK_SUMS, BLOCK_SUMS * 4,
                          arrived, to);
        }
    }
    float tensor_scale = tensor_scale_of<SUM_EXPONENT>(a, x_scale[COLS]);
    float common[4];
    biases_at(common, w, 0, mine);
    wait_at(arrived, 0);
    for (u32 i = thread(); i < X_ROWS_PER_BLOCK * ROWS / 4; i += THREADS) {
        u32 col = i / (ROWS / 4), at = col * SUM_PITCH + i % (ROWS / 4) * 4;
        if (x_row + col >= a.m) break;
        float sum[4] = {}, bias[4];
        biases_of(bias, w, x_row + col, mine, common);
#pragma unroll
        for (u32 r = 0; r < SPLIT; r++) {
            const float* partial =
                r == rank ? shared + rank * BLOCK_SUMS : others + (r < rank ? r : r - 1) * BLOCK_SUMS;
#pragma unroll
            for (int e = 0; e < 4; e++) sum[e] += partial[at + e];
        }
        finish_four(a, w, x_row + col, mine, sum, tensor_scale, bias);
    }
    arrive_in_cluster(), wait_for_cluster();  // no block may exit before its sums have arrived
}

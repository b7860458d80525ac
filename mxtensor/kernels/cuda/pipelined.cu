// The pipelined kernel: y (M, N) = x (M, K) w (N, K)^T for few rows of x; the codes of w are read once and decoded in
// registers.
//
// A block of WR x WK warps computes ROWS rows of w times COLS rows of x. The codes, scales and activations of BK
// columns, a stage, are copied asynchronously to shared memory, STAGES stages ahead; the WK warps of one row of warps
// divide the columns of a stage. w is the left operand of the matrix instruction, 16 rows at a time, and x the right
// one, 8 rows at a time. The order of the columns of K is free as long as both operands agree: thread t of four takes
// columns 8 t to 8 t + 7 of a slab of 32, so that its codes are consecutive bytes. A block scale multiplies the sum of
// a slab's products in float32, as the definition has it. An NVFP4 scale, of 16 values, multiplies the codes instead:
// float16 holds these products exactly.

// ---------------------------------------------------------------------------------------------- the result

// The scale of a row of x, computed by this block or by activations.cu before.
DEVICE float scale_of(const float* x_scale, u32 row) { return WHOLE_X ? x_scale[row] : load_fresh(x_scale + row); }

// Adds the sums of the warps along K and of the blocks of a cluster, in their order, and writes results.
DEVICE void write_result(
    const Arguments& a, const Weight& weight, const BlockWork& p, u32 x_row, const Sums& sums, const Lane& l,
    float* shared, const float* x_scale) {
    u32 warp = thread() / 32;
    sync_block();  // the stages are not read any more
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                u32 row = l.row + 16 * i + e / 2 * 8, col = 8 * j + 2 * l.t + e % 2;
                shared[(warp % WK * ROWS + row) * SUM_STRIDE + col] = sums[i][j][e];
            }
    sync_block();
    u32 rank = block_z(), span = (ROWS * p.x_rows + SPLIT - 1) / SPLIT, begin = 0, end = ROWS * p.x_rows;
    if constexpr (SPLIT > 1) {
        for (u32 i = thread(); i < end; i += THREADS) {  // first the sums of this block
            u32 at = i % ROWS * SUM_STRIDE + i / ROWS;
            float sum = shared[at];
#pragma unroll
            for (int w = 1; w < WK; w++) sum += shared[at + w * ROWS * SUM_STRIDE];
            shared[at] = sum * scale_of(x_scale, i / ROWS);
        }
        sync_cluster();
        begin = rank * span, end = begin + span < end ? begin + span : end;
    }
    float tensor_scale = tensor_scale_of<ELEMENT_EXPONENT>(a, global_scale_of(weight));
    static_assert(THREADS % ROWS == 0, "each thread has one row of w");
    u32 row = (begin + thread()) % ROWS, n = p.row + row;
    float common = row < p.rows ? bias_at(weight, 0, n) : 0;
    for (u32 i = begin + thread(); i < end; i += THREADS) {
        u32 col = i / ROWS, at = row * SUM_STRIDE + col;
        if (row >= p.rows) break;
        float sum = 0;
        if constexpr (SPLIT > 1) {
#pragma unroll
            for (int r = 0; r < SPLIT; r++) sum += read_of_block(shared + at, r);
        } else {
#pragma unroll
            for (int w = 0; w < WK; w++) sum += shared[at + w * ROWS * SUM_STRIDE];
            sum *= scale_of(x_scale, col);
        }
        float bias = bias_of(weight, x_row + col, n, common);
        finish(a, weight, p.scales, x_row + col, n, with_nans(a, p.scales, n, sum), tensor_scale, bias);
    }
    if constexpr (SPLIT > 1) sync_cluster();  // no block may exit while others read its memory
}

// ---------------------------------------------------------------------------------------------- the kernel

DEVICE void multiply_rows(const Arguments& a, const Weight& w, const BlockWork& p, u32 x_row) {
    u8* shared = shared_memory();
    u8* whole = shared + WHOLE_AT;
    u32 lane = thread() % 32, warp = thread() / 32, stages = p.end - p.begin;
    Lane l = {lane / 4, lane % 4, warp / WK * (16 * MT) + lane / 4, warp % WK * SLABS};
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {  // weights do not depend on the previous kernel
        if (s < stages) fetch_weights(a, p, shared + s * STAGE, p.begin + s, thread());
        end_of_stage();
    }
    u32 x_stride = X_STRIDE;
    const float* x_scale = a.x_scale + x_row;
    if constexpr (WHOLE_X) {
        x_stride = 2 * stages * BK + 64;
        float* scale = reinterpret_cast<float*>(whole);
        read_x(a, p.x, p.x_rows, p.begin * BK, stages * BK, whole + WHOLE_HEAD, x_stride, scale);
        x_scale = scale;
        let_next_start();
    } else {
        wait_for_previous();
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) {
            if (s < stages) fetch_x(a, p, shared + s * STAGE, p.begin + s);
            end_of_stage();
        }
    }
#pragma unroll
    for (int j = 0; j < NT; j++) {
        u32 column = 8 * j + l.g;
        l.columns[j] = (WHOLE_X && column >= p.x_rows ? 0 : column) * x_stride + l.t * 16;
    }
    Sums sums = {};
    for (u32 index = 0, slot = 0; index < stages; index++) {
        wait_for_stage<STAGES - 2>();
        sync_block();
        if (index + STAGES - 1 < stages) {
            u32 free = (slot == 0 ? STAGES - 1 : slot - 1) * STAGE;
            fetch_weights(a, p, shared + free, p.begin + index + STAGES - 1, thread());
            if constexpr (!WHOLE_X) fetch_x(a, p, shared + free, p.begin + index + STAGES - 1);
        }
        end_of_stage();
        const u8* x = WHOLE_X ? whole + WHOLE_HEAD + index * 2 * BK : shared + slot * STAGE;
        multiply_stage(sums, l, shared + slot * STAGE, x);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    wait_for_stage<0>();
    write_result(a, w, p, x_row, sums, l, reinterpret_cast<float*>(shared), x_scale);
}

KERNEL void BOUNDS(THREADS, BLOCKS) pipelined(const Arguments a) {
    // with WHOLE_X later: the next kernel's weights would be loaded before this kernel's x
    if (!WHOLE_X) let_next_start();
    u32 group = 0, stages = (a.k + BK - 1) / BK, x_row = block_y() * COLS, x_end = a.m;
    BlockWork p;
    const Weight& w = a.weights[weight_of(a, block_x())];
    p.row = (block_x() - w.first) * ROWS;
    p.rows = w.n - p.row < ROWS ? w.n - p.row : ROWS;
    p.begin = block_z() * stages / SPLIT;
    p.end = (block_z() + 1) * stages / SPLIT;
    if (a.ends) {
        wait_for_previous();
        if (block_y() == 0 && block_z() == 0) zeros_after_groups(a, w, p.row, p.rows);
        group = blocks_y() < a.groups ? group_with_rows(a, block_y()) : block_y();  // fewer blocks: one for each row
        if (group == a.groups) return;
        x_row = start_of_group(a, group), x_end = end_of_group(a, group);
    }
    p.codes = w.codes + group * a.codes_group;
    p.scales = w.scales + group * a.scales_group;
    for (; x_row < x_end; x_row += COLS) {
        p.x = a.x + u64(x_row) * a.x_stride;
        p.x_rows = x_end - x_row < COLS ? x_end - x_row : COLS;
        multiply_rows(a, w, p, x_row);
        if (!a.ends) break;
        sync_block();  // before the next rows of the group use the same memory
    }
}

// y (M, N) = x (M, K) w (N, K)^T for few rows of x: the codes of w are read once and decoded in registers.
//
// A block of WR x WK warps makes ROWS rows of w times COLS rows of x. The codes, scales and activations of BK columns
// at a time, a stage, come asynchronously into shared memory, STAGES of them under way; the warps of one row of
// warps take turns along K. w is the left factor of the matrix instruction, 16 rows of it at a time, x the right one, 8.
// Where columns lie in K is free as long as both sides agree: thread t of four takes columns 8 t to 8 t + 7 of 32, a
// slab, so that its codes are consecutive bytes. A block scale multiplies the sum of a slab's products in float32, as
// the definition has it; nvfp4's, for 16, multiplies the codes, whose products with it float16 holds exactly.
//
// With SPREAD (sm_90) four warps multiply together, 64 rows of w by all COLS rows of x, which the matrix instruction
// reads from shared memory by itself while the warps decode what comes next.

constexpr int WARPS = WR * WK, THREADS = 32 * WARPS;
constexpr int ROWS = 16 * MT * WR, COLS = 8 * NT, BK = 32 * SLABS * WK;  // a warp takes SLABS slabs of a stage
constexpr int CODES = BK * BITS / 8, CODES_STRIDE = CODES + (BITS == 8 ? 32 : 16);  // bytes; strides free of conflicts
constexpr int SCALES = SCALE == AT_THE_END ? 0 : SCALE == UE4M3 ? BK / 16 : BK / 32;  // bytes of a row and stage
constexpr int SCALES_STRIDE = (SCALES + 15) / 16 * 16 + 16;
constexpr int X_STRIDE = SPREAD ? 2 * BK : 2 * BK + 64;
constexpr int X_BYTES = WHOLE_X ? 0 : COLS * X_STRIDE, SCALES_BYTES = SCALES ? ROWS * SCALES_STRIDE : 0;
constexpr int CODES_AT = X_BYTES, SCALES_AT = CODES_AT + ROWS * CODES_STRIDE, ALIGN = SPREAD ? 1024 : 16;  // in a stage
constexpr int STAGE = (SCALES_AT + SCALES_BYTES + ALIGN - 1) / ALIGN * ALIGN;
constexpr int SUM_STRIDE = COLS + 2;  // float32 of the sums that the warps of one row of warps bring together
constexpr int SUMS = 4 * WK * ROWS * SUM_STRIDE;  // bytes, where the stages were
constexpr int WHOLE_AT = STAGES * STAGE > SUMS ? STAGES * STAGE : SUMS;
constexpr int WHOLE_HEAD = 8 * COLS;  // in front of the rows of WHOLE_X: what scales them, and maxima
static_assert(!WHOLE_X || BK % 256 == 0, "a warp casts 256 columns at a time");
static_assert(!SPREAD || (MT == 1 && WK == 1 && WR % 4 == 0 && !WHOLE_X && NT >= 4), "four warps have 64 rows of w");

struct Arguments {
    const u8* codes;
    const u8* scales;
    const u16* x;
    void* y;
    const float* x_scale;      // of each row of x, where they are float16 already
    const float* global_scale;
    const float* x_global_scale;
    const void* bias;
    const int* ends;           // of the groups of rows of x, each with a w of its own; null for one w
    u64 codes_group, scales_group;  // bytes from one w to the next
    u32 codes_stride, scales_stride, x_stride;  // of a row: bytes, bytes, values
    u32 m, n, k;
    u32 bias_stride;           // from one row of y to the next: 0 where all have the same
    float alpha, beta;
};

DEVICE float number(const void* at, u64 i, int type) {
    if (type == FLOAT) return static_cast<const float*>(at)[i];
    u32 bits = static_cast<const u16*>(at)[i];
    return type == FLOAT16 ? float_of_half(bits) : float_of_bits(bits << 16);
}

// ---------------------------------------------------------------------------------------------- stages

struct Place {  // what this block works on
    const u8* codes;
    const u8* scales;
    const u16* x;
    u32 row, rows;       // of w: the first, and how many there are
    u32 x_rows;          // of x, at most COLS
    u32 first, last;     // stages along K
};

DEVICE u32 row_of_scales(u32 row) {
    if constexpr (BLOCK_ROWS == 0) return 0;  // one for the whole tensor
    else return row / BLOCK_ROWS;
}

DEVICE constexpr u32 common(u32 a, u32 b) { return b == 0 ? a : common(b, a % b); }

// ROWS_ rows of WIDTH bytes, COPY at a time, from column ``begin`` of a matrix with ``stride`` bytes a row; zeros
// where that has no row (``rows``) or column (``limit``), which ALL says that it has. ``shared_rows`` rows of the copy come from one of the matrix.
template <int WIDTH, int COPY, int STRIDE, int SHARED_ROWS, bool ALL>
DEVICE void fetch(u8* to, const u8* from, u32 first, u32 rows, u32 most, u64 stride, u32 begin, u32 limit) {
    constexpr u32 pieces = WIDTH / COPY, across = common(pieces, THREADS), down = THREADS / across;
    u32 row = thread() / across, at = thread() % across * COPY;
    to += row * STRIDE + at, from += begin + at;
    const u8* line = from + (first + row) * stride;
#pragma unroll 8
    for (u32 i = 0; i < most; i += down) {
        if constexpr (SHARED_ROWS != 1) line = from + row_of_scales(first + row + i) * stride;
#pragma unroll
        for (u32 j = 0; j < pieces / across; j++) {
            bool there = ALL || row + i < rows && begin + at + j * across * COPY < limit;
            if (most % down == 0 || row + i < most)
                copy<COPY>(to + i * STRIDE + j * across * COPY, line + j * across * COPY, there);
        }
        line += down * stride;
    }
}

DEVICE void fetch_weights(const Arguments& a, const Place& p, u8* stage, u32 index) {
    fetch<CODES, CODES_COPY, CODES_STRIDE, 1, WHOLE_TILES>(
        stage + CODES_AT, p.codes, p.row, p.rows, ROWS, a.codes_stride, index * CODES, a.codes_stride);
    if constexpr (SCALES > 0)
        fetch<SCALES, SCALES_COPY, SCALES_STRIDE, BLOCK_ROWS, WHOLE_TILES>(
            stage + SCALES_AT, p.scales, p.row, p.rows, ROWS, a.scales_stride, index * SCALES, a.scales_stride);
}

// COLS rows whether or not there are as many: what follows x can be read, and comes into columns that nobody wants.
DEVICE void fetch_x(const Arguments& a, const Place& p, u8* to, u32 index) {
    if constexpr (SPREAD) {
        constexpr u32 pieces = BK / 8;  // of 16 bytes; 8 of a row lie together
        const u8* from = reinterpret_cast<const u8*>(p.x) + index * 2 * BK;
#pragma unroll
        for (u32 i = thread(); i < COLS * pieces; i += THREADS) {
            u32 row = i / pieces, piece = i % pieces;
            u8* at = to + (piece / 8 * COLS + row) * 128 + (piece % 8 ^ row % 8) * 16;
            copy<16>(at, from + row * u64(2 * a.x_stride) + piece * 16, WHOLE_TILES || index * BK + piece * 8 < a.x_stride);
        }
        return;
    }
    fetch<2 * BK, 16, X_STRIDE, 1, WHOLE_TILES>(
        to, reinterpret_cast<const u8*>(p.x), 0, COLS, COLS, 2 * a.x_stride, index * 2 * BK, 2 * a.x_stride);
}

// All columns of this block at once: in front what scales each row, and its largest magnitude, then the rows.
DEVICE void read_x(const Arguments& a, const Place& p, u8* to, u32 stride) {
    float* scale = reinterpret_cast<float*>(to);
    u32* maxima = reinterpret_cast<u32*>(scale + COLS);
    if (thread() < COLS) maxima[thread()] = 0;
    sync_block();
    wait_for_previous();
    Rows mine = {p.x, a.x_stride, a.k, p.x_rows, p.first * BK, (p.last - p.first) * BK};
    Rows all = {p.x, a.x_stride, a.k, p.x_rows, 0, (a.k + 255) / 256 * 256};
    find_maxima(maxima, CAST == TWO_LEVELS ? all : mine);
    sync_block();
    write_rows(to + WHOLE_HEAD, stride, mine, maxima, largest_of(maxima, p.x_rows));
    if (thread() < p.x_rows) scale[thread()] = scale_of_row(maxima, thread(), p.x_rows);
}

// ---------------------------------------------------------------------------------------------- the sum

using Sums = float[MT][NT][4];
constexpr bool SCALES_SUMS = SCALE == E8M0 || SCALE == FLOAT32;

struct Lane {  // where a thread stands in a fragment: row g of 8, group t of 8 columns
    u32 g, t, row, slab;
    const u8* stage;
    const u8* x;
    u32 columns[NT];   // bytes from x to what this thread reads of it: row g, g + 8, ...
};

// Slab Q of those that share a word of scales; of ue4m3 scales each twice in a word.
template <int Q> DEVICE void multiply_slab(Sums& sums, const Lane& l, u32 slab, const u32 (&scales)[2 * MT]) {
    u32 a[MT][8];
    float scale[2 * MT];
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        u32 words[4];
        decode(words, l.stage + CODES_AT + (l.row + 8 * i) * CODES_STRIDE + slab * (4 * BITS), l.t);
        if constexpr (SCALE == UE4M3)
#pragma unroll
            for (int j = 0; j < 4; j++) words[j] = multiply_half(words[j], scales[i]);
#pragma unroll
        for (int j = 0; j < 4; j++) a[i / 2][j / 2 * 4 + j % 2 * 2 + i % 2] = words[j];
        if constexpr (SCALE == E8M0) scale[i] = power_of_two<Q % 4>(scales[i]);
        if constexpr (SCALE == FLOAT32) scale[i] = float_of_bits(scales[i]);
    }
    constexpr int together = NT < 4 ? NT : 4 / MT;  // products that do not wait for each other
#pragma unroll
    for (int j0 = 0; j0 < NT; j0 += together) {
        uint4 b[together];
        float sum[MT][together][4];
#pragma unroll
        for (int j = 0; j < together; j++) b[j] = *reinterpret_cast<const uint4*>(l.x + l.columns[j0 + j] + slab * 64);
#pragma unroll
        for (int j = 0; j < together; j++)
#pragma unroll
            for (int i = 0; i < MT; i++)
                if constexpr (SCALES_SUMS) multiply(sum[i][j], a[i], b[j].x, b[j].y);
                else multiply_add(sums[i][j0 + j], a[i], b[j].x, b[j].y, sums[i][j0 + j]);
#pragma unroll
        for (int j = 0; j < together; j++)
#pragma unroll
            for (int i = 0; i < MT; i++)
                if constexpr (SCALES_SUMS) multiply_add(sum[i][j], a[i] + 4, b[j].z, b[j].w, sum[i][j]);
                else multiply_add(sums[i][j0 + j], a[i] + 4, b[j].z, b[j].w, sums[i][j0 + j]);
        if constexpr (SCALES_SUMS)
#pragma unroll
            for (int j = 0; j < together; j++)
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int e = 0; e < 4; e++) sums[i][j0 + j][e] += scale[2 * i + e / 2] * sum[i][j][e];
    }
}

// The slabs that share one word of scales: four of e8m0, two of ue4m3.
constexpr int SLABS_A_WORD = SCALE == UE4M3 ? 2 : 4;
constexpr int UNROLL = MT * NT > 2 ? 1 : SLABS / SLABS_A_WORD;

DEVICE void multiply_stage(Sums& sums, Lane& l, const u8* stage, const u8* x) {
    l.stage = stage, l.x = x;
    const u8* at = stage + SCALES_AT + l.row * SCALES_STRIDE + l.slab * (SCALE == UE4M3 ? 2 : 1);
#pragma unroll UNROLL
    for (int word = 0; word < SLABS / SLABS_A_WORD; word++) {
        u32 scales[2 * MT], second[2 * MT], slab = l.slab + word * SLABS_A_WORD;
#pragma unroll
        for (int i = 0; i < 2 * MT; i++) {
            if constexpr (SCALES > 0) scales[i] = *reinterpret_cast<const u32*>(at + 8 * i * SCALES_STRIDE + 4 * word);
            if constexpr (SCALE == UE4M3) pairs_of_ue4m3(scales[i], second[i], scales[i] >> l.t / 2 * 8);
        }
        multiply_slab<0>(sums, l, slab, scales);
        multiply_slab<1>(sums, l, slab + 1, SCALE == UE4M3 ? second : scales);
        if constexpr (SLABS_A_WORD == 4) {
            multiply_slab<2>(sums, l, slab + 2, scales);
            multiply_slab<3>(sums, l, slab + 3, scales);
        }
    }
}

// The same by four warps together. While the products of a slab run, the next one is decoded.
DEVICE void multiply_stage_together(Sums& sums, Lane& l, const u8* stage, const u8* x) {
    l.stage = stage;
    const u8* at = stage + SCALES_AT + l.row * SCALES_STRIDE;
    u32 a[2][8], words[2][SCALES > 0 ? SLABS / SLABS_A_WORD : 1];
    float scale[2][2], sum[NT][4];
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int word = 0; word < (SCALES > 0 ? SLABS / SLABS_A_WORD : 0); word++) {
            words[i][word] = *reinterpret_cast<const u32*>(at + 8 * i * SCALES_STRIDE + 4 * word);
        }
    auto prepare = [&](int q) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 values[4];
            decode(values, stage + CODES_AT + (l.row + 8 * i) * CODES_STRIDE + q * (4 * BITS), l.t);
            u32 word = words[i][SCALES > 0 ? q / SLABS_A_WORD : 0];
            if constexpr (SCALE == UE4M3) {
                u32 both[2];
                pairs_of_ue4m3(both[0], both[1], word >> l.t / 2 * 8);
#pragma unroll
                for (int j = 0; j < 4; j++) values[j] = multiply_half(values[j], both[q % 2]);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) a[q % 2][j / 2 * 4 + j % 2 * 2 + i] = values[j];
            if constexpr (SCALE == E8M0) scale[q % 2][i] = power_of_two<0>(word >> q % 4 * 8);
            if constexpr (SCALE == FLOAT32) scale[q % 2][i] = float_of_bits(word);
        }
    };
    prepare(0);
#pragma unroll
    for (int q = 0; q < SLABS; q++) {
        const u8* columns = x + q / 2 * COLS * 128 + q % 2 * 64;
        begin_products();
        if constexpr (SCALES_SUMS) {
            multiply_group(sum, a[q % 2], place_of(columns), 0);
            multiply_group(sum, a[q % 2] + 4, place_of(columns + 32), 1);
        } else {
            multiply_group(sums[0], a[q % 2], place_of(columns), 1);
            multiply_group(sums[0], a[q % 2] + 4, place_of(columns + 32), 1);
        }
        end_products();
        if (q + 1 < SLABS) prepare(q + 1);
        wait_for_products();
        if constexpr (SCALES_SUMS) {
            settle(sum);
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[0][j][e] += scale[q % 2][e / 2] * sum[j][e];
        } else {
            settle(sums[0]);
        }
    }
}

// ---------------------------------------------------------------------------------------------- the result

// Whether a scale of row n of w is a NaN. Its block has made the sum infinite, if not a NaN already.
DEVICE bool has_nan(const Arguments& a, const Place& p, u32 n) {
    bool found = false;
    const u8* scales = p.scales + u64(row_of_scales(n)) * a.scales_stride;
    for (u32 i = 0; i < a.scales_stride; i++) found |= scales[i] == 255;
    return found;
}

// What the warps along K and the blocks of a cluster have summed, in that order, with what belongs at the end.
DEVICE void write(const Arguments& a, const Place& p, u32 x_row, const Sums& sums, const Lane& l, float* shared,
                  const float* x_scale) {
    u32 warp = thread() / 32;
    sync_block();  // the stages are no longer read
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
        for (u32 i = thread(); i < end; i += THREADS) {  // first those of this block
            u32 at = i % ROWS * SUM_STRIDE + i / ROWS;
            float sum = shared[at];
#pragma unroll
            for (int w = 1; w < WK; w++) sum += shared[at + w * ROWS * SUM_STRIDE];
            shared[at] = sum * x_scale[i / ROWS];
        }
        sync_cluster();
        begin = rank * span, end = begin + span < end ? begin + span : end;
    }
    float factor = a.alpha * float_of_bits((FACTOR + 127) << 23);
    if (a.global_scale) factor *= *a.global_scale;
    if (a.x_global_scale) factor *= *a.x_global_scale;
    for (u32 i = begin + thread(); i < end; i += THREADS) {
        u32 row = i % ROWS, col = i / ROWS, n = p.row + row;
        u32 at = row * SUM_STRIDE + col;
        if (row >= p.rows) continue;
        float sum = 0;
        if constexpr (SPLIT > 1) {
#pragma unroll
            for (int r = 0; r < SPLIT; r++) sum += read_of_block(shared + at, r);
        } else {
#pragma unroll
            for (int w = 0; w < WK; w++) sum += shared[at + w * ROWS * SUM_STRIDE];
            sum *= x_scale[col];
        }
        if constexpr (SCALE == E8M0)
            if ((bits_of_float(sum) & 0x7FFFFFFF) == 0x7F800000 && has_nan(a, p, n)) sum = float_of_bits(0x7FFFFFFF);
        if constexpr (SCALE == AT_THE_END) sum *= reinterpret_cast<const float*>(p.scales)[row_of_scales(n)];
        sum *= factor;
        u64 m = x_row + col;
        if (a.bias) sum += a.beta * number(a.bias, m * a.bias_stride + n, BIAS);
        u64 to = m * a.n + n;
        if constexpr (RESULT == FLOAT) static_cast<float*>(a.y)[to] = sum;
        else if constexpr (RESULT == FLOAT16) static_cast<u16*>(a.y)[to] = half_of(sum);
        else static_cast<u16*>(a.y)[to] = bfloat16_of(sum);
    }
    if constexpr (SPLIT > 1) sync_cluster();  // nobody leaves while others read
}

// ---------------------------------------------------------------------------------------------- the kernel

DEVICE void multiply_rows(const Arguments& a, const Place& p, u32 x_row) {
    u8* shared = shared_memory();
    u8* whole = shared + WHOLE_AT;
    u32 lane = thread() % 32, warp = thread() / 32, stages = p.last - p.first;
    Lane l = {lane / 4, lane % 4, warp / WK * (16 * MT) + lane / 4, warp % WK * SLABS};
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {  // weights do not wait for the kernel before this one
        if (s < stages) fetch_weights(a, p, shared + s * STAGE, p.first + s);
        end_of_stage();
    }
    u32 x_stride = X_STRIDE;
    const float* x_scale = a.x_scale + x_row;
    if constexpr (WHOLE_X) {
        x_stride = 2 * stages * BK + 64;
        read_x(a, p, whole, x_stride);
        x_scale = reinterpret_cast<const float*>(whole);
    } else {
        wait_for_previous();
#pragma unroll
        for (int s = 0; s < STAGES - 1; s++) {
            if (s < stages) fetch_x(a, p, shared + s * STAGE, p.first + s);
            end_of_stage();
        }
    }
#pragma unroll
    for (int j = 0; j < NT; j++) l.columns[j] = (WHOLE_X && 8 * j + l.g >= p.x_rows ? 0 : 8 * j + l.g) * x_stride + l.t * 16;
    Sums sums = {};
    for (u32 index = 0, slot = 0; index < stages; index++) {
        wait_for_stage<STAGES - 2>();
        if constexpr (SPREAD) show_to_products();
        sync_block();
        if (index + STAGES - 1 < stages) {
            u32 free = (slot == 0 ? STAGES - 1 : slot - 1) * STAGE;
            fetch_weights(a, p, shared + free, p.first + index + STAGES - 1);
            if constexpr (!WHOLE_X) fetch_x(a, p, shared + free, p.first + index + STAGES - 1);
        }
        end_of_stage();
        const u8* x = WHOLE_X ? whole + WHOLE_HEAD + index * 2 * BK : shared + slot * STAGE;
        if constexpr (SPREAD) multiply_stage_together(sums, l, shared + slot * STAGE, x);
        else multiply_stage(sums, l, shared + slot * STAGE, x);
        slot = slot + 1 == STAGES ? 0 : slot + 1;
    }
    wait_for_stage<0>();
    write(a, p, x_row, sums, l, reinterpret_cast<float*>(shared), x_scale);
}

KERNEL void BOUNDS(THREADS, BLOCKS) product(const Arguments a) {
    let_next_start();
    u32 group = a.ends ? block_y() : 0, stages = (a.k + BK - 1) / BK;
    Place p;
    p.codes = a.codes + group * a.codes_group;
    p.scales = a.scales + group * a.scales_group;
    p.row = block_x() * ROWS;
    p.rows = a.n - p.row < ROWS ? a.n - p.row : ROWS;
    p.first = block_z() * stages / SPLIT;
    p.last = (block_z() + 1) * stages / SPLIT;
    u32 x_row = block_y() * COLS, x_end = a.m;
    if (a.ends) {
        wait_for_previous();
        x_row = group ? a.ends[group - 1] : 0, x_end = a.ends[group];
    }
    for (; x_row < x_end; x_row += COLS) {
        p.x = a.x + u64(x_row) * a.x_stride;
        p.x_rows = x_end - x_row < COLS ? x_end - x_row : COLS;
        multiply_rows(a, p, x_row);
        if (!a.ends) break;
        sync_block();  // before the next rows of the group take the same memory
    }
}

// Casts a matrix in one pass over it: codes and scales of its rows, and codes and scales of its columns, stored as rows of
// the transpose. A block of threads takes a strip of STRIP tiles beside each other, so that the scales of a row leave as
// one run of bytes.

struct CastBothArguments {
    const u8* x;
    u8 *codes, *scales;  // of the rows: (rows, code_bytes), (rows, scale_bytes)
    u8 *columns, *column_scales;  // of the columns: (cols, column_bytes), (cols, column_scale_bytes)
    const u32* amax;  // the bits of the largest magnitude, for a global scale
    float* global_scale;
    u64 stride;  // bytes from a row of x to the next
    u32 rows, cols, code_bytes, scale_bytes, column_bytes, column_scale_bytes;
    u32 tiles, strips;  // in a row of the matrix
};

constexpr u32 TILE_SCALES = TILE_COLS / BLOCK, COLUMN_SCALES = TILE_ROWS / BLOCK;  // of a row and of a column of a tile
constexpr u32 STRIP_SCALES = STRIP * TILE_SCALES;
constexpr u32 ROW_SCALES_AT = STAGES * TILE_BYTES, COLUMN_SCALES_AT = ROW_SCALES_AT + TILE_ROWS * STRIP_SCALES;

// The rows of a tile at ``row`` and ``col``; ``scales``: where the scales of row 0 of the tile go in shared memory.
DEVICE void cast_rows(const CastBothArguments& a, const u8* tile, u8* scales, u32 row, u32 col, const Level& level) {
    constexpr u32 step = THREADS / ROW_UNITS;  // rows that the threads cast at a time
    u32 r = thread() / ROW_UNITS, unit = thread() % ROW_UNITS, first = place_of(r, unit * UNIT_CHUNKS);
    scales += r * STRIP_SCALES + unit / LANES;
    u8* to = a.codes + u64(row + r) * a.code_bytes;
    u64 further = u64(step) * a.code_bytes;
#pragma unroll 1
    for (u32 down = 0; down < TILE_ROWS; down += step, to += further, scales += step * STRIP_SCALES) {
        u32 words[16 / VALUES], codes[CODE_WORDS];
        load_row_unit(words, tile, place_below(first, down));
        u32 amax = largest_magnitudes(words);
        if (VALUES == 2) amax = larger_magnitudes(amax, bytes_of(amax, 0, 0x1032));
        BlockScale scale = scale_of(wide_magnitude(largest_of_block(amax), 0), level);
        if (unit % LANES == 0) *scales = scale.stored;
        if constexpr (IN_PAIRS) {
            PairScale pairs = pair_scale(scale.multiplier, scale.multiplier);
            zero_unless_finite(words, scale.finite, scale.finite);
            encode_pairs(codes, words, pairs);
        } else {
            float x[16];
            if constexpr (BITS == 4) {
                u32 signs[2], least = least_magnitudes(words);
                if (VALUES == 2) least = smaller_magnitudes(least, bytes_of(least, 0, 0x1032));
#pragma unroll
                for (u32 j = 0; j < 16; j++) x[j] = magnitude(value_of(words[j / VALUES], j % VALUES));
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    const u32* w = words + 8 / VALUES * j;
                    signs[j] = VALUES == 1 ? eight_signs(w)
                                           : four_signs(bytes_of(w[0], w[2], 0x5410), bytes_of(w[0], w[2], 0x7632),
                                                        bytes_of(w[1], w[3], 0x5410), bytes_of(w[1], w[3], 0x7632));
                }
                encode_e2m1(codes, x, value_of(least, 0), signs, scale);
            } else {
#pragma unroll
                for (u32 j = 0; j < 16; j++) x[j] = value_of(words[j / VALUES], j % VALUES);
                encode(codes, x, scale);
            }
        }
        finish(codes, scale.finite);
        store_codes<CODES_PIECE>(to, codes, col + unit * 16, a.code_bytes, row + r + down < a.rows);
    }
}

// The columns of a tile; ``scales``: those of column 0 of the tile in shared memory.
DEVICE void cast_columns(const CastBothArguments& a, const u8* tile, u8* scales, u32 row, u32 col, const Level& level) {
    constexpr u32 words_across = TILE_COLS / VALUES;
#pragma unroll 1
    for (u32 i = thread(); i < words_across * COLUMN_UNITS; i += THREADS) {
        u32 word = i / GROUPS % words_across, unit = i / (GROUPS * words_across) * GROUPS + i % GROUPS, words[16];
        load_column_unit(words, tile, unit * 16, word);
        u32 amax = largest_of_block(largest_magnitudes(words));
        BlockScale scale[VALUES];
        u32 codes[VALUES][CODE_WORDS];
#pragma unroll
        for (u32 v = 0; v < VALUES; v++) {
            scale[v] = scale_of(wide_magnitude(amax, v), level);
            if (unit % LANES == 0) scales[(word * VALUES + v) * COLUMN_SCALES + unit / LANES] = scale[v].stored;
        }
        if constexpr (IN_PAIRS) {
            PairScale pairs = pair_scale(scale[0].multiplier, scale[1].multiplier);
            zero_unless_finite(words, scale[0].finite, scale[1].finite);
            encode_columns(codes[0], codes[1], words, pairs);
        }
        u32 signs[VALUES][2], least = 0;
        if constexpr (!IN_PAIRS && BITS == 4) {
            least = least_magnitudes(words);
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                const u32* w = words + 8 * j;
                if constexpr (VALUES == 1) {
                    signs[0][j] = eight_signs(w);
                } else {
                    u32 upper = four_signs(w[0], w[1], w[2], w[3]), lower = four_signs(w[4], w[5], w[6], w[7]);
                    signs[0][j] = bytes_of(upper, lower, 0x5410), signs[1][j] = bytes_of(upper, lower, 0x7632);
                }
            }
        }
#pragma unroll
        for (u32 v = 0; v < VALUES; v++) {
            if constexpr (!IN_PAIRS && BITS == 4) {
                float x[16];
#pragma unroll
                for (u32 j = 0; j < 16; j++) x[j] = magnitude(value_of(words[j], v));
                encode_e2m1(codes[v], x, value_of(least, v), signs[v], scale[v]);
            } else if constexpr (!IN_PAIRS) {
                float x[16];
#pragma unroll
                for (u32 j = 0; j < 16; j++) x[j] = value_of(words[j], v);
                encode(codes[v], x, scale[v]);
            }
            finish(codes[v], scale[v].finite);
            u32 column = col + word * VALUES + v;
            u8* to = a.columns + u64(column) * a.column_bytes;
            store_codes<COLUMN_CODES_PIECE>(to, codes[v], row + unit * 16, a.column_bytes, column < a.cols);
        }
    }
}

KERNEL void BOUNDS(THREADS, BLOCKS) cast_both(const CastBothArguments a) {
    u8 *memory = shared_memory(), *row_scales = memory + ROW_SCALES_AT, *column_scales = memory + COLUMN_SCALES_AT;
    // a pass for the amax left the last values in the cache
    u32 block = NEEDS_TENSOR_AMAX ? blocks_x() - 1 - block_x() : block_x();
    u32 row = block / a.strips * TILE_ROWS, first = block % a.strips * STRIP;
    u32 tiles = smaller(a.tiles - first, STRIP);
    Source source = {a.x, a.stride, a.rows, a.cols};
    wait_for_previous();
#pragma unroll
    for (u32 t = 0; t + 1 < STAGES; t++) {
        if (t < tiles) load_tile(memory + t * TILE_BYTES, source, row, (first + t) * TILE_COLS);
        else end_of_stage();
    }
    Level level = level_of(NEEDS_TENSOR_AMAX ? load_fresh(a.amax) : 0);
    if (CAST_GLOBAL && block_x() == 0 && thread() == 0) {
        u32 amax = load_fresh(a.amax);
        *a.global_scale = has_global_scale(amax) ? float_of_bits(amax) / (448 * CAST_MAX) : 1.0f;
    }
#pragma unroll 1
    for (u32 t = 0; t < tiles; t++) {
        u32 next = t + STAGES - 1, col = (first + t) * TILE_COLS;
        if (next < tiles) load_tile(memory + next % STAGES * TILE_BYTES, source, row, (first + next) * TILE_COLS);
        else end_of_stage();
        wait_for_stage<STAGES - 1>();
        sync_block();
        const u8* tile = memory + t % STAGES * TILE_BYTES;
        cast_rows(a, tile, row_scales + t * TILE_SCALES, row, col, level);
        cast_columns(a, tile, column_scales, row, col, level);
        sync_block();
        store_scales<TILE_COLS, COLUMN_SCALES, COLUMN_SCALES_PIECE>(
            a.column_scales, column_scales, col, a.cols, a.column_scale_bytes, row / BLOCK);
    }
    store_scales<TILE_ROWS, STRIP_SCALES, SCALES_PIECE>(
        a.scales, row_scales, row, a.rows, a.scale_bytes, first * TILE_SCALES);
}

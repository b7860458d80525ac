// A tile of a matrix in shared memory, for reads along rows and along columns without bank conflicts, and the stores of
// what is made of it. A unit is 16 neighbouring values, which one thread casts.

enum { CHUNK = 16 };  // bytes of a copy to shared memory
constexpr u32 VALUE_BYTES = X == FLOAT ? 4 : 2;
constexpr u32 VALUES = 4 / VALUE_BYTES;  // in a word
constexpr u32 UNIT_CHUNKS = 16 * VALUE_BYTES / CHUNK;
constexpr u32 ROW_CHUNKS = TILE_COLS * VALUE_BYTES / CHUNK, ROW_UNITS = TILE_COLS / 16;
constexpr u32 TILE_BYTES = TILE_ROWS * TILE_COLS * VALUE_BYTES;
constexpr u32 COLUMN_UNITS = TILE_ROWS / 16;
constexpr u32 LANES = BLOCK / 16;  // neighbouring threads that share a block
constexpr u32 UNIT_BYTES = 2 * BITS;  // codes of a unit
// Threads of a warp that read along columns: GROUPS below each other, each with its own 16 rows; the others beside.
constexpr u32 GROUPS = COLUMN_UNITS < 8 ? COLUMN_UNITS : 8;
static_assert(ROW_UNITS >= 4 && GROUPS >= LANES && GROUPS % 4 == 0, "a tile has too few rows or columns");
static_assert(TILE_ROWS * ROW_UNITS % THREADS == 0 && TILE_COLS / VALUES * COLUMN_UNITS % THREADS == 0,
              "every thread has as many units as the others");

// ---------------------------------------------------------------------------------------------- the tile

// Where chunk ``c`` of a row is, in chunks. Eight threads that read the first chunk of neighbouring units get eight of
// eight positions, and so do GROUPS threads that read one column, each 16 rows below the one before.
DEVICE u32 place_of(u32 row, u32 c) {
    u32 at = row * ROW_CHUNKS + c;
    return at ^ (at >> 3 & (UNIT_CHUNKS - 1)) ^ (row >> 4 & (GROUPS - 1)) * (8 / GROUPS);
}

struct Source {
    const u8* x;
    u64 stride;  // bytes
    u32 rows, cols;
};

// The place of chunk ``c`` of row ``row + down``, where ``first`` is that of ``row``, and ``down`` is a multiple of a power
// of two above ``row``: all sizes are powers of two, so that a place is the exclusive or of two places.
DEVICE u32 place_below(u32 first, u32 down) {
    u32 more = place_of(down, 0);
    return (first ^ (more & 7)) + (more & ~7u);
}

// Begins to copy the tile at ``row`` and ``col``; values outside the matrix are zeros.
DEVICE void load_tile(u8* tile, const Source& s, u32 row, u32 col) {
    constexpr u32 step = THREADS / ROW_CHUNKS;  // rows that the threads copy at a time
    static_assert(THREADS % ROW_CHUNKS == 0, "whole rows at a time");
    u32 r = thread() / ROW_CHUNKS, c = thread() % ROW_CHUNKS, first = place_of(r, c);
    const u8* from = s.x + (row + r) * s.stride + (u64(col) * VALUE_BYTES + c * CHUNK);
    u64 further = step * s.stride;
#pragma unroll
    for (u32 down = 0; down < TILE_ROWS; down += step, from += further) {
        u8* to = tile + place_below(first, down) * CHUNK;
        if constexpr (WHOLE_TILES) {
            copy<CHUNK>(to, from, true);
        } else {
            u32 left = row + r + down < s.rows ? (s.cols - col) * VALUE_BYTES : 0;
#pragma unroll
            for (u32 at = 0; at < CHUNK; at += X_COPY) {
                bool there = c * CHUNK + at < left;
                copy<X_COPY>(to + at, there ? from + at : s.x, there);
            }
        }
    }
    end_of_stage();
}

// The words of a unit of a row, whose first chunk is at ``first``.
DEVICE void load_row_unit(u32 (&words)[16 / VALUES], const u8* tile, u32 first) {
#pragma unroll
    for (u32 i = 0; i < UNIT_CHUNKS; i++) {
        uint4 chunk = *reinterpret_cast<const uint4*>(tile + (first ^ i) * CHUNK);
        words[4 * i] = chunk.x, words[4 * i + 1] = chunk.y, words[4 * i + 2] = chunk.z, words[4 * i + 3] = chunk.w;
    }
}

// The words of 16 rows from ``row`` on, a multiple of 16, one below the other.
DEVICE void load_column_unit(u32 (&words)[16], const u8* tile, u32 row, u32 word) {
    u32 first = place_of(row, word / 4);
#pragma unroll
    for (u32 r = 0; r < 16; r++) {
        words[r] = *reinterpret_cast<const u32*>(tile + place_below(first, r) * CHUNK + word % 4 * 4);
    }
}

// ---------------------------------------------------------------------------------------------- values

DEVICE float value_of(u32 word, u32 i) {
    if constexpr (X == FLOAT) return float_of_bits(word);
    else if constexpr (X == FLOAT16) return float_of_half(word >> 16 * i & 0xFFFF);
    else return float_of_bits(i ? word & 0xFFFF0000 : word << 16);
}

// The larger magnitudes of two words that have no signs, and the magnitudes of a word.
DEVICE u32 larger_magnitudes(u32 a, u32 b) { return X == FLOAT ? larger(a, b) : larger_halves(a, b); }
DEVICE u32 magnitudes(u32 word) { return word & (X == FLOAT ? 0x7FFFFFFF : 0x7FFF7FFF); }
// The bits of a magnitude as a float32.
DEVICE u32 wide_magnitude(u32 word, u32 i) { return bits_of_float(value_of(word, i)); }

DEVICE u32 smaller_magnitudes(u32 a, u32 b) { return X == FLOAT ? smaller(a, b) : smaller_halves(a, b); }
template <u32 N> DEVICE u32 least_magnitudes(const u32 (&words)[N]) {
    u32 least = magnitudes(words[0]);
#pragma unroll
    for (u32 i = 1; i < N; i++) least = smaller_magnitudes(least, magnitudes(words[i]));
    return least;
}
template <u32 N> DEVICE u32 largest_magnitudes(const u32 (&words)[N]) {
    u32 most = magnitudes(words[0]);
#pragma unroll
    for (u32 i = 1; i < N; i++) most = larger_magnitudes(most, magnitudes(words[i]));
    return most;
}
// Over the threads that share a block.
DEVICE u32 largest_of_block(u32 most) {
#pragma unroll
    for (u32 mask = 1; mask < LANES; mask *= 2) most = larger_magnitudes(most, from_lane_xor(most, mask));
    return most;
}

// ---------------------------------------------------------------------------------------------- stores

// Stores the first ``inside`` of BYTES bytes in pieces; ``inside`` is a multiple of a piece, or more than BYTES.
template <int BYTES, int PIECE> DEVICE void store_pieces(u8* to, const u32* words, int inside) {
    static_assert(BYTES % PIECE == 0, "whole pieces");
#pragma unroll
    for (int at = 0; at < BYTES; at += PIECE) {
        if (!WHOLE_TILES && at >= inside) return;
        const u32* word = words + at / 4;
        if constexpr (PIECE == 16) *reinterpret_cast<uint4*>(to + at) = {word[0], word[1], word[2], word[3]};
        else if constexpr (PIECE == 8) *reinterpret_cast<uint2*>(to + at) = {word[0], word[1]};
        else if constexpr (PIECE == 4) *reinterpret_cast<u32*>(to + at) = *word;
        else if constexpr (PIECE == 2) *reinterpret_cast<u16*>(to + at) = *word >> 8 * (at % 4);
        else to[at] = *word >> 8 * (at % 4);
    }
}

// Stores the codes of a unit in a row of codes that ends after ``row_bytes``; ``first``: of the 16 values. All threads of
// a warp call it with neighbouring units; ``there``: whether the row is one.
template <int PIECE> DEVICE void store_codes(u8* row, const u32 (&codes)[CODE_WORDS], u32 first, u32 row_bytes, bool there) {
    if constexpr (BITS == 6) {  // 48 bytes of four threads leave in 16 bytes of three
        u32 lane = lane_of_warp(), part = lane % 4, six[6], out[4];
#pragma unroll
        for (u32 i = 0; i < 3; i++) six[i] = codes[i], six[3 + i] = from_lane(codes[i], lane + 1 & 31);
#pragma unroll
        for (u32 i = 0; i < 4; i++) out[i] = part == 0 ? six[i] : part == 1 ? six[i + 1] : six[i + 2 < 6 ? i + 2 : 5];
        u32 at = first / 64 * 48 + part * 16;
        if (part < 3 && (WHOLE_TILES || (there && at < row_bytes))) store_pieces<16, PIECE>(row + at, out, int(row_bytes - at));
    } else {
        u32 at = first / 8 * BITS;
        if (WHOLE_TILES || (there && at < row_bytes))
            store_pieces<UNIT_BYTES, PIECE < UNIT_BYTES ? PIECE : UNIT_BYTES>(row + at, codes, int(row_bytes - at));
    }
}

// Stores LINES lines of BYTES scales from shared memory: line i is row ``first + i`` of ``count`` rows of ``stride``
// scales, from scale ``at`` on.
template <u32 LINES, u32 BYTES, u32 PIECE>
DEVICE void store_scales(u8* to, const u8* from_shared, u32 first, u32 count, u32 stride, u32 at) {
    constexpr u32 pieces = BYTES / PIECE;
    for (u32 i = thread(); i < LINES * pieces; i += THREADS) {
        u32 line = i / pieces, byte = i % pieces * PIECE;
        if ((WHOLE_TILES || first + line < count) && at + byte < stride) {
            u8* there = to + u64(first + line) * stride + at + byte;
            const u8* from = from_shared + line * BYTES + byte;
            if constexpr (PIECE == 16) *reinterpret_cast<uint4*>(there) = *reinterpret_cast<const uint4*>(from);
            else if constexpr (PIECE == 8) *reinterpret_cast<uint2*>(there) = *reinterpret_cast<const uint2*>(from);
            else if constexpr (PIECE == 4) *reinterpret_cast<u32*>(there) = *reinterpret_cast<const u32*>(from);
            else if constexpr (PIECE == 2) *reinterpret_cast<u16*>(there) = *reinterpret_cast<const u16*>(from);
            else *there = *from;
        }
    }
}

// What a thread of the wgmma kernel loads of a weight: the codes and scales of its two rows, a chunk of 128 columns at a
// time, from global memory to registers.
//
// With TAIL the scales of a row may start at any byte, and the last chunk may be short. No memory is read after the end of
// a row: what is missing is loaded from the start of the chunk and replaced when the chunk is used, codes by zeros and
// scales by the first one of the chunk. (A condition at each load would make a warp wait for what it has loaded.)

constexpr int CHUNK = 128, CODES_PER_CHUNK = 16 * BITS;  // columns of w at a time; bytes of a row's codes in them
constexpr bool SCALED = SCALE_BYTES > 0;  // whether words are multiplied by scales
constexpr bool TAIL = !WHOLE_TILES;  // whether the last chunk may be short, or scales are not aligned
constexpr int SCALE_COLUMNS = SCALED ? CHUNK / SCALES_PER_CHUNK : CHUNK;  // columns that share a scale

struct ThreadRows {  // where this thread reads its two rows of w
    const u8 *codes[2], *scales[2];
    u32 t;
    int left;  // TAIL: columns from here to the end of the row
    int farthest[2];  // TAIL: bytes from its scales of a chunk to the last word, or byte, that has some of them
};
// loaded words that a thread's scales of a row are put together from, when they are used
constexpr int LOADED = !TAIL || SCALE_BYTES < 2 ? SCALE_WORDS : SCALE_WORDS + 1;
struct Chunk {  // 32 codes of each row, BITS words, and their scales
    u32 codes[2][BITS], scales[2][LOADED];
};

// Bytes from a multiple of four to the scales of row r.
DEVICE int shift_of(const ThreadRows& mine, int r) { return int(reinterpret_cast<u64>(mine.scales[r]) % 4); }
// Bytes from the scales to the last word that has some of ``count``.
DEVICE int farthest_word(int shift, int count) { return ((shift + count - 1) & ~3) - shift; }

// The rows of this thread from chunk ``first`` on. Rows after the last one repeat it; their results are not written.
DEVICE ThreadRows rows_of_thread(const Arguments& a, const Weight& w, u32 first) {
    u32 lane = thread() % 32;
    ThreadRows mine = {{}, {}, lane % 4, int(a.k) - int(first * CHUNK), {}};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        u32 row = (block_x() - w.first) * ROWS + thread() / 32 % WR * 16 + lane / 4 + 8 * r;
        row = row < w.n ? row : w.n - 1;
        u64 scales = u64(row_of_scales(row)) * a.scales_stride + first * SCALES_PER_CHUNK + place_of_scales(mine.t);
        mine.codes[r] = w.codes + u64(row) * a.codes_stride + first * CODES_PER_CHUNK + column_of(mine.t) * BITS / 8;
        mine.scales[r] = w.scales + scales;
        if constexpr (TAIL) mine.farthest[r] = SCALE_BYTES < 4 ? 1 : farthest_word(shift_of(mine, r), SCALE_BYTES);
    }
    return mine;
}

// ---------------------------------------------------------------------------------------------- the last chunk

// Whether the INDEX-th chunk from here is not whole; and the scales of a row that it has.
template <int INDEX> DEVICE bool is_short(const ThreadRows& mine) { return TAIL && (INDEX + 1) * CHUNK > mine.left; }
template <int INDEX> DEVICE int scales_in(const ThreadRows& mine) {
    return (mine.left - INDEX * CHUNK + SCALE_COLUMNS - 1) / SCALE_COLUMNS;
}
// Whether this thread's columns of piece H of the INDEX-th chunk from here are missing.
template <int INDEX, int H> DEVICE bool is_missing(const ThreadRows& mine) {
    return INDEX * CHUNK + (BITS == 8 ? 64 * H : 0) + int(column_of(mine.t)) >= mine.left;
}

// Moves the codes of piece H of the INDEX-th chunk, if they are missing, to the first of the chunk.
template <int INDEX, int H> DEVICE void move_codes(ThreadRows& mine) {
    if (!is_missing<INDEX, H>(mine)) return;
    bool moved = BITS == 8 && H == 1 && is_missing<INDEX, 0>(mine);
#pragma unroll
    for (int r = 0; r < 2; r++)
        mine.codes[r] -= (moved ? 0 : column_of(mine.t) * BITS / 8) + (BITS == 8 ? 64 * H : 0);
}
// Moves scales that the INDEX-th chunk lacks to the first of the chunk, and the last word to load to one that it has.
template <int INDEX> DEVICE void move_scales(ThreadRows& mine) {
    int place = int(place_of_scales(mine.t)), count = scales_in<INDEX>(mine);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (place >= count) mine.scales[r] -= place;
        if (SCALE_BYTES == 2) mine.farthest[r] = place + 1 < count;
        if (SCALE_BYTES >= 4) mine.farthest[r] = farthest_word(shift_of(mine, r), count < SCALE_BYTES ? count : SCALE_BYTES);
    }
}
// Replaces what the INDEX-th chunk lacks, codes and scales.
template <int INDEX> DEVICE void replace_missing(Chunk& chunk, u32 (&scales)[2][SCALE_WORDS], const ThreadRows& mine) {
    int count = scales_in<INDEX>(mine);
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
        for (int i = 0; i < BITS; i++)
            if (i < BITS / 2 && BITS == 8 ? is_missing<INDEX, 0>(mine) : is_missing<INDEX, 1>(mine)) chunk.codes[r][i] = 0;
#pragma unroll
        for (int b = 1; b < SCALE_BYTES && SCALE_BYTES >= 4; b++) {  // byte b, or the first
            u32 selector = 0x3210 & ~(0xF << 4 * (b % 4)), of_first = bytes_of(scales[r][b / 4], scales[r][0], selector | 4 << 4 * (b % 4));
            if (b >= count) scales[r][b / 4] = of_first;
        }
    }
}

// ---------------------------------------------------------------------------------------------- loads

// Loads piece H of both rows of the INDEX-th chunk from here. Codes of fewer than 8 bits load both pieces with the
// second.
template <int INDEX, int H> DEVICE void load_codes(Chunk& chunk, ThreadRows& mine) {
    if constexpr (BITS != 8 && H == 0) return;
    if (is_short<INDEX>(mine)) move_codes<INDEX, H>(mine);
    constexpr int at = INDEX * CODES_PER_CHUNK + (BITS == 8 ? 64 * H : 0);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if constexpr (BITS == 6) {
            load_once<8, at>(chunk.codes[r], mine.codes[r]);
            load_once<8, at + 8>(chunk.codes[r] + 2, mine.codes[r]);
            load_once<8, at + 16>(chunk.codes[r] + 4, mine.codes[r]);
        } else {
            load_once<16, at>(chunk.codes[r] + (BITS == 8 ? 4 * H : 0), mine.codes[r]);
        }
    }
}
// The scale of block ``block`` of the chunk here.
DEVICE u32 scale_of_block(const u8* scales, const ThreadRows& mine, int block) {
    return *(scales - place_of_scales(mine.t) + (TAIL && block * SCALE_COLUMNS >= mine.left ? 0 : block));
}
// Loads a thread's scales of both rows of the INDEX-th chunk from here: with TAIL the words, or bytes, that have them.
template <int INDEX> DEVICE void load_scales(Chunk& chunk, ThreadRows& mine) {
    constexpr int at = INDEX * SCALES_PER_CHUNK;
    if constexpr (!SCALED) return;
    if (is_short<INDEX>(mine)) move_scales<INDEX>(mine);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        u32 (&words)[LOADED] = chunk.scales[r];
        const u8* from = mine.scales[r];
        if constexpr (TAIL && SCALE_BYTES < 4) {
            words[0] = load_scale<1, at>(from);
            if constexpr (SCALE_BYTES == 2) words[1] = load_scale<1, at>(from + mine.farthest[r]);
        } else if constexpr (TAIL) {
            int shift = shift_of(mine, r), second = 4 - shift;
            words[0] = load_scale<4, at>(from - shift);
            if constexpr (SCALE_WORDS > 1) words[1] = load_scale<4, at>(from + (second < mine.farthest[r] ? second : mine.farthest[r]));
            words[SCALE_WORDS] = load_scale<4, at>(from + mine.farthest[r]);
        } else {
            words[0] = load_scale<SCALE_BYTES / SCALE_WORDS, at>(from);
            if constexpr (SCALE_WORDS > 1) words[1] = load_scale<4, at + 4>(from);
        }
    }
}

// The scales of row r of a chunk from its loaded words.
DEVICE void scales_of(u32 (&scales)[SCALE_WORDS], const Chunk& chunk, const ThreadRows& mine, int r) {
#pragma unroll
    for (int i = 0; i < SCALE_WORDS; i++) {
        scales[i] = chunk.scales[r][i];
        if constexpr (TAIL && SCALE_BYTES == 2) scales[i] |= chunk.scales[r][1] << 8;
        if constexpr (TAIL && SCALE_BYTES >= 4)
            scales[i] = bytes_of(scales[i], chunk.scales[r][i + 1], 0x3210 + 0x1111 * shift_of(mine, r));
    }
}

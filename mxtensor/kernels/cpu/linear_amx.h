// Products in the tile registers of AMX: from some rows of x on, each code is decoded once into bfloat16 values times
// their scales, in a piece of a few rows of w that stays in the cache, and multiplied from there with all rows of x.
//
// A tile of w has 16 rows of w with 32 values each, in the order of packed x; a tile of x has, for each pair of these
// values, those of 16 rows of x. So neither codes nor decoded values are transposed, only x and the sums. The instruction
// takes subnormal values as zero: rows of w with scales so small that this counts are multiplied in double.
//
// There is no product of int8 codes as integers (TDPBSSD). Blocks of 32 have scales of their own, so a step could take 32
// bytes a row only: as many products as a step of bfloat16, in as many cycles, and its sums would still have to be stored,
// scaled and added. int8 codes and their scales are exact in bfloat16, where no step needs a scale.
#pragma once
#ifdef MX_TILES
#include MX_TILES
#else
#include "tiles_amx.h"
#endif
#include <immintrin.h>

#include "linear_tiles.h"

namespace {

constexpr int64_t PIECE = 512;  // values of a row of w that are decoded at a time
constexpr int64_t PIECE_PITCH = PIECE + 32;  // a power of two would put the rows of a tile into few sets of the cache
constexpr int64_t MOST_TILE_ROWS = 128;      // of w at a time; 32 where all rows of x fit the cache beside them
constexpr int32_t LEAST_EXPONENT = 64 << 23, MOST_EXPONENT = 190 << 23;  // of scales that tiles take

// Whether x and decoded w are exact in bfloat16, and there are enough rows of x, and not too many.
inline bool takes_tiles(const Problem& p) {
  return p.x_kind == BFLOAT16 && exact_in_bfloat16(p.element, p.scale_kind) && p.m >= TILES_FROM && p.m <= TILES_UP_TO;
}

// to[j][i] = from[i][j], 16 x 16 words of 32 bits, which are moved as floats; pitches are counted in words.
inline void transpose(const float* from, int64_t from_pitch, float* to, int64_t to_pitch) {
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 16; j += 4) {
      __m128 row[4];
      for (int r = 0; r < 4; r++) row[r] = _mm_loadu_ps(from + (i + r) * from_pitch + j);
      _MM_TRANSPOSE4_PS(row[0], row[1], row[2], row[3]);
      for (int r = 0; r < 4; r++) _mm_storeu_ps(to + (j + r) * to_pitch + i, row[r]);
    }
}

// The tops of float32 values that are bfloat16 numbers, for instruction sets that decode into float32.
inline void narrow(const float* from, int64_t n, uint16_t* to) {
  for (int64_t i = 0; i < n; i++) to[i] = uint16_t(uint32_t(as_int(from[i])) >> 16);
}

// Packs rows first to end - 1 of x, which is bfloat16; ``first`` is a multiple of 16. Rows of x after the last are zeros.
template <typename D> void pack_tiles(const Problem& p, int64_t first, int64_t end) {
  const int64_t values = packed_row<D>(p), words = values / 2;
  float* memory = buffer(16 * words + values + 16);
  uint16_t* rows = reinterpret_cast<uint16_t*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
  for (int64_t m = first; m < end; m += 16) {
    for (int64_t i = 0; i < 16; i++) {
      const BFloat16* x = static_cast<const BFloat16*>(p.x) + (m + i) * p.x_stride;
      uint16_t* row = rows + i * values;
      if (m + i >= p.m) {
        std::memset(row, 0, size_t(values) * 2);
      } else if (DECODES_BFLOAT16) {
        pack_row<D>(x, p.k, true, row);
      } else {
        float* wide = reinterpret_cast<float*>(rows + 16 * values);
        pack_row<D>(x, p.k, false, wide);
        narrow(wide, values, row);
      }
    }
    float* to = static_cast<float*>(p.packed) + m * words;
    for (int64_t t = 0; t < words; t += 16) transpose(reinterpret_cast<const float*>(rows) + t, words, to + t * 16, 16);
  }
}

// Whether tiles take row n of w: its scales are neither large nor so small that products vanish, or belong
// to blocks of zeros.
template <typename D> bool is_usual(const Problem& p, int64_t n, int64_t steps, int per_step, const float* scales) {
  const int64_t values = D::STEP / per_step;
  uint32_t least = ~0u;
  int32_t most = 0;
  for (int64_t i = 0; i < steps * per_step; i++) {
    const int32_t size = as_int(scales[i]) & 0x7FFFFFFF;
    least = smaller(least, uint32_t(size) - 1), most = larger(most, size);  // a scale of zero is not the least
  }
  if (least >= uint32_t(LEAST_EXPONENT) - 1 && most < MOST_EXPONENT) return true;
  for (int64_t i = 0; i < steps * per_step; i++) {
    const int32_t size = as_int(scales[i]) & 0x7FFFFFFF;
    if (size == 0 || (size >= LEAST_EXPONENT && size < MOST_EXPONENT)) continue;
    if (size >= MOST_EXPONENT) return false;
    const uint8_t* row = p.data + n * p.row_bytes;
    const int sign = 1 << (BITS[p.element] - 1);
    for (int64_t k = i * values; k < smaller(p.k, (i + 1) * values); k++) {
      const int code = code_at(p.element, row, k);
      if (p.element == INT8_ID ? code : code & (sign - 1)) return false;
    }
  }
  return true;
}

// Some values of some rows of w, from value ``start`` on, into ``out``.
template <typename D>
void decode_piece(const Problem& p, const D& decode, int64_t first, int64_t end, int64_t start, const float* scales,
                  int64_t scales_row, int per_step, uint16_t* out) {
  Problem part = p;
  const int64_t at = start / D::STEP * D::BYTES;
  part.k = smaller(PIECE, p.k - start);
  part.row_bytes = smaller<int64_t>(PIECE / D::STEP * D::BYTES, p.row_bytes - at);
  part.mode = IN_BFLOAT16;
  const int64_t next = at + part.row_bytes < p.row_bytes ? part.row_bytes : (end - first) * p.row_bytes - at;
  const uint8_t* stop = p.data + p.n * p.row_bytes - part.row_bytes;
  for (int64_t n = first; n < end; n++, out += PIECE_PITCH, scales += scales_row) {
    const uint8_t *w = p.data + n * p.row_bytes + at, *ahead = smaller(w + next, stop);
    for (int64_t i = 0; i < part.row_bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
    const float* of_piece = scales + start / D::STEP * per_step;
    if constexpr (DECODES_BFLOAT16) {
      decode_row<D>(part, decode, w, of_piece, per_step, out);
    } else {
      alignas(64) float wide[PIECE];
      decode_row<D>(part, decode, w, of_piece, per_step, wide);
      narrow(wide, ceil_div(part.k, D::STEP) * D::STEP, out);
    }
  }
}

// The sums of ``rows`` rows of w with all rows of x over ``steps`` steps, added to those in memory unless they are the first.
inline void multiply_piece(const uint16_t* w, int64_t rows, const char* x, int64_t x_block, int64_t blocks, int64_t steps,
                           bool first, float* sums, int64_t pitch) {
  const auto some = [&](auto nt, auto mt, int64_t n, int64_t m) {
    constexpr int NT = decltype(nt)::value, MT = decltype(mt)::value;
    float* c = sums + n * pitch + m * 16;
    if (first) tiles_zero<NT, MT>();
    else tiles_load<NT, MT>(c, pitch);
    tiles_multiply<NT, MT>(w + n * PIECE_PITCH, PIECE_PITCH * 2, x + m * x_block, x_block, steps);
    tiles_store<NT, MT>(c, pitch);
  };
  const std::integral_constant<int, 1> one;
  const std::integral_constant<int, 2> two;
  for (int64_t m = 0; m < blocks; m += 2)  // 32 rows of x stay in the first cache for all rows of w
    for (int64_t n = 0; n < rows; n += 32) {
      const bool both = m + 1 < blocks;
      if (rows - n > 16) both ? some(two, two, n, m) : some(two, one, n, m);
      else both ? some(one, two, n, m) : some(one, one, n, m);
    }
}

// Results of rows first to ``end`` - 1 of w.
template <typename D> void rows_by_tiles(const Problem& p, int64_t first, int64_t end) {
  const D decode{};
  const int64_t steps = ceil_div(p.k, D::STEP), values = packed_row<D>(p), blocks = ceil_div(p.m, 16), pitch = blocks * 16;
  const int per_step = scales_per_step(p, D::STEP);
  const int64_t scales_row = steps * per_step, height = p.m <= 64 ? 32 : MOST_TILE_ROWS;
  float* memory = buffer(height * (scales_row + pitch + PIECE_PITCH / 2) + 96);
  float* sums = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
  uint16_t* piece = reinterpret_cast<uint16_t*>(sums + height * pitch);
  float* scales = sums + height * (pitch + PIECE_PITCH / 2);  // a load may read 15 scales too many
  tiles_begin();
  for (int64_t top = first; top < end; top += height) {
    const int64_t bottom = smaller(top + height, end), rows = bottom - top;
    bool usual[MOST_TILE_ROWS];
    scales_of_rows(p, top, bottom, D::STEP, per_step, steps, scales, usual);
    for (int64_t n = top; n < bottom; n++)
      usual[n - top] = usual[n - top] && is_usual<D>(p, n, steps, per_step, scales + (n - top) * scales_row);
    for (int64_t start = 0; start < values; start += PIECE) {
      decode_piece(p, decode, top, bottom, start, scales, scales_row, per_step, piece);
      const char* x = static_cast<const char*>(p.packed) + start * 32;
      multiply_piece(piece, rows, x, values * 32, blocks, smaller(PIECE, values - start) / 32, start == 0, sums, pitch);
    }
    for (int64_t n = top; n < bottom; n++)
      if (!usual[n - top]) row_in_double(p, n, sums + (n - top) * pitch, 1);
    for (int64_t m = 0; m < p.m; m += 16) {
      alignas(64) float of_block[16 * MOST_TILE_ROWS];
      for (int64_t n = 0; n < rows; n += 16) transpose(sums + n * pitch + m, pitch, of_block + n, MOST_TILE_ROWS);
      finish(rows_of(p, m, smaller<int64_t>(16, p.m - m)), top, bottom, of_block, MOST_TILE_ROWS);
    }
  }
  tiles_end();
}

}  // namespace

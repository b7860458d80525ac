// Activations that were cast, as integers: codes whose values are integers times a unit, and the multiplier of each block.
// The sum of a block of their products with integer codes of w is exact.
#pragma once
#include "linear_tiles.h"

namespace {

inline int8_t integer_of(int element, int code) {
  return element == INT8_ID ? int8_t(code) : int8_t(value_of(element, code) / unit_of(element));
}

// Integers by code: of 6 bits, and of two codes of 4 bits.
struct ByCode {
  int8_t six[64], pairs[256][2];
  ByCode() {
    for (int c = 0; c < 64; c++) six[c] = integer_of(E2M3_ID, c);
    for (int c = 0; c < 256; c++) pairs[c][0] = integer_of(E2M1_ID, c & 15), pairs[c][1] = integer_of(E2M1_ID, c >> 4);
  }
};

// n integers from their codes; up to three more may be written.
inline void integers_of(int element, const uint8_t* codes, int64_t n, int8_t* values) {
  static const ByCode of;
  if (element == INT8_ID) std::memcpy(values, codes, size_t(n));
  else if (element == E2M1_ID)
    for (int64_t i = 0; i < n; i += 2) std::memcpy(values + i, of.pairs[*codes++], 2);
  else
    for (int64_t i = 0; i < n; i += 4, codes += 3) {
      const uint32_t four = codes[0] | uint32_t(codes[1]) << 8 | uint32_t(codes[2]) << 16;
      for (int j = 0; j < 4; j++) values[i + j] = of.six[four >> (6 * j) & 63];
    }
}

// The integers of row m of x, with zeros up to ``all``, a multiple of 32, and a multiplier for each block: its scale times
// ``unit``; that of zeros is the unit. False if scales are so large or so small that sums in float32 could not take them.
inline bool integers_of_row(const Problem& p, int64_t m, int64_t all, float unit, int8_t* values, float* scales) {
  integers_of(p.x_element, p.x_codes + m * p.x_codes_stride, p.k, values);
  std::memset(values + p.k, 0, size_t(all - p.k));
  const int64_t blocks = ceil_div(p.k, p.x_block);
  const uint8_t* bytes = p.x_scales + m * p.x_scales_stride;
  float most = 0;
  for (int64_t b = 0; b < blocks; b++) {
    const float scale = p.x_scale_kind == UE4M3 ? tables().value[E4M3_ID][bytes[b]] : bytes[b] == 255 ? NAN : power_of_two(bytes[b]);
    if (!(scale >= 0)) return false;
    int8_t any = 0;
    for (int64_t i = b * p.x_block; i < smaller<int64_t>((b + 1) * p.x_block, all); i++) any |= values[i];
    if (any) most = larger(most, scale);
    scales[b] = any ? scale * unit : unit;
  }
  return most == 0 || (most <= 0x1p60f && most >= 0x1p-40f);
}

}  // namespace

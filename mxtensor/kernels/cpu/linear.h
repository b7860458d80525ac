// Products y = x w^T of a few rows x with a quantized weight w (N, K): what all instruction sets share. The fields of
// the problem, the values of scales, rows that are multiplied in double, and the rounding of the result.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "elements.h"
#include "problem.h"

namespace {

inline int64_t block_cols(const Problem& p) { return p.block_cols < 0 ? p.k : p.block_cols; }
// Scales that a step of so many values has: one where a block has it whole.
inline int scales_per_step(const Problem& p, int step) {
  return p.block_cols < 0 || p.block_cols >= step ? 1 : step / p.block_cols;
}
inline int64_t scale_row(const Problem& p, int64_t n) { return p.block_rows < 0 ? 0 : n / p.block_rows; }

inline float value_of(int element, int code) {
  constexpr Minifloat ROWS[] = {Minifloat(3, 7, 0x7F), Minifloat(2, 15, 0x7C), Minifloat(2, 3, 256),
                                Minifloat(3, 1, 256), Minifloat(1, 1, 256)};
  if (element == INT8_ID) return float(int8_t(code)) / 64.0f;
  const int sign = 1 << (BITS[element] - 1), magnitude = code & (sign - 1);
  float value = ROWS[element].decode(magnitude);
  if (element == E5M2_ID && magnitude == 0x7C) value = as_float(INFINITE);
  if (magnitude > 0x7C && element < E3M2_ID && std::isinf(value)) value = as_float(0x7FC00000);
  return code & sign ? -value : value;
}

struct Tables {
  float value[6][256];
  Tables() {
    for (int e = 0; e < 6; e++)
      for (int c = 0; c < 256; c++) value[e][c] = value_of(e, c & ((1 << BITS[e]) - 1));
  }
};
inline const Tables& tables() {
  static const Tables made;
  return made;
}

inline float scale_at(const Problem& p, int64_t i) {
  if (p.scale_kind >= FP32) return static_cast<const float*>(p.scale)[i];
  const int byte = static_cast<const uint8_t*>(p.scale)[i];
  if (p.scale_kind == UE4M3) return tables().value[E4M3_ID][byte];
  return byte == 255 ? as_float(0x7FC00000) : power_of_two(byte);
}

// Whether a block with this scale may be summed before it is scaled. Large scales may make values infinite, and these
// must meet x one by one: infinity times zero is NaN.
inline bool is_plain(float scale) { return as_int(scale < 0 ? -scale : scale) < (227 << 23); }

inline int code_at(int element, const uint8_t* row, int64_t i) {
  if (BITS[element] == 8) return row[i];
  if (BITS[element] == 4) return row[i / 2] >> (i % 2 * 4) & 15;
  const uint8_t* group = row + i / 4 * 3;
  return (group[0] | group[1] << 8 | group[2] << 16) >> (i % 4 * 6) & 63;
}

// One row of w with every row of x in double, value by value as the definition says: for infinities, NaN and extreme scales.
inline void row_in_double(const Problem& p, int64_t n, float* sums, int64_t step) {
  const uint8_t* row = p.data + n * p.row_bytes;
  const float* values = tables().value[p.element];
  const int64_t scales = scale_row(p, n) * p.scale_stride, block = block_cols(p);
  with_kind(p.x_kind, [&](auto kind) {
    for (int64_t m = 0; m < p.m; m++) {
      const auto* x = static_cast<const decltype(kind)*>(p.x) + m * p.x_stride;
      double sum = 0;
      for (int64_t i = 0; i < p.k; i++) {
        const float w = values[code_at(p.element, row, i)] * scale_at(p, scales + i / block);
        sum += double(load(x[i])) * w;
      }
      sums[m * step] = float(sum);
    }
  });
}

// Whether sums over blocks of the values of this row of x neither overflow nor vanish before they are scaled.
template <typename T> bool fits_float32_sums(const T* x, int64_t k) {
  int32_t most = 0;
  for (int64_t i = 0; i < k; i++) most = larger(most, as_int(load(x[i])) & 0x7FFFFFFF);
  return most == 0 || (most >= (127 - 40) << 23 && most < (127 + 60) << 23);
}

// The same product for ``count`` rows of x from ``first`` on. Packed x stays that of all rows.
inline Problem rows_of(const Problem& p, int64_t first, int64_t count) {
  Problem some = p;
  some.m = count;
  with_kind(p.x_kind, [&](auto kind) { some.x = static_cast<const decltype(kind)*>(p.x) + first * p.x_stride; });
  with_kind(p.out_kind, [&](auto kind) { some.out = static_cast<decltype(kind)*>(p.out) + first * p.out_stride; });
  if (p.bias)
    with_kind(p.bias_kind, [&](auto kind) { some.bias = static_cast<const decltype(kind)*>(p.bias) + first * p.bias_stride; });
  return some;
}

// Sums of rows first to end - 1 of w, at most 256, times the global scales, plus the bias, rounded once.
inline void finish(const Problem& p, int64_t first, int64_t end, const float* sums, int64_t step) {
  const double whole = multiplier_of(p);
  const bool scaled = whole != 1.0, changes = scaled || p.bias;
  const float multiplier = float(whole), beta = float(p.beta);
  const int64_t width = end - first;
  alignas(64) float row[256];
  with_kind(p.out_kind, [&](auto kind) {
    auto* out = static_cast<decltype(kind)*>(p.out) + first;
    for (int64_t m = 0; m < p.m; m++, sums += step, out += p.out_stride) {
      const float* from = changes ? row : sums;
      if (changes)
        for (int64_t i = 0; i < width; i++) row[i] = scaled ? sums[i] * multiplier : sums[i];
      if (p.bias)
        with_kind(p.bias_kind, [&](auto bias_kind) {
          const auto* bias = static_cast<const decltype(bias_kind)*>(p.bias) + m * p.bias_stride + first;
          for (int64_t i = 0; i < width; i++) row[i] += load(bias[i]) * beta;
        });
      for (int64_t i = 0; i < width; i++) store(out[i], from[i]);
    }
  });
}

}  // namespace

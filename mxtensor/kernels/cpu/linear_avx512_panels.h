// Panels: codes of some rows of w, brought once into an order in which each lane of a register belongs to one row of w, for
// products with many rows of x. No sum is spread over lanes, and codes are decoded once for all rows of x. This file has what
// panels of integers and of bfloat16 share.
#pragma once
#include "linear_avx512_dots.h"

namespace {

constexpr int64_t PANEL_BYTES = 1 << 18;  // of a panel at a time, so that it stays in the L2 cache
constexpr int64_t X_IN_CACHE = 1 << 21;   // bytes of packed x that are multiplied by every panel before the next
constexpr int64_t LEAST_CHUNK = 32;       // rows of x

template <typename T> T& at_byte(char* row, int64_t byte) { return *reinterpret_cast<T*>(row + byte); }
template <typename T> const T& at_byte(const char* row, int64_t byte) { return *reinterpret_cast<const T*>(row + byte); }

// x[j] lane i = x[i] lane j.
inline void transpose(Bits* x) {
  Bits y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]), y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; j++) {
      y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
      y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xDD);
    }
  for (int j = 0; j < 8; j++) {
    x[j] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0x88);
    x[j + 8] = _mm512_shuffle_i32x4(y[j], y[j + 8], 0xDD);
  }
}

// Column j of a step of 16 rows of w, whose codes are spread: what lane i has of row ``row_of(i)`` after ``top``. Rows of w after
// the last are the last once more.
template <typename D, typename R>
void columns_of_step(const Problem& p, const D& decode, int64_t top, int64_t at, int64_t panel, R row_of, Bits* columns) {
  const uint8_t* lowest = p.data + (p.n - 1) * p.row_bytes;
  const int64_t bytes = smaller<int64_t>(D::BYTES, p.row_bytes - at * D::BYTES);
  for (int i = 0; i < 16; i++) {
    const uint8_t* w = smaller(p.data + (top + row_of(i)) * p.row_bytes, lowest) + at * D::BYTES;
    fetch(smaller(w + panel * p.row_bytes, lowest));
    columns[i] = decode.spread(_mm512_maskz_loadu_epi8(first_bytes(bytes), w));
  }
  transpose(columns);
}

// The scales of ``rows`` rows of a panel, those of its rows side by side for each of ``count`` blocks, and ones up to ``row``. True
// if all are powers of two from 2^(FIRST - 127) on and fewer than COUNT exponents after it, if they are powers of two.
template <int FIRST, int COUNT>
bool order_scales(const float* scales, int64_t row, int64_t rows, int64_t panel, int64_t count, float* out) {
  __mmask16 unusual = 0;
  for (int64_t b = 0; b < row; b += 16)
    for (int64_t top = 0; top < panel; top += 16) {
      Bits all[16];
      for (int64_t r = 0; r < 16; r++) all[r] = _mm512_loadu_si512(scales + smaller(top + r, rows - 1) * row + b);
      transpose(all);
      for (int64_t i = 0; i < smaller<int64_t>(16, row - b); i++) {
        if (b + i >= count) all[i] = _mm512_castps_si512(_mm512_set1_ps(1));
        const Bits after = _mm512_sub_epi32(_mm512_srli_epi32(all[i], 23), _mm512_set1_epi32(FIRST));
        unusual |= _mm512_cmpge_epu32_mask(after, _mm512_set1_epi32(COUNT));
        _mm512_store_si512(out + (b + i) * panel + top, all[i]);
      }
    }
  return unusual == 0;
}

// Results of rows first to end - 1 of w: P has the order of codes and the products of one kind of panel.
template <typename P, typename D> void rows_by_panels(const Problem& p, int64_t first, int64_t end) {
  constexpr int64_t PANEL = P::PANEL;
  const P kind(p);
  const int per_step = scales_per_step(p, D::STEP);
  const int64_t values = packed_row<D>(p), steps = values / D::STEP, row = steps * per_step;
  const int64_t piece = smaller<int64_t>(PANEL_BYTES / P::VALUE_BYTES / PANEL, values);
  const int64_t chunk = larger(LEAST_CHUNK, X_IN_CACHE / (2 * values) / 4 * 4), height = smaller(chunk, p.m);
  float* memory = buffer(16 + piece * PANEL * P::VALUE_BYTES / 4 + row * PANEL * 2 + 16 + height * PANEL);
  float* panel = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
  float *scales = panel + piece * PANEL * P::VALUE_BYTES / 4, *sums = scales + row * PANEL, *of_rows = sums + height * PANEL;
  for (int64_t m = 0; m < p.m; m += chunk) {
    const Problem some = rows_of(p, m, smaller(chunk, p.m - m));
    const char* x = static_cast<const char*>(p.packed) + m * 2 * values;
    for (int64_t top = first; top < end; top += PANEL) {
      const int64_t bottom = smaller(top + PANEL, end), blocks = ceil_div(p.k, block_cols(p));
      bool plain[PANEL];
      scales_of_rows(p, top, bottom, D::STEP, per_step, steps, of_rows, plain);
      const int64_t real = per_step == 1 ? steps : blocks;
      const bool usual = order_scales<P::FIRST, P::COUNT>(of_rows, row, bottom - top, PANEL, real, scales) && kind.takes_usual(p);
      for (int64_t start = 0; start < p.k; start += piece) {
        char* w = reinterpret_cast<char*>(panel);
        kind.order(p, top, start, smaller(piece, p.k - start), scales, usual, w);
        kind.multiply(x, some.m, w, scales, usual, start, smaller(piece, p.k - start), sums);
      }
      for (int64_t n = top; n < bottom; n++)
        if (!plain[n - top]) row_in_double(some, n, sums + (n - top), PANEL);
      finish(some, top, bottom, sums, PANEL);
    }
  }
}

}  // namespace

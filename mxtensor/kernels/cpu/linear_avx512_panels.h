// Products of integers, as in linear_avx512_integers.h, with many rows of x: codes of a panel of 32 rows of w are brought once
// into the order in which a lane of a register belongs to a row of w and has four of its integers. An instruction multiplies
// them by four integers of a row of x, and no sum is spread over lanes. One row of w and one of x need as many instructions for
// 512 products as the dot products of bfloat16 for 300.
#pragma once
#include "linear_avx512_integers.h"

namespace {

constexpr int64_t PANEL = 32;            // rows of w
constexpr int64_t PANEL_PIECE = 8192;    // values of a row of w at a time, so that a panel stays in the L2 cache
constexpr int64_t X_IN_CACHE = 1 << 21;  // bytes of packed x that are multiplied by every panel before the next
constexpr int64_t LEAST_CHUNK = 32;      // rows of x

// Values that have one scale of w and one of x.
inline int64_t panel_block(const Problem& p) { return smaller<int64_t>(p.block_cols, p.x_block); }

// The least rows of x: with fewer, bringing the codes into order takes longer than it saves. Measured on an AMD EPYC (Zen 4).
inline int64_t panels_from(const Problem& p) { return panel_block(p) == 16 ? 20 : p.element == E2M1_ID ? 12 : 8; }
inline bool takes_panels(const Problem& p) { return p.x_codes && blocks_of_integers(p) && p.m >= panels_from(p); }

// ------------------------------------------------------------------------------------------ x

constexpr int32_t ONE = 127 << 23;

// Where a row of packed x has its integers, and for each block what sums start with, the multiplier, and this less ONE as an
// integer, to be added to the exponents of scales of w. After them: whether all multipliers are such powers of two.
struct PanelRow {
  int64_t values, blocks;
  int64_t starts() const { return values; }
  int64_t multipliers() const { return values + 4 * blocks; }
  int64_t exponents() const { return values + 8 * blocks; }
  int64_t flag() const { return values + 12 * blocks; }
  int64_t bytes() const { return 2 * values; }
};
template <typename D> PanelRow panel_row(const Problem& p) {
  const int64_t values = packed_row<D>(p);
  return {values, values / panel_block(p)};
}
template <typename T> T& at_byte(char* row, int64_t byte) { return *reinterpret_cast<T*>(row + byte); }
template <typename T> const T& at_byte(const char* row, int64_t byte) { return *reinterpret_cast<const T*>(row + byte); }

// Integers of each 16 values in the order of those of w.
template <typename I> void arrange_row(char* values, int64_t n) {
  if constexpr (I::VECTORS == 1) return;
  const Bits places = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  for (int64_t i = 0; i < n; i += 64)
    _mm512_store_si512(values + i, _mm512_shuffle_epi8(_mm512_load_si512(values + i), places));
}

// Packs rows first to end - 1 of x. False if scales of one are so large or so small that sums in float32 could not take them.
template <typename D> bool pack_panels(const Problem& p, int64_t first, int64_t end) {
  using I = typename IntegersOf<D>::type;
  const PanelRow of = panel_row<D>(p);
  const int64_t block = panel_block(p), fours = block / 4, repeats = p.x_block / block;
  float* scales = buffer(of.blocks + 16);
  for (int64_t m = first; m < end; m++) {
    char* row = static_cast<char*>(p.packed) + m * of.bytes();
    int8_t* values = reinterpret_cast<int8_t*>(row);
    if (!integers_of_row(p, m, of.values, unit_of(p.element) * unit_of(p.x_element), values, scales)) return false;
    for (int64_t b = ceil_div(p.k, p.x_block); b < ceil_div(of.values, p.x_block); b++) scales[b] = 1;  // of zeros
    arrange_row<I>(row, of.values);
    bool exponents = p.scale_kind == E8M0 && p.x_scale_kind == E8M0;
    for (int64_t at = 0; at < of.values; at += 64) {
      alignas(64) int32_t sums[16];
      const Bits x = _mm512_load_si512(values + at);
      _mm512_store_si512(sums, _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(char(I::OFFSET)), x));
      for (int64_t i = 0; i < 16; i += fours) {
        int32_t sum = 0;
        for (int64_t j = 0; j < fours; j++) sum += sums[i + j];
        const int64_t b = at / block + i / fours;
        const float scale = scales[b / repeats];
        at_byte<int32_t>(row, of.starts() + 4 * b) = -sum;
        at_byte<float>(row, of.multipliers() + 4 * b) = scale;
        at_byte<int32_t>(row, of.exponents() + 4 * b) = as_int(scale) - ONE;
        exponents &= scale >= 0x1p-53f;
      }
    }
    at_byte<int32_t>(row, of.flag()) = exponents;
  }
  return true;
}

// ------------------------------------------------------------------------------------------ w

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

// ``count`` values of the rows of a panel from value ``start`` on: registers of four integers of 16 rows each, and those of the
// other 16. Rows of w after the last are the last once more.
template <typename I> void order_panel(const Problem& p, const I& decode, int64_t top, int64_t start, int64_t count, char* out) {
  for (int64_t at = start / I::STEP; at * I::STEP < start + count; at++, out += I::VECTORS * 2048) {
    const int64_t bytes = smaller<int64_t>(I::BYTES, p.row_bytes - at * I::BYTES);
    for (int half = 0; half < 2; half++) {
      Bits all[16];
      for (int r = 0; r < 16; r++) {
        const uint8_t* w = p.data + smaller(top + half * 16 + r, p.n - 1) * p.row_bytes + at * I::BYTES;
        fetch(smaller(w + PANEL * p.row_bytes, p.data + p.n * p.row_bytes - 1));
        all[r] = decode.spread(_mm512_maskz_loadu_epi8(first_bytes(bytes), w));
      }
      transpose(all);
      for (int g = 0; g < 16; g++) {
        Bits of_rows[I::VECTORS];
        decode(all[g], of_rows);
        for (int v = 0; v < I::VECTORS; v++) {
          const int place = I::VECTORS == 1 ? g : g / 2 * 4 + v * 2 + g % 2;
          _mm512_store_si512(out + (place * 2 + half) * 64, of_rows[v]);
        }
      }
    }
  }
}

// The scales of a panel, those of its rows side by side for each of ``count`` blocks, and ones up to a step. True if products of
// them with multipliers of x are products of powers of two that are normal numbers.
inline bool order_scales(const float* scales, int64_t row, int64_t rows, int64_t count, float* out) {
  const Bits first = _mm512_set1_epi32(FIRST_EXPONENT), most = _mm512_set1_epi32(EXPONENTS);
  __mmask16 unusual = 0;
  for (int64_t b = 0; b < row; b += 16)
    for (int64_t half = 0; half < 2; half++) {
      Bits all[16];
      for (int64_t r = 0; r < 16; r++) all[r] = _mm512_loadu_si512(scales + smaller(half * 16 + r, rows - 1) * row + b);
      transpose(all);
      for (int64_t i = 0; i < smaller<int64_t>(16, row - b); i++) {
        if (b + i >= count) all[i] = _mm512_set1_epi32(ONE);
        unusual |= _mm512_cmpge_epu32_mask(_mm512_sub_epi32(_mm512_srli_epi32(all[i], 23), first), most);
        _mm512_store_si512(out + ((b + i) * 2 + half) * 16, all[i]);
      }
    }
  return unusual == 0;
}

// ------------------------------------------------------------------------------------------ products

// Sums of the rows of a panel with ROWS rows of x over ``count`` blocks, added to those in memory unless they are the first.
template <int ROWS, int BLOCK, bool BY_EXPONENTS>
void panel_dots(const PanelRow& of, const char* x, const char* w, const float* scales, int shift, int64_t from, int64_t count,
                float* sums) {
  __m512 total[ROWS][2];
  for (int m = 0; m < ROWS; m++)
    for (int h = 0; h < 2; h++) total[m][h] = from ? _mm512_loadu_ps(sums + m * PANEL + h * 16) : _mm512_setzero_ps();
  const int64_t multipliers = BY_EXPONENTS ? of.exponents() : of.multipliers();
  for (int64_t b = from; b < from + count; b++, w += BLOCK * PANEL) {
    Bits sum[ROWS][2];
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; m++)
      for (int h = 0; h < 2; h++) sum[m][h] = _mm512_set1_epi32(at_byte<int32_t>(x + m * of.bytes(), of.starts() + 4 * b));
#pragma GCC unroll 8
    for (int g = 0; g < BLOCK / 4; g++) {
      const Bits w0 = _mm512_load_si512(w + g * 128), w1 = _mm512_load_si512(w + g * 128 + 64);
#pragma GCC unroll 4
      for (int m = 0; m < ROWS; m++) {
        const Bits four = _mm512_set1_epi32(at_byte<int32_t>(x + m * of.bytes(), b * BLOCK + g * 4));
        sum[m][0] = _mm512_dpbusd_epi32(sum[m][0], w0, four), sum[m][1] = _mm512_dpbusd_epi32(sum[m][1], w1, four);
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const __m512 value = _mm512_cvtepi32_ps(sum[m][h]), of_w = _mm512_load_ps(scales + ((b >> shift) * 2 + h) * 16);
        const char* of_x = x + m * of.bytes() + multipliers + 4 * b;
        if constexpr (BY_EXPONENTS) {
          const Bits both = _mm512_add_epi32(_mm512_castps_si512(of_w), _mm512_set1_epi32(at_byte<int32_t>(of_x, 0)));
          total[m][h] = _mm512_fmadd_ps(value, _mm512_castsi512_ps(both), total[m][h]);
        } else {
          total[m][h] = _mm512_fmadd_ps(_mm512_mul_ps(value, _mm512_set1_ps(at_byte<float>(of_x, 0))), of_w, total[m][h]);
        }
      }
  }
  for (int m = 0; m < ROWS; m++)
    for (int h = 0; h < 2; h++) _mm512_storeu_ps(sums + m * PANEL + h * 16, total[m][h]);
}

// The same for ``rows`` rows of x; ``exponents``: scales of w are powers of two that are large enough.
template <int BLOCK>
void multiply_panel(const PanelRow& of, const char* x, int64_t rows, const char* w, const float* scales, bool exponents, int shift,
                    int64_t from, int64_t count, float* sums) {
  in_fours(rows, [&](auto some, int64_t m) {
    constexpr int ROWS = decltype(some)::value;
    const char* row = x + m * of.bytes();
    bool both = exponents;
    for (int i = 0; i < ROWS; i++) both = both && at_byte<int32_t>(row + i * of.bytes(), of.flag());
    if (both) panel_dots<ROWS, BLOCK, true>(of, row, w, scales, shift, from, count, sums + m * PANEL);
    else panel_dots<ROWS, BLOCK, false>(of, row, w, scales, shift, from, count, sums + m * PANEL);
  });
}

// Results of rows first to end - 1 of w.
template <typename D> void rows_by_panels(const Problem& p, int64_t first, int64_t end) {
  using I = typename IntegersOf<D>::type;
  const I decode{};
  const PanelRow of = panel_row<D>(p);
  const int per_step = scales_per_step(p, D::STEP), shift = p.block_cols > panel_block(p);
  const int64_t steps = of.values / D::STEP, row = steps * per_step, block = panel_block(p);
  const int64_t chunk = larger(LEAST_CHUNK, X_IN_CACHE / of.bytes() / 4 * 4), piece = smaller(PANEL_PIECE, of.values);
  const int64_t height = smaller(chunk, p.m);
  float* memory = buffer(16 + piece * PANEL / 4 + row * PANEL * 2 + 16 + height * PANEL);
  float* panel = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
  float *scales = panel + piece * PANEL / 4, *sums = scales + row * PANEL, *of_rows = sums + height * PANEL;
  for (int64_t m = 0; m < p.m; m += chunk) {
    const Problem some = rows_of(p, m, smaller(chunk, p.m - m));
    const char* x = static_cast<const char*>(p.packed) + m * of.bytes();
    for (int64_t top = first; top < end; top += PANEL) {
      const int64_t bottom = smaller(top + PANEL, end);
      bool plain[PANEL];
      scales_of_rows(p, top, bottom, D::STEP, per_step, steps, of_rows, plain);
      const bool exponents = order_scales(of_rows, row, bottom - top, ceil_div(p.k, p.block_cols), scales);
      for (int64_t start = 0; start < p.k; start += piece) {
        const int64_t count = smaller(piece, p.k - start), from = start / block, blocks = ceil_div(count, block);
        char* w = reinterpret_cast<char*>(panel);
        order_panel(p, decode, top, start, count, w);
        if (block == 32) multiply_panel<32>(of, x, some.m, w, scales, exponents, shift, from, blocks, sums);
        else multiply_panel<16>(of, x, some.m, w, scales, exponents, shift, from, blocks, sums);
      }
      for (int64_t n = top; n < bottom; n++)
        if (!plain[n - top]) row_in_double(some, n, sums + (n - top), PANEL);
      finish(some, top, bottom, sums, PANEL);
    }
  }
}

}  // namespace

// Panels of integers, as in linear_avx512_integers.h: a lane has four integers of a row of w, which an instruction multiplies by
// four integers of a row of x. One row of w and one of x need as many instructions for 512 products as the dot products of
// bfloat16 for 300.
#pragma once
#include "linear_avx512_integers.h"
#include "linear_avx512_panels.h"

namespace {

// Values that have one scale of w and one of x.
inline int64_t panel_block(const Problem& p) { return smaller<int64_t>(p.block_cols, p.x_block); }

// The least rows of x: with fewer, bringing the codes into order takes longer than it saves. Measured on an AMD EPYC (Zen 4).
inline int64_t panels_from(const Problem& p) { return panel_block(p) == 16 ? 20 : p.element == E2M1_ID ? 12 : 8; }
inline bool takes_integer_panels(const Problem& p) { return p.x_codes && blocks_of_integers(p) && p.m >= panels_from(p); }

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

// Integers of each 16 values in the order of those of w.
template <typename I> void arrange_row(char* values, int64_t n) {
  if constexpr (I::VECTORS == 1) return;
  const Bits places = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  for (int64_t i = 0; i < n; i += 64)
    _mm512_store_si512(values + i, _mm512_shuffle_epi8(_mm512_load_si512(values + i), places));
}

// Packs rows first to end - 1 of x. False if scales of one are so large or so small that sums in float32 could not take them.
template <typename D> bool pack_integer_panels(const Problem& p, int64_t first, int64_t end) {
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

// ------------------------------------------------------------------------------------------ products

template <typename D> struct IntegerPanels {
  using I = typename IntegersOf<D>::type;
  static constexpr int64_t PANEL = 32, VALUE_BYTES = 1;
  static constexpr int FIRST = FIRST_EXPONENT, COUNT = EXPONENTS;  // of scales that are multiplied by adding exponents

  const I decode{};
  const PanelRow of;
  const int64_t block;
  const int shift;  // from blocks here to those of w
  explicit IntegerPanels(const Problem& p)
      : of(panel_row<D>(p)), block(panel_block(p)), shift(p.block_cols > panel_block(p)) {}

  // Whether ``usual`` scales of w are powers of two.
  static bool takes_usual(const Problem& p) { return p.scale_kind == E8M0; }

  // ``count`` values of the rows of a panel from value ``start`` on: registers of four integers of 16 rows each, and those of the
  // other 16.
  void order(const Problem& p, int64_t top, int64_t start, int64_t count, const float*, bool, char* out) const {
    for (int64_t at = start / I::STEP; at * I::STEP < start + count; at++, out += I::VECTORS * 2048)
      for (int half = 0; half < 2; half++) {
        Bits columns[16];
        columns_of_step(p, decode, top + half * 16, at, PANEL, [](int i) { return i; }, columns);
        for (int g = 0; g < 16; g++) {
          Bits of_rows[I::VECTORS];
          decode.values(columns[g], of_rows);
          for (int v = 0; v < I::VECTORS; v++) {
            const int place = I::VECTORS == 1 ? g : g / 2 * 4 + v * 2 + g % 2;
            _mm512_store_si512(out + (place * 2 + half) * 64, of_rows[v]);
          }
        }
      }
  }

  // Sums of the rows of a panel with ROWS rows of x over ``count`` blocks, added to those in memory unless they are the first.
  template <int ROWS, int BLOCK, bool BY_EXPONENTS>
  void dots(const char* x, const char* w, const float* scales, int64_t from, int64_t count, float* sums) const {
    __m512 total[ROWS][2];
    for (int m = 0; m < ROWS; m++)
      for (int h = 0; h < 2; h++) total[m][h] = from ? _mm512_loadu_ps(sums + m * PANEL + h * 16) : _mm512_setzero_ps();
    const int64_t bytes = of.bytes(), starts = of.starts(), multipliers = BY_EXPONENTS ? of.exponents() : of.multipliers();
    for (int64_t b = from; b < from + count; b++, w += BLOCK * PANEL) {
      Bits sum[ROWS][2];
#pragma GCC unroll 4
      for (int m = 0; m < ROWS; m++)
        for (int h = 0; h < 2; h++) sum[m][h] = _mm512_set1_epi32(at_byte<int32_t>(x + m * bytes, starts + 4 * b));
#pragma GCC unroll 8
      for (int g = 0; g < BLOCK / 4; g++) {
        const Bits w0 = _mm512_load_si512(w + g * 128), w1 = _mm512_load_si512(w + g * 128 + 64);
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; m++) {
          const Bits four = _mm512_set1_epi32(at_byte<int32_t>(x + m * bytes, b * BLOCK + g * 4));
          sum[m][0] = _mm512_dpbusd_epi32(sum[m][0], w0, four), sum[m][1] = _mm512_dpbusd_epi32(sum[m][1], w1, four);
        }
      }
#pragma GCC unroll 4
      for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
          const __m512 value = _mm512_cvtepi32_ps(sum[m][h]), of_w = _mm512_load_ps(scales + ((b >> shift) * 2 + h) * 16);
          const char* of_x = x + m * bytes + multipliers + 4 * b;
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

  // The same for ``rows`` rows of x over ``count`` values; ``usual``: scales of w are powers of two that are large enough.
  void multiply(const char* x, int64_t rows, const char* w, const float* scales, bool usual, int64_t start, int64_t count,
                float* sums) const {
    in_fours(rows, [&](auto some, int64_t m) {
      constexpr int ROWS = decltype(some)::value;
      const char* row = x + m * of.bytes();
      bool both = usual;
      for (int i = 0; i < ROWS; i++) both = both && at_byte<int32_t>(row + i * of.bytes(), of.flag());
      const auto work = [&](auto size, auto by_exponents) {
        constexpr int BLOCK = decltype(size)::value;
        dots<ROWS, BLOCK, decltype(by_exponents)::value>(row, w, scales, start / BLOCK, ceil_div(count, BLOCK), sums + m * PANEL);
      };
      if (block == 16) work(Int<16>(), std::false_type());
      else if (both) work(Int<32>(), std::true_type());
      else work(Int<32>(), std::false_type());
    });
  }
};

}  // namespace

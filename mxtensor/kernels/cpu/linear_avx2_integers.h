// Dot products of codes of 8 and 4 bits with activations that were cast to int8 codes, with AVX2: the sum of a block of 32 is
// an integer and exact, and is scaled once. The instruction multiplies unsigned by signed bytes: here the magnitudes of w by
// x, which takes the signs of w. Twice a value of 4 bits is an integer.
#pragma once
#include "linear_avx2.h"
#include "linear_integers.h"

namespace {

template <int ELEMENT> struct Integers;  // the integers of 32 codes, and their magnitudes

template <> struct Integers<INT8_ID> : Step<INT8_ID> {
  ALWAYS_INLINE void operator()(const uint8_t* codes, __m256i& values, __m256i& magnitudes) const {
    values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)), magnitudes = _mm256_abs_epi8(values);
  }
};

template <> struct Integers<E2M1_ID> : Step<E2M1_ID> {
  static constexpr int source(int i) { return i % 16 * 2 + i / 16; }
  ALWAYS_INLINE void operator()(const uint8_t* codes, __m256i& values, __m256i& magnitudes) const {
    const __m256i sizes = table_of(0x0C080604'03020100, 0x0C080604'03020100);
    const __m256i both = table_of(0x0C080604'03020100, int64_t(0xF4F8FAFC'FDFEFF00));
    const __m256i place = nibbles(codes, nibble_shifts());
    values = _mm256_shuffle_epi8(both, place), magnitudes = _mm256_shuffle_epi8(sizes, place);
  }
};

// One and two rows take 0.65 to 0.86 of the time in float32, in the cache of an AMD EPYC (Zen 3); four take up to 1.17.
constexpr int64_t MOST_INTEGER_ROWS = 2;
template <typename D> constexpr bool takes_integers() {
  return std::is_same_v<D, Decoder<INT8_ID>> || std::is_same_v<D, Decoder<E2M1_ID>>;
}

inline bool blocks_of_integers(const Problem& p) { return p.scale_kind == E8M0 && p.block_cols == 32 && p.x_block == 32; }
template <typename D> struct IntegersOf;
template <int ELEMENT> struct IntegersOf<Decoder<ELEMENT>> { using type = Integers<ELEMENT>; };

// Bytes of a row of packed x: a byte for each value, then a scale for each block.
template <typename D> int64_t integer_row(const Problem& p) { return ceil_div(ceil_div(p.k, 32) * 36, 64) * 64; }

// Packs a row of x. False if a code is -128, which has no magnitude, or if scales are so large or so small that sums in
// float32 could not take them.
template <typename D> bool pack_integers(const Problem& p, int64_t m, char* to) {
  using I = typename IntegersOf<D>::type;
  const int64_t all = ceil_div(p.k, 32) * 32;
  int8_t* values = reinterpret_cast<int8_t*>(to);
  if (!integers_of_row(p, m, all, unit_of(p.element) * unit_of(p.x_element), values, reinterpret_cast<float*>(to + all))) return false;
  int8_t lowest = 0, step[32];
  for (int64_t start = 0; start < all; start += 32) {
    for (int i = 0; i < 32; i++) step[i] = values[start + I::source(i)], lowest = smaller(lowest, step[i]);
    std::memcpy(values + start, step, 32);
  }
  return lowest > -128;
}

// Sums of OUTS rows of w with ROWS rows of x over steps first to end - 1, added to those of the steps before.
template <int ROWS, int OUTS, typename I>
void integer_dots(const Problem& p, const char* x, int64_t x_bytes, const uint8_t* w, int64_t w_step, const float* scales,
                  int64_t scales_step, int64_t first, int64_t end, float* sums, int64_t step) {
  const float* x_scales = reinterpret_cast<const float*>(x + ceil_div(p.k, 32) * 32);
  Floats total[ROWS][OUTS] = {};
  const auto add = [&](const uint8_t* codes, int64_t codes_step, int64_t at) ALWAYS_INLINE {
#pragma GCC unroll 2
    for (int o = 0; o < OUTS; o++) {
      __m256i values, magnitudes;
      I()(codes + o * codes_step, values, magnitudes);
      const Floats scale = all_of(scales[o * scales_step + at]);
#pragma GCC unroll 4
      for (int m = 0; m < ROWS; m++) {
        const __m256i of_x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + m * x_bytes + at * 32));
        const __m256i pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(of_x, values));
        const Floats sum = Floats(_mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
        total[m][o] += sum * all_of(x_scales[m * (x_bytes / 4) + at]) * scale;
      }
    }
  };
  each_step<OUTS, I>(p, w, w_step, first, end, add);
  for (int m = 0; m < ROWS; m++)
    for (int o = 0; o < OUTS; o++) add_to(sums[m * step + o], total[m][o], first == 0);
}

template <typename D>
void integer_dots_of_rows(const Problem& p, int outs, const uint8_t* w, int64_t w_step, const float* scales,
                          int64_t scales_step, int, float* sums, int64_t step) {
  using I = typename IntegersOf<D>::type;
  const char* x = static_cast<const char*>(p.packed);
  const int64_t x_bytes = integer_row<D>(p);
  const auto work = [&](auto rows, auto pair, int64_t m, int o, int64_t first, int64_t end) ALWAYS_INLINE {
    integer_dots<decltype(rows)::value, decltype(pair)::value, I>(p, x + m * x_bytes, x_bytes, w + o * w_step, w_step,
                                                                  scales + o * scales_step, scales_step, first, end,
                                                                  sums + m * step + o, step);
  };
  in_pieces(p, outs, ceil_div(p.k, 32), 36, work);
}

template <typename D> int64_t integers_by_fours(const Problem&, int64_t first, int64_t, float*, int64_t) { return first; }

}  // namespace

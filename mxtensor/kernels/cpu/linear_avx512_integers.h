// Dot products of codes whose values are integers with activations that were cast to integers, by the instruction of VNNI
// for products of bytes: the sum of a block is an integer and exact, and is scaled once. The instruction multiplies unsigned
// by signed bytes: here codes of w, OFFSET more than their integer, by x. OFFSET times the sum of x is taken off again: a
// lane of 32 bits starts with it.
#pragma once
#include "linear_avx512_dots.h"
#include "linear_integers.h"

namespace {

// A register of codes as registers of unsigned bytes, ``spread`` and looked up as by a Decoder, and x in their order.
template <int ELEMENT> struct Integers;

template <> struct Integers<INT8_ID> : OfBytes {
  static constexpr int VECTORS = 1, BYTES = 64, OFFSET = 128;
  void values(Bits spread, Bits* w) const { w[0] = _mm512_xor_si512(spread, _mm512_set1_epi8(char(0x80))); }
  static void arrange(const int8_t* x, Bits* out) { out[0] = _mm512_loadu_si512(x); }
};

// A table of integers by code, OFFSET more than they are, repeated: a permute looks at six bits.
template <int ELEMENT, int OFFSET> struct IntegerTable {
  alignas(64) uint8_t values[64];
  IntegerTable() {
    for (int i = 0; i < 64; i++) values[i] = uint8_t(integer_of(ELEMENT, i % (1 << BITS[ELEMENT])) + OFFSET);
  }
};
template <int ELEMENT, int OFFSET> Bits table_of_integers() {
  static const IntegerTable<ELEMENT, OFFSET> made;
  return _mm512_load_si512(made.values);
}

template <> struct Integers<E2M3_ID> : OfBytes {
  static constexpr int VECTORS = 1, BYTES = 48, OFFSET = 60;
  SixBitBytes bytes;
  Bits table = table_of_integers<E2M3_ID, OFFSET>();
  Bits spread(Bits codes) const { return bytes(codes); }
  void values(Bits spread, Bits* w) const { w[0] = _mm512_permutexvar_epi8(spread, table); }
  static void arrange(const int8_t* x, Bits* out) { out[0] = _mm512_loadu_si512(x); }
};

template <> struct Integers<E2M1_ID> {  // codes at even places, then those at odd places
  static constexpr int STEP = 128, VECTORS = 2, BYTES = 64, OFFSET = 12;
  Bits table = table_of_integers<E2M1_ID, OFFSET>();
  Bits spread(Bits codes) const { return codes; }
  void values(Bits spread, Bits* w) const {
    w[0] = _mm512_permutexvar_epi8(spread, table);
    w[1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(spread, 4), table);
  }
  static void arrange(const int8_t* x, Bits* out) {
    const Bits low = _mm512_loadu_si512(x), high = _mm512_loadu_si512(x + 64);
    alignas(64) uint8_t places[64];
    for (int i = 0; i < 64; i++) places[i] = uint8_t(2 * i);
    const Bits even = _mm512_load_si512(places);
    out[0] = _mm512_permutex2var_epi8(low, even, high);
    out[1] = _mm512_permutex2var_epi8(low, _mm512_or_si512(even, _mm512_set1_epi8(1)), high);
  }
};

constexpr int64_t MOST_INTEGER_ROWS = INT64_MAX;
template <typename D> struct IntegersOf { using type = void; };
template <int ELEMENT> struct IntegersOf<Decoder<ELEMENT>> {
  using type = std::conditional_t<unit_of(ELEMENT) != 0, Integers<ELEMENT>, void>;
};
template <typename D> constexpr bool takes_integers() { return !std::is_void_v<typename IntegersOf<D>::type>; }
inline bool blocks_of_integers(const Problem& p) {
  const bool of_w = p.scale_kind == E8M0 ? p.block_cols == 32 : p.scale_kind == UE4M3 && p.element == E2M1_ID && p.block_cols == 16;
  return of_w && (p.x_block == 32 || p.x_block == 16);
}

// A step of packed x: its integers, what each lane starts with, and what it is multiplied by.
template <typename I> constexpr int64_t step_of_x() { return I::VECTORS * 64 + 128; }
template <typename I> int64_t row_of_x(const Problem& p) { return ceil_div(p.k, I::STEP) * step_of_x<I>(); }

template <typename D> int64_t integer_row(const Problem& p) { return row_of_x<typename IntegersOf<D>::type>(p); }

// Packs a row of x. False if its scales are so large or so small that sums in float32 could not take them.
template <typename D> bool pack_integers(const Problem& p, int64_t m, char* to) {
  using I = typename IntegersOf<D>::type;
  const int64_t steps = ceil_div(p.k, I::STEP), all = steps * I::STEP, blocks = all / p.x_block;
  float* scales = buffer(blocks + 16 + all / 4);
  int8_t* values = reinterpret_cast<int8_t*>(scales + blocks + 16);
  if (!integers_of_row(p, m, all, unit_of(p.element) * unit_of(p.x_element), values, scales)) return false;
  for (int64_t b = ceil_div(p.k, p.x_block); b < blocks; b++) scales[b] = 1;  // of zeros
  const FloatScales of_x(scales, 0, I::STEP / p.x_block);
  for (int64_t at = 0; at < steps; at++, to += step_of_x<I>()) {
    Bits x[I::VECTORS], sum = _mm512_setzero_si512();
    I::arrange(values + at * I::STEP, x);
    for (int v = 0; v < I::VECTORS; v++) {
      sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(char(I::OFFSET)), x[v]);
      _mm512_store_si512(to + v * 64, x[v]);
    }
    _mm512_store_si512(to + I::VECTORS * 64, _mm512_sub_epi32(_mm512_setzero_si512(), sum));
    _mm512_store_ps(to + I::VECTORS * 64 + 64, of_x(0, at));
  }
  return true;
}

// The product of a scale of w and a scale of x that are powers of two, by adding their exponents, for which more units of
// the processor serve than for a product of floats.
inline __m512 of_both(__m512 of_w, __m512 of_x) {
  const Bits exponent = _mm512_sub_epi32(_mm512_castps_si512(of_x), _mm512_castps_si512(_mm512_set1_ps(1)));
  return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(of_w), exponent));
}

// OUTS rows of w, ``w_step`` bytes apart, with ROWS rows of x. EXPONENTS: ``of_both`` has the products of their scales.
template <bool EXPONENTS, int OUTS, int ROWS, typename I, typename S>
void integer_dots(const Problem& p, const I& decode, const char* x, int64_t x_bytes, const uint8_t* w, int64_t w_step, const S& scales,
                  float* sums, int64_t step) {
  __m512 total[ROWS][4];
  for (auto& row : total)
    for (auto& sum : row) sum = _mm512_setzero_ps();
  const uint8_t* ahead = w + larger(AHEAD, OUTS * w_step);
  if (ahead >= p.data + p.n * p.row_bytes) ahead = w;
  const auto add = [&](int64_t at, int64_t bytes, auto whole) {
    Bits values[OUTS][I::VECTORS];
    __m512 scale[OUTS];
#pragma GCC unroll 4
    for (int o = 0; o < OUTS; o++) {
      const uint8_t* from = w + o * w_step + at * I::BYTES;
      const Bits codes = decltype(whole)::value && I::BYTES == 64 ? _mm512_loadu_si512(from)
                                                                  : _mm512_maskz_loadu_epi8(first_bytes(bytes), from);
      fetch(ahead + (at * OUTS + o) * I::BYTES);
      decode.values(decode.spread(codes), values[o]);
      scale[o] = scales(o, at);
    }
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; m++) {
      const char* row = x + m * x_bytes + at * step_of_x<I>();
      const Bits start = _mm512_load_si512(row + I::VECTORS * 64);
      const __m512 of_x = _mm512_load_ps(row + I::VECTORS * 64 + 64);
#pragma GCC unroll 4
      for (int o = 0; o < OUTS; o++) {
        Bits sum = start;
#pragma GCC unroll 2
        for (int v = 0; v < I::VECTORS; v++) sum = _mm512_dpbusd_epi32(sum, values[o][v], _mm512_load_si512(row + v * 64));
        const __m512 value = _mm512_cvtepi32_ps(sum);
        if constexpr (EXPONENTS) total[m][o] = _mm512_fmadd_ps(value, of_both(scale[o], of_x), total[m][o]);
        else total[m][o] = _mm512_fmadd_ps(_mm512_mul_ps(value, of_x), scale[o], total[m][o]);
      }
    }
  };
  const int64_t whole = p.k / I::STEP, bytes = p.row_bytes - whole * I::BYTES;
  for (int64_t at = 0; at < whole; at++) add(at, I::BYTES, std::true_type());
  if (bytes) add(whole, bytes, std::false_type());
  for (int m = 0; m < ROWS; m++) {
    alignas(16) float four[4];
    _mm_store_ps(four, sums_of(total[m], S::UNIT));
    for (int o = 0; o < OUTS; o++) sums[m * step + o] = four[o];
  }
}

template <int OUTS, typename I, typename S>
void integer_rows(const Problem& p, const I& decode, const uint8_t* w, int64_t w_step, const S& scales, float* sums, int64_t step) {
  const int64_t x_bytes = row_of_x<I>(p);
  const char* x = static_cast<const char*>(p.packed);
  in_fours(p.m, [&](auto rows, int64_t m) {
    integer_dots<false, OUTS, decltype(rows)::value>(p, decode, x + m * x_bytes, x_bytes, w, w_step, scales, sums + m * step, step);
  });
}

// Up to four rows of w by float32 scales, ``per_step`` for each step.
template <typename D>
void integer_dots_of_rows(const Problem& p, int outs, const uint8_t* w, int64_t w_step, const float* values,
                          int64_t values_step, int per_step, float* sums, int64_t step) {
  using I = typename IntegersOf<D>::type;
  const FloatScales scales(values, values_step, per_step);
  const I decode{};
  if (outs == 4) integer_rows<4>(p, decode, w, w_step, scales, sums, step);
  else if (outs == 2) integer_rows<2>(p, decode, w, w_step, scales, sums, step);
  else integer_rows<1>(p, decode, w, w_step, scales, sums, step);
}

// Bytes of scales of w whose products with multipliers of x, from 2^-53 to 2^60, are normal numbers.
constexpr int FIRST_EXPONENT = 60, EXPONENTS = 121;

// Whether all multipliers of a packed row of x are powers of two that are large enough; none is larger.
template <typename I> bool are_exponents(const Problem& p) {
  if (p.scale_kind != E8M0 || p.x_scale_kind != E8M0) return false;
  const char* x = static_cast<const char*>(p.packed) + I::VECTORS * 64 + 64;
  __mmask16 small = 0;
  for (int64_t at = 0; at < ceil_div(p.k, I::STEP); at++, x += step_of_x<I>())
    small |= _mm512_cmp_ps_mask(_mm512_load_ps(x), _mm512_set1_ps(0x1p-53f), _CMP_LT_OQ);
  return small == 0;
}

// Rows of w from ``first`` on, four at a time, as long as their scales need not be made float32 first. The first row that is
// left.
template <typename D> int64_t integers_by_fours(const Problem& p, int64_t first, int64_t end, float* sums, int64_t step) {
  using I = typename IntegersOf<D>::type;
  const I decode{};
  const int64_t begin = first;
  if (p.m == 1 && are_exponents<I>(p))
    first = by_fours<I::STEP, FIRST_EXPONENT, EXPONENTS>(p, first, end, sums, [&](const uint8_t* w, const auto& scales, float* to) {
      integer_dots<true, 4, 1>(p, decode, static_cast<const char*>(p.packed), 0, w, p.row_bytes, scales, to, step);
    });
  return by_fours<I::STEP>(p, first, end, sums + (first - begin), [&](const uint8_t* w, const auto& scales, float* to) {
    integer_rows<4>(p, decode, w, p.row_bytes, scales, to, step);
  });
}

}  // namespace

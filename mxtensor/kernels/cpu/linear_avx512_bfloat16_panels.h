// Panels of bfloat16: a lane has two decoded values of a row of w, which an instruction multiplies by two values of a row of x.
// Scales are multiplied into the values, where these stay exact; others scale the sum of a block.
#pragma once
#include "linear_avx512_panels.h"

namespace {

// The least and the most rows of x, measured on an AMD EPYC (Zen 4): with fewer, bringing the codes into order takes longer than
// it saves; with more, torch's BLAS is as fast.
inline int64_t bfloat16_panels_from(const Problem& p) { return p.element != E2M1_ID ? 20 : p.scale_kind == E8M0 ? 24 : 32; }
constexpr int64_t BFLOAT16_PANELS_UP_TO = 1024;
constexpr int64_t MULTIPLIED_FROM = 48;  // rows for which scales that are not powers of two are multiplied into the values

// Whether a block of w is a multiple of those that sums are made of.
inline bool takes_bfloat16_panels(const Problem& p) {
  const int64_t block = block_cols(p);
  const bool blocks = block == 16 || block == 32 || block == 64 || block == 128 || p.block_cols < 0;
  return HAS_BFLOAT16 && p.x_kind == BFLOAT16 && blocks && p.m >= bfloat16_panels_from(p) && p.m <= BFLOAT16_PANELS_UP_TO;
}

// Packs rows first to end - 1 of x. False if a sum in float32 could not take one.
template <typename D> bool pack_bfloat16_panels(const Problem& p, int64_t first, int64_t end) {
  const int64_t values = packed_row<D>(p);
  const Bits places = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
  for (int64_t m = first; m < end; m++) {
    const BFloat16* x = static_cast<const BFloat16*>(p.x) + m * p.x_stride;
    if (!fits_float32_sums(x, p.k)) return false;
    char* row = static_cast<char*>(p.packed) + m * 2 * values;
    std::memcpy(row, x, size_t(p.k) * 2);
    std::memset(row + p.k * 2, 0, size_t(values - p.k) * 2);
    if (D::VECTORS == 4)
      for (int64_t i = 0; i < 2 * values; i += 64)
        _mm512_store_si512(row + i, _mm512_shuffle_epi8(_mm512_load_si512(row + i), places));
  }
  return true;
}

#ifdef __AVX512BF16__
template <typename D> struct BFloat16Panels {
  static constexpr int64_t PANEL = D::VECTORS == 4 ? 32 : 16, VALUE_BYTES = 2;
  static constexpr int FIRST = 67, COUNT = 121;  // 2^-60 to 2^60: with any value, normal numbers of bfloat16
  // Values of a row in a lane, or in two that are neighbours: 4-bit codes are decoded into pairs four apart, others into four in
  // order.
  static constexpr int LANE = D::VECTORS == 4 ? 2 : 4;

  const D decode{};
  const bool powers;  // whether scales are powers of two
  const int64_t x_bytes;
  const int64_t scale_block;  // values that have one scale of w, at most a step
  Bits spread[2];             // the lanes of rows of a register from the scales of 16 rows
  explicit BFloat16Panels(const Problem& p)
      : powers(p.scale_kind == E8M0), x_bytes(2 * packed_row<D>(p)), scale_block(D::STEP / scales_per_step(p, D::STEP)) {
    const Bits lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    spread[0] = PANEL == 32 ? lanes : _mm512_srli_epi32(lanes, 1);
    spread[1] = PANEL == 32 ? lanes : _mm512_add_epi32(spread[0], _mm512_set1_epi32(8));
  }

  // Whether values times ``usual`` scales are numbers of bfloat16.
  bool takes_usual(const Problem& p) const { return powers || (p.scale_kind == UE4M3 && p.element == E2M1_ID && p.m >= MULTIPLIED_FROM); }

  // The scales of the rows of register h, in its lanes.
  Bits scales_of_lanes(const float* scales, int64_t value, int h) const {
    const float* from = scales + value / scale_block * PANEL + (PANEL == 32 ? h * 16 : 0);
    return _mm512_permutexvar_epi32(spread[h], _mm512_load_si512(from));
  }

  // ``count`` values of the rows of a panel from value ``start`` on, two registers for LANE values of its rows; ``usual``: times
  // their scales.
  void order(const Problem& p, int64_t top, int64_t start, int64_t count, const float* scales, bool usual, char* out) const {
    constexpr int COLUMN = PANEL == 32 ? 8 : 4;  // values of a row in a column of 32 bits
    for (int64_t at = start / D::STEP; at * D::STEP < start + count; at++, out += D::STEP * PANEL * 2)
      for (int half = 0; half < PANEL / 16; half++) {
        Bits columns[16];
        const auto row_of = [](int i) { return PANEL == 32 ? i : i / 4 * 2 + i % 2 + i % 4 / 2 * 8; };
        columns_of_step(p, decode, top + half * 16, at, PANEL, row_of, columns);
        for (int c = 0; c < 16; c++) {
          Bits values[D::VECTORS];
          decode.values(columns[c], values);
          for (int v = 0; v < D::VECTORS; v++) {
            const int h = PANEL == 32 ? half : v;
            if (usual) values[v] = scaled(values[v], scales_of_lanes(scales, at * D::STEP + c * COLUMN, h));
            _mm512_store_si512(out + (PANEL == 32 ? (c * 4 + v) * 2 + half : c * 2 + v) * 64, values[v]);
          }
        }
      }
  }

  // Pairs of values times a scale: a power of two by adding to their exponents.
  Bits scaled(Bits values, Bits scale) const {
    if (!powers) {
      const Bits upper = _mm512_set1_epi32(int(0xFFFF0000));
      const __m512 even = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(values, 16)), _mm512_castsi512_ps(scale));
      const __m512 odd = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(values, upper)), _mm512_castsi512_ps(scale));
      return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
    }
    const Bits exponent = _mm512_srai_epi32(_mm512_sub_epi32(scale, _mm512_castps_si512(_mm512_set1_ps(1))), 16);
    const Bits both = _mm512_or_si512(_mm512_slli_epi32(exponent, 16), _mm512_and_si512(exponent, _mm512_set1_epi32(0xFFFF)));
    return _mm512_mask_add_epi16(values, with_exponent(values), values, both);
  }

  // Which values are neither zero nor infinite nor NaN. None is subnormal.
  static __mmask32 with_exponent(Bits values) {
    if constexpr (std::is_same_v<D, Decoder<E4M3_ID>> || std::is_same_v<D, Decoder<E5M2_ID>>) {
      const Bits before = _mm512_sub_epi16(_mm512_add_epi16(values, values), _mm512_set1_epi16(1));  // without the sign
      return _mm512_cmplt_epu16_mask(before, _mm512_set1_epi16(int16_t(0xFEFF)));
    }
    return _mm512_test_epi16_mask(values, _mm512_set1_epi16(0x7FFF));
  }

  static Bits repeated(const char* x) {
    if constexpr (LANE == 4) return _mm512_set1_epi64(at_byte<int64_t>(x, 0));
    else return _mm512_set1_epi32(at_byte<int32_t>(x, 0));
  }

  // Sums of the rows of a panel with ROWS rows of x over ``count`` blocks of BLOCK values, added to those in memory unless they are
  // the first. BLOCK 0: ``count`` values that are times their scales.
  template <int ROWS, int BLOCK>
  void dots(const char* x, const char* w, const float* scales, int64_t start, int64_t count, float* sums) const {
    constexpr int GROUPS = (BLOCK ? BLOCK : 16) / LANE;
    __m512 total[ROWS][2];
    for (auto& row : total)
      for (auto& sum : row) sum = _mm512_setzero_ps();
    for (int64_t at = start; at < start + count; at += GROUPS * LANE, w += GROUPS * 128) {
      __m512 sum[ROWS][2];
#pragma GCC unroll 4
      for (int m = 0; m < ROWS; m++)
        for (int h = 0; h < 2; h++) sum[m][h] = BLOCK ? _mm512_setzero_ps() : total[m][h];
#pragma GCC unroll 16
      for (int g = 0; g < GROUPS; g++) {
        const __m512bh w0 = __m512bh(_mm512_load_si512(w + g * 128)), w1 = __m512bh(_mm512_load_si512(w + g * 128 + 64));
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; m++) {
          const __m512bh some = __m512bh(repeated(x + m * x_bytes + (at + g * LANE) * 2));
          sum[m][0] = _mm512_dpbf16_ps(sum[m][0], w0, some), sum[m][1] = _mm512_dpbf16_ps(sum[m][1], w1, some);
        }
      }
#pragma GCC unroll 2
      for (int h = 0; h < 2; h++) {
        const __m512 scale = BLOCK ? _mm512_castsi512_ps(scales_of_lanes(scales, at, h)) : _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; m++) total[m][h] = BLOCK ? _mm512_fmadd_ps(sum[m][h], scale, total[m][h]) : sum[m][h];
      }
    }
    for (int m = 0; m < ROWS; m++) store(total[m], start != 0, sums + m * PANEL);
  }

  // The sums of a row of x: those of two neighbouring lanes together, where a row of w has two.
  static void store(const __m512* total, bool more, float* sums) {
    const Bits lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), even = _mm512_slli_epi32(lanes, 1);
    for (int h = 0; h < PANEL / 16; h++) {
      __m512 sum = total[h];
      if (PANEL == 16) {
        const __m512 odd = _mm512_permutex2var_ps(total[0], _mm512_add_epi32(even, _mm512_set1_epi32(1)), total[1]);
        sum = _mm512_add_ps(_mm512_permutex2var_ps(total[0], even, total[1]), odd);
      }
      _mm512_storeu_ps(sums + h * 16, more ? _mm512_add_ps(sum, _mm512_loadu_ps(sums + h * 16)) : sum);
    }
  }

  void multiply(const char* x, int64_t rows, const char* w, const float* scales, bool usual, int64_t start, int64_t count,
                float* sums) const {
    in_fours(rows, [&](auto some, int64_t m) {
      constexpr int ROWS = decltype(some)::value;
      const char* row = x + m * x_bytes;
      if (usual) dots<ROWS, 0>(row, w, scales, start, count, sums + m * PANEL);
      else if (scale_block == 16) dots<ROWS, 16>(row, w, scales, start, count, sums + m * PANEL);
      else dots<ROWS, 32>(row, w, scales, start, count, sums + m * PANEL);
    });
  }
};
#endif

}  // namespace

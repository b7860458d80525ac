// Dot products of rows of w with packed rows of x, by the decoders of linear_avx512.h.
#pragma once
#include "linear_avx512.h"

namespace {

// Asks for codes that are AHEAD of those that are multiplied, and once more for those halfway there: the processor forgets
// some of what it is asked for while it waits for memory. 4-bit codes take 2 to 6 % less time so, integers of 8 bits 13 %.
inline void fetch(const uint8_t* ahead) {
  _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
  _mm_prefetch(reinterpret_cast<const char*>(ahead - AHEAD / 2), _MM_HINT_T1);
}

// The scales of a step over UNIT as multipliers of the lanes of one register: from float32, ``per_step`` for each step.
struct FloatScales {
  static constexpr float UNIT = 1;
  const float* values;
  int64_t row;  // values from one row of w to the next
  int per_step;
  Bits spread;
  FloatScales(const float* values, int64_t row, int per_step) : values(values), row(row), per_step(per_step) {
    const Bits lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    spread = _mm512_srli_epi32(_mm512_mullo_epi32(lane, _mm512_set1_epi32(per_step)), 4);
  }
  __m512 operator()(int o, int64_t at) const {
    return _mm512_permutexvar_ps(spread, _mm512_loadu_ps(values + o * row + at * per_step));
  }
};

// The same from the bytes of E8M0, PER_STEP for each step: a byte from 1 to 254 is the exponent of its multiplier.
template <int PER_STEP, int FIRST_BYTE = 1, int BYTES = 226> struct E8M0Scales {
  static constexpr int FIRST = FIRST_BYTE, COUNT = BYTES;  // normal and small enough, as is_plain in linear.h
  static constexpr float UNIT = 1;
  const uint8_t* bytes;
  int64_t row;
  Bits place;
  E8M0Scales(const uint8_t* bytes, int64_t row) : bytes(bytes), row(row) {
    alignas(64) uint8_t from[64];
    for (int i = 0; i < 64; i++) from[i] = uint8_t(i % 4 == 3 ? i / 4 * PER_STEP / 16 : 0x80);
    place = _mm512_load_si512(from);
  }
  __m512 operator()(int o, int64_t at) const {
    uint32_t some = 0;
    std::memcpy(&some, bytes + o * row + at * PER_STEP, PER_STEP);
    const Bits repeated = PER_STEP == 4 ? _mm512_set1_epi32(int(some)) : _mm512_set1_epi16(int16_t(some));
    return _mm512_castsi512_ps(_mm512_srli_epi32(_mm512_shuffle_epi8(repeated, place), 1));
  }
};

// The same from eight bytes of UE4M3 for each step, as float16 with the same fields.
struct UE4M3Scales {
  static constexpr int FIRST = 0, COUNT = 0x7F;
  static constexpr float UNIT = 256;
  const uint8_t* bytes;
  int64_t row;
  UE4M3Scales(const uint8_t* bytes, int64_t row) : bytes(bytes), row(row) {}
  __m512 operator()(int o, int64_t at) const {
    const __m256i place = _mm256_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1, 4, -1, 4, -1, 5,
                                           -1, 5, -1, 6, -1, 6, -1, 7, -1, 7);
    int64_t some;
    std::memcpy(&some, bytes + o * row + at * 8, 8);
    const __m256i halves = _mm256_srli_epi16(_mm256_shuffle_epi8(_mm256_set1_epi64x(some), place), 1);
    return _mm512_cvtph_ps(halves);
  }
};

// Whether n bytes are all from S::FIRST on and fewer than S::COUNT after it.
template <typename S> bool are_usual(const uint8_t* bytes, int64_t n) {
  __mmask64 unusual = 0;
  for (int64_t i = 0; i < n; i += 64) {
    const Bits after = _mm512_sub_epi8(_mm512_maskz_loadu_epi8(first_bytes(n - i), bytes + i), _mm512_set1_epi8(S::FIRST));
    unusual |= _mm512_mask_cmpge_epu8_mask(first_bytes(n - i), after, _mm512_set1_epi8(char(S::COUNT)));
  }
  return unusual == 0;
}

// The sums of four registers, times ``unit``.
inline __m128 sums_of(const __m512 (&x)[4], float unit) {
  const auto half = [](__m512 v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); };
  const __m256 low = _mm256_hadd_ps(half(x[0]), half(x[1])), high = _mm256_hadd_ps(half(x[2]), half(x[3]));
  const __m256 sum = _mm256_hadd_ps(low, high);
  return _mm_mul_ps(_mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1)), _mm_set1_ps(unit));
}

// OUTS rows of w, ``w_step`` bytes apart, with ROWS rows of x.
template <int OUTS, int ROWS, bool BFLOAT16_X, typename D, typename S>
void dots(const Problem& p, const D& decode, const char* x, int64_t x_bytes, const uint8_t* w, int64_t w_step,
          const S& scales, float* sums, int64_t step) {
  constexpr int VALUE = BFLOAT16_X ? 2 : 4;
  __m512 total[ROWS][OUTS];
  for (int m = 0; m < ROWS; m++)
    for (int o = 0; o < OUTS; o++) total[m][o] = _mm512_setzero_ps();
  const uint8_t* ahead = w + larger(AHEAD, OUTS * w_step);
  if (ahead >= p.data + p.n * p.row_bytes) ahead = w;
  const auto add = [&](int64_t at, int64_t bytes, auto whole) {
    Bits values[OUTS][D::VECTORS];
    __m512 scale[OUTS];
#pragma GCC unroll 4
    for (int o = 0; o < OUTS; o++) {
      const uint8_t* from = w + o * w_step + at * D::BYTES;
      const Bits codes = decltype(whole)::value && D::BYTES == 64 ? _mm512_loadu_si512(from)
                                                                  : _mm512_maskz_loadu_epi8(first_bytes(bytes), from);
      fetch(ahead + (at * OUTS + o) * D::BYTES);
      decode.values(decode.spread(codes), values[o]);
      scale[o] = scales(o, at);
    }
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
      const char* row = x + m * x_bytes + at * D::STEP * VALUE;
      __m512 sum[OUTS];
#pragma GCC unroll 4
      for (int o = 0; o < OUTS; o++) sum[o] = _mm512_setzero_ps();
#pragma GCC unroll 4
      for (int v = 0; v < D::VECTORS; v++) {
        const char* xs = row + v * 32 * VALUE;
#pragma GCC unroll 4
        for (int o = 0; o < OUTS; o++) {
#ifdef __AVX512BF16__
          if constexpr (BFLOAT16_X) {
            sum[o] = _mm512_dpbf16_ps(sum[o], __m512bh(values[o][v]), __m512bh(_mm512_load_si512(xs)));
            continue;
          }
#endif
          const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(values[o][v], 16));
          const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(values[o][v], _mm512_set1_epi32(int(0xFFFF0000))));
          sum[o] = _mm512_fmadd_ps(even, _mm512_load_ps(xs), sum[o]);
          sum[o] = _mm512_fmadd_ps(odd, _mm512_load_ps(xs + 64), sum[o]);
        }
      }
#pragma GCC unroll 4
      for (int o = 0; o < OUTS; o++) total[m][o] = _mm512_fmadd_ps(sum[o], scale[o], total[m][o]);
    }
  };
  const int64_t whole = p.k / D::STEP, bytes = p.row_bytes - whole * D::BYTES;
  for (int64_t at = 0; at < whole; at++) add(at, D::BYTES, std::true_type());
  if (bytes) add(whole, bytes, std::false_type());
  for (int m = 0; m < ROWS; m++) {
    const __m512 none = _mm512_setzero_ps();
    if constexpr (OUTS == 4) {
      _mm_storeu_ps(sums + m * step, sums_of(total[m], S::UNIT));
    } else {
      const __m128 sum = sums_of({total[m][0], total[m][1], none, none}, S::UNIT);
      _mm_storel_pi(reinterpret_cast<__m64*>(sums + m * step), sum);
    }
  }
}

inline int most_outs(int64_t m, int outs) {  // four for up to three rows of x, else two
  return outs >= 4 && m < 4 ? 4 : outs >= 2 ? 2 : 1;
}

template <bool BFLOAT16_X, typename D>
void dots_of_rows(const Problem& p, int outs, const D& decode, int64_t x_bytes, const uint8_t* w, int64_t w_step,
                  const float* values, int64_t values_step, int per_step, float* sums, int64_t step) {
  const FloatScales scales(values, values_step, per_step);
  const char* x = static_cast<const char*>(p.packed);
  const auto some = [&](auto rows, int64_t m, auto at_a_time) {
    dots<decltype(at_a_time)::value, decltype(rows)::value, BFLOAT16_X>(p, decode, x + m * x_bytes, x_bytes, w, w_step,
                                                                        scales, sums + m * step, step);
  };
  if (outs == 4) return with_few(p.m, [&](auto rows) { some(rows, 0, Int<4>()); });
  int64_t m = 0;
  for (; p.m - m >= 8; m += 8) some(Int<8>(), m, Int<2>());
  for (; p.m - m >= 4; m += 4) some(Int<4>(), m, Int<2>());
  with_few(p.m - m, [&](auto rows) { some(rows, m, Int<2>()); });
}

// work(w, scales, sums) for rows of w from ``first`` on, four at a time, as long as scales need not be made float32 first.
// The first row that is left.
template <int STEP, int FIRST = 1, int COUNT = 226, typename F>
int64_t by_fours(const Problem& p, int64_t first, int64_t end, float* sums, F work) {
  const auto from = [&](auto* kind, int64_t per_step) {
    using S = std::remove_pointer_t<decltype(kind)>;
    const uint8_t* bytes = static_cast<const uint8_t*>(p.scale);
    const int64_t row = p.scale_stride, read = 3 * row + ceil_div(p.k, STEP) * per_step;  // a step is read whole
    for (; end - first >= 4 && first * row + read <= p.n * row; first += 4, sums += 4) {
      if (!are_usual<S>(bytes + first * row, read)) break;
      work(p.data + first * p.row_bytes, S(bytes + first * row, row), sums);
    }
  };
  if (p.block_rows != 1) return first;
  if (p.scale_kind == E8M0 && p.block_cols == 32) from(static_cast<E8M0Scales<STEP / 32, FIRST, COUNT>*>(nullptr), STEP / 32);
  if constexpr (STEP == 128)
    if (p.scale_kind == UE4M3 && p.block_cols == 16) from(static_cast<UE4M3Scales*>(nullptr), 8);
  return first;
}

// The same for one to three rows of x.
template <bool BFLOAT16_X, typename D>
int64_t dots_by_fours(const Problem& p, const D& decode, int64_t x_bytes, int64_t first, int64_t end, float* sums, int64_t step) {
  return by_fours<D::STEP>(p, first, end, sums, [&](const uint8_t* w, const auto& scales, float* to) {
    with_few(p.m, [&](auto rows) {
      dots<4, decltype(rows)::value, BFLOAT16_X>(p, decode, static_cast<const char*>(p.packed), x_bytes, w, p.row_bytes, scales, to,
                                                 step);
    });
  });
}

}  // namespace

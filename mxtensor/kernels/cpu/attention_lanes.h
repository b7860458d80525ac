// Vectors of floats for attention, as wide as a register, in the extensions of GCC and Clang: both make the instructions of
// the processor of them. GCC keeps wider vectors in memory, which takes thirty times as long. Codes become floats through
// float16, which has conversions that are fast for subnormal numbers, too.
#pragma once
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include <limits>

#include "elements.h"

namespace {

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX2__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif
typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

inline Lanes get(const float* from) { Lanes x; std::memcpy(&x, from, sizeof x); return x; }
inline void put(float* to, const Lanes& x) { std::memcpy(to, &x, sizeof x); }
inline Bytes load_bytes(const uint8_t* from, int64_t n) {
  Bytes x = {};
  if (n >= LANES) std::memcpy(&x, from, sizeof x);
  else std::memcpy(&x, from, size_t(n));
  return x;
}
inline Lanes all_lanes(float x) { return x - Lanes{}; }
inline Words words_of(const Lanes& x) { Words w; std::memcpy(&w, &x, sizeof w); return w; }
inline Lanes lanes_of(const Words& x) { Lanes f; std::memcpy(&f, &x, sizeof f); return f; }

inline Lanes from_halves(const Halves& x) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_cvtph_ps((__m256i)x);
#elif defined(__AVX2__) && defined(__F16C__)
  return (Lanes)_mm256_cvtph_ps((__m128i)x);
#elif defined(__aarch64__) && defined(__ARM_NEON)
  return (Lanes)vcvt_f32_f16((float16x4_t)x);
#else
  float out[LANES];
  for (int64_t i = 0; i < LANES; i++) out[i] = load(Half{x[i]});
  return get(out);
#endif
}

inline Lanes get(const BFloat16* from) {
  Halves x;
  std::memcpy(&x, from, sizeof x);
#if defined(__AVX512F__)
  return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#elif defined(__AVX2__)
  return (Lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)x), 16);
#else
  return lanes_of(__builtin_convertvector(x, Words) << 16);
#endif
}
inline Lanes get(const Half* from) {
  Halves x;
  std::memcpy(&x, from, sizeof x);
  return from_halves(x);
}

// Codes without special values as floats: a block with a NaN has a scale that is one. Integers if MANTISSA is -1.
template <int BITS, int MANTISSA>
inline Lanes float_of_codes(const Bytes& codes, const Element& e) {
  if constexpr (MANTISSA < 0) {
    typedef int8_t Signed __attribute__((vector_size(LANES)));
    return __builtin_convertvector((Signed)codes, Lanes) * all_lanes(1.0f / float(1 << e.mantissa_bits));
  } else {
    const Halves wide = __builtin_convertvector(codes, Halves);
    constexpr uint16_t magnitude = uint16_t((1 << (BITS - 1)) - 1), sign = uint16_t(1 << (BITS - 1));
    const Halves half = (wide & magnitude) << (10 - MANTISSA) | (wide & sign) << (16 - BITS);
    return from_halves(half) * all_lanes(as_float((127 + 15 - e.bias) << 23));
  }
}

// e^x for x <= 0, to 2 units in the last place; 0 below -87. A NaN stays one.
inline Lanes exponential(const Lanes& x) {
  const Lanes low = all_lanes(-87.0f), magic = all_lanes(12582912.0f), one = all_lanes(1.0f);
  const Words small = x < low;
  const Lanes clamped = lanes_of((words_of(low) & small) | (words_of(x) & ~small));
  const Lanes rounded = clamped * 1.44269504f + magic, n = rounded - magic;
  const Lanes r = clamped - n * 0.693145752f - n * 1.42860677e-6f;
  Lanes p = r * (1.0f / 720) + 1.0f / 120;
  p = p * r + 1.0f / 24, p = p * r + 1.0f / 6, p = p * r + 0.5f, p = p * r + one, p = p * r + one;
  return lanes_of(words_of(p * lanes_of((words_of(rounded) + 127) << 23)) & ~small);
}
inline float exponential(float x) { return exponential(all_lanes(x))[0]; }

// Lane t of the result is the sum of the lanes of x[t].
inline Lanes sums_of(Lanes* x) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define MX_SHUFFLES
#endif
#endif
  // Each step adds the halves of two vectors, so that one vector has both.
#if defined(MX_SHUFFLES) && defined(__AVX512F__)
  for (int i = 0; i < 8; i++)
    x[i] = __builtin_shufflevector(x[i], x[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(x[i], x[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  for (int i = 0; i < 4; i++)
    x[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int i = 0; i < 2; i++)
    x[i] = __builtin_shufflevector(x[i], x[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(x[i], x[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  return __builtin_shufflevector(x[0], x[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         __builtin_shufflevector(x[0], x[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#elif defined(MX_SHUFFLES) && defined(__AVX2__)
  for (int i = 0; i < 4; i++)
    x[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  for (int i = 0; i < 2; i++)
    x[i] = __builtin_shufflevector(x[i], x[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(x[i], x[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(x[0], x[1], 0, 8, 2, 10, 4, 12, 6, 14) +
         __builtin_shufflevector(x[0], x[1], 1, 9, 3, 11, 5, 13, 7, 15);
#else
  Lanes out = {};
  for (int64_t t = 0; t < LANES; t++)
    for (int64_t i = 0; i < LANES; i++) out[t] += x[t][i];
  return out;
#endif
}

}  // namespace

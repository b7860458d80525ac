// Codes to float32 with AVX2 and F16C. E4M3 and E2M1 become bfloat16, each of whose two bytes is looked up or shifted, and
// whose bits are the upper half of a float32. Of the others every element is a shifted float16, which has subnormal values
// where the element has them; it has another bias, and values times UNIT are those of the format.
#pragma once
#include <immintrin.h>

#include "linear_narrow.h"

namespace {

// 16 float16 values as float32.
ALWAYS_INLINE inline void widen(__m256i halves, Floats* w) {
  w[0] = Floats(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
  w[1] = Floats(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
}

template <int ELEMENT> struct Decoder;

// 32 bfloat16 values from their lower and upper bytes. In each half: bytes 0, 2, 4, 6; 1, 3, 5, 7; and so from 8 on. Bits
// of lower bytes at odd places that are not in ``used`` count as 0.
ALWAYS_INLINE inline void widen_bytes(__m256i lower, __m256i upper, uint32_t used, Floats* w) {
  const __m256i first = _mm256_unpacklo_epi8(lower, upper), second = _mm256_unpackhi_epi8(lower, upper);
  const __m256i odd = _mm256_set1_epi32(int32_t(used));
  w[0] = Floats(_mm256_slli_epi32(first, 16)), w[1] = Floats(_mm256_and_si256(first, odd));
  w[2] = Floats(_mm256_slli_epi32(second, 16)), w[3] = Floats(_mm256_and_si256(second, odd));
}

inline __m256i table_of(int64_t low, int64_t high) { return _mm256_setr_epi64x(low, high, low, high); }

// The upper byte is the sign and the upper seven bits of the exponent, which follow from the upper four bits of a code;
// the upper half of the lower byte is its lower four bits. Zero, subnormal values and NaN are looked up where there are any.
template <> struct Decoder<E4M3_ID> : Step<E4M3_ID> {
  static constexpr bool BY_HALVES = true;
  static constexpr int source(int i) { return i / 4 % 2 * 16 + i / 16 * 8 + i % 4 * 2 + i / 8 % 2; }
  ALWAYS_INLINE void operator()(const uint8_t* codes, Floats* w) const {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    const __m256i four = _mm256_set1_epi8(15), exponents = table_of(0x43424140'3F3E3D3C, int64_t(0xC3C2C1C0'BFBEBDBC));
    __m256i upper = _mm256_shuffle_epi8(exponents, _mm256_and_si256(_mm256_srli_epi16(raw, 4), four));
    __m256i lower = _mm256_slli_epi16(raw, 4);  // at odd places with bits of the next code
    // Twice the magnitude, from -128 on: above 108 are 127 (NaN) and, as they wrap around, 0 to 7.
    const __m256i twice = _mm256_add_epi8(_mm256_add_epi8(raw, raw), _mm256_set1_epi8(0x70));
    if (_mm256_movemask_epi8(_mm256_cmpgt_epi8(twice, _mm256_set1_epi8(108)))) {
      const __m256i sign = _mm256_and_si256(raw, _mm256_set1_epi8(int8_t(0x80))), most = _mm256_set1_epi8(0x7F);
      const __m256i small = _mm256_cmpeq_epi8(_mm256_and_si256(raw, _mm256_set1_epi8(0x78)), _mm256_setzero_si256());
      const __m256i nan = _mm256_cmpeq_epi8(_mm256_and_si256(raw, most), most), place = _mm256_and_si256(raw, four);
      const __m256i uppers = table_of(0x3C3C3C3C'3B3B3B00, 0), lowers = table_of(0x60402000'C0800000, 0);
      upper = _mm256_blendv_epi8(upper, _mm256_or_si256(sign, _mm256_shuffle_epi8(uppers, place)), small);
      lower = _mm256_blendv_epi8(lower, _mm256_shuffle_epi8(lowers, place), small);
      upper = _mm256_or_si256(upper, nan), lower = _mm256_or_si256(lower, nan);
    }
    widen_bytes(lower, upper, 0xFFF00000, w);
  }
};

template <> struct Decoder<E5M2_ID> : Step<E5M2_ID> {
  ALWAYS_INLINE void operator()(const uint8_t* codes, Floats* w) const {
    for (int i = 0; i < 2; i++) {
      const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * i));
      widen(_mm256_slli_epi16(_mm256_cvtepu8_epi16(raw), 8), w + 2 * i);
    }
  }
};

template <> struct Decoder<INT8_ID> : Step<INT8_ID> {
  static constexpr float UNIT = 1.0f / 64.0f;
  ALWAYS_INLINE void operator()(const uint8_t* codes, Floats* w) const {
    for (int i = 0; i < 4; i++) {
      const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * i));
      w[i] = Floats(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw)));
    }
  }
};

ALWAYS_INLINE inline __m256i nibble_shifts() { return _mm256_setr_epi64x(0, 0, 4, 4); }

// 32 codes of 4 bits in a byte each: those at even places in one half, those at odd places in the other.
ALWAYS_INLINE inline __m256i nibbles(const uint8_t* codes, __m256i shifts) {
  const __m256i raw = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  return _mm256_and_si256(_mm256_srlv_epi64(raw, shifts), _mm256_set1_epi8(15));
}

template <> struct Decoder<E2M1_ID> : Step<E2M1_ID> {
  static constexpr int source(int i) { return i / 16 * 16 + i % 4 * 4 + i / 8 % 2 * 2 + i / 4 % 2; }
  __m256i uppers = table_of(0x40404040'3F3F3F00, int64_t(0xC0C0C0C0'BFBFBF80)), shifts = nibble_shifts();
  __m256i lowers = table_of(int64_t(0xC0804000'C0800000), int64_t(0xC0804000'C0800000));
  ALWAYS_INLINE void keep() { asm("" : "+x"(uppers), "+x"(lowers), "+x"(shifts)); }
  ALWAYS_INLINE void operator()(const uint8_t* codes, Floats* w) const {
    const __m256i place = nibbles(codes, shifts);
    widen_bytes(_mm256_shuffle_epi8(lowers, place), _mm256_shuffle_epi8(uppers, place), 0xFFFF0000, w);
  }
};

// 16 codes in 12 bytes: each 16 bits get the two bytes that hold a code, a product moves it to the top, and a shift that
// spreads the sign moves its magnitude to that of a float16.
template <int ELEMENT, int SHIFT> struct SixBits : Step<ELEMENT> {
  static constexpr float UNIT = SHIFT == 2 ? 4096 : 16384;
  ALWAYS_INLINE void operator()(const uint8_t* codes, Floats* w) const {
    const __m256i place = _mm256_setr_epi8(0, 1, 0, 1, 1, 2, 2, 3, 3, 4, 3, 4, 4, 5, 5, 6,  //
                                           6, 7, 6, 7, 7, 8, 8, 9, 9, 10, 9, 10, 10, 11, 11, 12);
    const __m256i to_top = _mm256_setr_epi16(1024, 16, 64, 256, 1024, 16, 64, 256, 1024, 16, 64, 256, 1024, 16, 64, 256);
    const __m256i used = _mm256_set1_epi16(int16_t(0x8000 | 0x7C00 >> SHIFT)), later = _mm256_set1_epi8(4);
    for (int i = 0; i < 2; i++) {  // the second 12 bytes are the last of 16 that start 8 bytes after the first
      const __m256i raw = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 8 * i)));
      const __m256i pairs = _mm256_shuffle_epi8(raw, i ? _mm256_add_epi8(place, later) : place);
      widen(_mm256_and_si256(_mm256_srai_epi16(_mm256_mullo_epi16(pairs, to_top), SHIFT), used), w + 2 * i);
    }
  }
};
template <> struct Decoder<E3M2_ID> : SixBits<E3M2_ID, 2> {};
template <> struct Decoder<E2M3_ID> : SixBits<E2M3_ID, 3> {};

const char* const INSTRUCTIONS = "avx2";

}  // namespace

// Codes to float32 with AVX2 and F16C: every element is a shifted float16, which has subnormal values where the element
// has them. Float16 has another bias: values times UNIT are those of the format.
#pragma once
#include <immintrin.h>

#include "linear_narrow.h"

namespace {

// 16 float16 values as float32.
inline void widen(__m256i halves, Floats* w) {
  w[0] = Floats(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
  w[1] = Floats(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
}

template <int ELEMENT> struct Decoder;

template <> struct Decoder<E4M3_ID> : Step<E4M3_ID> {
  static constexpr float UNIT = 256;
  void operator()(const uint8_t* codes, Floats* w) const {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)), most = _mm256_set1_epi8(0x7F);
    const __m256i mask = _mm256_set1_epi16(int16_t(0xBFFF));
    const __m128i half[] = {_mm256_castsi256_si128(raw), _mm256_extracti128_si256(raw, 1)};
    for (int i = 0; i < 2; i++) widen(_mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(half[i]), 7), mask), w + 2 * i);
    const int nan = _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_and_si256(raw, most), most));
    if (__builtin_expect(nan, 0))
      for (int i = 0; i < 32; i++)
        if (uint32_t(nan) >> i & 1) reinterpret_cast<float*>(w)[i] = as_float(0x7FC00000);
  }
};

template <> struct Decoder<E5M2_ID> : Step<E5M2_ID> {
  void operator()(const uint8_t* codes, Floats* w) const {
    for (int i = 0; i < 2; i++) {
      const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * i));
      widen(_mm256_slli_epi16(_mm256_cvtepu8_epi16(raw), 8), w + 2 * i);
    }
  }
};

template <> struct Decoder<INT8_ID> : Step<INT8_ID> {
  static constexpr float UNIT = 1.0f / 64.0f;
  void operator()(const uint8_t* codes, Floats* w) const {
    for (int i = 0; i < 4; i++) {
      const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * i));
      w[i] = Floats(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(raw)));
    }
  }
};

template <> struct Decoder<E2M1_ID> : Step<E2M1_ID> {  // the upper bytes of float16; the lower ones are 0
  void operator()(const uint8_t* codes, Floats* w) const {
    const __m128i table = _mm_setr_epi8(0, 0x38, 0x3C, 0x3E, 0x40, 0x42, 0x44, 0x46, char(0x80), char(0xB8), char(0xBC),
                                        char(0xBE), char(0xC0), char(0xC2), char(0xC4), char(0xC6));
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)), four = _mm_set1_epi8(15);
    const __m128i even = _mm_shuffle_epi8(table, _mm_and_si128(raw, four));
    const __m128i odd = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(raw, 4), four));
    const __m128i low = _mm_unpacklo_epi8(even, odd), high = _mm_unpackhi_epi8(even, odd);
    widen(_mm256_slli_epi16(_mm256_cvtepu8_epi16(low), 8), w);
    widen(_mm256_slli_epi16(_mm256_cvtepu8_epi16(high), 8), w + 2);
  }
};

// 16 codes in 12 bytes: each 16 bits get the two bytes that hold a code, and a product moves it to the top.
template <int ELEMENT, int SHIFT> struct SixBits : Step<ELEMENT> {
  static constexpr float UNIT = SHIFT == 2 ? 4096 : 16384;
  void operator()(const uint8_t* codes, Floats* w) const {
    const __m256i place = _mm256_setr_epi8(0, 1, 0, 1, 1, 2, 2, 3, 3, 4, 3, 4, 4, 5, 5, 6,  //
                                           6, 7, 6, 7, 7, 8, 8, 9, 9, 10, 9, 10, 10, 11, 11, 12);
    const __m256i to_top = _mm256_setr_epi16(1024, 16, 64, 256, 1024, 16, 64, 256, 1024, 16, 64, 256, 1024, 16, 64, 256);
    for (int i = 0; i < 2; i++) {
      int rest;  // loaded apart: a wider load of bytes that were just copied would wait for them
      std::memcpy(&rest, codes + 12 * i + 8, 4);
      const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 12 * i));
      const __m256i raw = _mm256_broadcastsi128_si256(_mm_insert_epi32(first, rest, 2));
      const __m256i top = _mm256_mullo_epi16(_mm256_shuffle_epi8(raw, place), to_top);
      const __m256i sign = _mm256_and_si256(top, _mm256_set1_epi16(int16_t(0x8000)));
      const __m256i magnitude = _mm256_srli_epi16(_mm256_and_si256(top, _mm256_set1_epi16(0x7C00)), SHIFT);
      widen(_mm256_or_si256(sign, magnitude), w + 2 * i);
    }
  }
};
template <> struct Decoder<E3M2_ID> : SixBits<E3M2_ID, 2> {};
template <> struct Decoder<E2M3_ID> : SixBits<E2M3_ID, 3> {};

const char* const INSTRUCTIONS = "avx2";

}  // namespace

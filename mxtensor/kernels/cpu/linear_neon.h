// Codes to float32 with the instructions of 64-bit ARM. E4M3 and E2M1 become bfloat16, each of whose two bytes is looked up
// or shifted, and whose bits are the upper half of a float32. Of the others every element is a shifted float16, which has
// subnormal values where the element has them; it has another bias, and values times UNIT are those of the format.
#pragma once
#include <arm_neon.h>

#include "linear_narrow.h"
#include "linear_no_integers.h"

namespace {

// 8 bfloat16 values as float32.
ALWAYS_INLINE inline void widen_bfloat16(uint16x8_t x, Floats* w) {
  w[0] = (Floats)vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16));
  w[1] = (Floats)vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(x), 16));
}

// 16 bfloat16 values from their lower and upper bytes, in order.
ALWAYS_INLINE inline void widen_bytes(uint8x16_t lower, uint8x16_t upper, Floats* w) {
  widen_bfloat16(vreinterpretq_u16_u8(vzip1q_u8(lower, upper)), w);
  widen_bfloat16(vreinterpretq_u16_u8(vzip2q_u8(lower, upper)), w + 2);
}

// 8 float16 values as float32.
ALWAYS_INLINE inline void widen_float16(uint16x8_t x, Floats* w) {
  const float16x8_t halves = vreinterpretq_f16_u16(x);
  w[0] = (Floats)vcvt_f32_f16(vget_low_f16(halves)), w[1] = (Floats)vcvt_f32_f16(vget_high_f16(halves));
}

inline uint8x16_t table_of(uint64_t low, uint64_t high) {
  return vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(low), vcreate_u64(high)));
}

template <int ELEMENT> struct Decoder;

// As linear_avx2.h decodes it, 16 codes at a time.
template <> struct Decoder<E4M3_ID> : Step<E4M3_ID> {
  ALWAYS_INLINE void operator()(const uint8_t* codes, Floats* w) const {
    const uint8x16_t exponents = table_of(0x43424140'3F3E3D3C, 0xC3C2C1C0'BFBEBDBC), four = vdupq_n_u8(15);
    for (int i = 0; i < 2; i++) {
      const uint8x16_t raw = vld1q_u8(codes + 16 * i);
      uint8x16_t upper = vqtbl1q_u8(exponents, vshrq_n_u8(raw, 4)), lower = vshlq_n_u8(raw, 4);
      // Twice the magnitude, from -128 on: above 108 are 127 (NaN) and, as they wrap around, 0 to 7.
      const uint8x16_t twice = vaddq_u8(vaddq_u8(raw, raw), vdupq_n_u8(0x70));
      if (vmaxvq_u8(vcgtq_s8(vreinterpretq_s8_u8(twice), vdupq_n_s8(108)))) {
        const uint8x16_t sign = vandq_u8(raw, vdupq_n_u8(0x80)), most = vdupq_n_u8(0x7F), place = vandq_u8(raw, four);
        const uint8x16_t small = vceqq_u8(vandq_u8(raw, vdupq_n_u8(0x78)), vdupq_n_u8(0));
        const uint8x16_t nan = vceqq_u8(vandq_u8(raw, most), most);
        const uint8x16_t uppers = table_of(0x3C3C3C3C'3B3B3B00, 0), lowers = table_of(0x60402000'C0800000, 0);
        upper = vorrq_u8(vbslq_u8(small, vorrq_u8(sign, vqtbl1q_u8(uppers, place)), upper), nan);
        lower = vorrq_u8(vbslq_u8(small, vqtbl1q_u8(lowers, place), lower), nan);
      }
      widen_bytes(lower, upper, w + 4 * i);
    }
  }
};

template <> struct Decoder<E5M2_ID> : Step<E5M2_ID> {
  ALWAYS_INLINE void operator()(const uint8_t* codes, Floats* w) const {
    for (int i = 0; i < 2; i++) {
      const uint8x16_t raw = vld1q_u8(codes + 16 * i), zero = vdupq_n_u8(0);
      widen_float16(vreinterpretq_u16_u8(vzip1q_u8(zero, raw)), w + 4 * i);
      widen_float16(vreinterpretq_u16_u8(vzip2q_u8(zero, raw)), w + 4 * i + 2);
    }
  }
};

template <> struct Decoder<INT8_ID> : Step<INT8_ID> {
  static constexpr float UNIT = 1.0f / 64.0f;
  ALWAYS_INLINE void operator()(const uint8_t* codes, Floats* w) const {
    for (int i = 0; i < 4; i++) {
      const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(vld1_u8(codes + 8 * i)));
      w[2 * i] = (Floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
      w[2 * i + 1] = (Floats)vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)));
    }
  }
};

// Of the first 16 codes those at even places, then those at odd places; then so of the last 16.
template <> struct Decoder<E2M1_ID> : Step<E2M1_ID> {
  static constexpr int source(int i) { return i / 16 * 16 + i % 8 * 2 + i / 8 % 2; }
  ALWAYS_INLINE void operator()(const uint8_t* codes, Floats* w) const {
    const uint8x16_t uppers = table_of(0x40404040'3F3F3F00, 0xC0C0C0C0'BFBFBF80);
    const uint8x16_t lowers = table_of(0xC0804000'C0800000, 0xC0804000'C0800000);
    const uint8x16_t raw = vld1q_u8(codes), even = vandq_u8(raw, vdupq_n_u8(15)), odd = vshrq_n_u8(raw, 4);
    Floats at_even[8], at_odd[8];
    widen_bytes(vqtbl1q_u8(lowers, even), vqtbl1q_u8(uppers, even), at_even);
    widen_bytes(vqtbl1q_u8(lowers, odd), vqtbl1q_u8(uppers, odd), at_odd);
    for (int i = 0; i < 2; i++) {
      w[i] = at_even[i], w[2 + i] = at_odd[i];
      w[4 + i] = at_even[2 + i], w[6 + i] = at_odd[2 + i];
    }
  }
};

// 16 codes in 12 bytes: each 16 bits get the two bytes that hold a code, a product moves it to the top, and a shift that
// spreads the sign moves its magnitude to that of a float16.
template <int ELEMENT, int SHIFT> struct SixBits : Step<ELEMENT> {
  static constexpr float UNIT = SHIFT == 2 ? 4096 : 16384;
  ALWAYS_INLINE void operator()(const uint8_t* codes, Floats* w) const {
    const uint8x16_t place = table_of(0x03020201'01000100, 0x06050504'04030403), later = vdupq_n_u8(6);
    const uint16x8_t to_top = vreinterpretq_u16_u64(vdupq_n_u64(0x0100'0040'0010'0400));
    const uint16x8_t used = vdupq_n_u16(0x8000 | 0x7C00 >> SHIFT);
    for (int i = 0; i < 4; i++) {  // the last 6 bytes of a step end a load of 16 bytes
      const uint8x16_t raw = vld1q_u8(codes + (i < 2 ? 0 : 8));
      uint8x16_t at = i % 2 ? vaddq_u8(place, later) : place;
      if (i >= 2) at = vaddq_u8(at, vdupq_n_u8(4));
      const int16x8_t top = vreinterpretq_s16_u16(vmulq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(raw, at)), to_top));
      widen_float16(vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16(top, SHIFT)), used), w + 2 * i);
    }
  }
};
template <> struct Decoder<E3M2_ID> : SixBits<E3M2_ID, 2> {};
template <> struct Decoder<E2M3_ID> : SixBits<E2M3_ID, 3> {};

const char* const INSTRUCTIONS = "neon";

}  // namespace

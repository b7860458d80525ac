// The instructions of 64-bit ARM that linear_neon.h uses, element by element, for processors without them. Float16 vectors
// hold the bits. An instruction does what the Arm C Language Extensions say of its name.
#pragma once
#include <cstdint>
#include <cstring>

#include "elements.h"

#define VECTOR(type, count) __attribute__((vector_size(sizeof(type) * count))) type
typedef VECTOR(uint8_t, 16) uint8x16_t;
typedef VECTOR(uint8_t, 8) uint8x8_t;
typedef VECTOR(int8_t, 16) int8x16_t;
typedef VECTOR(int8_t, 8) int8x8_t;
typedef VECTOR(uint16_t, 8) uint16x8_t;
typedef VECTOR(uint16_t, 4) uint16x4_t;
typedef VECTOR(int16_t, 8) int16x8_t;
typedef VECTOR(int16_t, 4) int16x4_t;
typedef VECTOR(uint32_t, 4) uint32x4_t;
typedef VECTOR(int32_t, 4) int32x4_t;
typedef VECTOR(float, 4) float32x4_t;
typedef VECTOR(uint64_t, 2) uint64x2_t;
typedef uint64_t uint64x1_t;
struct float16x4_t { uint16x4_t bits; };
struct float16x8_t { uint16x8_t bits; };

template <typename To, typename From> To same_bits(const From& x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
template <typename To, typename From, typename F> To each(const From& x, int first, F f) {
  To y = {};
  for (int i = 0; i < int(sizeof y / sizeof y[0]); i++) y[i] = f(x[first + i]);
  return y;
}
template <typename V> V repeated(decltype(V()[0] + 0) x) {
  V y = {};
  for (int i = 0; i < int(sizeof y / sizeof y[0]); i++) y[i] = decltype(V()[0] + 0)(x);
  return y;
}
const auto itself = [](auto x) { return x; };

inline float32x4_t vreinterpretq_f32_u32(uint32x4_t x) { return same_bits<float32x4_t>(x); }
inline uint16x8_t vreinterpretq_u16_u8(uint8x16_t x) { return same_bits<uint16x8_t>(x); }
inline uint16x8_t vreinterpretq_u16_u64(uint64x2_t x) { return same_bits<uint16x8_t>(x); }
inline uint16x8_t vreinterpretq_u16_s16(int16x8_t x) { return same_bits<uint16x8_t>(x); }
inline int16x8_t vreinterpretq_s16_u16(uint16x8_t x) { return same_bits<int16x8_t>(x); }
inline uint8x16_t vreinterpretq_u8_u64(uint64x2_t x) { return same_bits<uint8x16_t>(x); }
inline int8x16_t vreinterpretq_s8_u8(uint8x16_t x) { return same_bits<int8x16_t>(x); }
inline int8x8_t vreinterpret_s8_u8(uint8x8_t x) { return same_bits<int8x8_t>(x); }
inline float16x8_t vreinterpretq_f16_u16(uint16x8_t x) { return {x}; }

inline uint8x16_t vld1q_u8(const uint8_t* from) { uint8x16_t x; std::memcpy(&x, from, 16); return x; }
inline uint8x8_t vld1_u8(const uint8_t* from) { uint8x8_t x; std::memcpy(&x, from, 8); return x; }
inline uint8x16_t vdupq_n_u8(uint8_t x) { return repeated<uint8x16_t>(x); }
inline int8x16_t vdupq_n_s8(int8_t x) { return repeated<int8x16_t>(x); }
inline uint16x8_t vdupq_n_u16(uint16_t x) { return repeated<uint16x8_t>(x); }
inline uint64x2_t vdupq_n_u64(uint64_t x) { return uint64x2_t{x, x}; }
inline uint64x1_t vcreate_u64(uint64_t x) { return x; }
inline uint64x2_t vcombine_u64(uint64x1_t low, uint64x1_t high) { return uint64x2_t{low, high}; }
inline uint16x4_t vget_low_u16(uint16x8_t x) { return each<uint16x4_t>(x, 0, itself); }
inline uint16x4_t vget_high_u16(uint16x8_t x) { return each<uint16x4_t>(x, 4, itself); }
inline int16x4_t vget_low_s16(int16x8_t x) { return each<int16x4_t>(x, 0, itself); }
inline int16x4_t vget_high_s16(int16x8_t x) { return each<int16x4_t>(x, 4, itself); }
inline float16x4_t vget_low_f16(float16x8_t x) { return {vget_low_u16(x.bits)}; }
inline float16x4_t vget_high_f16(float16x8_t x) { return {vget_high_u16(x.bits)}; }

inline uint32x4_t vshll_n_u16(uint16x4_t x, int n) { return each<uint32x4_t>(x, 0, [n](uint16_t v) { return uint32_t(v) << n; }); }
inline int16x8_t vmovl_s8(int8x8_t x) { return each<int16x8_t>(x, 0, itself); }
inline int32x4_t vmovl_s16(int16x4_t x) { return each<int32x4_t>(x, 0, itself); }
inline float32x4_t vcvtq_f32_s32(int32x4_t x) { return each<float32x4_t>(x, 0, itself); }
inline float32x4_t vcvt_f32_f16(float16x4_t x) { return each<float32x4_t>(x.bits, 0, [](uint16_t v) { return load(Half{v}); }); }

inline uint8x16_t vandq_u8(uint8x16_t a, uint8x16_t b) { return a & b; }
inline uint8x16_t vorrq_u8(uint8x16_t a, uint8x16_t b) { return a | b; }
inline uint16x8_t vandq_u16(uint16x8_t a, uint16x8_t b) { return a & b; }
inline uint8x16_t vaddq_u8(uint8x16_t a, uint8x16_t b) { return a + b; }
inline uint16x8_t vmulq_u16(uint16x8_t a, uint16x8_t b) { return a * b; }
inline uint8x16_t vshrq_n_u8(uint8x16_t x, int n) { return x >> n; }
inline uint8x16_t vshlq_n_u8(uint8x16_t x, int n) { return x << n; }
inline int16x8_t vshrq_n_s16(int16x8_t x, int n) { return x >> n; }
inline uint8x16_t vceqq_u8(uint8x16_t a, uint8x16_t b) { return same_bits<uint8x16_t>(a == b); }
inline uint8x16_t vcgtq_s8(int8x16_t a, int8x16_t b) { return same_bits<uint8x16_t>(a > b); }
inline uint8x16_t vbslq_u8(uint8x16_t mask, uint8x16_t a, uint8x16_t b) { return (mask & a) | (~mask & b); }
inline uint8_t vmaxvq_u8(uint8x16_t x) {
  uint8_t most = 0;
  for (int i = 0; i < 16; i++) most = x[i] > most ? x[i] : most;
  return most;
}
inline uint8x16_t vqtbl1q_u8(uint8x16_t table, uint8x16_t places) {
  return each<uint8x16_t>(places, 0, [&](uint8_t place) { return place < 16 ? table[place] : uint8_t(0); });
}
inline uint8x16_t vzip1q_u8(uint8x16_t a, uint8x16_t b) {
  uint8x16_t y;
  for (int i = 0; i < 16; i++) y[i] = i % 2 ? b[i / 2] : a[i / 2];
  return y;
}
inline uint8x16_t vzip2q_u8(uint8x16_t a, uint8x16_t b) {
  uint8x16_t y;
  for (int i = 0; i < 16; i++) y[i] = i % 2 ? b[8 + i / 2] : a[8 + i / 2];
  return y;
}

// The elements of quantize.cpp, as in mxtensor/numerics/elements.py: rounding to codes, codes to values, packing of
// codes of less than a byte. Also the plain floats that are cast from and to.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "format.h"

namespace {

constexpr int32_t INFINITE = 0x7F800000;

inline float as_float(int32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline int32_t as_int(float f) { int32_t bits; std::memcpy(&bits, &f, 4); return bits; }
inline float power_of_two(int32_t byte) { return as_float(byte == 0 ? 0x00400000 : byte << 23); }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
template <typename V> V smaller(V a, V b) { return b < a ? b : a; }
template <typename V> V larger(V a, V b) { return b > a ? b : a; }

// Magnitudes of a small float: its codes are shifted float bits, except for those below the smallest normal value.
struct Minifloat {
  int32_t shift, first_normal, first_special, rebias, magic_bits;

  constexpr Minifloat(int mantissa, int bias, int special)
      : shift(23 - mantissa), first_normal(1 << mantissa), first_special(special), rebias((127 - bias) << 23),
        magic_bits((24 - bias - mantissa + 127) << 23) {}

  // Nearest, ties to even: by the bits for normal values, by the rounding of a float addition below. Never saturates.
  int32_t encode(float magnitude) const {
    const int32_t bits = as_int(magnitude), small = as_int(magnitude + as_float(magic_bits)) - magic_bits;
    const int32_t normal = (bits + ((1 << (shift - 1)) - 1 - rebias) + ((bits >> shift) & 1)) >> shift;
    return smaller(small, larger(normal, first_normal));
  }
  float decode(int32_t code) const {
    const float step = as_float(rebias + (1 << 23) - ((23 - shift) << 23));  // the smallest subnormal
    const int32_t normal = (code << shift) + rebias, value = code < first_normal ? as_int(float(code) * step) : normal;
    return as_float(code < first_special ? value : value | INFINITE);
  }
};
constexpr Minifloat HALF(10, 15, 0x7C00), E4M3(3, 7, 0x7F);

struct BFloat16 { uint16_t bits; };
struct Half { uint16_t bits; };

// work(value) with a value of the type of a Kind.
template <typename F> void with_kind(int kind, F work) {
  if (kind == FLOAT32) work(float());
  else if (kind == BFLOAT16) work(BFloat16());
  else work(Half());
}

template <int N> using Int = std::integral_constant<int, N>;

// work(count) for one to three rows; ``count`` is a constant.
template <typename F> void with_few(int64_t rows, F work) {
  if (rows == 3) work(Int<3>());
  if (rows == 2) work(Int<2>());
  if (rows == 1) work(Int<1>());
}

// work(count, first) for rows in runs of four and a last run of fewer; ``count`` is a constant.
template <typename F> void in_fours(int64_t rows, F work) {
  int64_t first = 0;
  for (; first + 4 <= rows; first += 4) work(Int<4>(), first);
  with_few(rows - first, [&](auto count) { work(count, first); });
}

inline float load(float x) { return x; }
inline float load(BFloat16 x) { return as_float(int32_t(uint32_t(x.bits) << 16)); }
inline float load(Half x) {
  return as_float(as_int(HALF.decode(x.bits & 0x7FFF)) | int32_t(uint32_t(x.bits & 0x8000) << 16));
}
inline void store(float& out, float v) { out = v; }
inline void store(BFloat16& out, float v) {  // nearest, ties to even; a NaN stays a NaN
  const int32_t bits = as_int(v);
  const int32_t rounded = int32_t((uint32_t(bits) + 0x7FFFu + ((uint32_t(bits) >> 16) & 1u)) >> 16);
  out.bits = uint16_t((bits & 0x7FFFFFFF) > INFINITE ? 0x7FC0 : rounded);
}
inline void store(Half& out, float v) {
  const int32_t bits = as_int(v), magnitude = bits & 0x7FFFFFFF;
  const int32_t code = smaller(HALF.encode(as_float(magnitude)), 0x7C00);
  out.bits = uint16_t((magnitude > INFINITE ? 0x7E00 : code) | int32_t(uint32_t(bits) >> 16 & 0x8000u));
}

// Codes of n values of a chunk, each multiplied by its multiplier. Unless ``signed_zero``, a product of -0.0 gets code 0.
template <typename T>
void encode_chunk(const T* x, int n, const float* multiplier, const Element& e, bool signed_zero, uint8_t* codes) {
  if (e.exponent_bits == 0) {
    const float steps = float(1 << e.mantissa_bits), limit = e.max * steps, magic = 12582912.0f;  // 1.5 * 2^23
    for (int i = 0; i < n; i++) {
      const float y = load(x[i]) * multiplier[i] * steps;
      codes[i] = uint8_t(as_int(smaller(larger(y, -limit), limit) + magic));  // nearest, ties to even, in the low bits
    }
    return;
  }
  const Minifloat code(e.mantissa_bits, e.bias, e.first_special);
  const int sign = 32 - e.bits;
  const int32_t sign_bit = 1 << (e.bits - 1);
  const float max = e.max, zero = signed_zero ? -0.0f : 0.0f;  // added, 0.0 changes -0.0 only, and -0.0 changes nothing
  for (int i = 0; i < n; i++) {
    const int32_t raw = as_int(load(x[i]) * multiplier[i] + zero);
    codes[i] = uint8_t(code.encode(smaller(as_float(raw & 0x7FFFFFFF), max)) | ((raw >> sign) & sign_bit));
  }
}

template <typename T>
void decode_chunk(const uint8_t* codes, int n, const float* scale, float global_scale, const Element& e, T* out) {
  if (e.exponent_bits == 0) {
    const float step = 1.0f / float(1 << e.mantissa_bits);
    for (int i = 0; i < n; i++) store(out[i], float(int8_t(codes[i])) * step * scale[i] * global_scale);
    return;
  }
  const Minifloat code(e.mantissa_bits, e.bias, e.first_special);
  const int sign = 32 - e.bits;
  const int32_t magnitudes = (1 << (e.bits - 1)) - 1;
  for (int i = 0; i < n; i++) {
    const int32_t negative = int32_t(uint32_t(codes[i] & ~magnitudes) << sign);
    store(out[i], as_float(as_int(code.decode(codes[i] & magnitudes)) | negative) * scale[i] * global_scale);
  }
}

inline int group(int bits) { return bits == 8 ? 1 : bits == 4 ? 2 : 4; }  // values in a group of whole bytes
// Bytes of n codes.
inline int64_t packed_size(int64_t n, int bits) { return ceil_div(n, group(bits)) * group(bits) * bits / 8; }

inline void pack(const uint8_t* codes, int n, int bits, uint8_t* out) {  // codes after n are 0 up to a whole group
  if (bits == 8) {
    std::memcpy(out, codes, size_t(n));
  } else if (bits == 4) {
    for (int i = 0; i < (n + 1) / 2; i++) out[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
  } else {
    for (int i = 0; i < (n + 3) / 4; i++) {
      uint32_t w;
      std::memcpy(&w, codes + 4 * i, 4);
      w = (w & 0x3F) | (w >> 2 & 0xFC0) | (w >> 4 & 0x3F000) | (w >> 6 & 0xFC0000);
      out[3 * i] = uint8_t(w), out[3 * i + 1] = uint8_t(w >> 8), out[3 * i + 2] = uint8_t(w >> 16);
    }
  }
}

inline const uint8_t* unpack(const uint8_t* data, int n, int bits, uint8_t* codes) {
  if (bits == 8) return data;
  if (bits == 4) {
    for (int i = 0; i < (n + 1) / 2; i++) codes[2 * i] = data[i] & 0xF, codes[2 * i + 1] = data[i] >> 4;
  } else {
    for (int i = 0; i < (n + 3) / 4; i++) {
      uint32_t w = data[3 * i] | uint32_t(data[3 * i + 1]) << 8 | uint32_t(data[3 * i + 2]) << 16;
      w = (w & 0x3F) | (w << 2 & 0x3F00) | (w << 4 & 0x3F0000) | (w << 6 & 0x3F000000);
      std::memcpy(codes + 4 * i, &w, 4);
    }
  }
  return codes;
}

}  // namespace

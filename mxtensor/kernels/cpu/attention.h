// Tiles of cached keys and values as floats, from codes or from values.
#pragma once
#include "attention_call.h"
#include "attention_lanes.h"

namespace {

// Decoded keys have a multiple of LANES values; those after the last are 0.
inline int64_t padded(const Side& side) { return ceil_div(side.size, LANES) * LANES; }
// Of a row and a range of keys: the largest score, the sum of weights, and the weighted values from LANES on.
inline int64_t part_size(const Side& side) { return LANES + padded(side); }

// Where the value i of a key stands after ``decode_key``: of 4-bit codes, all low nibbles come first.
inline int64_t place(const Side& side, int64_t i) {
  return side.values || side.format->element.bits != 4 ? i : i % 2 ? side.size / 2 + i / 2 : i / 2;
}

// LANES values of codes of one byte each, from their scales; ``n``: how many are stored.
template <int BITS, int MANTISSA>
inline void decode_lanes(const Bytes& codes, const Lanes& scale, const Element& e, int64_t n, float* out) {
  const Lanes values = float_of_codes<BITS, MANTISSA>(codes, e) * scale;
  if (n >= LANES) put(out, values);
  else std::memcpy(out, &values, size_t(n) * 4);
}

// The scales of LANES values from the value ``first`` on, where 2^shift >= 8 values share one.
inline Lanes scales_at(const float* scale, int64_t first, int shift) {
  const float* from = scale + (first >> shift);
#if defined(__AVX512F__)
  if (shift == 3) {
    const float a = from[0], b = from[1];
    return Lanes{a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
  }
#endif
  return all_lanes(from[0]);
}

template <int BITS, int MANTISSA>
void decode_key(const uint8_t* data, const float* scale, const Format& f, int64_t size, float* out) {
  const int shift = f.cols < 0 ? 62 : __builtin_ctz(uint32_t(f.cols));
  if (BITS == 4) {
    const int64_t half = size / 2;
    for (int64_t first = 0; first < half; first += LANES) {
      const int64_t n = smaller<int64_t>(LANES, half - first);
      const Bytes pairs = load_bytes(data + first, n);
      const Lanes scales = scales_at(scale, first, shift - 1);
      decode_lanes<BITS, MANTISSA>(pairs & 15, scales, f.element, n, out + first);
      decode_lanes<BITS, MANTISSA>(pairs >> 4, scales, f.element, n, out + half + first);
    }
    return;
  }
  uint8_t codes[MOST_VALUES + LANES];
  const uint8_t* from = unpack(data, int(size), BITS, codes);
  for (int64_t first = 0; first < size; first += LANES) {
    const int64_t n = smaller<int64_t>(LANES, size - first);
    decode_lanes<BITS, MANTISSA>(load_bytes(from + first, n), scales_at(scale, first, shift), f.element, n, out + first);
  }
}

using Decode = void (*)(const uint8_t*, const float*, const Format&, int64_t, float*);

inline Decode decoder_of(const Element& e) {
  if (e.exponent_bits == 0) return decode_key<8, -1>;
  if (e.bits == 4) return decode_key<4, 1>;
  if (e.bits == 6) return e.mantissa_bits == 2 ? decode_key<6, 2> : decode_key<6, 3>;
  return e.mantissa_bits == 3 ? decode_key<8, 3> : decode_key<8, 2>;
}

template <typename T>
void load_tile(const Side& side, int64_t b, int64_t h, int64_t first, int64_t n, float* out) {
  const uint8_t* data = side.data + b * side.data_strides[0] + h * side.data_strides[1] + first * side.data_strides[2];
  for (int64_t t = 0; t < n; t++, data += side.data_strides[2], out += padded(side)) {
    const T* from = reinterpret_cast<const T*>(data);
    for (int64_t i = 0; i < side.size; i++) out[i] = load(from[i]);
    for (int64_t i = side.size; i < padded(side); i++) out[i] = 0.0f;
  }
}

// Keys first to first + n - 1 of one head: their values, one key after the other.
inline void decode_tile(const Side& side, int64_t b, int64_t h, int64_t first, int64_t n, float* out) {
  if (side.values) return with_kind(side.values - 1, [&](auto value) { load_tile<decltype(value)>(side, b, h, first, n, out); });
  const Format& f = *side.format;
  const Decode decode = decoder_of(f.element);
  const int64_t blocks = f.cols < 0 ? 1 : ceil_div(side.size, f.cols), step = padded(side);
  const uint8_t* data = side.data + b * side.data_strides[0] + h * side.data_strides[1];
  const int64_t scales = b * side.scale_strides[0] + h * side.scale_strides[1];
  float scale[MOST_VALUES + LANES] = {};
  for (int64_t t = 0; t < n; t++) {
    float* to = out + t * step;
    for (int64_t i = side.size; i < step; i++) to[i] = 0.0f;
    if (first + t < side.first_count) {
      const float* values = side.first + ((b * side.heads + h) * side.first_count + first + t) * side.size;
      for (int64_t i = 0; i < side.size; i++) to[place(side, i)] = values[i];
      continue;
    }
    const int64_t key = first + t - side.first_count, at = scales + key * side.scale_strides[2];
    for (int64_t j = 0; j < blocks; j++)
      scale[j] = side.float_scales ? static_cast<const float*>(side.scale)[at + j]
                                   : f.scale_values[static_cast<const uint8_t*>(side.scale)[at + j]];
    decode(data + key * side.data_strides[2], scale, f, side.size, to);
  }
}

}  // namespace

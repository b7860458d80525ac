// Dot products of codes in steps of 32 values, for instruction sets without AVX-512. A step decodes codes into float32,
// multiplies them by their scales and adds their products with x, which stays in its order. Vectors are GCC's: a
// compiler maps them to the registers that there are. The instruction set defines Decoder<ELEMENT>.
#pragma once
#include <type_traits>

#include "linear_no_integers.h"

namespace {

constexpr bool HAS_BFLOAT16 = false, DECODES_BFLOAT16 = false;
typedef float Floats __attribute__((vector_size(32), aligned(4)));

template <int ELEMENT> struct Step {
  static constexpr bool TAKES_BFLOAT16 = false;
  static constexpr int STEP = 32, BYTES = 4 * BITS[ELEMENT];
  static constexpr float UNIT = 1;  // what decoded values have to be multiplied by
};

bool scales_of(const Problem& p, int64_t n, int step, int per_step, int64_t steps, float* out) {
  const int64_t start = scale_row(p, n) * p.scale_stride, block = block_cols(p), blocks = ceil_div(p.k, block);
  const int64_t wanted = steps * per_step;
  int32_t most = 0;
  if (p.scale_kind == E8M0 && block * per_step == step) {
    const uint8_t* bytes = static_cast<const uint8_t*>(p.scale) + start;
    for (int64_t i = 0; i < blocks; i++) {
      const int32_t bits = larger(int32_t(bytes[i]) << 23, 0x00400000);
      out[i] = as_float(bits), most = larger(most, bits);
    }
    for (int64_t i = blocks; i < wanted; i++) out[i] = 0;
    return is_plain(as_float(most));
  }
  bool plain = true;
  if (p.scale_kind == UE4M3 && block * per_step == step) {
    const uint8_t* bytes = static_cast<const uint8_t*>(p.scale) + start;
    for (int64_t i = 0; i < blocks; i++) out[i] = tables().value[E4M3_ID][bytes[i]], plain &= (bytes[i] & 0x7F) != 0x7F;
    for (int64_t i = blocks; i < wanted; i++) out[i] = 0;
    return plain;
  }
  for (int64_t i = 0; i < wanted; i++) {
    const int64_t b = block * per_step == step ? i : i * (step / per_step) / block;
    out[i] = b < blocks ? scale_at(p, start + b) : 0.0f;
    plain &= is_plain(out[i]);
  }
  return plain;
}

template <typename D, typename T> void pack_row(const T* x, int64_t k, bool, void* out) {
  float* to = static_cast<float*>(out);
  for (int64_t i = 0; i < k; i++) to[i] = load(x[i]);
  for (int64_t i = k; i < ceil_div(k, D::STEP) * D::STEP; i++) to[i] = 0.0f;
}

inline Floats eight(float x) { return Floats{x, x, x, x, x, x, x, x}; }

template <int ROWS, typename D>
void dots(const Problem& p, const D& decode, const float* x, int64_t x_step, const uint8_t* w, const float* scales,
          int per_step, float* sums, int64_t step) {
  Floats total[ROWS][2] = {};
  const auto add = [&](const uint8_t* codes, int64_t at) {
    Floats values[4];
    decode(codes, values);
    const Floats low = eight(scales[at * per_step] * D::UNIT), high = eight(scales[at * per_step + per_step / 2] * D::UNIT);
    if (ROWS > 1) values[0] *= low, values[1] *= low, values[2] *= high, values[3] *= high;
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; m++) {
      const Floats* xs = reinterpret_cast<const Floats*>(x + m * x_step + at * D::STEP);
      if (ROWS == 1) {  // scaling sums takes fewer products than scaling values
        total[m][0] += (values[0] * xs[0] + values[1] * xs[1]) * low;
        total[m][1] += (values[2] * xs[2] + values[3] * xs[3]) * high;
        continue;
      }
      total[m][0] += values[0] * xs[0], total[m][1] += values[1] * xs[1];
      total[m][0] += values[2] * xs[2], total[m][1] += values[3] * xs[3];
    }
  };
  const int64_t whole = p.k / D::STEP, bytes = p.row_bytes - whole * D::BYTES;
  for (int64_t at = 0; at < whole; at++) add(w + at * D::BYTES, at);
  if (bytes) {
    uint8_t tail[D::BYTES] = {};
    std::memcpy(tail, w + whole * D::BYTES, size_t(bytes));
    add(tail, whole);
  }
  for (int m = 0; m < ROWS; m++) {
    const Floats sum = total[m][0] + total[m][1];
    sums[m * step] = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
  }
}

template <bool, typename D>
void dots_of_rows(const Problem& p, int outs, const D& decode, int64_t x_bytes, const uint8_t* w, int64_t w_step,
                  const float* scales, int64_t scales_step, int per_step, float* sums, int64_t step) {
  for (int o = 0; o < outs; o++) {
    const auto some = [&](auto rows, int64_t m) {
      const float* x = static_cast<const float*>(p.packed) + m * (x_bytes / 4);
      dots<decltype(rows)::value>(p, decode, x, x_bytes / 4, w + o * w_step, scales + o * scales_step, per_step,
                                  sums + m * step + o, step);
    };
    int64_t m = 0;
    for (; p.m - m >= 4; m += 4) some(std::integral_constant<int, 4>(), m);
    if (p.m - m == 3) some(std::integral_constant<int, 3>(), m);
    if (p.m - m == 2) some(std::integral_constant<int, 2>(), m);
    if (p.m - m == 1) some(std::integral_constant<int, 1>(), m);
  }
}

template <bool, typename D>
int64_t dots_by_fours(const Problem&, const D&, int64_t, int64_t first, int64_t, float*, int64_t) {
  return first;
}

// A row of w times its scales, in float32.
template <typename D>
void decode_row(const Problem& p, const D& decode, const uint8_t* w, const float* scales, int per_step, void* out) {
  Floats* to = static_cast<Floats*>(out);
  for (int64_t at = 0; at < ceil_div(p.k, D::STEP); at++, to += 4) {
    uint8_t codes[D::BYTES] = {};
    std::memcpy(codes, w + at * D::BYTES, size_t(smaller<int64_t>(D::BYTES, p.row_bytes - at * D::BYTES)));
    Floats values[4];
    decode(codes, values);
    for (Floats& value : values) value *= eight(D::UNIT);
    const Floats low = eight(scales[at * per_step]), high = eight(scales[at * per_step + per_step / 2]);
    to[0] = values[0] * low, to[1] = values[1] * low, to[2] = values[2] * high, to[3] = values[3] * high;
  }
}

}  // namespace

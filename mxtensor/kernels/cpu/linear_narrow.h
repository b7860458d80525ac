// Dot products of codes in steps of 32 values, for instruction sets without AVX-512. A step decodes codes into float32,
// multiplies them by their scales and adds their products with x, which is packed in the order in which a step is decoded.
// Vectors are GCC's, as wide as a register: GCC keeps wider ones in memory. The instruction set defines Decoder<ELEMENT>.
#pragma once
#include "linear_tiles.h"

namespace {

// A step is some thirty instructions, which wait in a call. Loops over steps take up to 18 % longer in functions of their own.
#define ALWAYS_INLINE __attribute__((always_inline))

constexpr bool HAS_BFLOAT16 = false, DECODES_BFLOAT16 = false;
#ifdef __AVX2__
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int VECTORS = 32 / WIDTH;  // of a step
typedef float Floats __attribute__((vector_size(4 * WIDTH), aligned(4)));

template <int ELEMENT> struct Step {
  static constexpr bool TAKES_BFLOAT16 = false;
  static constexpr int STEP = 32, BYTES = 4 * BITS[ELEMENT];
  static constexpr float UNIT = 1;  // what decoded values have to be multiplied by
  static constexpr int source(int i) { return i; }  // the value of a step that is decoded as the i-th
  static constexpr bool BY_HALVES = false;  // whether the upper half of each vector has the values from 16 on
  void keep() {}  // makes constants stay in registers, which is faster where x leaves some
};

bool scales_of(const Problem& p, int64_t start, int64_t blocks, int step, int per_step, int64_t wanted, float* out) {
  const int64_t block = block_cols(p);
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
  if (p.scale_kind == UE4M3 && block * per_step == step) {
    const uint8_t* bytes = static_cast<const uint8_t*>(p.scale) + start;
    int32_t magnitudes = 0;
    for (int64_t i = 0; i < blocks; i++) {
      const int32_t magnitude = bytes[i] & 0x7F, sign = bytes[i] & 0x80;
      out[i] = as_float(magnitude << 20 | sign << 24) * as_float((127 + 120) << 23);
      magnitudes = larger(magnitudes, magnitude);
    }
    for (int64_t i = blocks; i < wanted; i++) out[i] = 0;
    return magnitudes < 0x7F;
  }
  bool plain = true;
  for (int64_t i = 0; i < wanted; i++) {
    const int64_t b = block * per_step == step ? i : i * (step / per_step) / block;
    out[i] = b < blocks ? scale_at(p, start + b) : 0.0f;
    plain &= is_plain(out[i]);
  }
  return plain;
}

template <typename D, typename T> void pack_row(const T* x, int64_t k, bool, void* out) {
  float* to = static_cast<float*>(out);
  for (int64_t start = 0; start < k; start += D::STEP, to += D::STEP)
    for (int i = 0; i < D::STEP; i++) to[i] = start + D::source(i) < k ? load(x[start + D::source(i)]) : 0.0f;
}

inline Floats all_of(float x) { return x - Floats{}; }

// What the vectors of a step, each times UNIT, are multiplied by: one or two scales.
template <int PER_STEP, typename D> ALWAYS_INLINE inline void scales_of_values(const float* scales, Floats* out) {
  const Floats first = all_of(scales[0] * D::UNIT), second = PER_STEP == 1 ? first : all_of(scales[PER_STEP - 1] * D::UNIT);
#ifdef __AVX2__
  const Floats both = {first[0], first[0], first[0], first[0], second[0], second[0], second[0], second[0]};
#else
  const Floats both = first;  // no half of a vector has values of its own
#endif
  for (int i = 0; i < VECTORS; i++) out[i] = PER_STEP == 2 && D::BY_HALVES ? both : i < VECTORS / 2 ? first : second;
}

// The sum of products of vectors ``first`` to end - 1 of a step.
template <int FIRST, int END> ALWAYS_INLINE inline Floats products_of(const Floats* values, const Floats* x) {
  Floats sum = values[FIRST] * x[FIRST];
#pragma GCC unroll 8
  for (int i = FIRST + 1; i < END; i++) sum += values[i] * x[i];
  return sum;
}

// add(codes, codes_step, at) for steps ``first`` to end - 1 of OUTS rows of w; the last one may be made whole by zeros. Rows
// that are multiplied whole are fetched in the order of memory, which is up to 1.3 times as fast; of pieces, each row is.
template <int OUTS, typename D, typename F>
ALWAYS_INLINE inline void each_step(const Problem& p, const uint8_t* w, int64_t w_step, int64_t first, int64_t end, F add) {
  const int64_t whole = smaller(end, p.k / D::STEP);
  const bool in_order = first == 0 && end * D::STEP >= p.k;
  const int64_t far_step = (in_order ? OUTS : 1) * D::BYTES, between = in_order ? D::BYTES : w_step;
  const uint8_t* far = w + first * far_step + AHEAD;
  for (int64_t at = first; at < whole; at++, far += far_step) {
    for (int o = 0; o < OUTS; o++) __builtin_prefetch(far + o * between, 0, 2);
    add(w + at * D::BYTES, w_step, at);
  }
  if (whole == end) return;
  uint8_t tail[OUTS][D::BYTES] = {};
  for (int o = 0; o < OUTS; o++) std::memcpy(tail[o], w + o * w_step + whole * D::BYTES, size_t(p.row_bytes - whole * D::BYTES));
  add(tail[0], D::BYTES, whole);
}

inline void add_to(float& sum, Floats of_steps, bool is_first) {
  const Floats& s = of_steps;
  float all = (s[0] + s[1]) + (s[2] + s[3]);
  if (WIDTH == 8) all += (s[WIDTH - 4] + s[WIDTH - 3]) + (s[WIDTH - 2] + s[WIDTH - 1]);
  sum = is_first ? all : sum + all;
}

// Sums of OUTS rows of w with ROWS rows of x over steps first to end - 1, added to those of the steps before. The sum of a
// block is multiplied by its scale: these are fewer products than scaling values, and no sum waits for another one.
template <int ROWS, int OUTS, int PER_STEP, typename D>
void dots(const Problem& p, const float* x, int64_t x_step, const uint8_t* w, int64_t w_step, const float* scales,
          int64_t scales_step, int64_t first, int64_t end, float* sums, int64_t step) {
  Floats total[ROWS][OUTS][PER_STEP] = {};
  D decode;
  if constexpr (ROWS == 1) decode.keep();
  each_step<OUTS, D>(p, w, w_step, first, end, [&](const uint8_t* codes, int64_t codes_step, int64_t at) ALWAYS_INLINE {
#pragma GCC unroll 2
    for (int o = 0; o < OUTS; o++) {
      Floats values[VECTORS], scale[VECTORS];
      decode(codes + o * codes_step, values);
      scales_of_values<PER_STEP, D>(scales + o * scales_step + at * PER_STEP, scale);
#pragma GCC unroll 4
      for (int m = 0; m < ROWS; m++) {
        const Floats* xs = reinterpret_cast<const Floats*>(x + m * x_step + at * D::STEP);
        if constexpr (PER_STEP == 1 || D::BY_HALVES) {
          total[m][o][0] += products_of<0, VECTORS>(values, xs) * scale[0];
        } else {
          total[m][o][0] += products_of<0, VECTORS / 2>(values, xs) * scale[0];
          total[m][o][1] += products_of<VECTORS / 2, VECTORS>(values, xs) * scale[VECTORS - 1];
        }
      }
    }
  });
  for (int m = 0; m < ROWS; m++)
    for (int o = 0; o < OUTS; o++)
      add_to(sums[m * step + o], PER_STEP == 1 ? total[m][o][0] : total[m][o][0] + total[m][o][PER_STEP - 1], first == 0);
}

inline int most_outs(int64_t, int outs) { return outs; }

constexpr int64_t NEAR = 1 << 14;  // bytes of x that stay in the L1 cache while rows of w are multiplied by them

// work(rows, outs, m, o, first, end) for up to four rows of x from m on, up to two rows of w from o on, and the steps of
// these rows of x that stay near; a step has so many bytes.
template <typename F> ALWAYS_INLINE inline void in_pieces(const Problem& p, int outs, int64_t steps, int64_t step_bytes, F work) {
  const int64_t chunk = NEAR / step_bytes / smaller<int64_t>(p.m, 4);
  const auto each = [&](auto rows, int64_t m, int64_t first) ALWAYS_INLINE {
    const int64_t end = smaller(first + chunk, steps);
    int o = 0;
    for (; o + 1 < outs; o += 2) work(rows, Int<2>(), m, o, first, end);
    if (o < outs) work(rows, Int<1>(), m, o, first, end);
  };
  for (int64_t m = 0; m < p.m; m += 4)
    for (int64_t first = 0; first < steps; first += chunk) {
      if (p.m - m >= 4) each(Int<4>(), m, first);
      else if (p.m - m == 3) each(Int<3>(), m, first);
      else if (p.m - m == 2) each(Int<2>(), m, first);
      else each(Int<1>(), m, first);
    }
}

template <bool, typename D>
void dots_of_rows(const Problem& p, int outs, const D&, int64_t x_bytes, const uint8_t* w, int64_t w_step,
                  const float* scales, int64_t scales_step, int per_step, float* sums, int64_t step) {
  const float* x = static_cast<const float*>(p.packed);
  const auto some = [&](auto rows, auto pair, auto halves, int64_t m, int o, int64_t first, int64_t end) ALWAYS_INLINE {
    dots<decltype(rows)::value, decltype(pair)::value, decltype(halves)::value, D>(
        p, x + m * (x_bytes / 4), x_bytes / 4, w + o * w_step, w_step, scales + o * scales_step, scales_step, first, end,
        sums + m * step + o, step);
  };
  const auto work = [&](auto rows, auto pair, int64_t m, int o, int64_t first, int64_t end) ALWAYS_INLINE {
    if (per_step == 1) some(rows, pair, Int<1>(), m, o, first, end);
    else some(rows, pair, Int<2>(), m, o, first, end);
  };
  in_pieces(p, outs, ceil_div(p.k, D::STEP), D::STEP * 4, work);
}

template <bool, typename D>
int64_t dots_by_fours(const Problem&, const D&, int64_t, int64_t first, int64_t, float*, int64_t) {
  return first;
}

// A row of w times its scales, in float32.
template <typename D>
void decode_row(const Problem& p, const D& decode, const uint8_t* w, const float* scales, int per_step, void* out) {
  Floats* to = static_cast<Floats*>(out);
  for (int64_t at = 0; at < ceil_div(p.k, D::STEP); at++, to += VECTORS) {
    uint8_t codes[D::BYTES] = {};
    std::memcpy(codes, w + at * D::BYTES, size_t(smaller<int64_t>(D::BYTES, p.row_bytes - at * D::BYTES)));
    Floats values[VECTORS], scale[VECTORS];
    decode(codes, values);
    if (per_step == 1) scales_of_values<1, D>(scales + at, scale);
    else scales_of_values<2, D>(scales + 2 * at, scale);
    for (int i = 0; i < VECTORS; i++) to[i] = values[i] * scale[i];
  }
}

}  // namespace

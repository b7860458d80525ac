// The order of the work: scales of some rows of w, then their sums with x, then the results of a tile of rows. The
// instruction set defines Decoder<ELEMENT>, scales_of, most_outs, dots_of_rows and dots_by_fours, and includes this file first.
#pragma once
#include <type_traits>

#include "linear.h"

namespace {

template <int ELEMENT> struct Decoder;

// ``wanted`` scales as float32, ``per_step`` for each step of values: those of ``blocks`` blocks, whose scales begin at
// ``start``, and zeros. False if one is for products in double.
bool scales_of(const Problem& p, int64_t start, int64_t blocks, int step, int per_step, int64_t wanted, float* out);

int most_outs(int64_t m, int outs);  // how many of ``outs`` rows of w dots_of_rows takes with m rows of x

template <bool BFLOAT16_X, typename D>
void dots_of_rows(const Problem& p, int outs, const D& decode, int64_t x_bytes, const uint8_t* w, int64_t w_step,
                  const float* scales, int64_t scales_step, int per_step, float* sums, int64_t step);

template <bool BFLOAT16_X, typename D>
int64_t dots_by_fours(const Problem& p, const D& decode, int64_t x_bytes, int64_t first, int64_t end, float* sums, int64_t step);

template <typename D>
void decode_row(const Problem& p, const D& decode, const uint8_t* w, const float* scales, int per_step, void* out);

template <typename D> constexpr bool takes_integers();  // of at most MOST_INTEGER_ROWS rows of x
template <typename D> int64_t integers_by_fours(const Problem& p, int64_t first, int64_t end, float* sums, int64_t step);
template <typename D>
void integer_dots_of_rows(const Problem& p, int outs, const uint8_t* w, int64_t w_step, const float* scales,
                          int64_t scales_step, int per_step, float* sums, int64_t step);

// Floats of this thread, which the next call may reuse.
inline float* buffer(int64_t size) {
  struct Memory {
    float* values = nullptr;
    int64_t size = 0;
    ~Memory() { delete[] values; }
  };
  thread_local Memory memory;
  if (size > memory.size) {
    delete[] memory.values;
    memory.values = new float[size_t(size)], memory.size = size;
  }
  return memory.values;
}

template <typename D> int64_t packed_row(const Problem& p) { return ceil_div(p.k, D::STEP) * D::STEP; }  // values

constexpr int TILE = 32;         // rows of w whose sums are finished together
constexpr int PITCH = TILE + 1;  // sums of a row of x; one more may be written
constexpr int SCALES = 1 << 12;  // of them that are made at a time

// Bytes between the codes that are multiplied and those that are brought into the L2 cache, in the order of memory: the
// processor's own prefetching follows one row well, but not some short rows at a time.
constexpr int64_t AHEAD = 12288;

// The scales of row n of w, as ``scales_of`` says.
inline bool scales_of_row(const Problem& p, int64_t n, int step, int per_step, int64_t steps, float* out) {
  const int64_t start = scale_row(p, n) * p.scale_stride, blocks = ceil_div(p.k, block_cols(p));
  return scales_of(p, start, blocks, step, per_step, steps * per_step, out);
}

// The scales of rows first to end - 1 of w, and which rows are not for products in double (``plain``). Scales without gaps
// between rows are made at once.
inline void scales_of_rows(const Problem& p, int64_t first, int64_t end, int step, int per_step, int64_t steps, float* out,
                           bool* plain) {
  const int64_t row = steps * per_step, all = (end - first) * row;
  const bool joined = p.block_rows == 1 && p.scale_stride == row && row * step == p.k * per_step && block_cols(p) * per_step == step;
  const bool made = joined && scales_of(p, first * row, all, step, per_step, all, out);
  for (int64_t n = first; n < end; n++)
    plain[n - first] = made || scales_of_row(p, n, step, per_step, steps, out + (n - first) * row);
}

template <typename D> void linear_rows(const Problem& p, int64_t first, int64_t end) {
  const D decode{};
  const int64_t steps = ceil_div(p.k, D::STEP);
  const int per_step = scales_per_step(p, D::STEP);
  const int64_t scales_row = steps * per_step;
  const bool bfloat16 = p.mode == IN_BFLOAT16;
  const int64_t x_bytes = packed_row<D>(p) * (bfloat16 ? 2 : 4);
  const int64_t group = larger<int64_t>(4, smaller<int64_t>(TILE, SCALES / scales_row / 4 * 4));
  const int64_t all = (end - first) * p.row_bytes;
  for (int64_t i = 0; i < smaller(AHEAD, all); i += 64) __builtin_prefetch(p.data + first * p.row_bytes + i, 0, 2);
  float* scales = buffer(group * scales_row + 64 + PITCH * p.m);
  float* sums = scales + group * scales_row + 64;  // a load may read 15 scales too many
  for (int64_t top = first; top < end; top += TILE) {
    const int64_t bottom = smaller(top + TILE, end);
    int64_t left = top;
    if constexpr (takes_integers<D>())
      if (p.mode == IN_INTEGERS) left = integers_by_fours<D>(p, top, bottom, sums, PITCH);
    if (p.m < 4 && bfloat16)
      left = dots_by_fours<D::TAKES_BFLOAT16>(p, decode, x_bytes, top, bottom, sums, PITCH);
    else if (p.m < 4 && p.mode == IN_FLOAT32)
      left = dots_by_fours<false>(p, decode, x_bytes, top, bottom, sums, PITCH);
    for (int64_t n = left; n < bottom; n += group) {
      const int64_t stop = smaller(n + group, bottom);
      bool plain[TILE];
      scales_of_rows(p, n, stop, D::STEP, per_step, steps, scales, plain);
      for (int64_t r = n; r < stop;) {
        if (!plain[r - n]) {
          row_in_double(p, r, sums + (r - top), PITCH);
          r++;
          continue;
        }
        int outs = 1;  // rows of w at a time
        while (r + outs < stop && plain[r + outs - n]) outs++;
        outs = most_outs(p.m, outs);
        const bool more = outs > 1;  // else this one twice
        const uint8_t* w = p.data + r * p.row_bytes;
        const float* s = scales + (r - n) * scales_row;
        if constexpr (takes_integers<D>())
          if (p.mode == IN_INTEGERS) {
            integer_dots_of_rows<D>(p, outs, w, p.row_bytes, s, scales_row, per_step, sums + (r - top), PITCH);
            r += outs;
            continue;
          }
        const auto work = [&](auto is_bfloat16) {
          dots_of_rows<decltype(is_bfloat16)::value>(p, outs, decode, x_bytes, w, more ? p.row_bytes : 0, s,
                                                     more ? scales_row : 0, per_step, sums + (r - top), PITCH);
        };
        if (bfloat16) work(std::integral_constant<bool, D::TAKES_BFLOAT16>());
        else work(std::false_type());
        r += outs;
      }
    }
    finish(p, top, bottom, sums, PITCH);
  }
}

// Rows first to end - 1 of w, each ``packed_row`` values after the one before, in the order and dtype of packed x.
template <typename D> void decode_rows(const Problem& p, int64_t first, int64_t end, char* out) {
  const D decode{};
  const int64_t steps = ceil_div(p.k, D::STEP), block = block_cols(p), blocks = ceil_div(p.k, block);
  const int per_step = scales_per_step(p, D::STEP);
  float* scales = buffer(steps * per_step + 64);
  for (int64_t n = first; n < end; n++, out += packed_row<D>(p) * (p.mode == IN_BFLOAT16 ? 2 : 4)) {
    if (!scales_of_row(p, n, D::STEP, per_step, steps, scales))
      for (int64_t i = 0; i < steps * per_step; i++) {
        const int64_t b = i * D::STEP / per_step / block;
        scales[i] = b < blocks ? scale_at(p, scale_row(p, n) * p.scale_stride + b) : 0.0f;
      }
    decode_row<D>(p, decode, p.data + n * p.row_bytes, scales, per_step, out);
  }
}

template <typename F> void with_decoder(int element, F work) {
  switch (element) {
    case E4M3_ID: return work(static_cast<Decoder<E4M3_ID>*>(nullptr));
    case E5M2_ID: return work(static_cast<Decoder<E5M2_ID>*>(nullptr));
    case E3M2_ID: return work(static_cast<Decoder<E3M2_ID>*>(nullptr));
    case E2M3_ID: return work(static_cast<Decoder<E2M3_ID>*>(nullptr));
    case E2M1_ID: return work(static_cast<Decoder<E2M1_ID>*>(nullptr));
    default: return work(static_cast<Decoder<INT8_ID>*>(nullptr));
  }
}

}  // namespace

// The order of the work: scales of some rows of w, then their sums with x, then the results of a tile of rows. The
// instruction set defines Decoder<ELEMENT>, scales_of and dots_of_rows, and includes this file first.
#pragma once
#include "linear.h"

namespace {

template <int ELEMENT> struct Decoder;
bool scales_of(const Problem& p, int64_t n, int step, int per_step, int64_t steps, float* out);

template <bool BFLOAT16_X, typename D>
void dots_of_rows(const Problem& p, const D& decode, int64_t x_bytes, const uint8_t* w, int64_t w_step,
                  const float* scales, int64_t scales_step, int per_step, float* sums, int64_t step);

template <typename D> int64_t packed_row(const Problem& p) { return ceil_div(p.k, D::STEP) * D::STEP; }  // values

constexpr int TILE = 32;         // rows of w whose sums are finished together
constexpr int PITCH = TILE + 1;  // sums of a row of x; one more may be written
constexpr int SCALES = 1 << 12;  // of them that are made at a time

template <typename D> void linear_rows(const Problem& p, int64_t first, int64_t end) {
  const D decode{};
  const int64_t steps = ceil_div(p.k, D::STEP), block = block_cols(p);
  const int per_step = int(larger<int64_t>(1, D::STEP / block));
  const int64_t scales_row = steps * per_step;
  const bool bfloat16 = p.mode == IN_BFLOAT16;
  const int64_t x_bytes = packed_row<D>(p) * (bfloat16 ? 2 : 4);
  const int64_t group = larger<int64_t>(2, smaller<int64_t>(TILE, SCALES / scales_row / 2 * 2));
  thread_local struct Buffer {
    float* values = nullptr;
    int64_t size = 0;
    float* of(int64_t n) {
      if (n > size) delete[] values, values = new float[size_t(n)], size = n;
      return values;
    }
    ~Buffer() { delete[] values; }
  } buffer;
  float* scales = buffer.of(group * scales_row + 64 + PITCH * p.m);
  float* sums = scales + group * scales_row + 64;  // a load may read 15 scales after the last
  for (int64_t top = first; top < end; top += TILE) {
    const int64_t bottom = smaller(top + TILE, end);
    for (int64_t n = top; n < bottom; n += group) {
      const int64_t last = smaller(n + group, bottom);
      bool plain[TILE];
      for (int64_t r = n; r < last; r++)
        plain[r - n] = scales_of(p, r, D::STEP, per_step, steps, scales + (r - n) * scales_row);
      for (int64_t r = n; r < last;) {
        if (!plain[r - n]) {
          careful_row(p, r, sums + (r - top), PITCH);
          r++;
          continue;
        }
        const bool two = last - r > 1 && plain[r - n + 1];  // else this one twice
        const uint8_t* w = p.data + r * p.row_bytes;
        const float* s = scales + (r - n) * scales_row;
        const auto work = [&](auto is_bfloat16) {
          dots_of_rows<decltype(is_bfloat16)::value>(p, decode, x_bytes, w, two ? p.row_bytes : 0, s,
                                                     two ? scales_row : 0, per_step, sums + (r - top), PITCH);
        };
        if (bfloat16) work(std::integral_constant<bool, D::TAKES_BFLOAT16>());
        else work(std::false_type());
        r += two ? 2 : 1;
      }
    }
    finish(p, top, bottom, sums, PITCH);
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

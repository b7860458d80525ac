// Casts to NVFP4 with four over six, and with a global scale for each row, bitwise equal to numerics/reference.py: a
// block is read once and rounded with each of its two scales. quantize/cpu_casts.py compiles this once on each machine.
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "elements.h"

namespace {

constexpr int BLOCK = 16;
constexpr float VALUES[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                              -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

enum Error { NONE, MAE, MSE };  // NONE: the scale of 6 only

struct Candidate {
  int32_t scale;  // its code
  float error;
  alignas(64) uint8_t codes[BLOCK][BLOCK];
};

// What all blocks under one global scale share.
struct Whole {
  float amax, largest, encode, decode;

  Whole(float amax, float bound) : amax(amax), largest(bound * 6.0f), encode(1.0f) {
    const float wanted = smaller(largest / amax, FLT_MAX);
    if (amax > 0.0f && wanted > 0.0f) encode = wanted;  // neither for a NaN
    decode = 1.0f / encode;
  }
};

// A block of ``rows`` rows, its scale being that of 6 (multiple 1) or of 4 (multiple 1.5).
void round_block(const float (*x)[BLOCK], int rows, float amax, const Whole& whole, int error, float multiple,
                 const Minifloat& e2m1, Candidate& out) {
  const float base =
      error == NONE ? amax * (whole.encode * (1.0f / 6.0f)) : amax / 6.0f * whole.encode * multiple;
  out.scale = E4M3.encode(smaller(448.0f, base));
  const float scale = E4M3.decode(out.scale), multiplier = smaller(1.0f / (scale * whole.decode), FLT_MAX);
  float sums[BLOCK];
  for (int r = 0; r < rows; r++) {
    alignas(64) float errors[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
      const int32_t raw = as_int(x[r][i] * multiplier + 0.0f);  // -0.0 becomes 0.0
      const int32_t code = e2m1.encode(smaller(as_float(raw & 0x7FFFFFFF), 6.0f)) | ((raw >> 28) & 8);
      out.codes[r][i] = uint8_t(code);
      const float difference = VALUES[code] * scale * whole.amax / whole.largest - x[r][i];
      errors[i] = error == MSE ? difference * difference : std::fabs(difference);
    }
    if (error == NONE) continue;
    sums[r] = errors[0];
    for (int i = 1; i < BLOCK; i++) sums[r] = sums[r] + errors[i];  // in this order
  }
  for (int half = rows / 2; half > 0; half /= 2)
    for (int r = 0; r < half; r++) sums[r] = sums[r] + sums[r + half];
  out.error = sums[0];
}

template <typename T>
void encode_bands(const T* x, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride, int tile, int error,
                  float bound, const float* amax, bool amax_of_rows, const Minifloat& e2m1, int64_t first, int64_t end,
                  uint8_t* data, uint8_t* scale) {
  const int64_t per_row = ceil_div(cols, BLOCK), row_bytes = packed_size(cols, 4);
  alignas(64) float block[BLOCK][BLOCK];
  Candidate six = {}, four = {};
  for (int64_t band = first; band < end; band++) {
    const int64_t top = band * tile;
    const int height = int(smaller<int64_t>(tile, rows - top));
    const Whole whole(amax[amax_of_rows ? top : 0], bound);
    for (int64_t b = 0; b < per_row; b++) {
      const int64_t left = b * BLOCK;
      const int width = int(smaller<int64_t>(BLOCK, cols - left));
      int32_t most = 0;
      std::memset(block, 0, sizeof(float) * BLOCK * size_t(tile));
      for (int r = 0; r < height; r++)
        for (int i = 0; i < width; i++) {
          block[r][i] = load(x[(top + r) * row_stride + (left + i) * col_stride]);
          most = larger(most, as_int(block[r][i]) & 0x7FFFFFFF);
        }
      const bool finite = most < INFINITE;
      const Candidate* chosen = &six;
      if (finite) {
        round_block(block, tile, as_float(most), whole, error, 1.0f, e2m1, six);
        if (error != NONE) {
          round_block(block, tile, as_float(most), whole, error, 1.5f, e2m1, four);
          if (four.error < six.error) chosen = &four;
        }
      }
      scale[band * per_row + b] = uint8_t(finite ? chosen->scale : 0x7F);
      for (int r = 0; r < height; r++) {
        uint8_t* out = data + (top + r) * row_bytes + left / 2;
        if (finite) pack(chosen->codes[r], width, 4, out);
        else std::memset(out, 0, size_t(packed_size(width, 4)));
      }
    }
  }
}

}  // namespace

extern "C" {

// Encode bands first to end - 1, of ``tile`` rows (1 or 16), of a matrix (rows, cols) with these strides. kind: 0
// float32, 1 bfloat16, 2 float16. amax: of the tensor, or of each row. bound: the largest scale of 6.
int mx_encode_nvfp4(const void* x, int kind, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride,
                    int tile, int error, float bound, const float* amax, int amax_of_rows, int64_t first, int64_t end,
                    uint8_t* data, uint8_t* scale) {
  const Minifloat e2m1(1, 1, 8);
  const auto work = [&](auto value) {
    encode_bands(static_cast<const decltype(value)*>(x), rows, cols, row_stride, col_stride, tile, error, bound, amax,
                 amax_of_rows != 0, e2m1, first, end, data, scale);
  };
  if (kind == 0) work(float());
  else if (kind == 1) work(BFloat16());
  else work(Half());
  return 0;
}
}

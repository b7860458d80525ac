// One product y = alpha x w^T + beta bias of rows x (M, K) with codes w (N, K), as linear_op.cpp hands it to linear.cpp.
#pragma once
#include <cstdint>

#include "format.h"

enum ElementId { E4M3_ID, E5M2_ID, E3M2_ID, E2M3_ID, E2M1_ID, INT8_ID };  // ELEMENTS in gemm/cpu_codes.py
constexpr int BITS[] = {8, 8, 6, 6, 4, 8};                                // of a code, by ElementId
enum ScaleId { E8M0, UE4M3, FP32, FP32_POW2 };                            // SCALES in quantize/cpu_casts.py
// How rows of x are packed and multiplied. IN_DOUBLE: not packed, value by value, for values that the others cannot take.
enum Mode { IN_FLOAT32, IN_BFLOAT16, IN_DOUBLE, IN_INTEGERS, IN_TILES, IN_INTEGER_PANELS, IN_BFLOAT16_PANELS };

// Strides are counted in values. A block extent of -1 is the whole dimension.
struct Problem {
  const uint8_t* data;
  const void *scale, *x, *bias;
  void *out, *packed;
  const float *global_scale, *x_global;  // or null
  int64_t m, n, k, row_bytes, scale_stride, x_stride, out_stride, bias_stride;
  double alpha, beta;
  int32_t element, scale_kind, block_rows, block_cols, x_kind, out_kind, bias_kind, mode;
  const uint8_t *x_codes, *x_scales;  // of the cast that x comes from, if its values are integers; null for others
  int64_t x_codes_stride, x_scales_stride;  // bytes of a row
  int32_t x_element, x_scale_kind, x_block;
};

// What an integer of one stands for; 0: values of this element are not integers of a byte.
constexpr float unit_of(int element) {
  return element == INT8_ID ? 1.0f / 64 : element == E2M1_ID ? 0.5f : element == E2M3_ID ? 0.125f : 0.0f;
}

// What sums are multiplied by: alpha and the global scales.
inline double multiplier_of(const Problem& p) {
  return p.alpha * (p.global_scale ? *p.global_scale : 1.0f) * (p.x_global ? *p.x_global : 1.0f);
}

// Whether element times block scale fits the 8 significant bits of bfloat16, as Format.exact_in_bfloat16 says.
inline bool exact_in_bfloat16(int element, int scale) {
  constexpr int ELEMENT_BITS[] = {4, 3, 3, 4, 2, 7}, SCALE_BITS[] = {0, 4, 24, 0};
  return ELEMENT_BITS[element] + SCALE_BITS[scale] <= 8;
}

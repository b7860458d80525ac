// What linear_op.cpp calls: functions of linear.cpp and quantize.cpp, which do not know torch.
#pragma once
#include <ATen/core/Tensor.h>

#include "elements.h"
#include "op_check.h"
#include "problem.h"

namespace {

using at::IntArrayRef;
using at::Tensor;

struct Functions {
  int64_t (*packed_row)(const Problem*);
  void (*pack)(Problem*, int, int64_t, int64_t);
  void (*rows)(const Problem*, int64_t, int64_t);
  void (*decode)(const Problem*, int64_t, int64_t, void*);
  void (*finish)(const Problem*, int64_t, int64_t, const float*, int64_t);
  int32_t (*amax)(const void*, int, int64_t, int64_t);
  int (*encode)(const Format*, int, const void*, int, int64_t, int64_t, int, int, int32_t, float, int64_t, int64_t,
                uint8_t*, void*, float*);
  int (*decode_values)(const Format*, const uint8_t*, const void*, const float*, int64_t, int64_t, int64_t, int64_t,
                       void*, int);
} functions;
const Format* formats[6][4];  // by element and scale, with blocks to be filled in

int32_t kind_of(at::ScalarType type) { return kind_of(type, "cpu_linear"); }

bool is_format(IntArrayRef f) {
  return f[0] >= 0 && f[0] < 6 && f[1] >= 0 && f[1] < 4 && (f[2] == -1 || f[2] > 0) && (f[3] == -1 || f[3] > 0);
}

}  // namespace

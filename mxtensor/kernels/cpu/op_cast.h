// Casts of activations in the op mxtensor::cpu_linear.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <atomic>
#include <optional>
#include <vector>

#include "op_functions.h"

namespace {

// The cast of activations: to the numbers of a format, whether it has a global scale and signed zeros, and the scale rule.
struct Cast {
  Format format;
  int32_t element, scale;
  bool global_scale, exact, integers;  // integers: codes are integers, in blocks of a row that have scales of a byte
  int32_t scaling;
  float amax_epsilon;
};

// The cast that the op got as numbers; none for no numbers.
std::optional<Cast> cast_of(IntArrayRef cast, double amax_epsilon) {
  if (cast.empty()) return std::nullopt;
  MX_CHECK_VALUE(cast.size() == 7 && is_format(cast), "mxtensor::cpu_linear: there is no cast ", cast);
  Cast c;
  c.format = *formats[cast[0]][cast[1]];
  c.format.rows = int32_t(cast[2]), c.format.cols = int32_t(cast[3]);
  c.global_scale = cast[4] != 0, c.format.signed_zero = cast[5] != 0, c.scaling = int32_t(cast[6]);
  c.exact = exact_in_bfloat16(int(cast[0]), int(cast[1])), c.amax_epsilon = float(amax_epsilon);
  c.element = int32_t(cast[0]), c.scale = int32_t(cast[1]);
  c.integers = unit_of(c.element) != 0 && c.scale < FP32 && cast[2] == 1 && cast[3] > 0;
  return c;
}

int32_t amax_of(const Problem& p) {
  std::atomic<int32_t> most{0};
  at::parallel_for(0, p.m * p.k, 1 << 16, [&](int64_t first, int64_t end) {
    const int32_t here = functions.amax(p.x, p.x_kind, first, end);
    for (int32_t old = most; old < here && !most.compare_exchange_weak(old, here);) {}
  });
  return most;
}

// x as the values that its codes stand for, in the memory that is returned; the global scale comes last in it.
Tensor fake_quantize(Problem& p, const Cast& c, const at::TensorOptions& options) {
  MX_CHECK_VALUE((p.m < 2 || p.x_stride == p.k) && !p.x_global,
                 "mxtensor::cpu_linear: values that are cast must be contiguous and have no scale");
  const Format& f = c.format;
  const int64_t tile = f.rows < 0 ? 1 : f.rows, bands = ceil_div(p.m, tile), code_bytes = ceil_div(p.k, 4) * 4;
  const int64_t scales = f.cols < 0 ? bands : bands * ceil_div(p.k, f.cols), values = p.m * p.k * (c.exact ? 2 : 4);
  const int64_t at_codes = ceil_div(values, 64) * 64, at_scales = at_codes + ceil_div(p.m * code_bytes, 64) * 64;
  const Tensor memory = at::empty({at_scales + scales * 4 + 4}, options.dtype(at::kByte));
  char* to = static_cast<char*>(memory.mutable_data_ptr());
  uint8_t* codes = reinterpret_cast<uint8_t*>(to + at_codes);
  float* global_scale = c.global_scale ? reinterpret_cast<float*>(to + at_scales + scales * 4) : nullptr;
  const int32_t amax = c.global_scale || f.rows < 0 ? amax_of(p) : 0;
  const int64_t grain = std::max<int64_t>(1, (1 << 16) / (tile * p.k));
  const auto encode = [&](int64_t first, int64_t end) {
    functions.encode(&f, c.scaling, p.x, p.x_kind, p.m, p.k, 0, int(tile), amax, c.amax_epsilon, first, end, codes,
                     to + at_scales, global_scale);
  };
  at::parallel_for(0, bands, grain, encode);
  const int kind = c.exact ? BFLOAT16 : FLOAT32;
  const int64_t size = p.k * (c.exact ? 2 : 4);
  at::parallel_for(0, p.m, std::max<int64_t>(1, (1 << 16) / p.k), [&](int64_t first, int64_t end) {
    functions.decode_values(&f, codes, to + at_scales, nullptr, p.m, p.k, first, end, to + first * size, kind);
  });
  p.x = to, p.x_kind = kind, p.x_stride = p.k, p.x_global = global_scale;
  if (c.integers) {
    p.x_element = c.element, p.x_scale_kind = c.scale, p.x_block = f.cols;
    p.x_codes = codes, p.x_codes_stride = packed_size(p.k, BITS[c.element]);
    p.x_scales = reinterpret_cast<const uint8_t*>(to + at_scales), p.x_scales_stride = ceil_div(p.k, f.cols);
  }
  return memory;
}

// The same x for another weight.
void take_x(Problem& to, const Problem& from) {
  to.x = from.x, to.x_kind = from.x_kind, to.x_stride = from.x_stride, to.x_global = from.x_global;
  to.x_element = from.x_element, to.x_scale_kind = from.x_scale_kind, to.x_block = from.x_block;
  to.x_codes = from.x_codes, to.x_codes_stride = from.x_codes_stride;
  to.x_scales = from.x_scales, to.x_scales_stride = from.x_scales_stride;
}

// Casts the x that these products share; the memory of its values.
Tensor cast_x(std::vector<Problem>& all, const Cast& cast, const at::TensorOptions& options) {
  const Tensor memory = fake_quantize(all[0], cast, options);
  for (size_t i = 1; i < all.size(); i++) take_x(all[i], all[0]);
  return memory;
}

}  // namespace

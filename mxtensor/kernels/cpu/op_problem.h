// The arguments of the op mxtensor::cpu_linear as the Problem that linear.cpp computes, checked.
#pragma once
#include <optional>

#include "op_functions.h"

namespace {

using OptionalTensor = std::optional<Tensor>;

// The address of a tensor whose memory was not freed.
const void* memory_of(const Tensor& t, const char* what) {
  const void* address = t.const_data_ptr();
  MX_CHECK_VALUE(address || !t.numel(), "mxtensor::cpu_linear: the memory of ", what, " ", t.sizes(), " was freed");
  return address;
}

void check_codes(const Problem& p, const Tensor& data, const Tensor& scale) {
  const int64_t bytes = packed_size(p.k, BITS[p.element]);
  const int64_t rows = p.block_rows < 0 ? 1 : ceil_div(p.n, p.block_rows), cols = p.block_cols < 0 ? 1 : ceil_div(p.k, p.block_cols);
  MX_CHECK_VALUE(data.is_contiguous() && data.size(1) == bytes && data.element_size() == 1,
                 "mxtensor::cpu_linear: ", p.k, " values are ", bytes, " contiguous bytes of codes, got ", data.sizes());
  MX_CHECK_VALUE(scale.is_contiguous() && scale.numel() == rows * cols &&
                     scale.element_size() == (p.scale_kind < 2 ? 1 : 4),
                 "mxtensor::cpu_linear: needs ", rows, " x ", cols, " contiguous scales, got ", scale.sizes());
}

Problem problem_of(const Tensor& x, const Tensor& data, const Tensor& scale, const OptionalTensor& global_scale,
                   const OptionalTensor& x_global, const OptionalTensor& bias, IntArrayRef format, double alpha,
                   double beta) {
  MX_CHECK_VALUE(x.dim() == 2 && data.dim() == 2 && format.size() == 4, "mxtensor::cpu_linear multiplies matrices, "
                 "not ", x.sizes(), " and ", data.sizes());
  MX_CHECK_VALUE(is_format(format), "mxtensor::cpu_linear: there is no format ", format);
  Problem p = {};
  p.element = int32_t(format[0]), p.scale_kind = int32_t(format[1]);
  p.block_rows = int32_t(format[2]), p.block_cols = int32_t(format[3]);
  p.m = x.size(0), p.k = x.size(1), p.n = data.size(0), p.row_bytes = data.size(1);
  check_codes(p, data, scale);
  for (const auto* t : {&global_scale, &x_global})
    MX_CHECK_VALUE(!t->has_value() || ((*t)->numel() == 1 && (*t)->scalar_type() == at::kFloat),
                   "mxtensor::cpu_linear: a global scale is one float32");
  MX_CHECK_VALUE(x.size(1) < 2 || x.stride(1) == 1, "mxtensor::cpu_linear: rows of x must be contiguous");
  p.scale_stride = p.block_cols < 0 ? 1 : ceil_div(p.k, p.block_cols);
  p.data = static_cast<const uint8_t*>(memory_of(data, "the codes")), p.scale = memory_of(scale, "the scales");
  p.global_scale = global_scale ? global_scale->const_data_ptr<float>() : nullptr;
  p.x_global = x_global ? x_global->const_data_ptr<float>() : nullptr;
  p.x = memory_of(x, "x"), p.x_kind = kind_of(x.scalar_type()), p.x_stride = x.stride(0);
  p.alpha = alpha, p.beta = beta, p.out_stride = p.n;
  if (bias && beta != 0) {
    const bool one = bias->dim() == 1;
    MX_CHECK_VALUE(bias->is_contiguous() && bias->sizes().back() == p.n && (one || (bias->dim() == 2 && bias->size(0) == p.m)),
                   "mxtensor::cpu_linear: a bias is (N,) or (M, N) and contiguous, got ", bias->sizes());
    p.bias = memory_of(*bias, "the bias"), p.bias_kind = kind_of(bias->scalar_type()), p.bias_stride = one ? 0 : p.n;
  }
  return p;
}

}  // namespace

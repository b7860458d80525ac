// Very large activations, whose sums would overflow before the global scale of the weight makes them smaller.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>

#include <algorithm>
#include <atomic>
#include <optional>

#include "op_cast.h"
#include "op_functions.h"
#include "op_problem.h"

namespace {

using at::Tensor;

// The values of x from which sums of products with codes may overflow before the global scale, which comes last:
// sums of 2^19 products with codes and scales up to 2688 = 2^11.4 stay below 2^127.
constexpr int32_t LARGE = (127 + 95) << 23;
constexpr float DOWN = 0x1p-32f, UP = 0x1p32f;

bool has_large(const Tensor& x) {
  if (x.scalar_type() == at::kHalf || x.dim() != 2 || !x.numel()) return false;
  const int64_t rows = x.is_contiguous() ? 1 : x.size(0), size = x.numel() / rows;
  const char* from = static_cast<const char*>(memory_of(x, "x"));
  const int kind = kind_of(x.scalar_type());
  std::atomic<bool> large{false};
  at::parallel_for(0, rows, std::max<int64_t>(1, (1 << 16) / size), [&](int64_t first, int64_t end) {
    for (int64_t m = first; m < end && !large; m++)
      if (functions.amax(from + m * x.stride(0) * x.element_size(), kind, 0, size) >= LARGE) large = true;
  });
  return large;
}

// Whether sums of x, which may still be cast, may overflow before a global scale of w (``scaled``: it has one). A cast with a
// global scale of its own makes x small.
bool may_overflow(bool scaled, const std::optional<Cast>& cast) { return scaled && !(cast && cast->global_scale); }

// x, or x times DOWN if it has large values: then alpha is UP times as large, and the cast of x has another least amax. Only
// values below 2^-94 lose bits.
Tensor scaled_down(const Tensor& x, double& alpha, std::optional<Cast>& cast) {
  if (!has_large(x)) return x;
  alpha *= UP;
  if (cast) cast->amax_epsilon *= DOWN;
  return at::mul(x, DOWN);
}

}  // namespace

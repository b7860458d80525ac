// The op mxtensor::cpu_linear: products with codes as one op of torch, on torch's own threads. The work is done by
// functions of linear.cpp and quantize.cpp, which do not know torch; gemm/cpu_library.py enters their addresses here.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "problem.h"

namespace {

using at::IntArrayRef;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

struct Functions {
  int64_t (*packed_bytes)(const Problem*);
  void (*pack)(Problem*);
  void (*rows)(const Problem*, int64_t, int64_t);
} functions;

constexpr int BITS[] = {8, 8, 6, 6, 4, 8};
constexpr int64_t LEAST = 1 << 15;  // values of w that are worth a thread

int32_t kind_of(at::ScalarType type) {
  if (type == at::kFloat) return FLOAT32;
  if (type == at::kBFloat16) return BFLOAT16;
  TORCH_CHECK_VALUE(type == at::kHalf, "mxtensor::cpu_linear takes float32, bfloat16 and float16, not ", type);
  return FLOAT16;
}
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory for packed x, which the threads of one call read.
char* scratch(int64_t bytes) {
  struct Free { void operator()(char* p) const { std::free(p); } };
  thread_local std::unique_ptr<char, Free> memory;
  thread_local int64_t size = 0;
  if (bytes > size) {
    memory.reset(static_cast<char*>(std::aligned_alloc(64, size_t(ceil_div(bytes, 64) * 64))));
    size = memory ? bytes : 0;
    TORCH_CHECK(memory, "mxtensor::cpu_linear: no memory for ", bytes, " bytes of activations");
  }
  return memory.get();
}

void compute(Problem& p) {
  if (!p.m || !p.n) return;
  p.packed = scratch(functions.packed_bytes(&p));
  functions.pack(&p);
  const int64_t grain = std::max<int64_t>(32, LEAST / std::max<int64_t>(p.k, 1));
  at::parallel_for(0, p.n, grain, [&](int64_t first, int64_t end) { functions.rows(&p, first, end); });
}

void check_codes(const Problem& p, const Tensor& data, const Tensor& scale) {
  const int bits = BITS[p.element], group = bits == 8 ? 1 : bits == 4 ? 2 : 4;
  const int64_t bytes = ceil_div(p.k, group) * group * bits / 8;
  const int64_t rows = p.block_rows < 0 ? 1 : ceil_div(p.n, p.block_rows), cols = p.block_cols < 0 ? 1 : ceil_div(p.k, p.block_cols);
  TORCH_CHECK_VALUE(data.is_contiguous() && data.size(1) == bytes && data.element_size() == 1,
                    "mxtensor::cpu_linear: ", p.k, " values are ", bytes, " contiguous bytes of codes, got ", data.sizes());
  TORCH_CHECK_VALUE(scale.is_contiguous() && scale.numel() == rows * cols &&
                        scale.element_size() == (p.scale_kind < 2 ? 1 : 4),
                    "mxtensor::cpu_linear: needs ", rows, " x ", cols, " contiguous scales, got ", scale.sizes());
}

Problem problem_of(const Tensor& x, const Tensor& data, const Tensor& scale, const OptionalTensor& global_scale,
                   const OptionalTensor& x_global, const OptionalTensor& bias, IntArrayRef format, double alpha,
                   double beta) {
  TORCH_CHECK_VALUE(x.dim() == 2 && data.dim() == 2 && format.size() == 4, "mxtensor::cpu_linear multiplies matrices, "
                    "not ", x.sizes(), " and ", data.sizes());
  TORCH_CHECK_VALUE(format[0] >= 0 && format[0] < 6 && format[1] >= 0 && format[1] < 4 &&
                        (format[2] == -1 || format[2] > 0) && (format[3] == -1 || format[3] > 0),
                    "mxtensor::cpu_linear: there is no format ", format);
  Problem p = {};
  p.element = int32_t(format[0]), p.scale_kind = int32_t(format[1]);
  p.block_rows = int32_t(format[2]), p.block_cols = int32_t(format[3]);
  p.m = x.size(0), p.k = x.size(1), p.n = data.size(0), p.row_bytes = data.size(1);
  check_codes(p, data, scale);
  for (const auto* t : {&global_scale, &x_global})
    TORCH_CHECK_VALUE(!t->has_value() || ((*t)->numel() == 1 && (*t)->scalar_type() == at::kFloat),
                      "mxtensor::cpu_linear: a global scale is one float32");
  TORCH_CHECK_VALUE(x.size(1) < 2 || x.stride(1) == 1, "mxtensor::cpu_linear: rows of x must be contiguous");
  p.scale_stride = p.block_cols < 0 ? 1 : ceil_div(p.k, p.block_cols);
  p.data = static_cast<const uint8_t*>(data.const_data_ptr()), p.scale = scale.const_data_ptr();
  p.global_scale = global_scale ? global_scale->const_data_ptr<float>() : nullptr;
  p.x_global = x_global ? x_global->const_data_ptr<float>() : nullptr;
  p.x = x.const_data_ptr(), p.x_kind = kind_of(x.scalar_type()), p.x_stride = x.stride(0);
  p.alpha = alpha, p.beta = beta, p.out_stride = p.n;
  if (bias && beta != 0) {
    const bool one = bias->dim() == 1;
    TORCH_CHECK_VALUE(bias->is_contiguous() && bias->sizes().back() == p.n && (one || (bias->dim() == 2 && bias->size(0) == p.m)),
                      "mxtensor::cpu_linear: a bias is (N,) or (M, N) and contiguous, got ", bias->sizes());
    p.bias = bias->const_data_ptr(), p.bias_kind = kind_of(bias->scalar_type()), p.bias_stride = one ? 0 : p.n;
  }
  return p;
}

Tensor cpu_linear(const Tensor& x, const Tensor& data, const Tensor& scale, const OptionalTensor& global_scale,
                  const OptionalTensor& x_global, const OptionalTensor& bias, IntArrayRef format, double alpha,
                  double beta, at::ScalarType out_dtype) {
  Problem p = problem_of(x, data, scale, global_scale, x_global, bias, format, alpha, beta);
  Tensor out = at::empty({p.m, p.n}, x.options().dtype(out_dtype));
  p.out = out.mutable_data_ptr(), p.out_kind = kind_of(out_dtype);
  compute(p);
  return out;
}

// Products with one weight whose addresses were prepared once, by number. The caller answers for the memory.
struct Prepared {
  Problem problem;
  std::vector<int64_t> shape;
};
std::mutex lock;
std::vector<std::unique_ptr<Prepared>> all_prepared;
std::vector<int64_t> unused;

int64_t cpu_linear_prepare(const Tensor& x, const Tensor& data, const Tensor& scale, const OptionalTensor& global_scale,
                           const OptionalTensor& bias, IntArrayRef format, IntArrayRef shape) {
  auto made = std::make_unique<Prepared>();
  made->problem = problem_of(x, data, scale, global_scale, std::nullopt, bias, format, 1, 1);
  made->problem.out_kind = made->problem.x_kind;
  made->shape = shape.vec();
  const std::lock_guard<std::mutex> held(lock);
  if (unused.empty()) {
    all_prepared.push_back(std::move(made));
    return int64_t(all_prepared.size()) - 1;
  }
  const int64_t number = unused.back();
  unused.pop_back();
  all_prepared[size_t(number)] = std::move(made);
  return number;
}

Tensor cpu_linear_prepared(const Tensor& x, int64_t number) {
  Problem p;
  std::vector<int64_t> shape;
  {
    const std::lock_guard<std::mutex> held(lock);
    const auto known = number >= 0 && size_t(number) < all_prepared.size() ? all_prepared[size_t(number)].get() : nullptr;
    TORCH_CHECK_VALUE(known && x.is_contiguous() && x.numel() == known->problem.m * known->problem.k &&
                          kind_of(x.scalar_type()) == known->problem.x_kind,
                      "mxtensor::cpu_linear_prepared: product ", number, " was not prepared for ", x.sizes());
    p = known->problem, shape = known->shape;
  }
  Tensor out = at::empty(shape, x.options());
  p.x = x.const_data_ptr(), p.out = out.mutable_data_ptr();
  compute(p);
  return out;
}

TORCH_LIBRARY_FRAGMENT(mxtensor, m) {
  m.def("cpu_linear(Tensor x, Tensor data, Tensor scale, Tensor? global_scale, Tensor? x_global, Tensor? bias, "
        "int[] format, float alpha, float beta, ScalarType out_dtype) -> Tensor");
  m.def("cpu_linear_prepare(Tensor x, Tensor data, Tensor scale, Tensor? global_scale, Tensor? bias, int[] format, "
        "int[] shape) -> int");
  m.def("cpu_linear_prepared(Tensor x, int number) -> Tensor");
}
TORCH_LIBRARY_IMPL(mxtensor, CPU, m) {
  m.impl("cpu_linear", cpu_linear);
  m.impl("cpu_linear_prepare", cpu_linear_prepare);
  m.impl("cpu_linear_prepared", cpu_linear_prepared);
}

}  // namespace

extern "C" {

void mx_linear_use(void* packed_bytes, void* pack, void* rows) {
  functions = {reinterpret_cast<decltype(functions.packed_bytes)>(packed_bytes),
               reinterpret_cast<decltype(functions.pack)>(pack), reinterpret_cast<decltype(functions.rows)>(rows)};
}

void mx_linear_forget(int64_t number) {
  const std::lock_guard<std::mutex> held(lock);
  all_prepared[size_t(number)].reset();
  unused.push_back(number);
}
}

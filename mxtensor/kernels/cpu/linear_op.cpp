// The op mxtensor::cpu_linear: products with codes as one op of torch, on torch's own threads. The work is done by
// functions of linear.cpp and quantize.cpp, which do not know torch; gemm/cpu_codes.py enters their addresses here.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>
#include <deque>
#include <mutex>
#include <vector>

#include "op_cast.h"
#include "op_overflow.h"
#include "op_product.h"
#include "op_recorder.h"

namespace {

// The products of few rows of x, another time.
Replay replay(const std::vector<Problem>& all, const std::optional<Cast>& cast, const Tensor& x, bool overflows) {
  return [=] {
    if (overflows && has_large(x)) return false;
    std::vector<Problem> now = all;
    Tensor memory;
    if (cast) memory = cast_x(now, *cast, x.options());
    return by_codes(now.data(), now.size(), x.options());
  };
}

// Products of one x with several weights of one format: the results side by side, (M, N of all).
Tensor cpu_linear_shared(const Tensor& given, at::TensorList data, at::TensorList scale,
                         const c10::List<OptionalTensor>& global_scale, const OptionalTensor& x_global,
                         const c10::List<OptionalTensor>& bias, IntArrayRef format, double alpha, double beta,
                         at::ScalarType out_dtype, IntArrayRef cast, double amax_epsilon) {
  const size_t count = data.size();
  MX_CHECK_VALUE(count && scale.size() == count && global_scale.size() == count && bias.size() == count,
                 "mxtensor::cpu_linear_shared: ", count, " weights need as many scales, global scales and biases");
  std::vector<Problem> all;
  bool scaled = false;
  for (size_t i = 0; i < count; i++) scaled = scaled || global_scale[i].has_value();
  std::optional<Cast> c = cast_of(cast, amax_epsilon);
  const bool overflows = may_overflow(scaled, c);
  const Tensor x = overflows ? scaled_down(given, alpha, c) : given;
  int64_t width = 0;
  for (size_t i = 0; i < count; i++) {
    all.push_back(problem_of(x, data[i], scale[i], global_scale[i], x_global, bias[i], format, alpha, beta));
    width += all[i].n;
  }
  const int64_t rows = all[0].m;
  const Tensor out = at::empty({rows, width}, x.options().dtype(out_dtype));
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for (Problem& each : all) {
    each.out = to, each.out_kind = kind_of(out_dtype), each.out_stride = width;
    to += each.n * out.element_size();
  }
  if (!rows || !all[0].k) return out.zero_();
  const std::vector<Problem> before_cast = is_recorded() ? all : std::vector<Problem>();
  Tensor memory;
  if (c) memory = cast_x(all, *c, x.options());
  const int64_t few = few_rows(all[0]);
  if (rows > few || !by_codes(all.data(), count, x.options())) {
    int64_t first = 0;
    for (size_t i = 0; i < count; first += all[i].n, i++) by_blas(all[i], few, x, bias[i], out.narrow(1, first, all[i].n));
    return out;
  }
  if (x.is_same(given)) offer(out, [&] { return replay(before_cast, c, unowned(x), overflows); });  // not a copy, which ends here
  return out;
}

Tensor cpu_linear(const Tensor& x, const Tensor& data, const Tensor& scale, const OptionalTensor& global_scale,
                  const OptionalTensor& x_global, const OptionalTensor& bias, IntArrayRef format, double alpha,
                  double beta, at::ScalarType out_dtype, IntArrayRef cast, double amax_epsilon) {
  const c10::List<OptionalTensor> global_scales({global_scale}), biases({bias});
  return cpu_linear_shared(x, data, scale, global_scales, x_global, biases, format, alpha, beta, out_dtype, cast, amax_epsilon);
}

// A stack of weights (G, N, bytes), each multiplied by the rows of its group, which end at ends[g]. A cast sees all rows at
// once; the rows after the last group are zeros.
Tensor cpu_linear_groups(const Tensor& given, const Tensor& data, const Tensor& scale, const OptionalTensor& global_scale,
                         const OptionalTensor& x_global, const Tensor& ends, IntArrayRef format, double alpha,
                         at::ScalarType out_dtype, IntArrayRef cast, double amax_epsilon) {
  const int64_t groups = data.size(0);
  MX_CHECK_VALUE(data.dim() == 3 && groups && scale.dim() > 1 && scale.size(0) == groups && data.is_contiguous() && scale.is_contiguous(),
                 "mxtensor::cpu_linear_groups multiplies a contiguous stack of weights and their scales, not ", data.sizes(),
                 " and ", scale.sizes());
  MX_CHECK_VALUE(ends.dim() == 1 && ends.size(0) == groups && ends.scalar_type() == at::kInt && ends.is_contiguous() && ends.is_cpu(),
                 "mxtensor::cpu_linear_groups: ", groups, " weights need as many ends of groups in int32, got ", ends.scalar_type(),
                 " ", ends.sizes());
  std::optional<Cast> c = cast_of(cast, amax_epsilon);
  const Tensor x = may_overflow(global_scale.has_value(), c) ? scaled_down(given, alpha, c) : given;
  Problem all = problem_of(x, data.select(0, 0), scale.select(0, 0), global_scale, x_global, std::nullopt, format, alpha, 0);
  const Tensor out = at::empty({all.m, all.n}, x.options().dtype(out_dtype));
  all.out_kind = kind_of(out_dtype);
  Tensor memory;
  if (c && all.m && all.k) memory = fake_quantize(all, *c, x.options());
  const int64_t codes = all.n * all.row_bytes, scales = scale.stride(0) * scale.element_size();
  const int64_t row = all.x_stride * (all.x_kind == FLOAT32 ? 4 : 2);
  const int* until = ends.const_data_ptr<int>();
  int64_t done = 0;
  for (int64_t g = 0; g < groups && all.k; g++) {
    const int64_t first = g ? std::max(until[g - 1], 0) : 0, end = std::min<int64_t>(until[g], all.m);
    if (first >= end) continue;
    Problem p = all;
    p.m = end - first, p.data += g * codes, p.scale = static_cast<const char*>(p.scale) + g * scales;
    p.x = static_cast<const char*>(p.x) + first * row;
    if (p.x_codes) p.x_codes += first * p.x_codes_stride, p.x_scales += first * p.x_scales_stride;
    const Tensor results = out.narrow(0, first, p.m);
    p.out = results.mutable_data_ptr();
    const int64_t few = few_rows(p);
    if (p.m > few || !by_codes(&p, 1, x.options())) by_blas(p, few, x, std::nullopt, results);
    done = std::max(done, end);
  }
  out.narrow(0, done, all.m - done).zero_();
  return out;
}

// The arguments of cpu_linear that are not tensors, by number: reading a number takes less than reading all of them.
struct Options {
  std::vector<int64_t> format, cast;
  double alpha, beta, amax_epsilon;
  at::ScalarType out_dtype;
};
std::mutex lock;
std::deque<Options> prepared;  // an element stays where it is

int64_t cpu_linear_prepare(IntArrayRef format, double alpha, double beta, at::ScalarType out_dtype, IntArrayRef cast, double amax_epsilon) {
  const std::lock_guard<std::mutex> guard(lock);
  prepared.push_back({format.vec(), cast.vec(), alpha, beta, amax_epsilon, out_dtype});
  return int64_t(prepared.size()) - 1;
}

Tensor cpu_linear_prepared(const Tensor& x, const Tensor& data, const Tensor& scale, const OptionalTensor& global_scale,
                           const OptionalTensor& x_global, const OptionalTensor& bias, int64_t number) {
  const Options* o;
  {
    const std::lock_guard<std::mutex> guard(lock);
    MX_CHECK_VALUE(number >= 0 && size_t(number) < prepared.size(), "mxtensor::cpu_linear_prepared: nothing has the number ", number);
    o = &prepared[size_t(number)];
  }
  return cpu_linear(x, data, scale, global_scale, x_global, bias, o->format, o->alpha, o->beta, o->out_dtype, o->cast, o->amax_epsilon);
}

TORCH_LIBRARY_IMPL(mxtensor, CompositeExplicitAutograd, m) { m.impl("cpu_linear_prepare", cpu_linear_prepare); }

TORCH_LIBRARY_IMPL(mxtensor, CPU, m) {
  m.impl("cpu_linear", cpu_linear);
  m.impl("cpu_linear_shared", cpu_linear_shared);
  m.impl("cpu_linear_groups", cpu_linear_groups);
  m.impl("cpu_linear_prepared", cpu_linear_prepared);
}

}  // namespace

extern "C" {

void mx_linear_use(void* const* addresses, const Format* const* all_formats, int64_t few_rows, int64_t few_float_rows) {
  std::memcpy(&functions, addresses, sizeof functions);
  std::memcpy(formats, all_formats, sizeof formats);
  FEW_ROWS = few_rows, FEW_FLOAT_ROWS = few_float_rows;
}

void mx_linear_record(bool (*wants)(), void (*take)(Replay*, const void*)) { recorder = {wants, take}; }
}

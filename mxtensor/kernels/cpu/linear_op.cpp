// The op mxtensor::cpu_linear: products with codes as one op of torch, on torch's own threads. The work is done by
// functions of linear.cpp and quantize.cpp, which do not know torch; gemm/cpu_library.py enters their addresses here.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "op_cast.h"
#include "op_functions.h"
#include "op_problem.h"
#include "op_tame.h"

namespace {

constexpr int64_t LEAST = 1 << 15;  // values of w that are worth a thread
constexpr int64_t SLAB = 1 << 18;   // values of w that a thread decodes at a time
constexpr int64_t SAVED = 1 << 22;   // bytes of packed x up to which a thread saves the memory for the next call
constexpr int64_t TINY = 1 << 14;   // values of w below which calling a bfloat16 product takes longer than the product
int64_t FEW_ROWS = 16, FEW_FLOAT_ROWS = 16;  // FEW_ROWS in gemm/cpu_library.py

// Memory for packed x, which the threads of one call read.
char* scratch(int64_t bytes) {
  struct Free { void operator()(char* p) const { std::free(p); } };
  thread_local std::unique_ptr<char, Free> memory;
  thread_local int64_t size = 0;
  if (bytes > size) {
    memory.reset(static_cast<char*>(std::aligned_alloc(64, size_t(ceil_div(bytes, 64) * 64))));
    size = memory ? bytes : 0;
    TORCH_CHECK(memory, joined("mxtensor::cpu_linear: no memory for ", bytes, " bytes of activations"));
  }
  return memory.get();
}

// Packs x for products with codes and chooses their mode: in tiles by all threads, 16 rows at a time. The memory, unless the
// thread saves it.
Tensor pack_x(Problem& p, const at::TensorOptions& options) {
  const int64_t row = functions.packed_row(&p), tiles = ceil_div(p.m, 16), bytes = row * tiles * 32;
  functions.pack(&p, false, 0, 0);
  if (p.mode != IN_TILES) {
    p.packed = scratch(row * p.m * 4);
    functions.pack(&p, false, 0, p.m);
    return Tensor();
  }
  Tensor memory;
  if (bytes > SAVED) memory = at::empty({bytes}, options.dtype(at::kByte));
  p.packed = bytes > SAVED ? memory.mutable_data_ptr() : scratch(bytes);
  std::atomic<bool> careful{false};
  at::parallel_for(0, tiles, std::max<int64_t>(1, LEAST / (16 * p.k)), [&](int64_t first, int64_t end) {
    Problem mine = p;
    functions.pack(&mine, false, first * 16, std::min(end * 16, p.m));
    if (mine.mode == CAREFULLY) careful = true;
  });
  if (careful) p.mode = CAREFULLY;
  return memory;
}

// Few rows: each code is decoded in a register or, for tiles, in the cache, for all rows of x. Several weights: x is packed
// once, and the threads share the rows of all weights. False if more than FEW_ROWS rows need care: nothing is done.
bool by_codes(Problem* all, size_t count, const at::TensorOptions& options) {
  Problem& p = all[0];
  const Tensor memory = pack_x(p, options);
  if (p.mode == CAREFULLY && p.m > FEW_ROWS) return false;
  int64_t total = p.n;
  for (size_t i = 1; i < count; i++) all[i].packed = p.packed, all[i].mode = p.mode, total += all[i].n;
  const int64_t grain = std::max<int64_t>(32, LEAST / p.k);
  at::parallel_for(0, total, grain, [&](int64_t first, int64_t end) {
    for (size_t i = 0; i < count && end > 0; first -= all[i].n, end -= all[i].n, i++) {
      const int64_t from = std::max<int64_t>(first, 0), to = std::min(end, all[i].n);
      if (from < to) functions.rows(&all[i], from, to);
    }
  });
  return true;
}

// Whether products take bfloat16; ``exactly``: those of many rows.
bool in_bfloat16(Problem& p, bool exactly) {
  functions.pack(&p, exactly, 0, 0);
  return p.mode == IN_BFLOAT16;
}

// The most rows of x for which each code is decoded once for each call: fewer where the last codes of a row fill a small part
// of a step.
int64_t few_rows(Problem& p) {
  if (in_bfloat16(p, false)) return FEW_ROWS;
  if (p.mode == IN_TILES) return std::max(p.m, FEW_ROWS);
  return functions.packed_row(&p) * 8 > p.k * 9 ? FEW_FLOAT_ROWS / 2 : FEW_FLOAT_ROWS;
}

// Whether quantize.cpp decodes blocks of this size.
bool decodes_blocks(const Problem& p) {
  const int64_t cols = p.block_cols;
  const bool known = cols == 16 || cols == 32 || cols == 64 || cols == 128;
  return cols < 0 ? p.block_rows < 0 || p.block_rows == 1 : known && (p.block_rows == 1 || p.block_rows == cols);
}

// Results of rows first to first + rows - 1 of w from their sums (M, rows) in float32, which may be changed.
void finish_sums(const Problem& p, int64_t first, int64_t rows, const Tensor& sums, const Tensor& out) {
  if (p.bias) return functions.finish(&p, first, first + rows, sums.const_data_ptr<float>(), sums.stride(0));
  const double multiplier = multiplier_of(p);
  if (multiplier != 1) sums.mul_(float(multiplier));
  out.narrow(1, first, rows).copy_(sums);
}

// Many rows: some rows of w are decoded into the cache and multiplied by torch's BLAS, then the next.
void by_slabs(Problem& p, const Tensor& x, const OptionalTensor& bias, const Tensor& out) {
  const int64_t cols = functions.packed_row(&p);
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), 8);
  const int64_t height = std::min(p.n, std::max<int64_t>(64, SLAB * threads / cols / 16 * 16));
  Tensor packed = at::empty({p.m, cols}, x.options().dtype(at::kFloat));
  p.packed = packed.mutable_data_ptr();
  const bool bfloat16 = in_bfloat16(p, true);
  at::parallel_for(0, p.m, std::max<int64_t>(1, LEAST / p.k), [&](int64_t first, int64_t end) {
    Problem mine = p;
    functions.pack(&mine, true, first, end);
  });
  const Tensor memory = packed;
  if (bfloat16) packed = at::from_blob(p.packed, {p.m, cols}, x.options().dtype(at::kBFloat16));
  const Tensor slab = at::empty({height, cols}, packed.options());
  const Tensor sums = bfloat16 ? Tensor() : at::empty({p.m, height}, packed.options());
  const double alpha = multiplier_of(p);
  for (int64_t first = 0; first < p.n; first += height) {
    const int64_t rows = std::min(height, p.n - first);
    char* to = static_cast<char*>(slab.mutable_data_ptr());
    const int64_t size = cols * (bfloat16 ? 2 : 4);
    at::parallel_for(0, rows, std::max<int64_t>(1, LEAST / p.k), [&](int64_t from, int64_t end) {
      functions.decode(&p, first + from, first + end, to + from * size);
    });
    const Tensor w = slab.narrow(0, 0, rows).t();
    if (!bfloat16) {
      Tensor part = sums.narrow(1, 0, rows);
      at::mm_out(part, packed, w);
      finish_sums(p, first, rows, part, out);
      continue;
    }
    Tensor part = out.narrow(1, first, rows);
    if (bias && p.beta != 0) at::addmm_out(part, bias->narrow(-1, first, rows), packed, w, p.beta, alpha);
    else if (alpha != 1) at::addmm_out(part, part, packed, w, 0, alpha);
    else at::mm_out(part, packed, w);
  }
}

// Many rows in float32: as above, but w is decoded in the order of its values, so that x need not be packed.
void by_values(Problem& p, const Tensor& out) {
  constexpr at::ScalarType KINDS[] = {at::kFloat, at::kBFloat16, at::kHalf};
  const auto options = out.options().dtype(at::kFloat);
  const Tensor x = at::from_blob(const_cast<void*>(p.x), {p.m, p.k}, {p.x_stride, 1}, options.dtype(KINDS[p.x_kind])).to(at::kFloat);
  Format format = *formats[p.element][p.scale_kind];
  format.rows = p.block_rows, format.cols = p.block_cols;
  const int64_t height = std::min(p.n, std::max<int64_t>(64, (SLAB << 4) / p.k / 16 * 16));
  const Tensor slab = at::empty({height, p.k}, options);
  const bool direct = multiplier_of(p) == 1 && !p.bias && p.out_kind == FLOAT32;
  const Tensor sums = direct ? out : at::empty({p.m, height}, options);
  for (int64_t first = 0; first < p.n; first += height) {
    const int64_t rows = std::min(height, p.n - first);
    float* to = slab.mutable_data_ptr<float>();
    at::parallel_for(0, rows, std::max<int64_t>(1, LEAST / p.k), [&](int64_t from, int64_t end) {
      functions.decode_values(&format, p.data, p.scale, nullptr, p.n, p.k, first + from, first + end, to + from * p.k, FLOAT32);
    });
    Tensor part = sums.narrow(1, direct ? first : 0, rows);
    at::mm_out(part, x, slab.narrow(0, 0, rows).t());
    if (!direct) finish_sums(p, first, rows, part, out);
  }
}

// Many rows.
void by_blas(Problem& p, int64_t few, const Tensor& x, const OptionalTensor& bias, const Tensor& out) {
  const bool tiny = p.n * p.k < TINY, many = few < FEW_ROWS || 2 * p.m > 3 * FEW_ROWS;
  if (decodes_blocks(p) && (tiny || (many && !in_bfloat16(p, true)))) by_values(p, out);
  else by_slabs(p, x, bias, out);
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
  const double before = alpha;
  const Tensor x = scaled && !has_global_scale(cast) ? tamed(given, alpha) : given;
  if (alpha != before) amax_epsilon *= DOWN;
  int64_t width = 0;
  for (size_t i = 0; i < count; i++) {
    all.push_back(problem_of(x, data[i], scale[i], global_scale[i], x_global, bias[i], format, alpha, beta));
    width += all[i].n;
  }
  Problem& p = all[0];
  const Tensor out = at::empty({p.m, width}, x.options().dtype(out_dtype));
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for (Problem& each : all) {
    each.out = to, each.out_kind = kind_of(out_dtype), each.out_stride = width;
    to += each.n * out.element_size();
  }
  Tensor memory;
  if (!cast.empty() && p.m && p.k) {
    MX_CHECK_VALUE(x.is_contiguous() && !x_global, "mxtensor::cpu_linear: values that are cast must be contiguous and have no scale");
    memory = fake_quantize(p, cast_of(cast, amax_epsilon), x.options());
    for (Problem& each : all) take_x(each, p);
  }
  if (!p.m || !p.k) return out.zero_();
  const int64_t few = few_rows(p);
  if (p.m <= few && by_codes(all.data(), count, x.options())) return out;
  int64_t first = 0;
  for (size_t i = 0; i < count; first += all[i].n, i++) by_blas(all[i], few, x, bias[i], out.narrow(1, first, all[i].n));
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
  const double before = alpha;
  const Tensor x = global_scale && !has_global_scale(cast) ? tamed(given, alpha) : given;
  if (alpha != before) amax_epsilon *= DOWN;
  Problem all = problem_of(x, data.select(0, 0), scale.select(0, 0), global_scale, x_global, std::nullopt, format, alpha, 0);
  const Tensor out = at::empty({all.m, all.n}, x.options().dtype(out_dtype));
  all.out_kind = kind_of(out_dtype);
  Tensor memory;
  if (!cast.empty() && all.m && all.k) {
    MX_CHECK_VALUE(x.is_contiguous() && !x_global, "mxtensor::cpu_linear: values that are cast must be contiguous and have no scale");
    memory = fake_quantize(all, cast_of(cast, amax_epsilon), x.options());
  }
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

// Products with one weight whose addresses were prepared once, by number. The caller answers for the memory.
struct Prepared {
  Problem problem;
  std::optional<Cast> cast;
  std::vector<int64_t> shape;
};
std::mutex lock;
std::vector<std::unique_ptr<Prepared>> all_prepared;
std::vector<int64_t> unused;

int64_t cpu_linear_prepare(const Tensor& x, const Tensor& data, const Tensor& scale, const OptionalTensor& global_scale,
                           const OptionalTensor& bias, IntArrayRef format, IntArrayRef cast, double amax_epsilon,
                           IntArrayRef shape) {
  auto made = std::make_unique<Prepared>();
  made->problem = problem_of(x, data, scale, global_scale, std::nullopt, bias, format, 1, 1);
  made->problem.out_kind = made->problem.x_kind;
  made->shape = shape.vec();
  if (!cast.empty()) made->cast = cast_of(cast, amax_epsilon);
  const std::lock_guard<std::mutex> guard(lock);
  if (unused.empty()) {
    all_prepared.push_back(std::move(made));
    return int64_t(all_prepared.size()) - 1;
  }
  const int64_t number = unused.back();
  unused.pop_back();
  all_prepared[size_t(number)] = std::move(made);
  return number;
}

Tensor cpu_linear_prepared(const Tensor& given, int64_t number) {
  Problem p;
  std::optional<Cast> cast;
  std::vector<int64_t> shape;
  {
    const std::lock_guard<std::mutex> guard(lock);
    const auto known = number >= 0 && size_t(number) < all_prepared.size() ? all_prepared[size_t(number)].get() : nullptr;
    MX_CHECK_VALUE(known && given.is_contiguous() && given.numel() == known->problem.m * known->problem.k &&
                       kind_of(given.scalar_type()) == known->problem.x_kind,
                   "mxtensor::cpu_linear_prepared: product ", number, " was not prepared for ", given.sizes());
    p = known->problem, shape = known->shape, cast = known->cast;
  }
  const double before = p.alpha;
  const Tensor x = p.global_scale && !(cast && cast->global_scale) ? tamed(given.view({p.m, p.k}), p.alpha) : given;
  if (cast && p.alpha != before) cast->amax_epsilon *= DOWN;
  Tensor out = at::empty(shape, x.options());
  p.x = memory_of(x, "x"), p.out = out.mutable_data_ptr();
  Tensor memory;
  if (cast) memory = fake_quantize(p, *cast, x.options());
  if (p.m <= few_rows(p) || !decodes_blocks(p)) by_codes(&p, 1, x.options());
  else by_values(p, out.view({p.m, p.n}));
  return out;
}

TORCH_LIBRARY_IMPL(mxtensor, CPU, m) {
  m.impl("cpu_linear", cpu_linear);
  m.impl("cpu_linear_shared", cpu_linear_shared);
  m.impl("cpu_linear_groups", cpu_linear_groups);
  m.impl("cpu_linear_prepare", cpu_linear_prepare);
  m.impl("cpu_linear_prepared", cpu_linear_prepared);
}

}  // namespace

extern "C" {

void mx_linear_use(void* const* addresses, const Format* const* all_formats, int64_t few_rows, int64_t few_float_rows) {
  std::memcpy(&functions, addresses, sizeof functions);
  std::memcpy(formats, all_formats, sizeof formats);
  FEW_ROWS = few_rows, FEW_FLOAT_ROWS = few_float_rows;
}

void mx_linear_forget(int64_t number) {
  const std::lock_guard<std::mutex> guard(lock);
  all_prepared[size_t(number)].reset();
  unused.push_back(number);
}
}

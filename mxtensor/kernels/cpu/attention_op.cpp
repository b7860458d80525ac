// The op mxtensor::cpu_attention: a few queries over keys and values of a high-precision cache, as one op of torch on
// torch's own threads. The work is done by functions of attention.cpp; attention/cpu_attention.py enters their addresses.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>

#include "attention_call.h"
#include "op_check.h"
#include "op_recorder.h"

namespace {

using at::Tensor;

struct Functions {
  int (*attend)(const Attention*, int64_t, int64_t);
  void (*finish)(const Attention*);
  int64_t (*part)(const Attention*);
} functions;

constexpr int64_t KEYS_PER_RANGE = 256;  // as in attention/cpu_attention.py
constexpr int64_t LEAST = 1 << 14;       // values of keys that are worth a thread

int32_t kind_of(const Tensor& t) { return kind_of(t.scalar_type(), "cpu_attention"); }

Side side_of(const Tensor& t) {
  Side side = {};
  side.data = static_cast<const uint8_t*>(t.const_data_ptr());
  for (int i = 0; i < 3; i++) side.data_strides[i] = t.stride(i) * int64_t(t.element_size());
  side.size = t.size(3), side.heads = t.size(1), side.values = 1 + kind_of(t);
  return side;
}

// Writes what a contiguous mask adds to scores.
void write_summands(const Tensor& mask, float* to) {
  if (mask.scalar_type() == at::kBool) {
    const bool* visible = mask.const_data_ptr<bool>();
    for (int64_t i = 0; i < mask.numel(); i++) to[i] = visible[i] ? 0 : -INFINITY;
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, mask.scalar_type(), "cpu_attention", [&] {
    const scalar_t* from = mask.const_data_ptr<scalar_t>();
    for (int64_t i = 0; i < mask.numel(); i++) to[i] = float(from[i]);
  });
}

void attend(const Attention& p) {
  const int64_t units = p.batch * p.heads * p.splits;
  const int64_t grain = std::max<int64_t>(1, LEAST * p.splits / (p.count * p.values.size));
  at::parallel_for(0, units, grain, [&](int64_t first, int64_t end) { functions.attend(&p, first, end); });
  functions.finish(&p);
}

// The same attention, another time. ``dense`` has the results in the order of the kernel; ``partials`` must stay too.
Replay replay(const Attention& p, const Tensor& mask, const Tensor& added, const Tensor& partials, const Tensor& dense, const Tensor& out) {
  return [p, mask, added, partials, dense, out] {
    if (mask.defined()) write_summands(mask, added.mutable_data_ptr<float>());
    attend(p);
    if (p.queries != 1) out.copy_(dense);
    return true;
  };
}

void check_sizes(const Tensor& query, const Tensor& key, const Tensor& value) {
  MX_CHECK_VALUE(query.dim() == 4 && key.dim() == 4 && value.dim() == 4, "mxtensor::cpu_attention takes (batch, heads, "
                 "tokens, head size), got ", query.sizes(), ", ", key.sizes(), " and ", value.sizes());
  const int64_t batch = query.size(0), heads = query.size(1), count = key.size(2), size = value.size(3);
  const int64_t groups = key.size(1), group = groups ? heads / groups : 0, rows = group * query.size(2);
  MX_CHECK_VALUE(key.size(0) == batch && value.size(0) == batch && value.size(1) == groups && value.size(2) == count &&
                     group * groups == heads && key.size(3) == query.size(3),
                 "mxtensor::cpu_attention: ", query.sizes(), ", ", key.sizes(), " and ", value.sizes(), " do not fit");
  MX_CHECK_VALUE(rows <= MOST_ROWS && key.size(3) <= MOST_VALUES && size <= MOST_VALUES, "mxtensor::cpu_attention is for ",
                 MOST_ROWS, " rows that read a head of keys and ", MOST_VALUES, " values, not ", rows, " and ", key.size(3));
}

Tensor cpu_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double scale) {
  check_sizes(query, key, value);
  const int64_t batch = query.size(0), heads = query.size(1), queries = query.size(2), count = key.size(2), size = value.size(3);
  const int64_t groups = key.size(1), group = groups ? heads / groups : 0, rows = group * queries;
  const Tensor q = query.contiguous(), k = key.stride(3) == 1 ? key : key.contiguous();
  const Tensor v = value.stride(3) == 1 ? value : value.contiguous();
  Tensor out = at::empty({batch, queries, heads, size}, q.options()).transpose(1, 2);  // torch's own layout
  if (!out.numel()) return out;
  if (!count) return out.zero_();
  Tensor dense = queries == 1 ? out : at::empty({batch, heads, queries, size}, q.options());
  Attention p = {};
  p.keys = side_of(k), p.values = side_of(v), p.q = q.const_data_ptr(), p.out = dense.mutable_data_ptr();
  p.batch = batch, p.heads = groups, p.group = group, p.queries = queries, p.count = count;
  p.scale = float(scale), p.value_scale = 1, p.kind = kind_of(q);
  const Tensor given = mask ? mask->contiguous() : Tensor();
  Tensor added;
  if (mask) {
    added = at::empty(given.sizes(), given.options().dtype(at::kFloat));
    write_summands(given, added.mutable_data_ptr<float>());
    const Tensor all = added.expand({batch, heads, queries, count});
    p.mask = all.const_data_ptr<float>();
    const int64_t strides[] = {all.stride(0), all.stride(1) * group, all.stride(1), all.stride(2), all.stride(3)};
    std::memcpy(p.mask_strides, strides, sizeof strides);
  }
  const int64_t threads = at::get_num_threads(), units = batch * groups, most = (2 * threads + units - 1) / units;
  p.splits = threads < 2 ? 1 : std::max<int64_t>(1, std::min(most, count / KEYS_PER_RANGE));
  const Tensor partials = at::empty({units * p.splits * rows * functions.part(&p)}, q.options().dtype(at::kFloat));
  p.partials = partials.mutable_data_ptr<float>();
  attend(p);
  if (queries != 1) out.copy_(dense);
  if (q.is_same(query) && k.is_same(key) && v.is_same(value) && (!mask || given.is_same(*mask)))
    offer(out, [&] { return replay(p, mask ? unowned(given) : Tensor(), added, partials, dense, out); });
  return out;
}

TORCH_LIBRARY_IMPL(mxtensor, CPU, m) { m.impl("cpu_attention", cpu_attention); }

}  // namespace

extern "C" {

void mx_attention_use(void* const* addresses) { std::memcpy(&functions, addresses, sizeof functions); }
void mx_attention_record(bool (*wants)(), void (*take)(Replay*, const void*)) { recorder = {wants, take}; }
}

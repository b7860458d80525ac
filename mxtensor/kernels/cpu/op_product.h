// How the op mxtensor::cpu_linear computes a product on torch's own threads: few rows by codes, many by torch's BLAS.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

#include <atomic>
#include <cstdlib>
#include <memory>

#include "op_functions.h"
#include "op_problem.h"

namespace {

constexpr int64_t LEAST = 1 << 15;  // values of w that are worth a thread
constexpr int64_t SLAB = 1 << 18;   // values of w that a thread decodes at a time
constexpr int64_t SAVED = 1 << 22;   // bytes of packed x up to which a thread saves the memory for the next call
constexpr int64_t TINY = 1 << 14;   // values of w below which calling a bfloat16 product takes longer than the product
int64_t FEW_ROWS = 16, FEW_FLOAT_ROWS = 16;  // FEW_ROWS in gemm/cpu_codes.py

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

// Whether each code is decoded once for all rows of x, which all threads pack.
bool takes_all_rows(const Problem& p) {
  return p.mode == IN_TILES || p.mode == IN_INTEGER_PANELS || p.mode == IN_BFLOAT16_PANELS;
}

// Packs x for products with codes and chooses their mode: in tiles and for panels by all threads, 16 rows at a time. The memory,
// unless the thread saves it.
Tensor pack_x(Problem& p, const at::TensorOptions& options) {
  const int64_t row = functions.packed_row(&p), tiles = ceil_div(p.m, 16), bytes = row * tiles * 32;
  functions.pack(&p, false, 0, 0);
  if (!takes_all_rows(p)) {
    p.packed = scratch(row * p.m * 4);
    functions.pack(&p, false, 0, p.m);
    return Tensor();
  }
  Tensor memory;
  if (bytes > SAVED) memory = at::empty({bytes}, options.dtype(at::kByte));
  p.packed = bytes > SAVED ? memory.mutable_data_ptr() : scratch(bytes);
  std::atomic<bool> in_double{false};
  at::parallel_for(0, tiles, std::max<int64_t>(1, LEAST / (16 * p.k)), [&](int64_t first, int64_t end) {
    Problem mine = p;
    functions.pack(&mine, false, first * 16, std::min(end * 16, p.m));
    if (mine.mode == IN_DOUBLE) in_double = true;
  });
  if (in_double) p.mode = IN_DOUBLE;
  return memory;
}

// Few rows: each code is decoded in a register or, for tiles, in the cache, for all rows of x. Several weights: x is packed
// once, and the threads share the rows of all weights. False if more than FEW_ROWS rows are for products in double: nothing is done.
bool by_codes(Problem* all, size_t count, const at::TensorOptions& options) {
  Problem& p = all[0];
  const Tensor memory = pack_x(p, options);
  if (p.mode == IN_DOUBLE && p.m > FEW_ROWS) return false;
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
  if (takes_all_rows(p)) return std::max(p.m, FEW_ROWS);
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

}  // namespace

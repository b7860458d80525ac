// Products of a few rows with codes, for one instruction set: gemm/cpu_codes.py compiles this file with the flags of
// the widest set that the processor has, and linear_op.cpp calls it from torch's threads.
#include <type_traits>

#include "linear.h"

#if defined(__AVX512VBMI__) && defined(__AVX512BW__)
#ifdef __AVX512VNNI__
#include "linear_avx512_integers.h"
#else
#include "linear_avx512_dots.h"
#include "linear_no_integers.h"
#endif
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "linear_avx2_integers.h"
#elif defined(MX_NEON) || (defined(__aarch64__) && defined(__ARM_NEON) && !defined(MX_PLAIN))
#include "linear_neon.h"
#else
#include "linear_plain.h"
#endif

#if defined(__AMX_BF16__) || defined(MX_TILES)
#include "linear_amx.h"
#else
#include "linear_no_tiles.h"
#endif

#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__) && defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#include "linear_avx512_bfloat16_panels.h"
#include "linear_avx512_integer_panels.h"
#else
#include "linear_no_panels.h"
#endif

namespace {

// Packs rows first to end - 1 of x as integers. False if one cannot be.
template <typename D> bool pack_as_integers(const Problem& p, int64_t first, int64_t end) {
  if constexpr (takes_integers<D>()) {
    if (p.m > MOST_INTEGER_ROWS || p.x_codes == nullptr || !blocks_of_integers(p)) return false;
    for (int64_t m = first; m < end; m++)
      if (!pack_integers<D>(p, m, static_cast<char*>(p.packed) + m * integer_row<D>(p))) return false;
    return true;
  }
  return false;
}

}  // namespace

extern "C" {

const char* mx_linear_instructions() { return INSTRUCTIONS; }

// Values of a row of ``packed``, which starts at a multiple of 64 bytes.
int64_t mx_linear_packed_row(const Problem* p) {
  int64_t values = 0;
  with_decoder(p->element, [&](auto* decoder) { values = packed_row<std::remove_pointer_t<decltype(decoder)>>(*p); });
  return values;
}

// Choose the mode and pack rows first to end - 1 of x in the order in which codes are decoded. ``exactly``: w will be
// decoded before its product; then the mode does not depend on the rows. In tiles, ``first`` is a multiple of 16.
void mx_linear_pack(Problem* p, int exactly, int64_t first, int64_t end) {
  p->mode = HAS_BFLOAT16 && p->x_kind == BFLOAT16 ? IN_BFLOAT16 : IN_FLOAT32;
  if (exactly && (!exact_in_bfloat16(p->element, p->scale_kind) || p->out_kind != BFLOAT16 || (p->bias && p->bias_kind != BFLOAT16))) p->mode = IN_FLOAT32;
  with_kind(p->x_kind, [&](auto kind) {
    const auto* x = static_cast<const decltype(kind)*>(p->x);
    with_decoder(p->element, [&](auto* decoder) {
      using D = std::remove_pointer_t<decltype(decoder)>;
      const bool tiles = !exactly && takes_tiles(*p);
      if (tiles) p->mode = IN_TILES;
      if constexpr (takes_integers<D>())
        if (!exactly && !tiles && takes_integer_panels(*p)) {
          p->mode = pack_integer_panels<D>(*p, first, end) ? IN_INTEGER_PANELS : IN_DOUBLE;
          return;
        }
      if (!exactly && !tiles && takes_bfloat16_panels(*p)) {
        p->mode = pack_bfloat16_panels<D>(*p, first, end) ? IN_BFLOAT16_PANELS : IN_DOUBLE;
        return;
      }
      if (!exactly && !tiles && pack_as_integers<D>(*p, first, end)) {
        p->mode = IN_INTEGERS;
        return;
      }
      const int64_t bytes = packed_row<D>(*p) * (p->mode == IN_BFLOAT16 ? 2 : 4);
      for (int64_t m = first; m < end && p->mode != IN_DOUBLE; m++) {
        if (!exactly && !fits_float32_sums(x + m * p->x_stride, p->k)) p->mode = IN_DOUBLE;
        else if (!tiles) pack_row<D>(x + m * p->x_stride, p->k, p->mode == IN_BFLOAT16, static_cast<char*>(p->packed) + m * bytes);
      }
      if (p->mode == IN_TILES) pack_tiles<D>(*p, first, end);
    });
  });
}

// Rows first to end - 1 of w as values, in the order of packed x and in its dtype.
void mx_linear_decode(const Problem* p, int64_t first, int64_t end, void* out) {
  with_decoder(p->element, [&](auto* decoder) {
    decode_rows<std::remove_pointer_t<decltype(decoder)>>(*p, first, end, static_cast<char*>(out));
  });
}

// Results of rows first to end - 1 of w from their sums, those of a row of x ``step`` after those of the last.
void mx_linear_finish(const Problem* p, int64_t first, int64_t end, const float* sums, int64_t step) {
  for (int64_t n = first; n < end; n += 256) finish(*p, n, smaller<int64_t>(n + 256, end), sums + (n - first), step);
}

// Results of rows first to end - 1 of w.
void mx_linear_rows(const Problem* p, int64_t first, int64_t end) {
  if (p->mode != IN_DOUBLE) {
    with_decoder(p->element, [&](auto* decoder) {
      using D = std::remove_pointer_t<decltype(decoder)>;
      if constexpr (takes_integers<D>())
        if (p->mode == IN_INTEGER_PANELS) return rows_by_panels<IntegerPanels<D>, D>(*p, first, end);
      if (p->mode == IN_BFLOAT16_PANELS) return rows_by_panels<BFloat16Panels<D>, D>(*p, first, end);
      if (p->mode == IN_TILES) rows_by_tiles<D>(*p, first, end);
      else linear_rows<D>(*p, first, end);
    });
    return;
  }
  for (int64_t n = first; n < end; n++) {
    float sums[64];
    for (int64_t m = 0; m < p->m; m += 64) {
      const Problem some = rows_of(*p, m, smaller<int64_t>(64, p->m - m));
      row_in_double(some, n, sums, 1);
      finish(some, n, n + 1, sums, 1);
    }
  }
}
}

// What linear_avx512_panels.h and its two kinds define, where the instructions are missing or tiles are faster.
#pragma once
#include "linear_tiles.h"

namespace {

inline bool takes_integer_panels(const Problem&) { return false; }
inline bool takes_bfloat16_panels(const Problem&) { return false; }
template <typename D> bool pack_integer_panels(const Problem&, int64_t, int64_t) { return false; }
template <typename D> bool pack_bfloat16_panels(const Problem&, int64_t, int64_t) { return false; }
template <typename D> struct IntegerPanels {};
template <typename D> struct BFloat16Panels {};
template <typename P, typename D> void rows_by_panels(const Problem&, int64_t, int64_t) {}

}  // namespace

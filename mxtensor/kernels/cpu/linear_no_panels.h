// What linear_avx512_panels.h defines, where the instructions for products of bytes are missing or tiles are faster.
#pragma once
#include "linear_tiles.h"

namespace {

inline bool takes_panels(const Problem&) { return false; }
template <typename D> bool pack_panels(const Problem&, int64_t, int64_t) { return false; }
template <typename D> void rows_by_panels(const Problem&, int64_t, int64_t) {}

}  // namespace

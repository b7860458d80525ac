// What linear_amx.h defines, where there are no tile registers: nothing is multiplied in them.
#pragma once
#include "linear_tiles.h"

namespace {

inline bool takes_tiles(const Problem&) { return false; }
template <typename D> void pack_tiles(const Problem&, int64_t, int64_t) {}
template <typename D> void rows_by_tiles(const Problem&, int64_t, int64_t) {}

}  // namespace

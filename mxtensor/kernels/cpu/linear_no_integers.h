// What linear_avx512_integers.h defines, where the instructions for products of bytes are missing: nothing is multiplied
// as integers.
#pragma once
#include "linear_tiles.h"

namespace {

constexpr int64_t MOST_INTEGER_ROWS = 0;
template <typename D> constexpr bool takes_integers() { return false; }
inline bool blocks_of_integers(const Problem&) { return false; }
template <typename D> int64_t integer_row(const Problem&) { return 0; }
template <typename D> bool pack_integers(const Problem&, int64_t, char*) { return false; }
template <typename D> int64_t integers_by_fours(const Problem&, int64_t first, int64_t, float*, int64_t) { return first; }
template <typename D>
void integer_dots_of_rows(const Problem&, int, const uint8_t*, int64_t, const float*, int64_t, int, float*, int64_t) {}

}  // namespace

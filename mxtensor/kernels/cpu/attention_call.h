// One call of attention over cached keys and values, as attention/cpu_attention.py and attention_op.cpp hand it to attention.cpp.
#pragma once
#include <cstdint>

#include "format.h"

namespace {

// Fields of _Side in attention/cpu_attention.py: (batch, heads, keys, size), the first ones as values, those after them as codes
// and scales, or all as values at ``data``. Strides are of batch, head, key.
struct Side {
  const float* first;  // (batch, heads, first_count, size), contiguous
  const uint8_t* data;
  const void* scale;
  const Format* format;
  int64_t data_strides[3], scale_strides[3];  // of bytes, and of scales
  int64_t size, heads, first_count;           // values of a key
  int32_t float_scales, values;  // values: 1 + Kind of those at ``data``; 0: codes
};

// Fields of _Attention in attention/cpu_attention.py. ``group`` heads of queries read one head of keys.
struct Attention {
  Side keys, values;
  const void* q;            // (batch, heads, group, queries, keys.size), contiguous
  const float* mask;        // added to scores; or null
  void* out;                // (batch, heads, group, queries, values.size), contiguous
  float* partials;             // (batch, heads, splits, group * queries, part_size(values))
  int64_t mask_strides[5];  // of batch, head, row of the group, query, key
  int64_t batch, heads, group, queries, count, splits;
  float scale, value_scale;  // scores are multiplied by the first, results by the second
  int32_t kind, unused;
};

constexpr int64_t MOST_VALUES = 512;      // of a key
constexpr int64_t TILE_VALUES = 1 << 13;  // decoded at a time: 32 KiB
constexpr int64_t MOST_KEYS = 64;         // of a tile
constexpr int64_t MOST_ROWS = 64;         // group * queries

}  // namespace

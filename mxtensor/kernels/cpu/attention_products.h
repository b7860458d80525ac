// Products of queries with a tile of keys, and of their weights with a tile of values, for up to four queries at a time:
// a register of keys or values is loaded, and made float32, once for all of them.
#pragma once
#include "attention.h"

namespace {

// Keys or values: those of a key ``step`` values of T after those of the last. ``ahead``: the key so many after one is of
// the next tile in memory; 0: there is none.
template <typename T> struct Tile {
  const T* first;
  int64_t step, ahead;
};

// work(tile) for keys first to first + n - 1 of one head: where they are if a register takes their values as they are, else
// decoded to ``buffer``.
template <typename F>
void with_tile(const Side& side, int64_t b, int64_t h, int64_t first, int64_t n, float* buffer, F work) {
  const auto in_place = [&](auto value) {
    using T = decltype(value);
    const int64_t* strides = side.data_strides;
    const uint8_t* from = side.data + b * strides[0] + h * strides[1] + first * strides[2];
    work(Tile<T>{reinterpret_cast<const T*>(from), strides[2] / int64_t(sizeof(T)), n});
  };
  if (side.values == 0 || side.size % LANES) {
    decode_tile(side, b, h, first, n, buffer);
    work(Tile<float>{buffer, padded(side), 0});
  } else {
    with_kind(side.values - 1, in_place);
  }
}

constexpr int KEYS = LANES == 16 ? 4 : 2;     // whose sums with four queries there are registers for
constexpr int VECTORS = LANES == 16 ? 4 : 2;  // of weighted values, likewise

// Asks for a key of a later tile, and once more for one halfway there: tiles of keys and of values take turns, which the
// processor does not foresee, and it forgets some of what it is asked for. Takes 10 to 40 % less time where memory is read.
template <typename T> void fetch(const Tile<T>& tile, const T* key, int64_t size) {
  if (!tile.ahead) return;
  const T *next = key + tile.ahead * tile.step, *between = key + tile.ahead / 2 * tile.step;
  for (int64_t i = 0; i < size; i += 64 / int64_t(sizeof(T))) {
    __builtin_prefetch(next + i, 0, 2);
    __builtin_prefetch(between + i, 0, 2);
  }
}

// Scores of ROWS queries (ROWS, step) with n keys, up to a multiple of LANES; those after the last are of any value.
template <int ROWS, typename T>
void write_scores(const Tile<T>& keys, int64_t n, const float* q, int64_t step, bool is_first, float* weights) {
  for (int64_t at = 0; at < n; at += LANES) {
    Lanes sums[ROWS][LANES];
    for (int64_t k = 0; k < LANES; k += KEYS) {
      const T* from[KEYS];
      Lanes total[ROWS][KEYS] = {};
#pragma GCC unroll 4
      for (int j = 0; j < KEYS; j++) {
        from[j] = keys.first + smaller(at + k + j, n - 1) * keys.step;
        if (is_first) fetch(keys, from[j], step);
      }
      for (int64_t i = 0; i < step; i += LANES) {
        Lanes key[KEYS];
#pragma GCC unroll 4
        for (int j = 0; j < KEYS; j++) key[j] = get(from[j] + i);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
          const Lanes row = get(q + r * step + i);
#pragma GCC unroll 4
          for (int j = 0; j < KEYS; j++) total[r][j] += row * key[j];
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int j = 0; j < KEYS; j++) sums[r][k + j] = total[r][j];
    }
    for (int r = 0; r < ROWS; r++) put(weights + r * MOST_KEYS + at, sums_of(sums[r]));
  }
}

// sums (ROWS, part) += weights (ROWS, n) times values (n, step), COUNT vectors from ``at`` on.
template <int ROWS, int COUNT, typename T>
void add_columns(const Tile<T>& values, int64_t n, const float* weights, int64_t at, bool is_first, float* sums,
                 int64_t part) {
  Lanes total[ROWS][COUNT] = {};
  for (int64_t t = 0; t < n; t++) {
    const T* from = values.first + t * values.step + at;
    if (is_first) fetch(values, from, COUNT * LANES);
    Lanes value[COUNT];
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i++) value[i] = get(from + i * LANES);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int i = 0; i < COUNT; i++) total[r][i] += value[i] * weights[r * MOST_KEYS + t];
  }
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < COUNT; i++) {
      float* to = sums + r * part + at + i * LANES;
      put(to, get(to) + total[r][i]);
    }
}

// The same for all ``step`` values. ``is_first``: no other rows have read this tile, which then asks for the next one.
template <int ROWS, typename T>
void add_weighted(const Tile<T>& values, int64_t n, const float* weights, int64_t step, bool is_first, float* sums,
                  int64_t part) {
  int64_t at = 0;
  for (; at + VECTORS * LANES <= step; at += VECTORS * LANES)
    add_columns<ROWS, VECTORS>(values, n, weights, at, is_first, sums, part);
  for (; at < step; at += LANES) add_columns<ROWS, 1>(values, n, weights, at, is_first, sums, part);
}

}  // namespace

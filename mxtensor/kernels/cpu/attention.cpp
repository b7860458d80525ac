// Attention of a few queries over keys and values: codes of a tile of keys are decoded once, into the first cache, for all
// queries that read it, and values are read where they are. The softmax is a running one. Keys are split into ranges, so that threads share one head.
// attention/cpu_attention.py compiles this file; it and attention_op.cpp call mx_attention for spans of (batch, head, range), then
// mx_attention_finish.
#include "attention_products.h"

namespace {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

template <typename T>
void load_rows(const Attention& p, int64_t first, int64_t rows, float* q) {
  const int64_t size = p.keys.size, step = padded(p.keys);
  const T* from = static_cast<const T*>(p.q) + first * size;
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t i = size; i < step; i++) q[r * step + i] = 0.0f;
    for (int64_t i = 0; i < size; i++) q[r * step + place(p.keys, i)] = load(from[r * size + i]) * p.scale;
  }
}

// Scores of a row, ``w`` (n, up to a multiple of LANES), become weights; ``part``: the sums so far, which are rescaled.
inline void soften(float* w, int64_t n, int64_t step, float* part) {
  float top = part[0];
  for (int64_t t = 0; t < n; t++) top = w[t] > top ? w[t] : top;
  const float base = top == LOWEST ? 0.0f : top, before = exponential(part[0] - base);
  for (int64_t t = n; t < ceil_div(n, LANES) * LANES; t++) w[t] = LOWEST;
  Lanes total = {};
  for (int64_t t = 0; t < n; t += LANES) {
    const Lanes weights = exponential(get(w + t) - base);
    put(w + t, weights);
    total += weights;
  }
  float sum = 0.0f;
  for (int64_t i = 0; i < LANES; i++) sum += total[i];
  part[0] = top, part[1] = part[1] * before + sum;
  if (before != 1.0f)
    for (int64_t i = LANES; i < LANES + step; i += LANES) put(part + i, get(part + i) * before);
}

// The keys up to the last one that a row takes: places of a cache that no token has yet come after it.
inline int64_t taken_keys(const Attention& p, int64_t b, int64_t h, int64_t first, int64_t n) {
  const int64_t* s = p.mask_strides;
  int64_t taken = 0;
  for (int64_t g = 0; g < (s[2] ? p.group : 1); g++)
    for (int64_t i = 0; i < (s[3] ? p.queries : 1); i++) {
      const float* m = p.mask + b * s[0] + h * s[1] + g * s[2] + i * s[3] + first * s[4];
      int64_t end = n;
      while (end > taken && m[(end - 1) * s[4]] == LOWEST) end--;
      taken = end;
    }
  return taken;
}

// One range of keys of one head.
void attend(const Attention& p, int64_t b, int64_t h, int64_t begin, int64_t end, int64_t rows, const float* q, float* partials) {
  alignas(64) static thread_local float tile[TILE_VALUES + LANES * MOST_VALUES], weights[MOST_ROWS * MOST_KEYS];
  const int64_t kstep = padded(p.keys), vstep = padded(p.values), part = part_size(p.values);
  const int64_t most = smaller(MOST_KEYS, TILE_VALUES / larger(kstep, vstep));
  for (int64_t r = 0; r < rows; r++) {
    for (int64_t i = 0; i < part; i++) partials[r * part + i] = 0.0f;
    partials[r * part] = LOWEST;
  }
  for (int64_t first = begin; first < end; first += most) {
    const int64_t all = smaller(most, end - first), n = p.mask ? taken_keys(p, b, h, first, all) : all;
    if (n == 0) continue;
    with_tile(p.keys, b, h, first, n, tile, [&](const auto& keys) {
      in_fours(rows, [&](auto count, int64_t r) {
        write_scores<decltype(count)::value>(keys, n, q + r * kstep, kstep, r == 0, weights + r * MOST_KEYS);
      });
    });
    for (int64_t r = 0; r < rows; r++) {
      float* w = weights + r * MOST_KEYS;
      if (p.mask) {
        const int64_t* s = p.mask_strides;
        const float* m = p.mask + b * s[0] + h * s[1] + r / p.queries * s[2] + r % p.queries * s[3] + first * s[4];
        for (int64_t t = 0; t < n; t++) w[t] += m[t * s[4]];
      }
      soften(w, n, vstep, partials + r * part);
    }
    with_tile(p.values, b, h, first, n, tile, [&](const auto& values) {
      in_fours(rows, [&](auto count, int64_t r) {
        float* sums = partials + r * part + LANES;
        add_weighted<decltype(count)::value>(values, n, weights + r * MOST_KEYS, vstep, r == 0, sums, part);
      });
    });
  }
}

template <typename T>
void finish_row(const Attention& p, const float* partials, int64_t rows, T* out) {
  const int64_t size = p.values.size, step = part_size(p.values) * rows;
  float top = LOWEST, total = 0.0f, sums[MOST_VALUES + LANES] = {};
  for (int64_t s = 0; s < p.splits; s++) top = larger(top, partials[s * step]);
  for (int64_t s = 0; s < p.splits; s++) {
    const float* part = partials + s * step;
    if (part[0] == LOWEST && part[1] == 0.0f) continue;  // every key of this range is masked
    const float weight = part[0] == top ? 1.0f : exponential(part[0] - top);
    total += weight * part[1];
    for (int64_t i = 0; i < size; i++) sums[i] += weight * part[LANES + i];
  }
  const float multiplier = total == 0.0f ? 0.0f : p.value_scale / total;
  for (int64_t i = 0; i < size; i++) store(out[i], sums[place(p.values, i)] * multiplier);
}

}  // namespace

extern "C" {

// Floats of ``partials`` for each row of a range.
int64_t mx_attention_part(const Attention* p) { return part_size(p->values); }

// Units first to end - 1 of (batch, heads, splits).
int mx_attention(const Attention* p, int64_t first, int64_t end) {
  alignas(64) static thread_local float q[MOST_ROWS * (MOST_VALUES + LANES)];
  const int64_t rows = p->group * p->queries;
  for (int64_t unit = first; unit < end; unit++) {
    const int64_t head = unit / p->splits, split = unit % p->splits;
    const int64_t begin = split * p->count / p->splits, stop = (split + 1) * p->count / p->splits;
    with_kind(p->kind, [&](auto value) { load_rows<decltype(value)>(*p, head * rows, rows, q); });
    attend(*p, head / p->heads, head % p->heads, begin, stop, rows, q, p->partials + unit * rows * part_size(p->values));
  }
  return 0;
}

// The results of all rows, from those of their ranges.
void mx_attention_finish(const Attention* p) {
  const int64_t rows = p->group * p->queries, part = part_size(p->values);
  for (int64_t row = 0; row < p->batch * p->heads * rows; row++) {
    const float* partials = p->partials + (row / rows * p->splits * rows + row % rows) * part;
    const int64_t at = row * p->values.size;
    with_kind(p->kind, [&](auto value) { finish_row(*p, partials, rows, static_cast<decltype(value)*>(p->out) + at); });
  }
}
}

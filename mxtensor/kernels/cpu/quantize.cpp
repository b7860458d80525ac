// Casts between float32, bfloat16 or float16 and block-scaled operands, bitwise equal to numerics/reference.py. A row
// is cast CHUNK values at a time, which are whole blocks or part of one, in plain loops that a compiler vectorizes: the
// scale of a block is first repeated for its values. quantize/cpu_casts.py compiles this once on each machine.
#include <cfloat>
#include <cstdint>
#include <cstring>

#include "elements.h"

namespace {

constexpr int FULL = -1;                      // the extent of a block, as in numerics/formats.py
constexpr int CHUNK = 128;                    // a multiple of every block and of every group of packed codes
constexpr int SPAN = 8 * CHUNK;               // columns whose scales are computed at a time
constexpr int MAX_BLOCKS = CHUNK * CHUNK / 16;  // in one span of a panel

enum Scaling { FLOOR, RCEIL, CEIL, EVEN };
enum Scale { E8M0, UE4M3, FP32, FP32_POW2 };  // the order of SCALES in quantize/cpu_casts.py

// ------------------------------------------------------------------------------------------ blocks and scales

template <typename T> void fold(const T* x, int n, int32_t* most) {  // bits of the larger magnitudes, elementwise
  for (int i = 0; i < n; i++) most[i] = larger(most[i], as_int(load(x[i])) & 0x7FFFFFFF);
}
template <int N> void reduce(const int32_t* most, int blocks, int32_t* amax) {
  for (int b = 0; b < blocks; b++) {
    int32_t of_block = amax[b];
    for (int i = 0; i < N; i++) of_block = larger(of_block, most[b * N + i]);
    amax[b] = of_block;
  }
}
template <int N> void spread(const float* of_block, int blocks, float* of_value) {
  for (int b = 0; b < blocks; b++)
    for (int i = 0; i < N; i++) of_value[b * N + i] = of_block[b];
}
void reduce(int block, const int32_t* most, int blocks, int32_t* amax) {
  (block == 16 ? reduce<16> : block == 32 ? reduce<32> : block == 64 ? reduce<64> : reduce<CHUNK>)(most, blocks, amax);
}
void spread(int block, const float* of_block, int blocks, float* of_value) {
  (block == 16   ? spread<16>
   : block == 32 ? spread<32>
   : block == 64 ? spread<64>
                 : spread<CHUNK>)(of_block, blocks, of_value);
}

// Biased exponent of the smallest power of two that is at least the positive float with these bits.
inline int32_t exponent_up(int32_t bits) {
  const int32_t exponent = bits >> 23, mantissa = bits & 0x7FFFFF;
  return exponent + int32_t(mantissa > (exponent > 0 ? 0 : 0x400000));
}
inline int32_t scale_byte(int32_t amax, const Element& e, int scaling) {
  const int32_t byte =
      scaling == RCEIL  ? exponent_up(as_int(as_float(amax) * e.inverse_max))
      : scaling == CEIL ? exponent_up(amax) - e.emax
      : scaling == EVEN ? int32_t((uint32_t(amax) + (1u << (22 - e.mantissa_bits))) >> 23) - e.emax  // NaN overflows
                        : (amax >> 23) - e.emax;
  return smaller(larger(byte, 0), 254);
}

// Scales and multipliers from the amax of blocks: SCALE_RULES of numerics/reference.py.
struct Rule {
  const Format& f;
  int scaling;
  int32_t whole;  // amax bits of the tensor, for a global scale or for one scale a tensor
  int32_t least;  // bits of amax_epsilon: a smaller amax counts as this, in float32 scales
  float encode = 1.0f, global_scale = 1.0f;

  Rule(const Format& f, int scaling, int32_t whole, float epsilon, bool global)
      : f(f), scaling(scaling), whole(whole), least(as_int(epsilon)) {
    if (!global || whole == 0 || whole >= INFINITE) return;
    const float largest = 448.0f * f.element.max;
    encode = smaller(largest / as_float(whole), FLT_MAX), global_scale = as_float(whole) / largest;
  }

  // For n blocks; scales are stored from ``at`` on. The multiplier of a block that is not finite is not used.
  void operator()(const int32_t* __restrict amax, int n, void* scale, int64_t at, float* __restrict multiplier) const {
    const Element e = f.element;  // a copy: the compiler knows that no store through a byte pointer changes it
    const int mode = scaling;
    uint8_t* __restrict bytes = static_cast<uint8_t*>(scale) + at;
    float* __restrict floats = static_cast<float*>(scale) + at;
    if (f.scale == E8M0) {
      for (int b = 0; b < n; b++) {
        const int32_t byte = scale_byte(amax[b], e, mode);
        bytes[b] = uint8_t(amax[b] < INFINITE ? byte : 255);
        multiplier[b] = power_of_two(254 - byte);
      }
    } else if (f.scale == UE4M3) {
      const float per_amax = encode * e.inverse_max, decode = 1.0f / encode;
      for (int b = 0; b < n; b++) {
        const int32_t byte = E4M3.encode(smaller(448.0f, as_float(amax[b]) * per_amax));  // 448 for a NaN
        bytes[b] = uint8_t(amax[b] < INFINITE ? byte : 0x7F);
        multiplier[b] = smaller(1.0f / (E4M3.decode(byte) * decode), FLT_MAX);
      }
    } else if (f.scale == FP32_POW2) {
      for (int b = 0; b < n; b++) {
        const int32_t most = larger(amax[b], least);
        const int32_t byte = most > 0 ? smaller(scale_byte(most, e, mode), 253) : 127;
        floats[b] = most < INFINITE ? power_of_two(byte) : as_float(0x7FC00000);
        multiplier[b] = power_of_two(254 - byte);
      }
    } else {
      for (int b = 0; b < n; b++) {
        const int32_t most = larger(amax[b], least);
        const float m = most > 0 ? smaller(e.max / as_float(most), FLT_MAX) : 1.0f;
        floats[b] = most < INFINITE ? 1.0f / m : as_float(0x7FC00000);
        multiplier[b] = m;
      }
    }
  }
};

// ------------------------------------------------------------------------------------------ encode and decode

// The positions of the blocks of a matrix.
struct Grid {
  int tile, block;          // rows and columns of a block inside a chunk
  bool whole, across;       // one block for the tensor; one block for a row
  int64_t rows, bands, per_row;

  Grid(const Format& f, int64_t rows, int64_t cols)
      : tile(f.rows == FULL ? 1 : f.rows), block(f.cols == FULL ? CHUNK : f.cols), whole(f.rows == FULL),
        across(f.cols == FULL), rows(rows), bands(ceil_div(rows, tile)), per_row(across ? 1 : ceil_div(cols, block)) {}
  // The index of a scale from the row and column of one of its values.
  int64_t scale_of(int64_t matrix, int64_t row, int64_t col) const {
    return whole ? 0 : (matrix * bands + row / tile) * per_row + (across ? 0 : col / block);
  }
};

// Contiguous matrices: row-major or, if ``transposed``, column-major.
template <typename T> struct Source {
  const T* x;
  int64_t rows, cols;
  bool transposed;
  alignas(64) T scratch[CHUNK * CHUNK];
  int64_t step = 0;  // from one row of the current tile to the next

  Source(const T* x, int64_t rows, int64_t cols, bool transposed)
      : x(x), rows(rows), cols(cols), transposed(transposed) {}

  const T* tile(int64_t matrix, int64_t top, int height, int64_t left, int width) {
    const T* from = x + matrix * rows * cols + (transposed ? left * rows + top : top * cols + left);
    step = transposed ? CHUNK : cols;
    if (!transposed) return from;
    for (int j = 0; j < width; j += 16)
      for (int i = 0; i < height; i += 16)
        transpose(from + j * rows + i, height - i, width - j, scratch + i * CHUNK + j);
    return scratch;
  }
  void transpose(const T* from, int height, int width, T* to) {  // 16 x 16, of which height x width exist
    T square[16][16] = {};
    for (int j = 0; j < smaller(width, 16); j++)
      if (height < 16) std::memcpy(square[j], from + j * rows, size_t(height) * sizeof(T));
      else std::memcpy(square[j], from + j * rows, sizeof square[j]);
    for (int i = 0; i < 16; i++)
      for (int j = 0; j < 16; j++) to[i * CHUNK + j] = square[j][i];
  }
};

// Encode panels first to end - 1; a panel is ``height`` rows of a matrix, in whole blocks, or the rows that remain.
template <typename T>
void encode_panels(const Format& f, const Rule& rule, Source<T>& x, int height, int64_t first, int64_t end,
                   uint8_t* data, void* scale) {
  const Element& e = f.element;
  const Grid grid(f, x.rows, x.cols);
  const int64_t panels = ceil_div(x.rows, height), row_bytes = packed_size(x.cols, e.bits);
  const int64_t span = grid.across ? x.cols : x.transposed ? CHUNK : SPAN;
  const int stride = grid.across ? 1 : int(span / grid.block);  // from the blocks of one band to those of the next
  alignas(64) int32_t amax[MAX_BLOCKS], most[CHUNK];
  alignas(64) float multiplier[MAX_BLOCKS], of_value[CHUNK];
  alignas(64) uint8_t codes[CHUNK + 4];

  for (int64_t panel = first; panel < end; panel++) {
    const int64_t matrix = panel / panels, top = panel % panels * height;
    const int rows = int(smaller<int64_t>(height, x.rows - top)), bands = int(ceil_div(rows, grid.tile));
    for (int64_t left = 0; left < x.cols; left += span) {
      const int64_t right = smaller(left + span, x.cols);
      const auto width = [&](int64_t c) { return int(smaller<int64_t>(CHUNK, right - c)); };
      const auto place = [&](int band, int64_t c) {
        return band * stride + (grid.across ? 0 : int(c - left) / grid.block);
      };
      const T* tile = nullptr;

      if (!grid.whole) std::memset(amax, 0, sizeof(int32_t) * size_t(bands * stride));
      for (int64_t c = left; c < right && !grid.whole; c += CHUNK) {
        tile = x.tile(matrix, top, rows, c, width(c));
        for (int band = 0; band < bands; band++) {
          std::memset(most, 0, sizeof most);
          for (int r = band * grid.tile; r < smaller((band + 1) * grid.tile, rows); r++)
            fold(tile + r * x.step, width(c), most);
          reduce(grid.block, most, int(ceil_div(width(c), grid.block)), amax + place(band, c));
        }
      }
      for (int band = 0; band < bands; band++) {
        if (grid.whole) amax[band] = rule.whole;
        const int at = place(band, left), n = grid.across ? 1 : int(ceil_div(right - left, grid.block));
        rule(amax + at, n, scale, grid.scale_of(matrix, top + band * grid.tile, left), multiplier + at);
      }
      for (int64_t c = left; c < right; c += CHUNK) {
        const int n = width(c), blocks = int(ceil_div(n, grid.block));
        if (tile != x.scratch || span > CHUNK) tile = x.tile(matrix, top, rows, c, n);
        for (int band = 0; band < bands; band++) {
          const int at = place(band, c);
          spread(grid.block, multiplier + at, blocks, of_value);
          for (int r = band * grid.tile; r < smaller((band + 1) * grid.tile, rows); r++) {
            std::memset(codes + n, 0, 4);  // zero codes up to a whole group
            encode_chunk(tile + r * x.step, n, of_value, e, f.signed_zero != 0, codes);
            for (int b = 0; b < blocks; b++)
              if (amax[at + b] >= INFINITE)
                std::memset(codes + b * grid.block, e.nan_code, size_t(grid.block));
            pack(codes, n, e.bits, data + (matrix * x.rows + top + r) * row_bytes + c * e.bits / 8);
          }
        }
      }
    }
  }
}

// Decode rows first to end - 1 of matrices of ``rows`` rows.
template <typename T>
void decode_rows(const Format& f, const uint8_t* data, const void* scale, float global_scale, int64_t rows,
                 int64_t cols, int64_t first, int64_t end, T* out) {
  const Element& e = f.element;
  const Grid grid(f, rows, cols);
  const int64_t row_bytes = packed_size(cols, e.bits);
  const bool floats = f.scale == FP32 || f.scale == FP32_POW2;
  alignas(64) float of_block[CHUNK / 16], of_value[CHUNK];
  alignas(64) uint8_t codes[CHUNK] = {};
  for (int64_t r = first; r < end; r++) {
    for (int64_t c = 0; c < cols; c += CHUNK) {
      const int n = int(smaller<int64_t>(CHUNK, cols - c)), blocks = int(ceil_div(n, grid.block));
      if (c == 0 || !grid.across) {
        const int64_t at = grid.scale_of(r / rows, r % rows, c);
        for (int b = 0; b < blocks; b++)
          of_block[b] = floats ? static_cast<const float*>(scale)[at + b]
                               : f.scale_values[static_cast<const uint8_t*>(scale)[at + b]];
        spread(grid.block, of_block, blocks, of_value);
      }
      const uint8_t* from = unpack(data + r * row_bytes + c * e.bits / 8, n, e.bits, codes);
      decode_chunk(from, n, of_value, global_scale, e, out + (r - first) * cols + c);
    }
  }
}

}  // namespace

// kind: 0 float32, 1 bfloat16, 2 float16.
extern "C" {

// The bits of the largest magnitude of values first to end - 1.
int32_t mx_amax(const void* x, int kind, int64_t first, int64_t end) {
  alignas(64) int32_t most[CHUNK] = {}, amax = 0;
  with_kind(kind, [&](auto value) {
    const auto* values = static_cast<const decltype(value)*>(x);
    for (int64_t i = first; i < end; i += CHUNK) fold(values + i, int(smaller<int64_t>(CHUNK, end - i)), most);
  });
  reduce<CHUNK>(most, 1, &amax);
  return amax;
}

// Encode panels first to end - 1 of matrices (rows, cols). amax: amax bits of the tensor if the format needs them.
int mx_encode(const Format* f, int scaling, const void* x, int kind, int64_t rows, int64_t cols, int transposed,
              int height, int32_t amax, float amax_epsilon, int64_t first, int64_t end, uint8_t* data, void* scale,
              float* global_scale) {
  const Rule rule(*f, scaling, amax, amax_epsilon, global_scale != nullptr);
  if (global_scale && first == 0) *global_scale = rule.global_scale;
  with_kind(kind, [&](auto value) {
    Source<decltype(value)> source(static_cast<const decltype(value)*>(x), rows, cols, transposed != 0);
    encode_panels(*f, rule, source, height, first, end, data, scale);
  });
  return 0;
}

// Decode rows first to end - 1 of matrices of ``rows`` rows to ``out``. global_scale: null if there is none.
int mx_decode(const Format* f, const uint8_t* data, const void* scale, const float* global_scale, int64_t rows,
              int64_t cols, int64_t first, int64_t end, void* out, int kind) {
  with_kind(kind, [&](auto value) {
    decode_rows(*f, data, scale, global_scale ? *global_scale : 1.0f, rows, cols, first, end,
                static_cast<decltype(value)*>(out));
  });
  return 0;
}
}

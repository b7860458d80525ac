// Casts between float32, bfloat16 or float16 and MX operands (power-of-two scales, blocks along rows), held to
// mxtensor/codec.py bit for bit. Plain loops that a compiler turns into vectors; compiled once a machine by native.py.
#include <cstdint>
#include <cstring>

namespace {

struct Element {
  int32_t exponent_bits, mantissa_bits, bias, emax, bits, nan_code;
  float max, inverse_max;
};
enum Mode { FLOOR, RCEIL, CEIL, EVEN };
constexpr int MAX_BLOCK = 128;

inline float as_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline int32_t as_int(float f) { int32_t bits; std::memcpy(&bits, &f, 4); return bits; }
inline float power_of_two(int32_t byte) { return as_float(byte == 0 ? 0x00400000u : uint32_t(byte) << 23); }

inline float load(const float* x) { return *x; }
inline float load(const uint16_t* x) { return as_float(uint32_t(*x) << 16); }
#ifdef __FLT16_MAX__
inline float load(const _Float16* x) { return float(*x); }
#endif
inline void store(float* out, float v) { *out = v; }
inline void store(uint16_t* out, float v) {  // bfloat16, nearest even; a NaN keeps being one
  uint32_t bits = uint32_t(as_int(v));
  *out = (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// Biased exponent of the smallest power of two >= the positive float with these bits.
inline int32_t exponent_up(int32_t bits) {
  int32_t exponent = bits >> 23, mantissa = bits & 0x7FFFFF;
  return exponent + (exponent > 0 ? mantissa > 0 : mantissa > 0x400000);
}

inline int32_t scale_byte(int32_t amax_bits, const Element& e, int mode) {
  int32_t byte;
  switch (mode) {
    case RCEIL: byte = exponent_up(as_int(as_float(uint32_t(amax_bits)) * e.inverse_max)); break;
    case CEIL: byte = exponent_up(amax_bits) - e.emax; break;
    case EVEN: byte = ((amax_bits + (1 << (22 - e.mantissa_bits))) >> 23) - e.emax; break;
    default: byte = (amax_bits >> 23) - e.emax;
  }
  return byte < 0 ? 0 : byte > 254 ? 254 : byte;
}

// Codes of one block: the bits rounded to the mantissa, or below the smallest normal the float adder's own rounding.
template <typename T>
void encode_block(const T* x, int n, float multiplier, const Element& e, uint8_t* codes) {
  if (e.exponent_bits == 0) {
    const float steps = float(1 << e.mantissa_bits), limit = e.max * steps;
    for (int i = 0; i < n; i++) {
      float y = load(x + i) * multiplier * steps;
      y = y < -limit ? -limit : y > limit ? limit : y;
      codes[i] = uint8_t(int8_t(int32_t((y + 12582912.0f) - 12582912.0f)));  // 1.5 * 2^23: nearest, ties to even
    }
    return;
  }
  const int shift = 23 - e.mantissa_bits, sign_bit = e.bits - 1;
  const int32_t magic_bits = (24 - e.bias - e.mantissa_bits + 127) << 23, first_normal = 1 << e.mantissa_bits;
  const float magic = as_float(uint32_t(magic_bits)), max = e.max;
  const int32_t offset = (1 << (shift - 1)) - 1 - ((127 - e.bias) << 23);
  for (int i = 0; i < n; i++) {
    float y = load(x + i) * multiplier;
    int32_t raw = as_int(y);
    float magnitude = as_float(uint32_t(raw) & 0x7FFFFFFFu);
    magnitude = magnitude > max ? max : magnitude;
    int32_t bits = as_int(magnitude), small = as_int(magnitude + magic) - magic_bits;
    int32_t normal = (bits + offset + ((bits >> shift) & 1)) >> shift;
    normal = normal < first_normal ? first_normal : normal;
    codes[i] = uint8_t((small < normal ? small : normal) | (int32_t(uint32_t(raw) >> 31) << sign_bit));
  }
}

inline void pack(const uint8_t* codes, int n, int bits, uint8_t* out) {  // codes beyond n are 0 up to a whole group
  if (bits == 8) {
    std::memcpy(out, codes, size_t(n));
  } else if (bits == 4) {
    for (int i = 0; i < (n + 1) / 2; i++) out[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
  } else {
    for (int i = 0; i < (n + 3) / 4; i++) {
      uint32_t w = codes[4 * i] | uint32_t(codes[4 * i + 1]) << 6 | uint32_t(codes[4 * i + 2]) << 12 |
                   uint32_t(codes[4 * i + 3]) << 18;
      out[3 * i] = uint8_t(w), out[3 * i + 1] = uint8_t(w >> 8), out[3 * i + 2] = uint8_t(w >> 16);
    }
  }
}

template <typename T>
void encode_rows(const T* x, int64_t first, int64_t last, int64_t cols, int block, const Element& e, int mode,
                 uint8_t* data, uint8_t* scale) {
  const int64_t blocks = (cols + block - 1) / block;
  const int group = e.bits == 8 ? 1 : e.bits == 4 ? 2 : 4;
  const int64_t row_bytes = (cols + group - 1) / group * group * e.bits / 8;
  alignas(64) uint8_t codes[MAX_BLOCK];
  for (int64_t r = first; r < last; r++) {
    for (int64_t b = 0; b < blocks; b++) {
      const T* values = x + r * cols + b * block;
      const int n = int(b + 1 < blocks ? block : cols - b * block);
      int32_t amax = 0;
      for (int i = 0; i < n; i++) {
        int32_t bits = as_int(load(values + i)) & 0x7FFFFFFF;
        amax = bits > amax ? bits : amax;
      }
      const bool finite = amax < 0x7F800000;
      const int32_t byte = finite ? scale_byte(amax, e, mode) : 255;
      scale[r * blocks + b] = uint8_t(byte);
      if (finite) {
        if (n < block) std::memset(codes, 0, sizeof codes);
        encode_block(values, n, power_of_two(254 - byte), e, codes);
      } else {
        std::memset(codes, e.nan_code, size_t(n));
        std::memset(codes + n, 0, sizeof codes - size_t(n));
      }
      pack(codes, n, e.bits, data + r * row_bytes + b * block * e.bits / 8);
    }
  }
}

inline void unpack(const uint8_t* data, int n, int bits, uint8_t* codes) {
  if (bits == 4) {
    for (int i = 0; i < (n + 1) / 2; i++) codes[2 * i] = data[i] & 0xF, codes[2 * i + 1] = data[i] >> 4;
  } else {
    for (int i = 0; i < (n + 3) / 4; i++) {
      const uint32_t w = data[3 * i] | uint32_t(data[3 * i + 1]) << 8 | uint32_t(data[3 * i + 2]) << 16;
      for (int j = 0; j < 4; j++) codes[4 * i + j] = (w >> (6 * j)) & 0x3F;
    }
  }
}

template <typename T>
void decode_rows(const uint8_t* data, const uint8_t* scale, int64_t first, int64_t last, int64_t cols, int block,
                 const Element& e, const float* values, T* out) {
  const int64_t blocks = (cols + block - 1) / block;
  const int bits = e.bits, group = bits == 8 ? 1 : bits == 4 ? 2 : 4, shift = 23 - e.mantissa_bits;
  const int64_t row_bytes = (cols + group - 1) / group * group * bits / 8;
  const int32_t magnitudes = (1 << (bits - 1)) - 1, first_normal = 1 << e.mantissa_bits, offset = (127 - e.bias) << 23;
  const float step = values[1];  // the smallest subnormal
  alignas(64) uint8_t codes[MAX_BLOCK];
  for (int64_t r = first; r < last; r++) {
    for (int64_t b = 0; b < blocks; b++) {
      const int n = int(b + 1 < blocks ? block : cols - b * block);
      const int byte = scale[r * blocks + b];
      const float s = byte == 255 ? as_float(0x7FC00000u) : power_of_two(byte);
      const uint8_t* from = data + r * row_bytes + b * block * bits / 8;
      T* to = out + r * cols + b * block;
      if (bits == 8) {
        for (int i = 0; i < n; i++) store(to + i, values[from[i]] * s);
        continue;
      }
      unpack(from, n, bits, codes);
      for (int i = 0; i < n; i++) {  // arithmetic, not a table: it becomes vectors
        const int32_t code = codes[i], magnitude = code & magnitudes;
        const int32_t small = as_int(float(magnitude) * step), normal = (magnitude << shift) + offset;
        const int32_t value = magnitude < first_normal ? small : normal;
        store(to + i, as_float(uint32_t(value) | uint32_t(code >> (bits - 1)) << 31) * s);
      }
    }
  }
}

}  // namespace

extern "C" {

// kind: 0 float32, 1 bfloat16, 2 float16. Returns 0, or 1 for a kind this build does not have.
int mx_encode(const void* x, int kind, int64_t first, int64_t last, int64_t cols, int block, const Element* e, int mode,
              uint8_t* data, uint8_t* scale) {
  if (kind == 0) encode_rows(static_cast<const float*>(x), first, last, cols, block, *e, mode, data, scale);
  else if (kind == 1) encode_rows(static_cast<const uint16_t*>(x), first, last, cols, block, *e, mode, data, scale);
#ifdef __FLT16_MAX__
  else if (kind == 2) encode_rows(static_cast<const _Float16*>(x), first, last, cols, block, *e, mode, data, scale);
#endif
  else return 1;
  return 0;
}

// values: the element's value for every code. kind: 0 float32, 1 bfloat16.
int mx_decode(const uint8_t* data, const uint8_t* scale, int64_t first, int64_t last, int64_t cols, int block,
              const Element* e, const float* values, void* out, int kind) {
  if (kind == 0) decode_rows(data, scale, first, last, cols, block, *e, values, static_cast<float*>(out));
  else if (kind == 1) decode_rows(data, scale, first, last, cols, block, *e, values, static_cast<uint16_t*>(out));
  else return 1;
  return 0;
}
}

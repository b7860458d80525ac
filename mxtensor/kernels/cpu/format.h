// A block-scaled format, as quantize/cpu_casts.py hands it to C++.
#pragma once
#include <cstdint>

enum Kind { FLOAT32, BFLOAT16, FLOAT16 };  // of values; KINDS in quantize/cpu_casts.py

namespace {

// The fields of _Element in quantize/cpu_casts.py.
struct Element {
  int32_t exponent_bits, mantissa_bits, bias, emax, bits, nan_code, first_special;
  float max, inverse_max;
};

// The fields of _Format in quantize/cpu_casts.py.
struct Format {
  Element element;
  int32_t scale, rows, cols, signed_zero;  // rows and cols: the extents of a block
  float scale_values[256];    // the value of every scale byte
};

}  // namespace

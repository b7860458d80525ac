// Codes to float32 without instructions of one processor: every code is looked up.
#pragma once
#include "linear_narrow.h"
#include "linear_no_integers.h"

namespace {

template <int ELEMENT> struct Decoder : Step<ELEMENT> {
  const float* table = tables().value[ELEMENT];
  ALWAYS_INLINE void operator()(const uint8_t* codes, Floats* w) const {
    float* to = reinterpret_cast<float*>(w);
    for (int i = 0; i < 32; i++) {
      if constexpr (BITS[ELEMENT] == 8) {
        to[i] = table[codes[i]];
      } else if constexpr (BITS[ELEMENT] == 4) {
        to[i] = table[codes[i / 2] >> (i % 2 * 4) & 15];
      } else {
        const uint8_t* group = codes + i / 4 * 3;
        to[i] = table[(group[0] | group[1] << 8 | group[2] << 16) >> (i % 4 * 6) & 63];
      }
    }
  }
};

const char* const INSTRUCTIONS = "plain";

}  // namespace
